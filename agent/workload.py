"""The attempts of an agent, from order to statement: the part of `agent.state` that handles work. Pure.

An attempt lives in one of three phases:

  RECEIVING   the header was checked, the ids of the prompt arrive.
  RUNNING     the engine works on it, frames flow.
  SIGNING     the engine is done, all ids are on their way, the statement is being signed.

Beside that its nonce is made durable, which takes a disk some milliseconds:
work begins meanwhile, but nothing of it leaves the node before. So no header
can have two executions that anybody sees, and no first token waits for a disk.

An attempt leaves by exactly one message, SendFinished, SendFailed or SendRefused, or
silently when the connection is lost, since the coordinator ends the attempts
of a lost stream itself. What was finished by then is told all the same, as soon
as there is somebody to tell (`agent.results`). Whatever arrives later about an
attempt that left finds none and is dropped; so an abort needs no answer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent import events as e
from agent.assignments import AttemptKey, Audience, NonceCache, check_assignment, claimed_key
from agent.attempts import Attempt, FrameQueue, Phase
from agent.energy.work_log import WorkLog
from agent.errors import AssignmentInvalid
from agent.inventory import Inventory
from agent.link import Link
from agent.owner.asks import AskSettings
from agent.owner.consent import Consent
from agent.owner.events import LocalTimeObserved
from agent.results import KeptResults

# A prompt of the longest kind crosses a slow line in this time; then its slot is worth more than its patience.
PROMPT_S_MAX = 30.0


@dataclass(slots=True)
class Terms:
    """What the owner allows; changed while attempts run, and asked when an order arrives."""

    attempts_max: int
    consent: Consent
    asks: AskSettings
    local_time: LocalTimeObserved | None = None
    draining: bool = False


class Workload:
    """All attempts of this node."""

    def __init__(
        self,
        audience: Audience,
        nonces: NonceCache,
        terms: Terms,
        log: WorkLog,
        inventory: Inventory,
        link: Link,
        now: float,
    ) -> None:
        self.audience = audience
        self.nonces = nonces
        self.terms = terms
        self.log = log
        self._inventory = inventory
        self._link = link
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._frames = FrameQueue(now)
        self._results = KeptResults()

    @property
    def attempts(self) -> Mapping[AttemptKey, Attempt]:
        return self._attempts

    def connection_lost(self, now: float) -> list[e.Command]:
        """Give up what is unfinished: the coordinator has somebody else do it."""
        unfinished = {key: one for key, one in self._attempts.items() if one.phase is not Phase.SIGNING}
        aborts: list[e.Command] = [e.AbortWork(key) for key, one in unfinished.items() if one.phase is Phase.RUNNING]
        for key, one in unfinished.items():
            self.log.ended(one, self._attempts, now, whole=False)
            del self._attempts[key]
        self._frames.clear()
        return aborts

    @property
    def results_waiting(self) -> int:
        return len(self._results)

    def results_again(self, now: float) -> list[e.Command]:
        """Return what was finished and not taken over the connections before this one."""
        return self._results.again(now)

    def results_overdue(self, now: float) -> list[e.Command]:
        return self._results.overdue(now)

    def result_taken(self, key: AttemptKey) -> list[e.Command]:
        self._results.taken(key)
        return []

    def flush_due(self, now: float) -> list[e.Command]:
        return self._frames.due(now)

    def late_prompts(self, now: float) -> list[e.Command]:
        """Refuse what waits for its prompt for too long."""
        detail = f"the prompt did not arrive whole within {PROMPT_S_MAX:.0f} s"
        late = [
            key
            for key, one in self._attempts.items()
            if one.phase is Phase.RECEIVING and now - one.assigned_at > PROMPT_S_MAX
        ]
        reason = e.RefusalReason.REFUSAL_REASON_PROMPT_MISMATCH
        return [command for key in late for command in self.refuse(key, reason, detail, now)]

    def suspects(self, now: float) -> set[str]:
        """Return the engines on which a sequence has stopped advancing."""
        return {one.engine_id for one in self._attempts.values() if one.suspect(now)}

    # ---- orders

    def assign(self, event: e.AssignmentReceived, now: float) -> list[e.Command]:
        terms = self.terms
        try:
            order, engine_id = check_assignment(
                event.envelope,
                event.chunk_count,
                audience=self.audience,
                now_ms=self._link.clock.now_ms(now),
                nonces=self.nonces,
                offers=self._inventory.offers(self._attempts, terms.attempts_max),
                consent=terms.consent,
                asks=terms.asks,
                tokens_today=self._tokens_today(),
                local_time=terms.local_time,
                draining=terms.draining,
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
        self.nonces.add(order.nonce_use)
        self._attempts[order.key] = Attempt(order, engine_id, now)
        self._inventory.changed()
        return [e.RecordNonce(order.key, order.nonce_use)]

    def prompt_chunk(self, event: e.ChunkReceived, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        # Chunks of a refused or cancelled attempt were on their way when the coordinator learned of it.
        if attempt is None or attempt.phase is not Phase.RECEIVING:
            return []
        try:
            complete = attempt.prompt.add(event.chunk_index, event.packed_ids)
        except AssignmentInvalid as refusal:
            return self.refuse(event.key, refusal.reason, refusal.detail, now)
        if not complete:
            return []
        if not self._inventory.ready(attempt.engine_id):
            detail = "the engine went down while the prompt arrived"
            return self.refuse(event.key, e.RefusalReason.REFUSAL_REASON_ENGINE_NOT_READY, detail, now)
        attempt.phase = Phase.RUNNING
        self.log.began(attempt, self._inventory.cards_of(attempt.engine_id), self._attempts, now)
        return [e.StartWork(attempt.engine_id, attempt.order, attempt.prompt.ids)]

    def nonce_recorded(self, event: e.NonceRecorded, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.order.nonce_use != event.use:
            return []
        attempt.nonce_durable = True
        if attempt.pending_ids:
            self._frames.add(attempt)
        if attempt.phase is Phase.SIGNING:
            return self._work_done(attempt, now)
        return self._frames.schedule(self._link.frame_delay_s, now)

    def refuse(self, key: AttemptKey, reason: "e.RefusalReason.ValueType", detail: str, now: float) -> list[e.Command]:
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        self.log.ended(attempt, self._attempts, now, whole=False)
        del self._attempts[key]
        self._inventory.changed()
        aborts: list[e.Command] = [e.AbortWork(key)] if attempt.phase is Phase.RUNNING else []
        return [*aborts, e.SendRefused(key, reason, detail)]

    def _tokens_today(self) -> int:
        """Return what was worked on today, and what is promised to attempts that are not over."""
        live = (one.order for one in self._attempts.values() if one.phase is not Phase.SIGNING)
        return self.log.counts.tokens + sum(order.prompt_token_count + order.max_tokens for order in live)

    def end_unwanted(self, now: float) -> list[e.Command]:
        """Hand back what the owner does not accept any more. Hours and counts concern only what arrives."""
        commands: list[e.Command] = []
        for key, one in list(self._attempts.items()):
            refusal = self.terms.consent.forbids(one.order)
            if refusal is not None and one.phase is not Phase.SIGNING:
                commands += self.end(key, e.FailureReason.FAILURE_REASON_OWNER_RETURNED, refusal, now)
        return commands

    # ---- the engine's answers

    def engine_chunk(self, event: e.EngineChunkArrived, now: float) -> list[e.Command]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.phase is not Phase.RUNNING:
            return []
        chunk = event.chunk
        if chunk.token_ids:
            first = not attempt.pending_ids
            opens = attempt.first_id_at is None
            fault = attempt.take(chunk, now)
            if fault is not None:
                return self.end(event.key, e.FailureReason.FAILURE_REASON_ENGINE_ERROR, fault, now)
            if first and attempt.nonce_durable:
                self._frames.add(attempt)
                if opens and chunk.finish_reason is None:
                    # A reader waits for the first id of an answer; company can wait for the next frame.
                    return self._frames.flush(now)
        if chunk.finish_reason is not None:
            attempt.finish_reason = chunk.finish_reason
            return self._work_done(attempt, now)
        return self._frames.schedule(self._link.frame_delay_s, now)

    def computed(self, event: e.EmbeddingComputed | e.ScoresComputed, now: float) -> list[e.Command]:
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
        self.log.ended(attempt, self._attempts, now, whole=True)
        if not attempt.nonce_durable:
            return []
        # Its ids go before its end does.
        return [*self._frames.flush(now), attempt.statement(self._inventory.engines[attempt.engine_id], now)]

    def statement_signed(self, event: e.StatementSigned, now: float) -> list[e.Command]:
        attempt = self._attempts.pop(event.key, None)
        if attempt is None:
            return []
        self._inventory.changed()
        finished = e.SendFinished(
            key=event.key,
            statement=event.statement,
            embedding=attempt.embedding,
            scores=attempt.scores,
            # For this stream it is news that there was such an order.
            header=attempt.order.header if attempt.assigned_at < self._link.opened_at else None,
        )
        self._results.add(attempt.order, finished, now)
        # Without a connection there is nobody to tell; the next one begins with it.
        return [finished] if self._link.up else []

    # ---- ends

    def end_all(
        self, keys: Sequence[AttemptKey], reason: "e.FailureReason.ValueType", detail: str, now: float
    ) -> list[e.Command]:
        return [command for key in keys for command in self.end(key, reason, detail, now)]

    def end(self, key: AttemptKey, reason: "e.FailureReason.ValueType", detail: str, now: float) -> list[e.Command]:
        """End an attempt from our side. The ids it produced go first: they are good, and may be delivered."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        commands = self._frames.flush(now)
        if attempt.phase is Phase.RUNNING:
            commands.append(e.AbortWork(key))
        self.log.ended(attempt, self._attempts, now, whole=False)
        del self._attempts[key]
        self._inventory.changed()
        return [*commands, e.SendFailed(key, reason, detail)]

    def end_stalled(self, event: e.CanaryPassed, now: float) -> list[e.Command]:
        stalled = [
            key
            for key, one in self._attempts.items()
            if one.engine_id == event.engine_id and one.suspect(now) and one.last_id_at < event.started_at
        ]
        detail = "no id while another request on the same engine got one"
        return self.end_all(stalled, e.FailureReason.FAILURE_REASON_ENGINE_STALLED, detail, now)
