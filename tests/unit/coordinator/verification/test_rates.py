"""What timed answers come to, when nodes are measured, and that a user's task goes first."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from coordinator.fleet.registry import FleetRegistry
from coordinator.ledger.entries import VERIFICATION_TENANT
from coordinator.scheduler import events as e
from coordinator.scheduler.testing import DIGEST, STOP_ID, VOCABULARY_SIZE, engine_view, task_spec
from coordinator.scheduler.testing_driver import DriverHarness, FakeConnection, ended, sign_result
from coordinator.stated_energy import StatedEnergy
from coordinator.store.port import OwnerRow
from coordinator.store.sql import SqlStore
from coordinator.store.testing import node_row
from coordinator.store.verification_port import RateRow
from coordinator.verification import rate_rounds
from coordinator.verification.events import AuditKind, Use
from coordinator.verification.rate_rounds import RateRounds, TimedModel
from coordinator.verification.rates import (
    ANSWER_IDS,
    BUILD_PAUSE_MS,
    DISTURBED_PAUSE_MS,
    INTERVAL_MS,
    KEPT_MS,
    RETRY_MS,
    RatePlan,
    Subject,
    TimedAnswer,
    rate_of,
)
from coordinator.verification.service import Verification
from coordinator.verification.tasks import AuditTasks
from coordinator.verification.testing import audit, quiet_hooks
from inference.manifest import Manifest
from inference.task import NodeId, OwnerId, TaskId, TaskKind
from protos.slackwater.common.v1 import capability_pb2, statement_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

NODE = NodeId("a")
SUBJECT = Subject(node_id=NODE, manifest_digest=DIGEST, engine_build="fake 1", slots=4)
NO_ENERGY = StatedEnergy(0, "none")
WAIT_S = 10.0
MANIFEST = Manifest(
    digest=DIGEST,
    name="m",
    revision="1",
    architecture="a",
    licence="Apache-2.0",
    dtype="float32",
    context_tokens=1000,
    vocabulary_size=VOCABULARY_SIZE,
    stop_token_ids=(STOP_ID,),
    files=(),
    origin="",
    kind=TaskKind.GENERATE,
)


def timed(ordered_at: float, first: float, last: float, energy: StatedEnergy = NO_ENERGY, ids: int = 64) -> TimedAnswer:
    return TimedAnswer(ordered_at=ordered_at, first_id_at=first, last_id_at=last, ids=ids, energy=energy)


def row(streams: int = 1, at_ms: int = 0, build: str = "fake 1") -> RateRow:
    made = rate_of(replace(SUBJECT, engine_build=build), [timed(0, 1, 2)] * streams, at_ms)
    assert made.streams == streams
    return made


@pytest.mark.parametrize(
    ("slots", "levels"), [(0, ()), (1, (1,)), (4, (1, 4)), (8, (1, 8)), (20, (1, 8, 20)), (400, (1, 8, 32))]
)
def test_never_more_answers_at_once_are_asked_for_than_the_engine_has_slots(
    slots: int, levels: tuple[int, ...]
) -> None:
    assert replace(SUBJECT, slots=slots).levels == levels


def test_the_time_goes_from_the_order_so_that_ids_held_back_gain_nothing() -> None:
    """Mutation seen to fail here: the duration from the first id on."""
    steady, held_back = timed(10.0, 10.1, 12.0), timed(10.0, 11.999, 12.0)
    assert rate_of(SUBJECT, [steady], 5).tokens_per_second == rate_of(SUBJECT, [held_back], 5).tokens_per_second == 32.0
    assert rate_of(SUBJECT, [held_back], 5).first_token_ms == 1999


def test_of_several_answers_all_ids_count_from_the_first_order_to_the_last_id() -> None:
    """Mutation seen to fail here: the mean of the answers' own rates."""
    counter = StatedEnergy(6_400, "counter")
    measured = rate_of(SUBJECT, [timed(0.0, 0.2, 2.0, counter), timed(2.0, 2.5, 8.0, counter)], 7)
    assert (measured.tokens_per_second, measured.first_token_ms, measured.streams) == (16.0, 500, 2)
    assert measured.joules_per_token == pytest.approx(0.1)
    assert measured.energy_method == "counter"
    mixed = rate_of(SUBJECT, [timed(0, 1, 2, counter), timed(0, 1, 2, StatedEnergy(5, "estimate"))], 7)
    assert (mixed.joules_per_token, mixed.energy_method) == (0.0, "none")


