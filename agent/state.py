"""What an agent does about everything that happens to it. Pure.

Theory of operation. An attempt lives in one of three phases:

  RECEIVING   the header was checked; its nonce is being made durable and the
              ids of the prompt arrive. Both must end before work begins.
  RUNNING     the engine works on it, frames flow.
  SIGNING     the engine is done, all ids are on their way, the statement is being signed.

and leaves by exactly one message, SendFinished, SendFailed or SendRefused, or
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
from agent.assignments import (
    AttemptKey,
    Audience,
    EngineOffer,
    NonceCache,
    ServedModel,
    check_assignment,
    claimed_key,
)
from agent.attempts import Attempt, FrameQueue, Phase
from agent.errors import AssignmentInvalid, ExitStatus
from agent.link import COORDINATOR_SILENT_S_MAX, Link
from protos.slackwater.common.v1 import capability_pb2

PROTOCOL_VERSION = 1
# At most four whole states a second, so that a burst of changes costs one message.
STATE_INTERVAL_S = 0.25
# A state without news, for power, memory and temperature, and in case one got lost.
STATE_PERIOD_S = 10.0
# A prompt of the longest kind crosses a slow line in this time; then its slot is worth more than its patience.
PROMPT_S_MAX = 30.0
# A rejoin after a protocol violation: long enough not to burden, short enough for an operator who watches.
VIOLATION_PAUSE_S = 5.0

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
        now: float,
    ) -> None:
        self._audience = audience
        self._nonces = nonces
        self._attempts_max = attempts_max
        self._context_tokens_max = context_tokens_max
        self._models: dict[str, ServedModel] = {}
        self._engines: dict[str, capability_pb2.Engine] = {}
        self._host = capability_pb2.Host()
        self._gpus: tuple[capability_pb2.Gpu, ...] = ()
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._frames = FrameQueue(now)
        self._link = Link(now)
        self._stopping = self._drain_wanted = False
        self._desired_sequence = 0
        self._state_sequence = 0
        self._state_at = now
        self._state_changed = True
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
    def engines(self) -> Mapping[str, capability_pb2.Engine]:
        return self._engines

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._stopping or self._drain_wanted

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        """Take one event and return what to do about it, in order."""
        # The hot path: thousands a second.
        if type(event) is e.EngineChunkArrived:
            return self._engine_chunk(event, now)
        commands = self._decide(event, now)
        if self._link.up and self._state_changed and now - self._state_at >= STATE_INTERVAL_S:
            commands.append(self._whole_state(now))
        return commands

    def _decide(self, event: e.Event, now: float) -> list[e.Command]:
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
            case (
                e.AssignmentReceived()
                | e.ChunkReceived()
                | e.CancelReceived()
                | e.DesiredReceived()
                | e.HeartbeatReceived()
            ):
                return self._from_coordinator(event, now) if self._link.up else []
            case e.ClosingReceived():
                return self._closing(event)
            case e.NonceRecorded():
                return self._nonce_recorded(event)
            case e.NonceNotRecorded():
                return self._refuse(event.key, e.RefusalReason.REFUSAL_REASON_BUSY, event.detail)
            case e.EmbeddingComputed() | e.ScoresComputed():
                return self._computed(event, now)
            case e.EngineFailed():
                return self._end(event.key, event.reason, event.detail, now)
            case e.ModelChecked():
                self._models[event.engine_id] = event.model
                return []
            case e.EngineChanged():
                return self._engine_changed(event, now)
            case e.CanaryPassed():
                return self._canary_passed(event, now)
            case e.CanaryFailed():
                self._canaries_open.discard(event.engine_id)
                return []
            case e.HardwareChanged():
                # Power and temperature change all the time and can wait; another card, or none, cannot.
                self._state_changed |= _cards(event.host, event.gpus) != _cards(self._host, self._gpus)
                self._host, self._gpus = event.host, event.gpus
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
        # The keys may have been rotated. The channel is rooted in the CA that was pinned at
        # enrolment, as the first keys were.
        self._audience = replace(self._audience, coordinator_keys=event.coordinator_keys)
        self._link.opened(event, now)
        self._desired_sequence = 0
        return [self._whole_state(now)]

    def _disconnected(self) -> list[e.Command]:
        aborts: list[e.Command] = [
            e.AbortWork(key) for key, one in self._attempts.items() if one.phase is Phase.RUNNING
        ]
        self._attempts.clear()
        self._frames.clear()
        self._link.closed()
        self._state_changed = True
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
        if now - self._state_at >= STATE_PERIOD_S:
            self._state_changed = True
        return commands

    def _whole_state(self, now: float) -> e.SendState:
        self._state_sequence += 1
        self._state_at = now
        self._state_changed = False
        engines = []
        for engine_id, reported in sorted(self._engines.items()):
            engine = capability_pb2.Engine()
            engine.CopyFrom(reported)
            engine.running = self._running_on(engine_id)
            engines.append(engine)
        return e.SendState(
            sequence=self._state_sequence,
            host=self._host,
            gpus=self._gpus,
            engines=tuple(engines),
            running=tuple(self._attempts),
            draining=self.draining,
        )

    # ---- assignments

    def _assignment(self, event: e.AssignmentReceived, now: float) -> list[e.Command]:
        try:
            order, engine_id = check_assignment(
                event.envelope,
                event.chunk_count,
                audience=self._audience,
                now_ms=self._link.clock.now_ms(now),
                nonces=self._nonces,
                offers=self._offers(),
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
        self._state_changed = True
        return [e.RecordNonce(order.key, order.nonce_use)]

    def _offers(self) -> list[EngineOffer]:
        left = self._attempts_max - len(self._attempts)
        offers = []
        for engine_id, model in self._models.items():
            engine = self._engines.get(engine_id)
            ready = engine is not None and engine.status == capability_pb2.ENGINE_STATUS_READY
            slots = engine.slots if engine is not None else 0
            offers.append(EngineOffer(engine_id, model, ready, min(left, slots - self._running_on(engine_id))))
        return offers

    def _running_on(self, engine_id: str) -> int:
        return sum(one.engine_id == engine_id for one in self._attempts.values())

    def _prompt_chunk(self, event: e.ChunkReceived) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        # Chunks of a refused or cancelled attempt were on their way when the coordinator learned of it.
        if attempt is None or attempt.phase is not Phase.RECEIVING:
            return []
        try:
            attempt.prompt_complete = attempt.prompt.add(event.chunk_index, event.packed_ids)
        except AssignmentInvalid as refusal:
            return self._refuse(event.key, refusal.reason, refusal.detail)
        return self._start_when_whole(attempt)

    def _nonce_recorded(self, event: e.NonceRecorded) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.order.nonce_use != event.use:
            return []
        attempt.nonce_durable = True
        return self._start_when_whole(attempt)

    def _start_when_whole(self, attempt: Attempt) -> list[e.Command]:
        if not (attempt.prompt_complete and attempt.nonce_durable):
            return []
        if self._engines[attempt.engine_id].status != capability_pb2.ENGINE_STATUS_READY:
            reason = e.RefusalReason.REFUSAL_REASON_ENGINE_NOT_READY
            return self._refuse(attempt.order.key, reason, "the engine went down while the prompt arrived")
        attempt.phase = Phase.RUNNING
        return [e.StartWork(attempt.engine_id, attempt.order, attempt.prompt.ids)]

    def _refuse(self, key: AttemptKey, reason: "e.RefusalReason.ValueType", detail: str) -> list[e.Command]:
        if self._attempts.pop(key, None) is None:
            return []
        self._state_changed = True
        return [e.SendRefused(key, reason, detail)]

    # ---- what the coordinator wants, and the end

    def _desired(self, event: e.DesiredReceived, now: float) -> list[e.Command]:
        if event.sequence <= self._desired_sequence:
            return []
        self._desired_sequence = event.sequence
        # Where it misses an attempt, it is told at once what there is.
        if event.drain != self._drain_wanted or not event.attempts <= self._attempts.keys():
            self._state_changed = True
        self._drain_wanted = event.drain
        commands: list[e.Command] = []
        # One ordered stream carries both, so every assignment known now arrived before this message.
        for key in [key for key in self._attempts if key not in event.attempts]:
            commands += self._end(key, e.FailureReason.FAILURE_REASON_CANCELLED, "no longer wanted", now)
        if event.drain:
            commands += self._hand_back(e.FailureReason.FAILURE_REASON_DRAINED, "this node is drained", now)
        return commands

    def _stop(self, now: float) -> list[e.Command]:
        self._stopping = True
        commands = self._hand_back(e.FailureReason.FAILURE_REASON_STOPPING, "this agent stops", now)
        if self._link.up:
            commands.append(self._whole_state(now))
        return [*commands, e.Exit(ExitStatus.STOPPED)]

    def _hand_back(self, reason: "e.FailureReason.ValueType", detail: str, now: float) -> list[e.Command]:
        commands: list[e.Command] = []
        for key in list(self._attempts):
            commands += self._end(key, reason, detail, now)
        return commands

    def _end(self, key: AttemptKey, reason: "e.FailureReason.ValueType", detail: str, now: float) -> list[e.Command]:
        """End an attempt from our side. The ids it produced go first: they are good, and may be delivered."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        commands = self._frames.flush(now)
        if attempt.phase is Phase.RUNNING:
            commands.append(e.AbortWork(key))
        del self._attempts[key]
        self._state_changed = True
        return [*commands, e.SendFailed(key, reason, detail)]

    # ---- engines

    def _engine_chunk(self, event: e.EngineChunkArrived, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.phase is not Phase.RUNNING:
            return []
        chunk = event.chunk
        if chunk.token_ids:
            first = not attempt.pending_ids
            fault = attempt.take(chunk, now)
            if fault is not None:
                return self._end(event.key, e.FailureReason.FAILURE_REASON_ENGINE_ERROR, fault, now)
            if first:
                self._frames.add(attempt)
        if chunk.finish_reason is None:
            return self._frames.schedule(self._link.frame_delay_s, now)
        attempt.phase = Phase.SIGNING
        # Its ids go before its end does.
        commands = self._frames.flush(now)
        commands.append(attempt.statement(self._engines[attempt.engine_id], chunk.finish_reason, now))
        return commands

    def _computed(self, event: e.EmbeddingComputed | e.ScoresComputed, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.phase is not Phase.RUNNING:
            return []
        attempt.phase = Phase.SIGNING
        if isinstance(event, e.EmbeddingComputed):
            attempt.embedding = event.vector
        else:
            attempt.scores = event.scores
        return [attempt.statement(self._engines[attempt.engine_id], None, now)]

    def _statement_signed(self, event: e.StatementSigned) -> list[e.Command]:
        attempt = self._attempts.pop(event.key, None)
        if attempt is None:
            return []
        self._state_changed = True
        return [
            e.SendFinished(key=event.key, statement=event.statement, embedding=attempt.embedding, scores=attempt.scores)
        ]

    def _engine_changed(self, event: e.EngineChanged, now: float) -> list[e.Command]:
        engine = event.engine
        before = self._engines.get(engine.engine_id)
        self._engines[engine.engine_id] = engine
        self._state_changed = True
        ready = engine.status == capability_pb2.ENGINE_STATUS_READY
        if before is None or (ready and before.pid == engine.pid):
            return []
        commands: list[e.Command] = []
        for key, one in list(self._attempts.items()):
            if one.engine_id == engine.engine_id and one.phase is Phase.RUNNING:
                detail = "the engine went down"
                commands += self._end(key, e.FailureReason.FAILURE_REASON_ENGINE_CRASHED, detail, now)
        return commands

    def _canary_passed(self, event: e.CanaryPassed, now: float) -> list[e.Command]:
        self._canaries_open.discard(event.engine_id)
        commands: list[e.Command] = []
        for key, one in list(self._attempts.items()):
            if one.engine_id == event.engine_id and one.suspect(now) and one.last_id_at < event.started_at:
                detail = "no id while another request on the same engine got one"
                commands += self._end(key, e.FailureReason.FAILURE_REASON_ENGINE_STALLED, detail, now)
        return commands


def _cards(host: capability_pb2.Host, gpus: Sequence[capability_pb2.Gpu]) -> tuple[object, ...]:
    return (host.cpu_model, host.gpu_note, [(gpu.uuid.value, gpu.uuid.status) for gpu in gpus])
