"""Builders for the scheduler's tests: one line of set-up per fact."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.api.testing import FakeClock
from coordinator.errors import SlackwaterError
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.driver import SchedulerDriver, Sink
from coordinator.scheduler.policy import Limits
from coordinator.scheduler.state import Scheduler
from coordinator.store.port import AttemptRow, LateStatementRow, TaskRow
from coordinator.tasks_port import AttemptBroken, AttemptStarted, Finished
from inference.task import (
    EngineId,
    FinishReason,
    ManifestDigest,
    NodeId,
    OwnerId,
    PositionLogprobs,
    PrivacyClass,
    Sampling,
    ServiceClass,
    TaskId,
    TaskKind,
    TaskSpec,
    TenantId,
    pack_token_ids,
    token_array,
)
from protos import signing
from protos.slackwater.common.v1 import completion_pb2, statement_pb2
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.node.v1 import node_service_pb2 as wire

DIGEST = ManifestDigest("sha256:" + "0" * 64)
STOP_ID = 2
GREEDY = Sampling(temperature=0.0)
VOCABULARY_SIZE = 1000


def task_spec(
    name: str = "task",
    *,
    prompt: Sequence[int] = (10, 11, 12),
    max_tokens: int = 8,
    sampling: Sampling = GREEDY,
    kind: TaskKind = TaskKind.GENERATE,
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
    privacy_class: PrivacyClass = PrivacyClass.PUBLIC,
    streaming: bool = True,
    deadline_s: float | None = None,
    digest: ManifestDigest = DIGEST,
) -> TaskSpec:
    return TaskSpec(
        task_id=TaskId(name),
        tenant_id=TenantId("tenant"),
        kind=kind,
        model="model",
        manifest_digest=digest,
        prompt_ids=token_array(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=(STOP_ID,),
        vocabulary_size=VOCABULARY_SIZE,
        service_class=service_class,
        privacy_class=privacy_class,
        streaming=streaming,
        deadline_s=deadline_s,
    )


def engine_view(
    *,
    slots: int = 4,
    tokens_per_second: float = 100.0,
    ready: bool = True,
    unloaded: bool = False,
    starting: bool = False,
    digest: ManifestDigest = DIGEST,
) -> e.EngineView:
    return e.EngineView(
        engine_id=EngineId("engine"),
        manifest_digest=digest,
        sampler_profile="position-hash-v1",
        ready=ready,
        slots=slots,
        tokens_per_second=tokens_per_second,
        unloaded=unloaded,
        starting=starting,
    )


class SchedulerHarness:
    """A scheduler, a clock and connected nodes, driven by hand.

    Connection ids are those of the nodes: the first connection of node "a" is
    found as `connections["a"]`.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.scheduler = Scheduler(limits or Limits(), first_lease_epoch=1)
        self.now = 1000.0
        self.connections: dict[str, e.ConnectionId] = {}
        self._connection_count = 0

    def feed(self, event: e.Event) -> list[c.Command]:
        commands = self.scheduler.handle(event, self.now)
        check_invariants(self.scheduler)
        return commands

    def connect(
        self,
        name: str,
        engine: e.EngineView | None = None,
        *,
        boot_started_at_ms: int = 0,
        stream_number: int = 0,
        trusted: bool = False,
        draining: bool = False,
    ) -> list[c.Command]:
        self._connection_count += 1
        connection_id = self.connections[name] = e.ConnectionId(self._connection_count)
        commands = self.feed(
            e.NodeConnected(
                node_id=NodeId(name),
                connection_id=connection_id,
                owner_id=OwnerId(f"owner of {name}"),
                trusted=trusted,
                draining=draining,
                boot_started_at_ms=boot_started_at_ms,
                stream_number=stream_number,
            )
        )
        return commands + self.report(name, engine or engine_view())

    def report(
        self, name: str, engine: e.EngineView, running: Iterable[tuple[str, int]] = (), *, accepting: bool = True
    ) -> list[c.Command]:
        return self.feed(
            e.NodeReported(
                node_id=NodeId(name),
                connection_id=self.connections[name],
                engines=(engine,),
                accepting=accepting,
                running=frozenset((TaskId(task), attempt) for task, attempt in running),
            )
        )

    def submit(self, spec: TaskSpec) -> list[c.Command]:
        return self.feed(e.TaskSubmitted(spec))

    def frames(self, name: str, attempt: int, first_index: int, *ids: int, task: str = "task") -> list[c.Command]:
        frame = e.Frame(TaskId(task), attempt, first_index, ids)
        return self.feed(e.FramesReceived(NodeId(name), self.connections[name], [frame]))

    def fail(self, name: str, attempt: int, reason: str, task: str = "task") -> list[c.Command]:
        return self.feed(
            e.AttemptFailed(
                node_id=NodeId(name),
                connection_id=self.connections[name],
                task_id=TaskId(task),
                attempt=attempt,
                reason=reason,
            )
        )

    def finish(
        self, name: str, attempt: int, ids: Sequence[int], reason: FinishReason = FinishReason.LENGTH
    ) -> list[c.Command]:
        return self.feed(
            e.AttemptFinished(
                node_id=NodeId(name),
                connection_id=self.connections[name],
                task_id=TaskId("task"),
                attempt=attempt,
                token_ids=ids,
                finish_reason=reason,
                statement=None,
            )
        )

    def disconnect(self, name: str) -> list[c.Command]:
        return self.feed(e.NodeDisconnected(NodeId(name), self.connections[name]))

    def pass_time(self, seconds: float, *, alive: Iterable[str] = ()) -> list[c.Command]:
        """Tick ten times a second; nodes in `alive` send a heartbeat before every tick."""
        commands: list[c.Command] = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for name in alive:
                commands += self.feed(e.NodeHeard(NodeId(name), self.connections[name]))
            commands += self.feed(e.Ticked())
        return commands


