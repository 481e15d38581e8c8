"""A whole fleet in one process and in no time, from one seed.

The real decisions run here: the coordinator's scheduler with its driver and
agent streams (signatures included) and each agent's state machine. Simulated
are the wires, the disks, the engines, the clients and the clock. One random
generator draws everything, the options of the run first, so a printed seed is
the whole recipe.

Safety is checked all along: a client gets the ids of an undisturbed answer, in
order, each once; the scheduler's collections agree. At the end all faults are
healed and the fleet must converge: every task has ended, fresh ones are
answered whole, and nothing runs anywhere.
"""

import json
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from simulated_agents import Agent, draw, fold
from simulated_wires import Wire, World

from coordinator.api.agent_messages import AgentMessages, ProtocolViolation
from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.registry import FleetRegistry
from coordinator.ledger.asks import Asks
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.prices import Price, Terms
from coordinator.ledger.service import Ledger, SettlingRecords
from coordinator.ledger.settlement import UNPAID_OUTCOMES
from coordinator.ledger.testing import MemoryLedgerStore, check_books, check_journal
from coordinator.scheduler import events as e
from coordinator.scheduler.cache_salts import CacheSalts
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.state import Scheduler
from coordinator.scheduler.testing import STOP_ID, check_invariants, task_spec
from coordinator.store.port import AttemptRow, LateStatementRow, NodeRow, OwnerRow, TaskRow
from coordinator.tasks_port import AttemptBroken, AttemptStarted, Finished
from inference.task import FinishReason, NodeId, OwnerId, PositionLogprobs, Sampling, TaskId, TaskSpec
from protos.slackwater.common.v1 import statement_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

EVENTS_MIN = 2_000
# How long a healed fleet may take to end everything: queue and silence limits, and the slowest answer.
CONVERGE_S = 150.0
# When keepalive gives up on a connection that swallows everything.
HALF_OPEN_S = 30.0
START = 1000.0
# What the benchmark promises of a frozen agent.
SILENCE_S_MAX = 3.0
# Failures that faults may cause; any other is a bug.
ALLOWED_FAILURES = frozenset(
    {
        Reason.TASK_CANCELLED,
        Reason.ATTEMPTS_EXHAUSTED,
        Reason.MIGRATION_IMPOSSIBLE,
        Reason.NO_CAPACITY,
        Reason.QUEUE_FULL,
        Reason.QUEUE_TIMEOUT,
    }
)


def expected_answer(spec: TaskSpec) -> list[int]:
    """Return the ids of an undisturbed answer."""
    state = 0
    for token_id in spec.prompt_ids:
        state = fold(state, token_id)
    ids: list[int] = []
    while len(ids) < spec.max_tokens and (not ids or ids[-1] != STOP_ID):
        ids.append(draw(state))
        state = fold(state, ids[-1])
    return ids


@dataclass(slots=True)
class Client:
    """The sink of one task; holds every delivery against the undisturbed answer."""

    spec: TaskSpec
    expected: list[int]
    received: int = 0
    attempts: list[AttemptStarted] = field(default_factory=list)
    broken: list[AttemptBroken] = field(default_factory=list)
    outcome: Finished | SlackwaterError | None = None

    def start_attempt(self, event: AttemptStarted) -> None:
        assert self.outcome is None
        assert len(self.running()) < 2, "a third attempt at once"
        self.attempts.append(event)

    def running(self) -> set[int]:
        return {event.attempt for event in self.attempts} - {event.attempt for event in self.broken}

    def break_attempt(self, event: AttemptBroken) -> None:
        assert event.attempt in self.running(), "an attempt broke that was not running"
        self.broken.append(event)

    def deliver(self, first_index: int, token_ids: Sequence[int], logprobs: tuple[PositionLogprobs, ...]) -> None:
        assert self.outcome is None, "ids after the end"
        assert first_index == self.received, f"ids {first_index} came after {self.received}: lost or doubled"
        end = first_index + len(token_ids)
        assert list(token_ids) == self.expected[first_index:end], "not the ids of an undisturbed answer"
        self.received = end

    def discard(self) -> None:
        assert not self.spec.streaming, "only what nobody has read may begin again"
        self.received = 0

    def finish(self, event: Finished) -> None:
        assert self.outcome is None, "ended twice"
        assert self.received == len(self.expected) == event.completion_tokens, "complete though ids are missing"
        stopped = self.expected[-1] == STOP_ID
        assert event.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        self.outcome = event

    def fail(self, error: SlackwaterError) -> None:
        assert self.outcome is None, "ended twice"
        self.outcome = error