def test_a_pair_is_measured_at_each_level_then_at_most_once_a_day_and_soon_for_another_build() -> None:
    """Mutations seen to fail here: builds are not compared; another build is due at once."""
    plan = RatePlan([row()])
    assert plan.streams_due(SUBJECT, 1) == 4
    plan.measured(row(4), 1.0)
    assert plan.streams_due(SUBJECT, INTERVAL_MS - 1) is None
    assert plan.streams_due(SUBJECT, INTERVAL_MS) == 1
    other = replace(SUBJECT, engine_build="fake 2")
    assert (plan.streams_due(other, BUILD_PAUSE_MS - 1), plan.streams_due(other, BUILD_PAUSE_MS)) == (None, 1)
    plan.measured(row(at_ms=BUILD_PAUSE_MS, build="fake 2"), 1.5)
    assert plan.streams_due(other, BUILD_PAUSE_MS) == 4


def test_what_could_not_be_measured_is_tried_ever_later_and_what_was_disturbed_soon() -> None:
    """Mutation seen to fail here: the pause is not doubled."""
    plan, only, now_ms = RatePlan([]), replace(SUBJECT, slots=1), 0
    for doubling in range(3):
        plan.failed(only, 1, now_ms)
        pause_ms = RETRY_MS << doubling
        assert (plan.streams_due(only, now_ms + pause_ms - 1), plan.streams_due(only, now_ms + pause_ms)) == (None, 1)
        now_ms += pause_ms
    for _ in range(40):
        plan.failed(only, 1, now_ms)
    assert plan.streams_due(only, now_ms + INTERVAL_MS) == 1
    plan.disturbed(only, 1, now_ms)
    assert plan.streams_due(only, now_ms + DISTURBED_PAUSE_MS) == 1


