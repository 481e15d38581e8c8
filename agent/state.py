"""What an agent does about everything that happens to it. Pure.

Theory of operation. An attempt lives in one of three phases:

  RECEIVING   the header was checked, the ids of the prompt arrive.
  RUNNING     the engine works on it, frames flow.
  SIGNING     the engine is done, all ids are on their way, the statement is being signed.

Beside that its nonce is made durable, which takes a disk some milliseconds:
work begins meanwhile, but nothing of it leaves the node before. So no header
can have two executions that anybody sees, and no first token waits for a disk.

An attempt leaves by exactly one message, SendFinished, SendFailed or SendRefused, or
silently when the connection is lost, since the coordinator ends the attempts
of a lost stream itself. Whatever arrives later about it finds no attempt and
is dropped; so an abort needs no answer, and nothing is said twice.

The node's whole state goes out after each change, a few times a second at
most, and once in a while without one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from agent import events as e
from agent.assignments import AttemptKey, Audience, NonceCache, check_assignment, claimed_key
from agent.attempts import Attempt, FrameQueue, Phase
from agent.errors import AssignmentInvalid, ExitStatus
from agent.inventory import Inventory
from agent.lending import EngineUse, Lending, Move, Raise
from agent.link import COORDINATOR_SILENT_S_MAX, Link
from protos.slackwater.common.v1 import capability_pb2

PROTOCOL_VERSION = 1
# A prompt of the longest kind crosses a slow line in this time; then its slot is worth more than its patience.
PROMPT_S_MAX = 30.0
# A rejoin after a protocol violation: long enough not to burden, short enough for an operator who watches.
VIOLATION_PAUSE_S = 5.0
# Raw Ed25519.
PUBLIC_KEY_BYTES = 32

_VERSION_UNSUPPORTED = e.Exit(
    ExitStatus.VERSION_UNSUPPORTED,
    f"the coordinator does not speak protocol version {PROTOCOL_VERSION}; update the agent",
)
_EXITS = {
    e.ClosingReason.CLOSING_REASON_SUPERSEDED: e.Exit(
        ExitStatus.SUPERSEDED, "a newer agent with this identity has connected"
    ),
    e.ClosingReason.CLOSING_REASON_BANNED: e.Exit(ExitStatus.BANNED, "the coordinator has banned this node"),
    e.ClosingReason.CLOSING_REASON_VERSION_UNSUPPORTED: _VERSION_UNSUPPORTED,
}


class AgentState:
    """The agent's decisions; `handle` is the only way to change it."""

    def __init__(
        self,
        *,
        audience: Audience,
        nonces: NonceCache,
        attempts_max: int,
        context_tokens_max: int | None,
        engines: Mapping[str, EngineUse],
        now: float,
    ) -> None:
        self._audience = audience
        self._nonces = nonces
        self._attempts_max = attempts_max
        self._context_tokens_max = context_tokens_max
        self._lending = Lending(engines, now)
        self._inventory = Inventory(self._lending, now)
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._frames = FrameQueue(now)
        self._link = Link(now)
        self._stopping = self._drain_wanted = self._owner_drains = False
        self._desired_sequence = 0
        self._canaries_open: set[str] = set()

    @property
    def connected(self) -> bool:
        return self._link.up

    def coordinator_time_ms(self, now: float) -> int | None:
        """The coordinator's time; None as long as it was never heard."""
        return self._link.clock.now_ms(now) if self._link.clock.known else None

    @property
    def attempts(self) -> Mapping[AttemptKey, Attempt]:
        return self._attempts

    @property
    def engines(self) -> Sequence[capability_pb2.Engine]:
        """The engines as the fleet is told of them."""
        return self._inventory.told_engines(self._attempts)

    @property
    def lending(self) -> Lending:
        return self._lending

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._stopping or self._drain_wanted or self._owner_drains

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        """Take one event and return what to do about it, in order."""
        # The hot path: thousands a second.
        if type(event) is e.EngineChunkArrived:
            return self._engine_chunk(event, now)
        commands = self._decide(event, now)
        if self._link.up and self._inventory.due(now):
            commands.append(self._inventory.report(self._attempts, self.draining, now))
        return commands

    def _decide(self, event: e.Event, now: float) -> list[e.Command]:
        if isinstance(event, e.OrderEvent):
            return self._from_coordinator(event, now) if self._link.up else []
        match event:
            case e.EngineChunkArrived():
                return self._engine_chunk(event, now)
            case e.FlushDue():
                return self._frames.due(now)
            case e.Tick():
                return self._tick(now)
            case e.Connected():
                return self._connected(event, now)
            case e.Disconnected():
                return self._disconnected()
            case e.ClosingReceived():
                return self._closing(event)
            case e.NonceRecorded():
                return self._nonce_recorded(event, now)
            case e.NonceNotRecorded():
                return self._refuse(event.key, e.RefusalReason.REFUSAL_REASON_BUSY, event.detail)
            case e.EmbeddingComputed() | e.ScoresComputed():
                return self._computed(event, now)
            case e.EngineFailed():
                return self._end(event.key, event.reason, event.detail, now)
            case e.ModelChecked():
                self._inventory.model_checked(event)
                return []
            case e.EngineChanged():
                return self._engine_changed(event, now)
            case e.CanaryPassed():
                return self._canary_passed(event, now)
            case e.CanaryFailed():
                self._canaries_open.discard(event.engine_id)
                return []
            case e.HardwareChanged():
                self._inventory.hardware_changed(event)
                return []
            case e.CardsListed() | e.CardLent() | e.CardWithdrawn():
                self._inventory.changed()
                return self._move(self._lending.take(event, now), now)
            case e.OwnerDrainChanged():
                self._owner_drains = event.draining
                self._inventory.changed()
                return []
            case e.StatementSigned():
                return self._statement_signed(event)
            case e.StopRequested():
                return self._stop(now)
            case _:
                assert_never(event)

    # ---- the connection

    def _connected(self, event: e.Connected, now: float) -> list[e.Command]:
        if event.protocol_version != PROTOCOL_VERSION:
            return [_VERSION_UNSUPPORTED]
        if event.cluster_id != self._audience.cluster_id:
            return [e.CloseConnection(f"welcome from cluster {event.cluster_id!r}, not ours", VIOLATION_PAUSE_S)]
        if not event.coordinator_keys or any(len(key) != PUBLIC_KEY_BYTES for key in event.coordinator_keys):
            return [e.CloseConnection("welcome without the coordinator's keys", VIOLATION_PAUSE_S)]
        # The keys may have been rotated. The channel is rooted in the CA that was pinned at
        # enrolment, as the first keys were.
        self._audience = replace(self._audience, coordinator_keys=event.coordinator_keys)
        self._link.opened(event, now)
        self._desired_sequence = 0
        return [self._inventory.report(self._attempts, self.draining, now)]

    def _disconnected(self) -> list[e.Command]:
        aborts: list[e.Command] = [
            e.AbortWork(key) for key, one in self._attempts.items() if one.phase is Phase.RUNNING
        ]
        self._attempts.clear()
        self._frames.clear()
        self._link.closed()
        self._inventory.changed()
        return aborts

    def _from_coordinator(self, event: e.OrderEvent, now: float) -> list[e.Command]:
        self._link.heard(now)
        match event:
            case e.AssignmentReceived():
                return self._assignment(event, now)
            case e.ChunkReceived():
                return self._prompt_chunk(event)
            case e.CancelReceived():
                return self._end(event.key, e.FailureReason.FAILURE_REASON_CANCELLED, "cancelled", now)
            case e.DesiredReceived():
                return self._desired(event, now)
            case e.HeartbeatReceived():
                self._link.answered(event, now)
                return []
            case _:
                assert_never(event)

    def _closing(self, event: e.ClosingReceived) -> list[e.Command]:
        final = _EXITS.get(event.reason)
        if final is not None:
            return [replace(final, detail=f"{final.detail} ({event.detail})") if event.detail else final]
        violated = event.reason == e.ClosingReason.CLOSING_REASON_PROTOCOL_VIOLATION
        return [e.CloseConnection(f"the coordinator closes: {event.detail}", VIOLATION_PAUSE_S if violated else 0.0)]

    def _tick(self, now: float) -> list[e.Command]:
        self._link.ticked(now)
        for attempt in self._attempts.values():
            self._lending.use(attempt.engine_id, now)
        unloads = self._move(self._lending.unload_idle(now), now)
        return [*unloads, *self._tick_link(now)]

    def _tick_link(self, now: float) -> list[e.Command]:
        if not self._link.up:
            return []
        if self._link.silent(now):
            return [e.CloseConnection(f"nothing heard from the coordinator for {COORDINATOR_SILENT_S_MAX:.0f} s")]
        self._nonces.forget_void(self._link.clock.now_ms(now))
        commands: list[e.Command] = []
        heartbeat = self._link.heartbeat(bool(self._attempts), now)
        if heartbeat is not None:
            commands.append(heartbeat)
        for key, one in list(self._attempts.items()):
            if one.phase is Phase.RECEIVING and now - one.assigned_at > PROMPT_S_MAX:
                detail = f"the prompt did not arrive whole within {PROMPT_S_MAX:.0f} s"
                commands += self._refuse(key, e.RefusalReason.REFUSAL_REASON_PROMPT_MISMATCH, detail)
            elif one.suspect(now) and one.engine_id not in self._canaries_open:
                self._canaries_open.add(one.engine_id)
                commands.append(e.CheckEngine(one.engine_id))
        return commands

    # ---- assignments

    def _assignment(self, event: e.AssignmentReceived, now: float) -> list[e.Command]:
        try:
            order, engine_id = check_assignment(
                event.envelope,
                event.chunk_count,
                audience=self._audience,
                now_ms=self._link.clock.now_ms(now),
                nonces=self._nonces,
                offers=self._inventory.offers(self._attempts, self._attempts_max),
                context_tokens_max=self._context_tokens_max,
                draining=self.draining,
            )
        except AssignmentInvalid as refusal:
            key = claimed_key(event.envelope)
            live = self._attempts.get(key)
            if live is not None and live.order.header_sha256 == hashlib.sha256(event.envelope.payload).digest():
                # The message arrived twice. A refusal would end the attempt that runs.
                return []
            return [e.SendRefused(key, refusal.reason, refusal.detail)]
        if order.key in self._attempts:
            detail = "this attempt already runs under another header"
            return [e.SendRefused(order.key, e.RefusalReason.REFUSAL_REASON_MALFORMED, detail)]
        self._nonces.add(order.nonce_use)
        self._attempts[order.key] = Attempt(order, engine_id, now)
        self._inventory.changed()
        return [e.RecordNonce(order.key, order.nonce_use)]

    def _prompt_chunk(self, event: e.ChunkReceived) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        # Chunks of a refused or cancelled attempt were on their way when the coordinator learned of it.
        if attempt is None or attempt.phase is not Phase.RECEIVING:
            return []
        try:
            complete = attempt.prompt.add(event.chunk_index, event.packed_ids)
        except AssignmentInvalid as refusal:
            return self._refuse(event.key, refusal.reason, refusal.detail)
        if not complete:
            return []
        if not self._inventory.ready(attempt.engine_id):
            detail = "the engine went down while the prompt arrived"
            return self._refuse(event.key, e.RefusalReason.REFUSAL_REASON_ENGINE_NOT_READY, detail)
        attempt.phase = Phase.RUNNING
        return [e.StartWork(attempt.engine_id, attempt.order, attempt.prompt.ids)]

    def _nonce_recorded(self, event: e.NonceRecorded, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.order.nonce_use != event.use:
            return []
        attempt.nonce_durable = True
        if attempt.pending_ids:
            self._frames.add(attempt)
        if attempt.phase is Phase.SIGNING:
            return self._work_done(attempt, now)
        return self._frames.schedule(self._link.frame_delay_s, now)

    def _refuse(self, key: AttemptKey, reason: "e.RefusalReason.ValueType", detail: str) -> list[e.Command]:
        attempt = self._attempts.pop(key, None)
        if attempt is None:
            return []
        self._inventory.changed()
        aborts: list[e.Command] = [e.AbortWork(key)] if attempt.phase is Phase.RUNNING else []
        return [*aborts, e.SendRefused(key, reason, detail)]

    # ---- what the coordinator wants, and the end

    def _desired(self, event: e.DesiredReceived, now: float) -> list[e.Command]:
        if event.sequence <= self._desired_sequence:
            return []
        self._desired_sequence = event.sequence
        # Where it misses an attempt, it is told at once what there is.
        if event.drain != self._drain_wanted or not event.attempts <= self._attempts.keys():
            self._inventory.changed()
        self._drain_wanted = event.drain
        commands = self._move(self._lending.want(event.engines_wanted, now), now)
        # One ordered stream carries both, so every assignment known now arrived before this message.
        unwanted = [key for key in self._attempts if key not in event.attempts]
        commands += self._end_all(unwanted, e.FailureReason.FAILURE_REASON_CANCELLED, "no longer wanted", now)
        if event.drain:
            left = list(self._attempts)
            commands += self._end_all(left, e.FailureReason.FAILURE_REASON_DRAINED, "this node is drained", now)
        return commands

    def _stop(self, now: float) -> list[e.Command]:
        self._stopping = True
        left = list(self._attempts)
        commands = self._end_all(left, e.FailureReason.FAILURE_REASON_STOPPING, "this agent stops", now)
        if self._link.up:
            commands.append(self._inventory.report(self._attempts, self.draining, now))
        return [*commands, e.Exit(ExitStatus.STOPPED)]

    def _end_all(
        self, keys: Sequence[AttemptKey], reason: "e.FailureReason.ValueType", detail: str, now: float
    ) -> list[e.Command]:
        return [command for key in keys for command in self._end(key, reason, detail, now)]

    def _end(self, key: AttemptKey, reason: "e.FailureReason.ValueType", detail: str, now: float) -> list[e.Command]:
        """End an attempt from our side. The ids it produced go first: they are good, and may be delivered."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        commands = self._frames.flush(now)
        if attempt.phase is Phase.RUNNING:
            commands.append(e.AbortWork(key))
        del self._attempts[key]
        self._inventory.changed()
        return [*commands, e.SendFailed(key, reason, detail)]

    # ---- engines

    def _move(self, moves: Sequence[Move], now: float) -> list[e.Command]:
        """Bring engines up or down. What an engine of the owner's card ran is handed back before it is killed."""
        commands: list[e.Command] = []
        for move in moves:
            self._inventory.changed()
            if isinstance(move, Raise):
                commands.append(e.StartEngine(move.engine_id))
                continue
            if move.owner:
                left = [
                    key
                    for key, one in self._attempts.items()
                    if one.engine_id == move.engine_id and one.phase is not Phase.SIGNING
                ]
                commands += self._end_all(left, e.FailureReason.FAILURE_REASON_OWNER_RETURNED, move.reason, now)
            commands.append(e.StopEngine(move.engine_id, move.reason))
        return commands

    def _engine_chunk(self, event: e.EngineChunkArrived, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.phase is not Phase.RUNNING:
            return []
        chunk = event.chunk
        if chunk.token_ids:
            first = not attempt.pending_ids
            opens = attempt.first_id_at is None
            fault = attempt.take(chunk, now)
            if fault is not None:
                return self._end(event.key, e.FailureReason.FAILURE_REASON_ENGINE_ERROR, fault, now)
            if first and attempt.nonce_durable:
                self._frames.add(attempt)
                if opens and chunk.finish_reason is None:
                    # A reader waits for the first id of an answer; company can wait for the next frame.
                    return self._frames.flush(now)
        if chunk.finish_reason is not None:
            attempt.finish_reason = chunk.finish_reason
            return self._work_done(attempt, now)
        return self._frames.schedule(self._link.frame_delay_s, now)

    def _computed(self, event: e.EmbeddingComputed | e.ScoresComputed, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.phase is not Phase.RUNNING:
            return []
        if isinstance(event, e.EmbeddingComputed):
            attempt.embedding = event.vector
        else:
            attempt.scores = event.scores
        return self._work_done(attempt, now)

    def _work_done(self, attempt: Attempt, now: float) -> list[e.Command]:
        attempt.phase = Phase.SIGNING
        if not attempt.nonce_durable:
            return []
        # Its ids go before its end does.
        return [*self._frames.flush(now), attempt.statement(self._inventory.engines[attempt.engine_id], now)]

    def _statement_signed(self, event: e.StatementSigned) -> list[e.Command]:
        attempt = self._attempts.pop(event.key, None)
        if attempt is None:
            return []
        self._inventory.changed()
        return [
            e.SendFinished(key=event.key, statement=event.statement, embedding=attempt.embedding, scores=attempt.scores)
        ]

    def _engine_changed(self, event: e.EngineChanged, now: float) -> list[e.Command]:
        if not self._inventory.engine_changed(event.engine):
            return []
        engine_id = event.engine.engine_id
        lost = [key for key, one in self._attempts.items() if one.engine_id == engine_id and one.phase is Phase.RUNNING]
        return self._end_all(lost, e.FailureReason.FAILURE_REASON_ENGINE_CRASHED, "the engine went down", now)

    def _canary_passed(self, event: e.CanaryPassed, now: float) -> list[e.Command]:
        self._canaries_open.discard(event.engine_id)
        stalled = [
            key
            for key, one in self._attempts.items()
            if one.engine_id == event.engine_id and one.suspect(now) and one.last_id_at < event.started_at
        ]
        detail = "no id while another request on the same engine got one"
        return self._end_all(stalled, e.FailureReason.FAILURE_REASON_ENGINE_STALLED, detail, now)