class Records:
    """In place of the recorder: what would be written."""

    def __init__(self, lossy: bool) -> None:
        self._lossy = lossy
        self.tasks: list[TaskRow] = []
        self.attempts: list[AttemptRow] = []

    def add_task(self, row: TaskRow) -> None:
        self.tasks.append(row)

    def add_attempt(self, row: AttemptRow) -> None:
        # A stream loses no message of many; where the world does, a node seems to contradict itself.
        honest = self._lossy or row.outcome not in UNPAID_OUTCOMES
        assert honest, f"an honest node seems to lie: {row.outcome}"
        self.attempts.append(row)

    def add_late_statement(self, row: LateStatementRow) -> None:
        """Proofs of attempts that ended otherwise change nothing that is checked here."""


class SimulatedStream:
    """Both ends of one Connect stream. Implements AgentConnection for the driver."""

    def __init__(self, fleet: "Fleet", agent: Agent, connection_id: e.ConnectionId) -> None:
        self._fleet = fleet
        self._agent = agent
        self._generation = fleet.generation
        self.connection_id = connection_id
        self.node_id = NodeId(agent.node_id)
        self.signing_public_key = agent.key.public_key().public_bytes_raw()
        self.up = Wire(fleet.world)
        self.down = Wire(fleet.world)
        self._joined = False

    # The coordinator's side, as the driver sees it.

    def send(self, message: wire.ConnectResponse, *, faithful: bool = False) -> None:
        if message.HasField("assignment"):
            self._fleet.ordered(message.assignment)
        self.down.send(lambda: self._agent.receive(self, message), faithful=faithful)

    def send_chunks(self, task_id: TaskId, attempt: int, chunks: Sequence[wire.PromptChunk]) -> None:
        for chunk in chunks:
            self.send(wire.ConnectResponse(prompt_chunk=chunk))

    def drop_chunks(self, task_id: TaskId, attempt: int) -> None:
        """Nothing waits here: every chunk is on the wire at once."""

    def close(self, reason: "wire.ClosingReason.ValueType", detail: str) -> None:
        self.send(wire.ConnectResponse(closing=wire.Closing(reason=reason, detail=detail)), faithful=True)
        self.break_off()

    def join(self, hello: wire.Hello) -> None:
        """The coordinator takes up the stream."""
        if self._fleet.generation != self._generation or not self.up.up:
            return
        self._joined = True
        self.send(
            wire.ConnectResponse(
                welcome=wire.Welcome(
                    cluster_id="cluster",
                    coordinator_time_ms=self._fleet.world.now_ms(),
                    heartbeat_busy_ms=1_000,
                    heartbeat_idle_ms=10_000,
                    frame_delay_ms=5,
                    coordinator_public_keys=[self._fleet.coordinator_key.public_key().public_bytes_raw()],
                    protocol_version=1,
                )
            ),
            faithful=True,
        )
        self._fleet.driver.add_connection(
            self,
            e.NodeConnected(
                node_id=self.node_id,
                connection_id=self.connection_id,
                owner_id=OwnerId("owner"),
                trusted=False,
                draining=self.node_id in self._fleet.draining,
                boot_started_at_ms=hello.boot_started_at_ms,
                stream_number=hello.stream_number,
            ),
        )

    # What passes between the two.

    def receive(self, request: wire.ConnectRequest) -> None:
        """A message of the agent has reached the coordinator."""
        fleet = self._fleet
        if fleet.asleep:
            fleet.inbox.append(lambda: self.receive(request))
        elif self._joined and fleet.generation == self._generation:
            fleet.heard_at[self.connection_id] = fleet.world.now
            try:
                fleet.messages.take(self, request)
            except ProtocolViolation as violation:
                raise AssertionError(f"an honest agent broke the protocol: {violation}") from violation
            fleet.check()

    def hang_up(self) -> None:
        """The agent's side closed: the coordinator hears of it after what was sent before."""
        self.up.send(self._lost_by_coordinator, faithful=True)
        self.down.up = False

    def break_off(self) -> None:
        """The connection broke: either side hears of it after what was sent before."""
        self.down.send(lambda: self._agent.lose_stream(self), faithful=True)
        self.up.send(self._lost_by_coordinator, faithful=True)

    def half_open(self) -> None:
        """Everything is swallowed; keepalive notices after half a minute."""
        self.up.swallows = self.down.swallows = True

        def notice() -> None:
            self.up.swallows = self.down.swallows = False
            self.break_off()

        self._fleet.world.after(HALF_OPEN_S, notice)

    def _lost_by_coordinator(self) -> None:
        fleet = self._fleet
        if fleet.asleep:
            fleet.inbox.append(self._lost_by_coordinator)
        elif self._joined and fleet.generation == self._generation:
            self._joined = False
            self.up.up = False
            fleet.driver.remove_connection(self)
            fleet.check()