def check_invariants(scheduler: Scheduler) -> None:
    """Hold the scheduler's collections against each other; an AssertionError names the first that disagree."""
    queued = [task_id for queue in scheduler.queues.values() for task_id in queue]
    assert len(queued) == len(set(queued)), "a task is queued twice"
    for task_id, task in scheduler.tasks.items():
        assert (task.attempt is None) == (task_id in queued), f"{task_id} is neither queued nor running, or both"
        assert len(task.received) <= task.spec.max_tokens, f"{task_id} received more than it may"
        if task.attempt is not None:
            node = scheduler.nodes.get(task.attempt.node_id)
            assert node is not None, f"{task_id} runs on a node that is not connected"
            assert node.connection_id == task.attempt.connection_id, f"{task_id} runs on an old connection"
            assert node.tasks.get(task_id) is task.attempt, f"{task_id} is unknown to its node"
    for node in scheduler.nodes.values():
        for task_id in node.tasks:
            assert scheduler.tasks[task_id].attempt is node.tasks[task_id], f"{node.node_id} holds a stale {task_id}"
        for engine in node.engines.values():
            assert node.running(engine.engine_id) <= max(engine.slots, 0) or not engine.ready, "more than its slots"
    assert set(queued) <= set(scheduler.tasks), "an ended task is queued"