@dataclass
class Bench:
    """Measurements over a real scheduler and store; the node answers when the test says so, by a clock of the test."""

    store: SqlStore
    harness: DriverHarness = field(default_factory=DriverHarness)
    occupied: set[NodeId] = field(default_factory=set)
    examined: bool = False
    # How often the node has been considered.
    looks: int = 0

    def __post_init__(self) -> None:
        clock, driver = self.harness.clock, self.harness.driver
        owner = OwnerRow(owner_id=OwnerId("o"), name="alice", trusted=False, created_at_ms=1)
        node = node_row(NODE, owner.owner_id)
        self.registry = FleetRegistry([owner], [node])
        self.verification = Verification(self.store, clock, quiet_hooks())
        tasks = AuditTasks(driver, lambda spec: None, 1)

        def occupied(node_id: NodeId) -> bool:
            self.looks += 1
            return node_id in self.occupied

        self.rounds = RateRounds(
            self.registry, self.store, self.verification, driver, tasks, clock, occupied, random.Random(1)
        )
        self.rounds.add_model(TimedModel(manifest=MANIFEST, prompts=[(10, 11), (12,)], examined=self.examined))

    def node(self, *, slots: int = 4) -> FakeConnection:
        connection = self.harness.connect(NODE)
        engine = capability_pb2.Engine(engine_id="engine", kind="fake", version="1")
        self.registry.reported(NODE, wire.NodeState(engines=[engine]), 1)
        self.harness.driver.feed(
            e.NodeReported(
                node_id=NODE,
                connection_id=connection.connection_id,
                engines=(engine_view(slots=slots, tokens_per_second=10_000.0),),
                accepting=True,
                running=frozenset(),
            )
        )
        return connection

    def rates(self) -> tuple[RateRow, ...]:
        """Return what people are shown, which comes after all else is done."""
        view = self.registry.find(NODE)
        assert view is not None
        return view.rates

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.verification.run()), asyncio.create_task(self.rounds.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def answer(self, node: FakeConnection, order: int, seconds: float, energy_mj: int = 0) -> None:
        """Have the node give one whole answer, so many seconds after the order."""
        header = node.sent_of("assignment")[order].assignment.header
        task = statement_pb2.TaskHeader.FromString(header.payload).task_id
        ids = [20 + index % 7 for index in range(ANSWER_IDS)]
        self.harness.clock.advance(seconds / 2)
        self.harness.frame(node, 0, *ids[:1], task=task)
        self.harness.clock.advance(seconds / 2)
        self.harness.frame(node, 1, *ids[1:], task=task)
        method = statement_pb2.ENERGY_METHOD_COUNTER if energy_mj else statement_pb2.ENERGY_METHOD_NONE
        signed = sign_result(node, header, ids, energy_mj=energy_mj, energy_method=method, total_ms=1000)
        self.harness.driver.finish_attempt(node, ended(signed, task=task))


@pytest.fixture
def store(tmp_path: Path) -> SqlStore:
    return SqlStore(f"sqlite:///{tmp_path / 'c.db'}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and do not take the jumps of the test's clock for a busy process."""
    monkeypatch.setattr(rate_rounds, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(rate_rounds, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(rate_rounds, "LATE_S_MAX", 1000.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            # What it waits for has no event of its own, and some of it is done in a thread.
            await asyncio.to_thread(os.sched_yield)


async def until_ordered(node: FakeConnection, count: int) -> None:
    await until(lambda: len(node.sent_of("assignment")) == count)


async def test_a_node_is_measured_by_the_coordinators_clock_whatever_it_says_of_itself(store: SqlStore) -> None:
    """Mutations seen to fail here: the rate is not told to the scheduler; it is told at any number of streams."""
    bench = Bench(store)
    node = bench.node()
    async with bench.running():
        await until_ordered(node, 1)
        bench.answer(node, 0, 2.0, energy_mj=6_400)
        await until_ordered(node, 5)
        for order in range(1, 5):
            bench.answer(node, order, 1.0)
        await until(lambda: len(bench.rates()) == 2)
    one, four = store.rates()
    assert (one.streams, one.tokens_per_second, one.first_token_ms) == (1, 32.0, 1000)
    assert (one.engine_build, one.joules_per_token, one.energy_method) == ("fake 1", 0.1, "counter")
    assert (four.streams, four.tokens_per_second, four.energy_method) == (4, 64.0, "none")
    engine = bench.harness.scheduler.nodes[NODE].engines
    assert [bench.harness.scheduler.speeds.rate(NODE, view).tokens_per_second for view in engine.values()] == [32.0]
    assert bench.rates() == (one, four)
    assert {task.tenant_id for task in bench.harness.records.tasks} == {VERIFICATION_TENANT}


async def test_what_was_measured_outlives_a_restart_but_not_a_week(store: SqlStore) -> None:
    """Mutations seen to fail here: old figures are told all the same; nothing is forgotten while it runs."""
    now_ms = DriverHarness().clock.now_ms()
    store.put_rate(row(1, now_ms))
    store.put_rate(replace(row(4, now_ms - KEPT_MS - 1)))
    bench = Bench(store)
    view = engine_view(tokens_per_second=10_000.0)
    assert bench.harness.scheduler.speeds.rate(NODE, view).tokens_per_second == 32.0
    assert [one.streams for one in bench.rates()] == [1]
    bench.harness.clock.advance(KEPT_MS / 1000 + 1)
    async with bench.running():
        await until(lambda: bench.harness.scheduler.speeds.rate(NODE, view).tokens_per_second == 10_000.0)
    assert bench.rates() == ()


@pytest.mark.parametrize("slots", [1, 4], ids=["no slot is left", "a slot is left"])
async def test_a_users_task_goes_first_and_what_it_disturbed_is_thrown_away(store: SqlStore, slots: int) -> None:
    """Mutation seen to fail here: nobody watches for what comes in between."""
    bench = Bench(store)
    node = bench.node(slots=slots)
    async with bench.running():
        await until_ordered(node, 1)
        bench.harness.submit(task_spec("user"))
        await until(lambda: TaskId("user") in bench.harness.scheduler.nodes[NODE].tasks)
        await until(lambda: list(bench.harness.scheduler.nodes[NODE].tasks) == ["user"])
        await until(lambda: not bench.rounds.measuring(NODE))
    assert [one.cancel.task_id for one in node.sent_of("cancel")] != []
    assert store.rates() == []


async def test_nobody_is_measured_while_something_else_is_under_way_or_before_the_first_canary(store: SqlStore) -> None:
    """Mutations seen to fail here: `occupied` is not asked; a bank makes no difference; nor does a quarantine."""
    bench = Bench(store, occupied={NODE}, examined=True)
    node = bench.node()

    async def not_ordered() -> bool:
        """Let it look a few times."""
        looks = bench.looks
        await until(lambda: bench.looks > looks + 3)
        return not node.sent_of("assignment")

    async with bench.running():
        bench.occupied.clear()
        assert await not_ordered()
        bench.harness.driver.feed(e.StandingChanged(NODE, DIGEST, Use.CANARIES_ONLY))
        first = audit(1, node_id=NODE, manifest_digest=DIGEST, kind=AuditKind.CANARY)
        await bench.verification.tell(first)
        assert await not_ordered()
        bench.occupied.add(NODE)
        bench.harness.driver.feed(e.StandingChanged(NODE, DIGEST, Use.PUBLIC_ONLY))
        assert await not_ordered()
        bench.occupied.clear()
        await until_ordered(node, 1)
    assert store.rates() == []


async def test_when_our_own_clock_is_not_read_in_time_nothing_is_believed(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation seen to fail here: lateness is not looked at."""
    monkeypatch.setattr(rate_rounds, "LATE_S_MAX", 0.25)
    bench = Bench(store)
    node = bench.node(slots=1)
    async with bench.running():
        await until_ordered(node, 1)
        bench.answer(node, 0, 2.0)
        await until(lambda: not bench.rounds.measuring(NODE))
    assert store.rates() == []