class Fleet:
    """A coordinator, its agents and its clients. `run` raises AssertionError, naming what broke."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed)
        self.coordinator_key = _key(self.world)
        self.generation = 0
        self.asleep = False
        self.awake_since = START
        self.inbox: list[Callable[[], None]] = []
        self.heard_at: dict[e.ConnectionId, float] = {}
        self.draining: set[str] = set()
        self.clients: list[Client] = []
        self.outcomes: Counter[str] = Counter()
        self._connection_count = 0
        self._healed = False
        self.ledger_store = MemoryLedgerStore()
        # By task and attempt, over all starts: who was ordered, and for what.
        self.promised: dict[tuple[str, int], tuple[str, Price]] = {}
        self._ticks = 0
        self._boot()
        self.agents = [self._agent(index) for index in range(self.world.options.nodes)]

    # --- the coordinator -------------------------------------------------------------------

    def _boot(self) -> None:
        """Start the coordinator's process: the store remembers nodes, the scheduler nothing."""
        self.generation += 1
        self.records = Records(lossy=self.world.options.lose > 0)
        terms = Terms()
        self.asks = Asks(terms)
        self.scheduler = Scheduler(Limits(), self.asks, first_lease_epoch=self.generation << 32)
        log = TransparencyLog("cluster", self.coordinator_key, self.ledger_store)
        self.ledger = Ledger(self.ledger_store, log, self.world, terms, lambda node_id: OwnerId("owner"))
        records = SettlingRecords(self.records, self.ledger)
        salts = CacheSalts(b"k" * 32, Random(1))
        self.driver = SchedulerDriver(self.scheduler, self.world, records, "cluster", self.coordinator_key, salts)
        owner = OwnerRow(owner_id=OwnerId("owner"), name="owner", trusted=False, created_at_ms=0)
        registry = FleetRegistry([owner], [_row(index) for index in range(self.world.options.nodes)])
        self.messages = AgentMessages(self.driver, registry, self.world, self.ledger.credits, self.asks)
        self._tick(self.generation)

    def _tick(self, generation: int) -> None:
        if generation != self.generation:
            return
        if not self.asleep:
            self.driver.feed(e.Ticked())
            self.check()
            self._check_patience()
            self._ticks += 1
            if self._ticks % 3 == 0:
                # So that a crash finds entries that wait, and some that do not.
                self.ledger.write_now()
        self.world.after(0.1, lambda: self._tick(generation))

    def check(self) -> None:
        check_invariants(self.scheduler)
        check_books(self.ledger.books, self.scheduler.tasks)

    def _check_patience(self) -> None:
        """No task stays with a node that has said nothing for three seconds, our own sleep not counted."""
        for node in self.scheduler.nodes.values():
            if node.tasks:
                begun = min(attempt.started_at for attempt in node.tasks.values())
                silent_s = self.world.now - max(self.heard_at.get(node.connection_id, 0.0), begun, self.awake_since)
                assert silent_s < SILENCE_S_MAX, f"{node.node_id} keeps its tasks after {silent_s:.1f} s of silence"

    def open_stream(self, agent: Agent, hello: wire.Hello) -> SimulatedStream | None:
        if self.asleep:
            return None
        self._connection_count += 1
        stream = SimulatedStream(self, agent, e.ConnectionId(self._connection_count))
        stream.up.send(lambda: stream.join(hello), faithful=True)
        return stream

    def _agent(self, index: int) -> Agent:
        public_key = self.coordinator_key.public_key().public_bytes_raw()
        return Agent(self.world, self, f"node-{index}", _key(self.world), public_key)

    # --- clients ---------------------------------------------------------------------------

    def _submit(self, name: str) -> Client:
        rng = self.world.rng
        penalised = rng.random() < 0.1
        spec = task_spec(
            name,
            prompt=[rng.randrange(3, 1000) for _ in range(rng.randint(1, 50))],
            max_tokens=rng.randint(1, 80),
            sampling=Sampling(presence_penalty=0.5) if penalised else Sampling(temperature=0.0),
            streaming=rng.random() < 0.7,
        )
        client = Client(spec, expected_answer(spec))
        self.clients.append(client)
        self.ledger.reserve(spec)
        self.driver.submit(spec, client)
        self.check()
        return client

    def _arrive(self, left: int) -> None:
        if left == 0:
            return
        if not self.asleep:
            client = self._submit(f"task-{self.generation}-{left}")
            if self.world.rng.random() < 0.1:
                self.world.after(self.world.rng.uniform(0, 3), lambda: self._cancel(client))
        gap_s = self.world.rng.uniform(0, 2 * self.world.options.faults_until_s / self.world.options.tasks)
        self.world.after(gap_s, lambda: self._arrive(left - 1))

    def _cancel(self, client: Client) -> None:
        if not self.asleep:
            self.driver.feed(e.TaskCancelled(client.spec.task_id))

    # --- faults ----------------------------------------------------------------------------

    def _strike(self) -> None:
        if self._healed:
            return
        agent = self.world.rng.choice(self.agents)
        fault = self.world.rng.choice(
            [
                self._crash_agent,
                self._crash_agent,
                self._freeze,
                self._cut,
                self._cut,
                self._half_open,
                self._crash_engine,
                self._stall,
                self._drain,
                self._owner_returns_and_goes,
                self._owner_returns_and_goes,
                self._sleep,
                self._crash_coordinator,
            ]
        )
        self._inflict(fault, agent)
        self.world.after(self.world.rng.expovariate(1 / self.world.options.fault_interval_s), self._strike)

    def _inflict(self, fault: Callable[[Agent], None], agent: Agent) -> None:
        self.world.coverage[fault.__name__.strip("_"), agent.phase()] += 1
        fault(agent)

    def _crash_agent(self, agent: Agent) -> None:
        agent.crash()
        self.world.after(self.world.rng.uniform(0.5, 8), agent.start)

    def _freeze(self, agent: Agent) -> None:
        agent.freeze(self.world.now + self.world.rng.uniform(0.5, 15))

    def _cut(self, agent: Agent) -> None:
        if isinstance(agent.stream, SimulatedStream):
            agent.stream.break_off()

    def _half_open(self, agent: Agent) -> None:
        if isinstance(agent.stream, SimulatedStream):
            agent.stream.half_open()

    def _crash_engine(self, agent: Agent) -> None:
        agent.crash_engine()

    def _stall(self, agent: Agent) -> None:
        for sequence in list(agent.sequences.values())[:1]:
            sequence.stalled = True

    def _drain(self, agent: Agent) -> None:
        self._set_draining(agent, True)
        self.world.after(self.world.rng.uniform(1, 5), lambda: self._set_draining(agent, False))

    def _owner_returns_and_goes(self, agent: Agent) -> None:
        """The owner wants the card back, at once, and leaves again; often before the engine was up."""
        agent.owner_returns()
        self.world.after(self.world.rng.uniform(0.2, 6), agent.owner_goes)

    def _set_draining(self, agent: Agent, draining: bool) -> None:
        (self.draining.add if draining else self.draining.discard)(agent.node_id)
        if not self.asleep:
            self.driver.feed(e.DrainChanged(NodeId(agent.node_id), draining))
            self.check()

    def _sleep(self, agent: Agent) -> None:
        """SIGSTOP of the coordinator, for up to ten seconds. It must blame nobody."""
        if self.asleep:
            return
        self.asleep = True
        self.world.after(self.world.rng.uniform(1.5, 10), self._wake)

    def _wake(self) -> None:
        if not self.asleep:
            return
        self.asleep = False
        self.awake_since = self.world.now
        ended_before = len(self.records.attempts)
        self.driver.feed(e.Ticked())
        blamed = [row.outcome for row in self.records.attempts[ended_before:]]
        assert not {"node_silent", "stalled"} & set(blamed), f"blamed for the coordinator's own sleep: {blamed}"
        inbox, self.inbox = self.inbox, []
        for deliver in inbox:
            deliver()

    def _crash_coordinator(self, agent: Agent) -> None:
        """SIGKILL and restart: its tasks are lost to their clients, its nodes come back by themselves."""
        if self.asleep or self.world.rng.random() < 0.7:
            return
        for client in self.clients:
            if client.outcome is None:
                client.fail(SlackwaterError(Reason.COORDINATOR_RESTARTED, "restarted"))
        self._boot()
        for one in self.agents:
            if one.stream is not None:
                one.lose_stream(one.stream)

    # --- a run -----------------------------------------------------------------------------

    def run(self) -> None:
        """Live through the faults, heal, and converge."""
        for agent in self.agents:
            agent.start()
        self._arrive(self.world.options.tasks)
        # Every run has at least one of each; so it has of delays and repetitions, see simulated_wires.py.
        self.world.after(8.0, lambda: self._inflict(self._crash_agent, self.agents[0]))
        self.world.after(14.0, lambda: self._inflict(self._cut, self.agents[0]))
        self.world.after(2.0, self._strike)
        self._run_until(START + self.world.options.faults_until_s)
        self._heal()
        # Frozen agents thaw, and keepalive finds the last half-open connections.
        self._run_until(self.world.now + HALF_OPEN_S)
        self._run_until(self.world.now + CONVERGE_S, done=self._converged)
        unfinished = [client.spec.task_id for client in self.clients if client.outcome is None]
        assert not unfinished, f"never ended: {unfinished}"
        self._answer_afresh()
        while self.world.events < EVENTS_MIN:
            self._answer_afresh()
        for client in self.clients:
            self._check_outcome(client)
        self.ledger.write_now()
        check_journal(self.ledger_store)
        self._check_earnings()
        struck = {fault for fault, _ in self.world.coverage}
        assert struck >= {"crash_agent", "cut", "delay", "duplicate"}, f"too easy a history: {struck}"

    def ordered(self, assignment: wire.Assignment) -> None:
        """Note what an order pays."""
        header = statement_pb2.TaskHeader.FromString(assignment.header.payload)
        share = Terms().node_share("model")
        paid = Price(header.ask.prompt_micro, header.ask.completion_micro) if header.HasField("ask") else share
        assert paid.within(share), f"{header.node_id} is promised more than the list leaves"
        self.promised[header.task_id, header.attempt] = header.node_id, paid

    def _check_earnings(self) -> None:
        """Each attempt was paid what its order said, whatever its node asked later, and to the node that it was for."""
        for row in self.ledger_store.entries:
            entry = json.loads(row.body)
            if entry["kind"] == "earn":
                facts = entry["facts"]
                node_id, paid = self.promised[row.task_id, facts["attempt"]]
                earned = sum(amount for account, amount in entry["legs"] if account.startswith(("held:", "unsigned:")))
                assert entry["node_id"] == node_id
                assert earned == paid.earned_micro(facts["prompt_tokens"], facts["delivered_tokens"])

    def _run_until(self, end: float, done: Callable[[], bool] | None = None) -> None:
        while self.world.now < end and not (done and done()):
            self.world.step()

    def _heal(self) -> None:
        self._healed = True
        if self.asleep:
            self._wake()
        for agent in self.agents:
            self._set_draining(agent, False)
            agent.owner_goes()
            agent.start()

    def _converged(self) -> bool:
        """Whether all has ended, and nobody works for anybody."""
        return (
            all(client.outcome is not None for client in self.clients)
            and not self.scheduler.tasks
            and all(
                agent.state is not None
                and agent.state.connected
                and not agent.state.results_waiting
                and not agent.sequences
                for agent in self.agents
            )
            and len(self.scheduler.nodes) == len(self.agents)
        )

    def _answer_afresh(self) -> None:
        fresh = [self._submit(f"fresh-{len(self.clients)}") for _ in range(len(self.agents))]
        self._run_until(self.world.now + CONVERGE_S, done=self._converged)
        for client in fresh:
            assert isinstance(client.outcome, Finished), (
                f"a healed fleet failed {client.spec.task_id}: {client.outcome}"
            )
        assert self._converged(), "something still runs in a fleet that has nothing to do"

    def _check_outcome(self, client: Client) -> None:
        outcome = client.outcome
        if isinstance(outcome, SlackwaterError):
            self.outcomes[outcome.reason.name] += 1
            allowed = ALLOWED_FAILURES | {Reason.COORDINATOR_RESTARTED}
            assert outcome.reason in allowed, f"{client.spec.task_id} failed with {outcome.reason}: {outcome}"
            impossible = outcome.reason is Reason.MIGRATION_IMPOSSIBLE
            assert not impossible or client.spec.sampling.penalised, "a resumable task was not resumed"
        else:
            self.outcomes["finished" if len(client.attempts) == 1 else "finished after failover"] += 1


