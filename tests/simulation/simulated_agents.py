"""A simulated machine: the agent's real decisions over a simulated disk and engine."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from simulated_wires import Wire, World

from agent import events as e
from agent.assignments import AttemptKey, Audience, NonceCache, NonceUse, ServedModel, TaskOrder
from agent.energy.day_counts import DayCounts, DayRecord
from agent.energy.work_log import WorkLog
from agent.owner.asks import Ask, AskSettings
from agent.owner.consent import Consent, ConsentSettings
from agent.owner.events import CPU_CARD
from agent.owner.lending import EngineUse, Standing
from agent.state import AgentState
from agent.statements import sign_statement
from agent.wire import read_message, read_welcome, write_command
from coordinator.ledger.prices import DEFAULT_PRICE
from coordinator.scheduler.testing import DIGEST, STOP_ID, VOCABULARY_SIZE
from inference.engine import TokenChunk
from inference.task import FinishReason, TaskKind
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

CONTEXT_TOKENS = 4096
TICK_S = 0.25
ENGINE_START_S = 1.5
# Short, so that engines come and go all along.
UNLOAD_AFTER_S = 4.0


def next_id(ids: Sequence[int]) -> int:
    """Return the id that follows: a hash of all ids, so that one wrong id changes all that come after."""
    state = 0
    for token_id in ids:
        state = fold(state, token_id)
    return draw(state)


def fold(state: int, token_id: int) -> int:
    return (state * 6364136223846793005 + token_id + 1442695040888963407) & (2**64 - 1)


def draw(state: int) -> int:
    value = state >> 40
    return STOP_ID if value % 41 == 0 else 3 + value % (VOCABULARY_SIZE - 3)


class Coordinator(Protocol):
    """Where a connection leads to; None is returned while the coordinator is down."""

    def open_stream(self, agent: "Agent", hello: wire.Hello) -> "Stream | None": ...


class Stream(Protocol):
    """One Connect stream, from the agent's side."""

    up: Wire
    down: Wire

    def receive(self, request: wire.ConnectRequest) -> None: ...

    def hang_up(self) -> None: ...


@dataclass(slots=True)
class EngineSequence:
    """What the engine does for one attempt."""

    key: AttemptKey
    order: TaskOrder
    state: int
    produced: int = 0
    stalled: bool = False
    alive: bool = True


