"""Fakes around the scheduler's driver: connections, records and sinks that keep what they are given."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.api.testing import FakeClock
from coordinator.errors import SlackwaterError
from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import Terms
from coordinator.scheduler import events as e
from coordinator.scheduler.cache_salts import CacheSalts
from coordinator.scheduler.driver import SchedulerDriver, Sink
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.state import Scheduler
from coordinator.scheduler.testing import engine_view, task_spec
from coordinator.store.port import AttemptRow, LateStatementRow, TaskRow
from coordinator.tasks_port import AttemptBroken, AttemptStarted, Finished
from inference.task import (
    NodeId,
    OwnerId,
    PositionLogprobs,
    TaskId,
    TaskSpec,
    pack_token_ids,
)
from protos import signing
from protos.slackwater.common.v1 import completion_pb2, statement_pb2
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.node.v1 import node_service_pb2 as wire


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
        self.scheduler = Scheduler(Limits(), Asks(Terms()), first_lease_epoch=1)
        salts = CacheSalts(b"k" * 32, Random(1))
        self.driver = SchedulerDriver(self.scheduler, self.clock, self.records, "cluster", self.signing_key, salts)
        self._connection_count = 0

    def connect(self, name: str, *, boot_started_at_ms: int = 0, owner: str = "owner") -> FakeConnection:
        """Connect a node; it is ready once it has reported."""
        self._connection_count += 1
        connection = FakeConnection(name, e.ConnectionId(self._connection_count))
        self.driver.add_connection(
            connection,
            e.NodeConnected(
                node_id=connection.node_id,
                connection_id=connection.connection_id,
                owner_id=OwnerId(owner),
                trusted=False,
                draining=False,
                boot_started_at_ms=boot_started_at_ms,
                stream_number=0,
            ),
        )
        return connection

    def ready(self, name: str, *, owner: str = "owner") -> FakeConnection:
        """Connect a node and report one engine with four slots."""
        connection = self.connect(name, owner=owner)
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
