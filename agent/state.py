"""What an agent does about everything that happens to it. Pure.

Here is the node: its connection, what the coordinator wants of it, its cards and
engines. Attempts, from order to statement, are `agent.workload`'s.

The node's whole state goes out after each change, a few times a second at
most, and once in a while without one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from agent import events as e
from agent.assignments import AttemptKey, Audience, NonceCache
from agent.attempts import Attempt, Phase
from agent.challenges import Challenges
from agent.endings import PROTOCOL_VERSION, VERSION_UNSUPPORTED, VIOLATION_PAUSE_S, after_closing
from agent.energy.work_log import WorkLog
from agent.errors import ExitStatus
from agent.inventory import Inventory
from agent.link import COORDINATOR_SILENT_S_MAX, Link
from agent.open_engines import OpenEngines
from agent.owner.asks import NOTHING_ASKED, AskSettings
from agent.owner.consent import Consent
from agent.owner.events import CPU_CARD
from agent.owner.lending import EngineUse, Lending, Move, Raise, Standing
from agent.workload import Terms, Workload
from protos.slackwater.common.v1 import capability_pb2

# Raw Ed25519.
PUBLIC_KEY_BYTES = 32


class AgentState:
    """The agent's decisions; `handle` is the only way to change it."""

    def __init__(
        self,
        *,
        audience: Audience,
        nonces: NonceCache,
        attempts_max: int,
        consent: Consent,
        work_log: WorkLog,
        engines: Mapping[str, EngineUse],
        now: float,
        asks: AskSettings = NOTHING_ASKED,
    ) -> None:
        self._lending = Lending(engines, now)
        self._open = OpenEngines(engines)
        self._inventory = Inventory(self._lending, self._open, now)
        self._link = Link(now)
        self._inventory.ask(asks)
        self._terms = Terms(attempts_max, consent, asks)
        self._work = Workload(
            audience,
            nonces,
            terms=self._terms,
            log=work_log,
            inventory=self._inventory,
            link=self._link,
            now=now,
        )
        self._stopping = self._drain_wanted = self._owner_drains = self._ledger_rewritten = False
        self._desired_sequence = 0
        self._canaries_open: set[str] = set()
        self._challenges = Challenges(self._lending)

    @property
    def connected(self) -> bool:
        return self._link.up

    def coordinator_time_ms(self, now: float) -> int | None:
        """The coordinator's time; None as long as it was never heard."""
        return self._link.clock.now_ms(now) if self._link.clock.known else None

    @property
    def link(self) -> Link:
        """What the coordinator last told: credits and terms. To be looked at only."""
        return self._link

    @property
    def coordinator_keys(self) -> tuple[bytes, ...]:
        """Raw Ed25519 keys whose signatures count, as the coordinator's last Welcome named them."""
        return self._work.audience.coordinator_keys

    @property
    def attempts(self) -> Mapping[AttemptKey, Attempt]:
        return self._work.attempts

    @property
    def results_waiting(self) -> int:
        """Finished results that the coordinator has not taken yet."""
        return self._work.results_waiting

    def engines(self, now: float) -> Sequence[capability_pb2.Engine]:
        """Return the engines as the fleet is told of them."""
        return self._inventory.told_engines(self.attempts, now)

    @property
    def lending(self) -> Lending:
        return self._lending

    @property
    def busy(self) -> bool:
        """Whether ticks are to come often: attempts run, or the fleet is to be told of something."""
        return bool(self.attempts) or self._open.any_switching or (self._link.up and self._inventory.untold)

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._stopping or self._drain_wanted or self._owner_drains or self._ledger_rewritten

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        """Take one event and return what to do about it, in order."""
        # The hot path: thousands a second.
        if type(event) is e.EngineChunkArrived:
            return self._work.engine_chunk(event, now)
        commands = self._decide(event, now)
        if self._link.up and self._inventory.due(now):
            commands.append(self._inventory.report(self.attempts, self.draining, now))
        return commands

    def _decide(self, event: e.Event, now: float) -> list[e.Command]:
        if isinstance(event, e.OrderEvent):
            return self._from_coordinator(event, now) if self._link.up else []
        match event:
            case e.EngineChunkArrived():
                return self._work.engine_chunk(event, now)
            case e.FlushDue():
                return self._work.flush_due(now)
            case e.Tick():
                return self._tick(now)
            case e.Connected():
                return self._connected(event, now)
            case e.Disconnected():
                return self._disconnected(now)
            case e.ClosingReceived():
                return after_closing(event)
            case e.ChallengeEnded():
                self._challenges.ended(event)
                return []
            case e.NonceRecorded():
                return self._work.nonce_recorded(event, now)
            case e.NonceNotRecorded():
                return self._work.refuse(event.key, e.RefusalReason.REFUSAL_REASON_BUSY, event.detail, now)
            case e.EmbeddingComputed() | e.ScoresComputed():
                return self._work.computed(event, now)
            case e.EngineFailed():
                return self._work.end(event.key, event.reason, event.detail, now)
            case e.ModelChecked():
                self._inventory.model_checked(event)
                return self._move(self._bar(event.engine_id, now), now)
            case e.ModelFound() | e.ModelFetched() | e.ModelNotHad():
                self._inventory.changed()
                return [*self._open.take(event, self._terms.consent, now), *self._switch(now)]
            case e.ModelsSeen():
                self._inventory.models_seen(event)
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
            case e.CardsSampled():
                self._work.log.sampled(event.samples, self._inventory.held_cards(), self.attempts, now)
                return []
            case e.MachineResumed():
                return self._restart_on_cards(event, now)
            case e.CardsListed() | e.CardLent() | e.CardWithdrawn():
                self._inventory.changed()
                broken_off = self._challenges.withdrawn(event.card) if isinstance(event, e.CardWithdrawn) else []
                return [*broken_off, *self._move(self._lending.take(event, now), now)]
            case e.SlotsShared():
                self._inventory.share_slots(event.shares)
                return []
            case e.OwnerDrainChanged():
                self._owner_drains = event.draining
                return self._drain_changed()
            case e.LedgerJudged():
                return self._ledger_judged(event)
            case e.LocalTimeKnown():
                self._terms.local_time = event.time
                self._work.log.counts.day_is(event.time.day)
                return []
            case e.ConsentChanged():
                return self._consent_changed(event, now)
            case e.AsksChanged():
                return self._asks_changed(event, now)
            case e.StatementSigned():
                return self._work.statement_signed(event, now)
            case e.StopRequested():
                return self._stop(now)
            case _:
                assert_never(event)

    # ---- the connection

    def _connected(self, event: e.Connected, now: float) -> list[e.Command]:
        if event.protocol_version != PROTOCOL_VERSION:
            return [VERSION_UNSUPPORTED]
        if event.cluster_id != self._work.audience.cluster_id:
            return [e.CloseConnection(f"welcome from cluster {event.cluster_id!r}, not ours", VIOLATION_PAUSE_S)]
        if not event.coordinator_keys or any(len(key) != PUBLIC_KEY_BYTES for key in event.coordinator_keys):
            return [e.CloseConnection("welcome without the coordinator's keys", VIOLATION_PAUSE_S)]
        # The keys may have been rotated. The channel is rooted in the CA that was pinned at
        # enrolment, as the first keys were.
        self._work.audience = replace(self._work.audience, coordinator_keys=event.coordinator_keys)
        self._link.opened(event, now)
        self._desired_sequence = 0
        return [self._inventory.report(self.attempts, self.draining, now), *self._work.results_again(now)]

    def _disconnected(self, now: float) -> list[e.Command]:
        self._link.closed()
        self._inventory.changed()
        return [*self._challenges.stop("the connection is lost"), *self._work.connection_lost(now)]

    def _from_coordinator(self, event: e.OrderEvent, now: float) -> list[e.Command]:
        self._link.heard(now)
        match event:
            case e.AssignmentReceived():
                return [*self._challenges.stop("work comes first"), *self._work.assign(event, now)]
            case e.ChunkReceived():
                return self._work.prompt_chunk(event, now)
            case e.CancelReceived():
                return self._work.end(event.key, e.FailureReason.FAILURE_REASON_CANCELLED, "cancelled", now)
            case e.DesiredReceived():
                return self._desired(event, now)
            case e.ResultTaken():
                return self._work.result_taken(event.key)
            case e.ChallengeAsked():
                return self._challenges.asked(
                    event,
                    working=bool(self.attempts),
                    draining=self.draining,
                    closed=self._terms.consent.closed(self._terms.local_time),
                    held=self._inventory.held_cards(),
                )
            case e.HeartbeatReceived():
                self._link.answered(event, now)
                return []
            case _:
                assert_never(event)

    def _tick(self, now: float) -> list[e.Command]:
        self._link.ticked(now)
        for attempt in self.attempts.values():
            self._lending.use(attempt.engine_id, now)
        for engine_id in self._inventory.engines:
            # Loading takes minutes, and is no time in which nobody used it.
            if not self._inventory.ready(engine_id):
                self._lending.use(engine_id, now)
        unloads = self._move(self._lending.unload_idle(now), now)
        return [*self._switch(now), *unloads, *self._tick_link(now)]

    def _tick_link(self, now: float) -> list[e.Command]:
        if not self._link.up:
            return []
        if self._link.silent(now):
            return [e.CloseConnection(f"nothing heard from the coordinator for {COORDINATOR_SILENT_S_MAX:.0f} s")]
        self._work.nonces.forget_void(self._link.clock.now_ms(now))
        commands: list[e.Command] = []
        heartbeat = self._link.heartbeat(bool(self.attempts), now)
        if heartbeat is not None:
            commands.append(heartbeat)
        commands += self._work.late_prompts(now)
        commands += self._work.results_overdue(now)
        for engine_id in sorted(self._work.suspects(now) - self._canaries_open):
            self._canaries_open.add(engine_id)
            commands.append(e.CheckEngine(engine_id))
        return commands

    # ---- what the coordinator wants, and the end

    def _desired(self, event: e.DesiredReceived, now: float) -> list[e.Command]:
        if event.sequence <= self._desired_sequence:
            return []
        self._desired_sequence = event.sequence
        # Where it misses an attempt, it is told at once what there is.
        if event.drain != self._drain_wanted or not event.attempts <= self.attempts.keys():
            self._inventory.changed()
        self._drain_wanted = event.drain
        self._drain_changed()
        commands = self._move(self._lending.want(event.engines_wanted, now), now)
        commands += self._open.want(event.models_wanted, now)
        # One ordered stream carries both, so every assignment known now arrived before this message.
        # What only waits for its signature is done, and is told whether it is wanted or not.
        unwanted = [
            key for key, one in self.attempts.items() if key not in event.attempts and one.phase is not Phase.SIGNING
        ]
        commands += self._work.end_all(unwanted, e.FailureReason.FAILURE_REASON_CANCELLED, "no longer wanted", now)
        if event.drain:
            left = list(self.attempts)
            commands += self._work.end_all(left, e.FailureReason.FAILURE_REASON_DRAINED, "this node is drained", now)
        return commands

    def _stop(self, now: float) -> list[e.Command]:
        self._stopping = True
        self._drain_changed()
        left = list(self.attempts)
        commands = self._work.end_all(left, e.FailureReason.FAILURE_REASON_STOPPING, "this agent stops", now)
        if self._link.up:
            commands.append(self._inventory.report(self.attempts, self.draining, now))
        return [*commands, *self._challenges.stop("this agent stops"), e.Exit(ExitStatus.STOPPED)]

    def _ledger_judged(self, event: e.LedgerJudged) -> list[e.Command]:
        if event.rewritten == self._ledger_rewritten:
            return []
        self._ledger_rewritten = event.rewritten
        return self._drain_changed()

    def _drain_changed(self) -> list[e.Command]:
        self._terms.draining = self.draining
        self._inventory.changed()
        return []

    # ---- engines

    def _restart_on_cards(self, event: e.MachineResumed, now: float) -> list[e.Command]:
        """Start engines anew whose contexts on a card did not survive the sleep of the machine."""
        commands: list[e.Command] = []
        for engine_id, engine in self._inventory.engines.items():
            if engine.pid and CPU_CARD not in self._lending.cards_of(engine_id):
                detail = f"the machine slept for {event.slept_s:.0f} s"
                commands += self._hand_back(engine_id, e.FailureReason.FAILURE_REASON_ENGINE_CRASHED, detail, now)
                commands.append(e.StopEngine(engine_id, detail))
                if self._lending.standing(engine_id) is Standing.UP:
                    commands.append(e.StartEngine(engine_id))
        return commands

    def _hand_back(
        self, engine_id: str, reason: "e.FailureReason.ValueType", detail: str, now: float
    ) -> list[e.Command]:
        """End what is on an engine; what only waits for its signature is done with it."""
        left = [
            key for key, one in self.attempts.items() if one.engine_id == engine_id and one.phase is not Phase.SIGNING
        ]
        return self._work.end_all(left, reason, detail, now)

    def _consent_changed(self, event: e.ConsentChanged, now: float) -> list[e.Command]:
        """Let nothing go on that the owner does not want any more."""
        self._terms.consent = event.consent
        moves = [move for engine_id in self._inventory.models for move in self._bar(engine_id, now)]
        left = self._open.consent_changed(event.consent, self._inventory.models, now)
        return [*self._work.end_unwanted(now), *self._move(moves, now), *left]

    def _asks_changed(self, event: e.AsksChanged, now: float) -> list[e.Command]:
        self._terms.asks = event.asks
        self._inventory.ask(event.asks)
        # The answer to a heartbeat behind it tells the owner what comes of it.
        return (
            [self._inventory.report(self.attempts, self.draining, now), self._link.beat(now)] if self._link.up else []
        )

    def _switch(self, now: float) -> list[e.Command]:
        """Have engines change their model that have nothing left to do, or have had their time for it."""
        commands: list[e.Command] = []
        for switch in self._open.switches({one.engine_id for one in self.attempts.values()}, now):
            drained = e.FailureReason.FAILURE_REASON_DRAINED
            commands += self._hand_back(switch.engine_id, drained, "the engine changes its model", now)
            commands.append(switch)
            self._inventory.changed()
        return commands

    def _bar(self, engine_id: str, now: float) -> list[Move]:
        refusal = self._terms.consent.allows_model(self._inventory.models[engine_id])
        return self._lending.bar(engine_id, refusal, now)

    def _move(self, moves: Sequence[Move], now: float) -> list[e.Command]:
        """Bring engines up or down. What an engine of the owner's card ran is handed back before it is killed."""
        commands: list[e.Command] = []
        for move in moves:
            self._inventory.changed()
            if isinstance(move, Raise):
                commands.append(e.StartEngine(move.engine_id))
                continue
            if move.owner:
                returned = e.FailureReason.FAILURE_REASON_OWNER_RETURNED
                commands += self._hand_back(move.engine_id, returned, move.reason, now)
            commands.append(e.StopEngine(move.engine_id, move.reason))
        return commands

    def _engine_changed(self, event: e.EngineChanged, now: float) -> list[e.Command]:
        if event.engine.status == capability_pb2.ENGINE_STATUS_FAILED:
            self._open.failed(event.engine.engine_id, event.engine.note, now)
        if not self._inventory.engine_changed(event.engine):
            return []
        engine_id = event.engine.engine_id
        lost = [key for key, one in self.attempts.items() if one.engine_id == engine_id and one.phase is Phase.RUNNING]
        return self._work.end_all(lost, e.FailureReason.FAILURE_REASON_ENGINE_CRASHED, "the engine went down", now)

    def _canary_passed(self, event: e.CanaryPassed, now: float) -> list[e.Command]:
        self._canaries_open.discard(event.engine_id)
        return self._work.end_stalled(event, now)