@dataclass(slots=True)
class Agent:
    """One node. `state` is new with every start of the agent; keys and used nonces are on its disk."""

    world: World
    coordinator: Coordinator
    node_id: str
    key: Ed25519PrivateKey
    coordinator_key: bytes
    state: AgentState | None = None
    stream: Stream | None = None
    frozen_until: float = 0.0
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    boots: int = 0
    streams: int = 0
    pid: int = 0
    nonces: list[NonceUse] = field(default_factory=list)
    sequences: dict[AttemptKey, EngineSequence] = field(default_factory=dict)
    banned: bool = False
    # Somebody sits at the machine: outlives restarts of the agent.
    owner_here: bool = False

    # --- life ------------------------------------------------------------------------------

    def start(self) -> None:
        if self.state is not None or self.banned:
            return
        self.boots += 1
        self.state = AgentState(
            audience=Audience("cluster", self.node_id, (self.coordinator_key,)),
            nonces=NonceCache(self.nonces),
            attempts_max=64,
            consent=Consent(ConsentSettings()),
            work_log=WorkLog({}, DayCounts(DayRecord())),
            engines={"engine": EngineUse(unload_after_s=UNLOAD_AFTER_S)},
            now=self.world.now,
            asks=AskSettings(default=self._ask()),
        )
        model = ServedModel(DIGEST, "model", "Apache-2.0", TaskKind.GENERATE, CONTEXT_TOKENS, VOCABULARY_SIZE)
        self.handle(e.ModelChecked("engine", model))
        self._report_engine(capability_pb2.ENGINE_STATUS_STOPPED)
        self.handle(e.CardsListed((CPU_CARD,)))
        if not self.owner_here:
            self.handle(e.CardLent(CPU_CARD))
        self.connect()
        self.tick(self.boots)

    def _ask(self) -> Ask | None:
        """Return what the owner asks from this start on: now and then something else, and the fifth one too much."""
        number = int(self.node_id.removeprefix("node-"))
        if number == 4:
            return Ask(prompt_micro=0, completion_micro=DEFAULT_PRICE.completion_micro)
        return (None, Ask(prompt_micro=100_000, completion_micro=400_000), Ask(prompt_micro=0, completion_micro=0))[
            (number + self.boots) % 3
        ]

    def crash(self) -> None:
        """SIGKILL: the kernel closes the sockets, the engine dies with its parent."""
        self.state = None
        self.frozen_until = 0.0
        self.waiting.clear()
        self._stop_engine()
        self._drop_stream()

    def start_engine(self) -> None:
        if self.state is None:
            return
        boot = self.boots
        self.pid += 1
        pid = self.pid
        self._report_engine(capability_pb2.ENGINE_STATUS_STARTING)

        def ready() -> None:
            if self.state is not None and self.boots == boot and self.pid == pid:
                self._report_engine(capability_pb2.ENGINE_STATUS_READY)

        self.world.after(ENGINE_START_S, lambda: self._when_awake(ready))

    def crash_engine(self) -> None:
        if self.state is not None and self.state.lending.standing("engine") is Standing.UP:
            self._stop_engine()
            self.start_engine()

    def owner_returns(self) -> None:
        self.owner_here = True
        self._when_awake(lambda: self.handle(e.CardWithdrawn(CPU_CARD, "its owner is there")))

    def owner_goes(self) -> None:
        self.owner_here = False
        self._when_awake(lambda: self.handle(e.CardLent(CPU_CARD)))

    def _stop_engine(self) -> None:
        for sequence in self.sequences.values():
            sequence.alive = False
        self.sequences.clear()

    def _report_engine(self, status: "capability_pb2.EngineStatus.ValueType") -> None:
        self.handle(
            e.EngineChanged(
                capability_pb2.Engine(
                    engine_id="engine",
                    kind="fake",
                    status=status,
                    manifest_digest=DIGEST,
                    sampler_profile="position-hash-v1",
                    slots=self.world.options.slots,
                    tokens_per_second=self.world.options.tokens_per_second,
                    pid=self.pid,
                )
            )
        )

    def tick(self, boot: int) -> None:
        if self.state is not None and self.boots == boot:
            self.handle(e.Tick())
            self.world.after(TICK_S, lambda: self._when_awake(lambda: self.tick(boot)))

    def _when_awake(self, action: Callable[[], None]) -> None:
        """Run an action of this process: at once, or in its turn when it is thawed."""
        if self.waiting or self.world.now < self.frozen_until:
            self.waiting.append(action)
        else:
            action()

    def freeze(self, until: float) -> None:
        """SIGSTOP until a moment: what comes in waits in its order, as in a socket's buffer."""
        self.frozen_until = max(self.frozen_until, until)
        self.world.at(until, self._thaw)

    def _thaw(self) -> None:
        while self.waiting and self.world.now >= self.frozen_until:
            self.waiting.popleft()()

    # --- the connection --------------------------------------------------------------------

    def connect(self) -> None:
        if self.state is None or self.stream is not None:
            return
        self.streams += 1
        hello = wire.Hello(
            protocol_version=1, boot_id=bytes(16), boot_started_at_ms=self.boots, stream_number=self.streams
        )
        self.stream = self.coordinator.open_stream(self, hello)
        if self.stream is None:
            self.world.after(self.world.rng.uniform(0.1, 1.0), lambda: self._when_awake(self.connect))

    def receive(self, stream: Stream, response: wire.ConnectResponse) -> None:
        def take() -> None:
            if self.stream is not stream or self.state is None:
                return
            if response.HasField("welcome"):
                self.handle(read_welcome(response.welcome, self.world.now))
                return
            event = read_message(response)
            if event is not None:
                self.handle(event)

        self._when_awake(take)

    def lose_stream(self, stream: Stream) -> None:
        """The stream broke, as this side hears of it."""

        def lose() -> None:
            if self.stream is not stream:
                return
            self.stream = None
            if self.state is not None:
                self.handle(e.Disconnected("the stream broke"))
                self.world.after(self.world.rng.uniform(0.1, 1.0), lambda: self._when_awake(self.connect))

        self._when_awake(lose)

    def _drop_stream(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.hang_up()

    # --- events and commands ---------------------------------------------------------------

    def handle(self, event: e.Event) -> None:
        if self.state is None:
            return
        boot = self.boots
        for command in self.state.handle(event, self.world.now):
            if self.boots == boot:
                self._execute(command, boot)

    def _later(self, boot: int, delay_s: float, event: e.Event) -> None:
        def happen() -> None:
            if self.boots == boot:
                self.handle(event)

        self.world.after(delay_s, lambda: self._when_awake(happen))

    def _execute(self, command: e.Command, boot: int) -> None:
        match command:
            case e.StartWork():
                self._start_work(command, boot)
            case e.AbortWork():
                sequence = self.sequences.pop(command.key, None)
                if sequence is not None:
                    sequence.alive = False
            case e.RecordNonce():
                self.nonces.append(command.use)
                self._later(boot, 0.002, e.NonceRecorded(command.key, command.use))
            case e.CheckEngine():
                self._later(boot, 0.1, e.CanaryPassed(command.engine_id, self.world.now))
            case e.StartEngine():
                self.start_engine()
            case e.StopEngine():
                self._stop_engine()
                # Whatever still starts is not the engine that is wanted.
                self.pid += 1
                self._report_engine(capability_pb2.ENGINE_STATUS_STOPPED)
            case e.SignStatement():
                signed = sign_statement(command, self.node_id, self.key)
                self._later(boot, 0.001, e.StatementSigned(command.order.key, signed))
            case e.ScheduleFlush():
                self._later(boot, max(0.0, command.at - self.world.now), e.FlushDue())
            case e.CloseConnection():
                stream = self.stream
                if stream is not None:
                    stream.hang_up()
                    self.lose_stream(stream)
            case e.Exit():
                self.crash()
            case (
                e.SendFrames() | e.SendState() | e.SendHeartbeat() | e.SendFinished() | e.SendFailed() | e.SendRefused()
            ):
                stream = self.stream
                if stream is not None:
                    request = write_command(command)
                    stream.up.send(lambda: stream.receive(request))
            case e.AnswerChallenge() | e.StopChallenge():
                raise AssertionError("no node is challenged in these histories")
            case _:
                assert_never(command)

    # --- the engine ------------------------------------------------------------------------

    def _start_work(self, command: e.StartWork, boot: int) -> None:
        state = 0
        for token_id in command.prompt_ids:
            state = fold(state, token_id)
        sequence = EngineSequence(command.order.key, command.order, state)
        self.sequences[command.order.key] = sequence
        prefill_s = self.world.rng.uniform(0.01, 0.3)
        self.world.after(prefill_s, lambda: self._produce(sequence, boot))

    def _produce(self, sequence: EngineSequence, boot: int) -> None:
        if not sequence.alive or sequence.stalled:
            return
        token_id = draw(sequence.state)
        sequence.state = fold(sequence.state, token_id)
        sequence.produced += 1
        finish = None
        if token_id == STOP_ID:
            finish = FinishReason.STOP
        elif sequence.produced == sequence.order.max_tokens:
            finish = FinishReason.LENGTH
        self._later(boot, 0.0, e.EngineChunkArrived(sequence.key, TokenChunk((token_id,), (), finish)))
        if finish is None:
            interval_s = self.world.rng.uniform(0.8, 1.2) / self.world.options.tokens_per_second
            self.world.after(interval_s, lambda: self._produce(sequence, boot))
        else:
            sequence.alive = False
            self.sequences.pop(sequence.key, None)

    def phase(self) -> str:
        """Return what the busiest attempt is doing, for the coverage table."""
        if self.state is None:
            return "down"
        if self.stream is None:
            return "disconnected"
        phases = [attempt.phase.value for attempt in self.state.attempts.values()]
        return min(phases) if phases else "idle"
