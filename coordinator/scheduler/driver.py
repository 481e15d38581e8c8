"""Carries out the scheduler's commands: signs, sends, delivers, records.

Everything happens on one event loop and nothing here awaits: `feed` hands an
event to the pure scheduler and runs its commands at once. A command whose
effect is itself an event (a delivery that completes a stop string) is queued
and handled after the commands before it, never inside them.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.cache_salts import CacheSalts
from coordinator.scheduler.claims import LIES
from coordinator.scheduler.completed import Completed
from coordinator.scheduler.decisions import attempt_row, decision_of
from coordinator.scheduler.orders import task_header
from coordinator.scheduler.state import Scheduler
from coordinator.scheduler.statements import check_late_statement, read_statement
from coordinator.stated_energy import stated_energy
from coordinator.store.port import AttemptRow, LateStatementRow, TaskRow
from coordinator.tasks_port import AttemptBroken, AttemptStarted, Finished
from inference.task import NodeId, PositionLogprobs, TaskId, TaskSpec, pack_token_ids
from protos import signing
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.node.v1 import node_service_pb2 as wire

TICK_INTERVAL_S = 0.1
# Small enough that a cancel behind it waits for one chunk at most (DESIGN section 4).
PROMPT_CHUNK_BYTES = 64 * 1024

CLOSE_TO_WIRE = {
    c.CloseReason.SUPERSEDED: (wire.CLOSING_REASON_SUPERSEDED, "a newer start of this node connected"),
    c.CloseReason.REPLACED: (wire.CLOSING_REASON_REPLACED, "a newer stream of this start is connected"),
    c.CloseReason.BANNED: (wire.CLOSING_REASON_BANNED, "this node was banned"),
}

log = structlog.get_logger()


class Sink(Protocol):
    """Who follows a task; coordinator.answers.LiveAnswer is one."""

    def start_attempt(self, event: AttemptStarted) -> None: ...
    def break_attempt(self, event: AttemptBroken) -> None: ...
    def deliver(self, first_index: int, token_ids: Sequence[int], logprobs: tuple[PositionLogprobs, ...]) -> None: ...
    def discard(self) -> None: ...
    def finish(self, event: Finished) -> None: ...
    def fail(self, error: SlackwaterError) -> None: ...


class Records(Protocol):
    """Who keeps what ended; coordinator.recorder.Recorder is one."""

    def add_task(self, row: TaskRow) -> None: ...
    def add_attempt(self, row: AttemptRow) -> None: ...
    def add_late_statement(self, row: LateStatementRow) -> None: ...


class AgentConnection(Protocol):
    """The sending side of one Connect stream. Never blocks."""

    @property
    def connection_id(self) -> e.ConnectionId: ...
    @property
    def node_id(self) -> NodeId: ...
    @property
    def signing_public_key(self) -> bytes: ...

    def send(self, message: wire.ConnectResponse) -> None:
        """Send ahead of any prompt chunk that still waits."""
        ...

    def send_chunks(self, task_id: TaskId, attempt: int, chunks: Sequence[wire.PromptChunk]) -> None: ...

    def drop_chunks(self, task_id: TaskId, attempt: int) -> None:
        """Forget chunks that wait: their attempt was cancelled."""
        ...

    def close(self, reason: "wire.ClosingReason.ValueType", detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Order:
    header: SignedEnvelope
    node_public_key: bytes


@dataclass(slots=True)
class _Followed:
    """A running task with what only the driver needs of it."""

    spec: TaskSpec
    sink: Sink
    submitted_at_ms: int
    # Of each attempt: the envelope exactly as sent, and the key of the node.
    orders: "dict[int, _Order]" = field(default_factory=dict)
    attempts: list[AttemptRow] = field(default_factory=list)
    sampler_profiles: dict[int, str] = field(default_factory=dict)


class SchedulerDriver:
    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        recorder: Records,
        cluster_id: str,
        signing_key: Ed25519PrivateKey,
        cache_salts: CacheSalts,
    ) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._recorder = recorder
        self._cluster_id = cluster_id
        self._signing_key = signing_key
        self._cache_salts = cache_salts
        self._connections: dict[e.ConnectionId, AgentConnection] = {}
        self._followed: dict[TaskId, _Followed] = {}
        self._pending: deque[e.Event] = deque()
        self._feeding = False
        # One count for all connections; each sees it grow.
        self._desired_sequence = itertools.count(1)
        self._on_completed: Callable[[Completed], None] | None = None

    def tell_completed(self, on_completed: Callable[[Completed], None]) -> None:
        """Have somebody told of every task that is answered; called from the event loop, after its client."""
        self._on_completed = on_completed

    # --- events in -------------------------------------------------------------------------

    async def run(self) -> None:
        """Tell the scheduler the time, for ever."""
        while True:
            self.feed(e.Ticked())
            await asyncio.sleep(TICK_INTERVAL_S)

    def feed(self, event: e.Event) -> None:
        self._pending.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._pending:
                for command in self.scheduler.handle(self._pending.popleft(), self._clock.monotonic()):
                    self._execute(command)
        finally:
            self._feeding = False

    def submit(self, spec: TaskSpec, sink: Sink) -> None:
        self._followed[spec.task_id] = _Followed(spec, sink, self._clock.now_ms())
        self.feed(e.TaskSubmitted(spec))

    def add_connection(self, connection: AgentConnection, event: e.NodeConnected) -> bool:
        """Tell of a new stream; return whether it counts, or a newer one of its node is connected already."""
        self._connections[connection.connection_id] = connection
        self.feed(event)
        node = self.scheduler.nodes.get(event.node_id)
        return node is not None and node.connection_id == connection.connection_id

    def remove_connection(self, connection: AgentConnection) -> None:
        del self._connections[connection.connection_id]
        self.feed(e.NodeDisconnected(connection.node_id, connection.connection_id))

    def runs(self, connection: AgentConnection, task_id: TaskId, attempt: int) -> bool:
        """Return whether an attempt is running, and on this connection."""
        task = self.scheduler.tasks.get(task_id)
        return task is not None and task.running(attempt, connection.connection_id) is not None

    def finish_attempt(self, connection: AgentConnection, ended: wire.AttemptEnded) -> None:
        """Check a node's signed statement and tell the scheduler what it is worth."""
        task_id, attempt = TaskId(ended.task_id), ended.attempt
        followed = self._followed.get(task_id)
        # Whatever it is worth, the agent need not send it again.
        taken = wire.AttemptRef(task_id=ended.task_id, attempt=attempt)
        connection.send(wire.ConnectResponse(result_taken=taken))
        if followed is None or not self.runs(connection, task_id, attempt):
            # Late: the task ended or went elsewhere. Or it never was with this node. Still a sign of life.
            self.feed(e.NodeHeard(connection.node_id, connection.connection_id))
            self._record_late(connection, ended)
            return
        try:
            event = read_statement(connection, followed.spec, followed.orders[attempt].header, ended)
        except signing.SignatureInvalid as error:
            log.warning("statement_refused", node=connection.node_id, task=task_id, attempt=attempt, why=str(error))
            self.feed(
                e.AttemptFailed(
                    node_id=connection.node_id,
                    connection_id=connection.connection_id,
                    task_id=task_id,
                    attempt=attempt,
                    reason="statement_invalid",
                )
            )
        else:
            self.feed(event)

    def _record_late(self, connection: AgentConnection, ended: wire.AttemptEnded) -> None:
        """Keep the proof of an attempt that was finished while its stream was lost, beside our record of its end."""
        if not ended.finished.HasField("header"):
            return  # Over the stream of its attempt: it crossed our Cancel.
        public_key = self._signing_key.public_key().public_bytes_raw()
        try:
            check_late_statement(connection, ended, public_key)
        except signing.SignatureInvalid as error:
            log.warning("statement_refused", node=connection.node_id, task=ended.task_id, why=str(error))
            return
        statement = ended.finished.statement
        energy = stated_energy(statement)
        log.info("late_result_taken", node=connection.node_id, task=ended.task_id, attempt=ended.attempt)
        self._recorder.add_late_statement(
            LateStatementRow(
                task_id=TaskId(ended.task_id),
                attempt=ended.attempt,
                node_id=connection.node_id,
                statement=statement.SerializeToString(),
                energy_mj=energy.energy_mj,
                energy_method=energy.method,
            )
        )

    def stop(self, message: str) -> None:
        """End every task with an error event and say goodbye to the agents: the coordinator stops."""
        self.feed(e.CoordinatorStopping(message))
        for connection in list(self._connections.values()):
            connection.close(wire.CLOSING_REASON_STOPPING, "the coordinator stops")

    # --- commands out ----------------------------------------------------------------------

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.Deliver():
                self._followed[command.task_id].sink.deliver(command.first_index, command.token_ids, command.logprobs)
            case c.Assign():
                self._assign(command)
            case c.CancelAttempt():
                self._cancel_attempt(command)
            case c.Discard():
                self._followed[command.task_id].sink.discard()
            case c.RecordAttempt():
                self._record_attempt(command)
            case c.CompleteTask():
                self._complete(command)
            case c.FailTask():
                self._fail(command)
            case c.SendDesired():
                self._send_desired(command)
            case c.CloseConnection():
                connection = self._connections.get(command.connection_id)
                if connection is not None:
                    connection.close(*CLOSE_TO_WIRE[command.reason])
            case _:
                assert_never(command)

    def _assign(self, command: c.Assign) -> None:
        followed = self._followed[command.spec.task_id]
        connection = self._connections[command.connection_id]
        packed = pack_token_ids(command.prompt_ids)
        cache_salt = self._cache_salts.of(command.spec.tenant_id, command.node_id)
        header = task_header(command, self._cluster_id, packed, cache_salt, self._clock.now_ms())
        envelope = signing.seal(signing.TASK_TYPE, header.SerializeToString(), self._signing_key)
        followed.orders[command.attempt] = _Order(envelope, connection.signing_public_key)
        followed.sampler_profiles[command.attempt] = command.sampler_profile
        starts = range(0, len(packed), PROMPT_CHUNK_BYTES)
        connection.send(wire.ConnectResponse(assignment=wire.Assignment(header=envelope, chunk_count=len(starts))))
        connection.send_chunks(
            command.spec.task_id,
            command.attempt,
            [
                wire.PromptChunk(
                    task_id=command.spec.task_id,
                    attempt=command.attempt,
                    chunk_index=index,
                    token_ids=packed[start : start + PROMPT_CHUNK_BYTES],
                )
                for index, start in enumerate(starts)
            ],
        )
        followed.sink.start_attempt(
            AttemptStarted(
                attempt=command.attempt,
                node_id=command.node_id,
                first_index=command.first_index,
                decision=decision_of(command.choice),
            )
        )

    def _cancel_attempt(self, command: c.CancelAttempt) -> None:
        connection = self._connections.get(command.connection_id)
        if connection is not None:
            connection.drop_chunks(command.task_id, command.attempt)
            cancel = wire.Cancel(task_id=command.task_id, attempt=command.attempt)
            connection.send(wire.ConnectResponse(cancel=cancel))

    def _record_attempt(self, command: c.RecordAttempt) -> None:
        if command.outcome in LIES:
            log.warning(
                "node_contradicted",
                node=command.node_id,
                task=command.task_id,
                attempt=command.attempt,
                why=command.outcome,
            )
        row = attempt_row(command, self._clock.now_ms())
        self._followed[command.task_id].attempts.append(row)
        self._recorder.add_attempt(row)
        if command.outcome not in ("finished", "stopped"):
            self._followed[command.task_id].sink.break_attempt(
                AttemptBroken(
                    attempt=command.attempt,
                    node_id=command.node_id,
                    reason=command.outcome,
                    delivered_tokens=command.delivered_tokens,
                    first_token_ms=row.first_token_ms,
                )
            )

    def _complete(self, command: c.CompleteTask) -> None:
        followed = self._end(command.task_id, command.finish_reason.value, command.completion_tokens)
        order = None if command.attempt is None else followed.orders[command.attempt]
        followed.sink.finish(
            Finished(
                finish_reason=command.finish_reason,
                prompt_tokens=len(followed.spec.prompt_ids),
                completion_tokens=command.completion_tokens,
                header=order.header if order else None,
                statement=command.statement,
                node_public_key=order.node_public_key if order else b"",
                embedding=command.embedding,
                scores=command.scores,
                first_token_ms=followed.attempts[-1].first_token_ms if followed.attempts else None,
            )
        )
        if self._on_completed is not None:
            self._on_completed(
                Completed(
                    spec=followed.spec,
                    finish_reason=command.finish_reason,
                    output_ids=command.output_ids,
                    attempts=followed.attempts,
                    sampler_profiles=followed.sampler_profiles,
                )
            )

    def _fail(self, command: c.FailTask) -> None:
        followed = self._end(command.task_id, command.failure.value, command.completion_tokens)
        reason = Reason[command.failure.name]
        followed.sink.fail(SlackwaterError(reason, command.message, retry_after_s=command.retry_after_s))

    def _end(self, task_id: TaskId, outcome: str, completion_tokens: int) -> _Followed:
        followed = self._followed.pop(task_id)
        spec = followed.spec
        self._recorder.add_task(
            TaskRow(
                task_id=task_id,
                tenant_id=spec.tenant_id,
                manifest_digest=spec.manifest_digest,
                outcome=outcome,
                prompt_tokens=len(spec.prompt_ids),
                completion_tokens=completion_tokens,
                submitted_at_ms=followed.submitted_at_ms,
                ended_at_ms=self._clock.now_ms(),
            )
        )
        return followed

    def _send_desired(self, command: c.SendDesired) -> None:
        connection = self._connections.get(command.connection_id)
        if connection is not None:
            attempts = [wire.AttemptRef(task_id=task_id, attempt=number) for task_id, number in command.attempts]
            connection.send(
                wire.ConnectResponse(
                    desired=wire.DesiredState(
                        sequence=next(self._desired_sequence),
                        drain=command.drain,
                        attempts=attempts,
                        engines_wanted=command.engines_wanted,
                        models_wanted=[
                            wire.WantedModel(engine_id=engine_id, manifest_digest=digest)
                            for engine_id, digest in command.models_wanted
                        ],
                    )
                )
            )