@dataclass(slots=True)
class FakeConnection:
    """A node's end of a Connect stream, as the driver sees it: keeps what it was sent."""

    name: str
    connection_id: e.ConnectionId
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    sent: list[wire.ConnectResponse] = field(default_factory=list)
    chunks: list[wire.PromptChunk] = field(default_factory=list)
    dropped: list[tuple[str, int]] = field(default_factory=list)
    closed: list["wire.ClosingReason.ValueType"] = field(default_factory=list)

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.name)

    @property
    def signing_public_key(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    def send(self, message: wire.ConnectResponse) -> None:
        self.sent.append(message)

    def send_chunks(self, task_id: TaskId, attempt: int, chunks: Sequence[wire.PromptChunk]) -> None:
        self.chunks += chunks

    def drop_chunks(self, task_id: TaskId, attempt: int) -> None:
        self.dropped.append((task_id, attempt))

    def close(self, reason: "wire.ClosingReason.ValueType", detail: str) -> None:
        self.closed.append(reason)

    def sent_of(self, kind: str) -> list[wire.ConnectResponse]:
        """Return the messages of one kind, named as in the protocol."""
        return [message for message in self.sent if message.WhichOneof("message") == kind]

    def last_header(self) -> SignedEnvelope:
        return self.sent_of("assignment")[-1].assignment.header


@dataclass(slots=True)
class FakeRecords:
    """Keeps the rows of ended tasks and attempts."""

    tasks: list[TaskRow] = field(default_factory=list)
    attempts: list[AttemptRow] = field(default_factory=list)
    late_statements: list[LateStatementRow] = field(default_factory=list)

    def add_task(self, row: TaskRow) -> None:
        self.tasks.append(row)

    def add_attempt(self, row: AttemptRow) -> None:
        self.attempts.append(row)

    def add_late_statement(self, row: LateStatementRow) -> None:
        self.late_statements.append(row)


@dataclass(slots=True)
class FakeSink:
    """Keeps what it is fed, in order; `ids` are those that count."""

    fed: list[object] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    failed: SlackwaterError | None = None

    def start_attempt(self, event: AttemptStarted) -> None:
        self.fed.append(event)

    def break_attempt(self, event: AttemptBroken) -> None:
        self.fed.append(event)

    def deliver(self, first_index: int, token_ids: Sequence[int], logprobs: tuple[PositionLogprobs, ...]) -> None:
        assert first_index == len(self.ids)
        self.fed.append((first_index, tuple(token_ids), logprobs))
        self.ids += token_ids

    def discard(self) -> None:
        self.fed.append("discard")
        self.ids.clear()

    def finish(self, event: Finished) -> None:
        self.finished = event

    def fail(self, error: SlackwaterError) -> None:
        self.failed = error


class DriverHarness:
    """A driver over a real scheduler, with connections, sinks and records that keep what they are given."""

    def __init__(self, signing_key: Ed25519PrivateKey | None = None) -> None:
        self.clock = FakeClock()
        self.records = FakeRecords()
        self.signing_key = signing_key or Ed25519PrivateKey.generate()
        self.scheduler = Scheduler(Limits(), first_lease_epoch=1)
        self.driver = SchedulerDriver(self.scheduler, self.clock, self.records, "cluster", self.signing_key)
        self._connection_count = 0

    def connect(self, name: str, *, boot_started_at_ms: int = 0) -> FakeConnection:
        """Connect a node; it is ready once it has reported."""
        self._connection_count += 1
        connection = FakeConnection(name, e.ConnectionId(self._connection_count))
        self.driver.add_connection(
            connection,
            e.NodeConnected(
                node_id=connection.node_id,
                connection_id=connection.connection_id,
                owner_id=OwnerId("owner"),
                trusted=False,
                draining=False,
                boot_started_at_ms=boot_started_at_ms,
                stream_number=0,
            ),
        )
        return connection

    def ready(self, name: str) -> FakeConnection:
        """Connect a node and report one engine with four slots."""
        connection = self.connect(name)
        self.driver.feed(
            e.NodeReported(
                node_id=connection.node_id,
                connection_id=connection.connection_id,
                engines=(engine_view(),),
                accepting=True,
                running=frozenset(),
            )
        )
        return connection

    def submit(self, spec: TaskSpec | None = None) -> FakeSink:
        sink = FakeSink()
        self.submit_to(sink, spec)
        return sink

    def submit_to(self, sink: Sink, spec: TaskSpec | None = None) -> None:
        self.driver.submit(spec or task_spec(), sink)

    def frames(self, connection: FakeConnection, *frames: e.Frame) -> None:
        self.driver.feed(e.FramesReceived(connection.node_id, connection.connection_id, frames))

    def frame(
        self, connection: FakeConnection, first_index: int, *ids: int, task: str = "task", attempt: int = 1
    ) -> None:
        self.frames(connection, e.Frame(TaskId(task), attempt, first_index, ids))


def sign_result(
    connection: FakeConnection,
    header: SignedEnvelope,
    ids: Sequence[int] = (),
    **changes: object,
) -> SignedEnvelope:
    """Return what an honest node signs about an attempt, but for the fields named in `changes`."""
    order = statement_pb2.TaskHeader.FromString(header.payload)
    fields: dict[str, object] = {
        "header_sha256": hashlib.sha256(header.payload).digest(),
        "node_id": order.node_id,
        "task_id": order.task_id,
        "attempt": order.attempt,
        "first_index": order.first_index,
        "token_ids": pack_token_ids(ids),
        "finish_reason": completion_pb2.FINISH_REASON_LENGTH,
        "prompt_tokens": order.prompt_token_count,
        "completion_tokens": len(ids),
        **changes,
    }
    statement = statement_pb2.ResultStatement(**fields)  # type: ignore[arg-type]
    return signing.seal(signing.RESULT_TYPE, statement.SerializeToString(), connection.key)


def ended(
    statement: SignedEnvelope, *, task: str = "task", attempt: int = 1, finished: wire.AttemptFinished | None = None
) -> wire.AttemptEnded:
    """Return the message that carries a statement, with the output in `finished` beside it."""
    outcome = wire.AttemptFinished(statement=statement)
    outcome.MergeFrom(finished or wire.AttemptFinished())
    return wire.AttemptEnded(task_id=task, attempt=attempt, finished=outcome)