def _key(world: World) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(world.rng.randbytes(32))


def _row(index: int) -> NodeRow:
    return NodeRow(
        node_id=NodeId(f"node-{index}"),
        owner_id=OwnerId("owner"),
        label="",
        signing_public_key=bytes(32),
        key_epoch=1,
        certificate_serial="",
        certificate_not_after_ms=0,
        enrolled_at_ms=0,
        banned_at_ms=None,
        ban_reason=None,
        draining=False,
    )


@dataclass(slots=True)
class Report:
    """What many seeds came to."""

    seeds: int = 0
    events: int = 0
    events_min: int = 10**9
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __add__(self, other: "Report") -> "Report":
        return Report(
            seeds=self.seeds + other.seeds,
            events=self.events + other.events,
            events_min=min(self.events_min, other.events_min),
            coverage=self.coverage + other.coverage,
            outcomes=self.outcomes + other.outcomes,
            failures=self.failures + other.failures,
        )

    def table(self) -> str:
        """Return how often each fault struck a node in each state, and how the tasks ended."""
        states = sorted({state for _, state in self.coverage if state != "message"})
        faults = sorted({fault for fault, state in self.coverage if state != "message"})
        lines = [f"{self.seeds} seeds, {self.events} events (at least {self.events_min} each)"]
        lines.append(f"{'fault':18}" + "".join(f"{state:>14}" for state in states))
        for fault in faults:
            lines.append(f"{fault:18}" + "".join(f"{self.coverage[fault, state]:14}" for state in states))
        messages = [f"{fault} {count}" for (fault, state), count in self.coverage.items() if state == "message"]
        lines.append("on the wire: " + ", ".join(sorted(messages)))
        lines.append("tasks: " + ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common()))
        return "\n".join(lines)


def simulate(seeds: Sequence[int]) -> Report:
    """Run seeds one after the other; a failure is kept with its seed, and the rest go on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    report = Report()
    for seed in seeds:
        fleet = Fleet(seed)
        try:
            fleet.run()
        except Exception as failure:
            where = traceback.extract_tb(failure.__traceback__)[-1]
            report.failures.append(f"seed {seed}: {failure!r} at {where.filename}:{where.lineno}")
        report.seeds += 1
        report.events += fleet.world.events
        report.events_min = min(report.events_min, fleet.world.events)
        report.coverage += fleet.world.coverage
        report.outcomes += fleet.outcomes
    return report
