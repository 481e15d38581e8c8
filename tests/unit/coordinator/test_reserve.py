"""Slots are kept for interactive answers whose engine may be lost, as many as the measured losses ask for."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.records import WaitingFor
from coordinator.scheduler.reserve import SUFFICIENCY, binomial_quantile, reserve_slots
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import NodeId, ServiceClass, TaskId

SEED = 20261202
# Of ten engines one is lost while one is replaced; more is very unlikely.
OFTEN = 0.01


@given(st.integers(0, 400), st.floats(0.0, 1.0))
def test_the_quantile_is_the_binomial_one(trials: int, probability: float) -> None:
    count = binomial_quantile(trials, probability, SUFFICIENCY)
    odds = [math.comb(trials, k) * probability**k * (1 - probability) ** (trials - k) for k in range(count + 1)]
    assert math.fsum(odds) >= SUFFICIENCY - 1e-9
    assert math.fsum(odds[:-1]) < SUFFICIENCY + 1e-9


def test_what_is_kept_covers_what_is_lost_until_it_is_replaced() -> None:
    """Mutations seen to fail: answers lost one by one; engines counted by answers."""
    draws = random.Random(SEED)
    engines, each, lost_share = 400, 8, 0.000275
    kept = reserve_slots(engines * each, engines, lost_share)
    short = sum(sum(draws.random() < lost_share for _ in range(engines)) * each > kept for _ in range(2000))
    assert kept <= 2 * each
    assert short <= 1.5 * (1 - SUFFICIENCY) * 2000, f"seed {SEED}"


def test_no_more_is_kept_than_is_read() -> None:
    assert reserve_slots(3, 3, 1.0) == 3
    assert reserve_slots(0, 0, 1.0) == 0


def fleet(*, lost_share: float, read: int) -> SchedulerHarness:
    """Ten engines of two slots; so many answers that are read, each on an engine of its own."""
    harness = SchedulerHarness()
    for number in range(10):
        harness.connect(f"node-{number}", engine_view(slots=2))
    harness.feed(e.LossesExpected(lost_share))
    for number in range(read):
        harness.submit(task_spec(f"read-{number}"))
    harness.pass_time(0.1)
    return harness


def batch(harness: SchedulerHarness, count: int) -> int:
    """Submit so many that nobody reads; return how many begin."""
    commands: list[c.Command] = []
    for number in range(count):
        commands += harness.submit(task_spec(f"batch-{number}", service_class=ServiceClass.BATCH))
    return sum(isinstance(command, c.Assign) for command in commands)


@pytest.mark.parametrize(("lost_share", "read", "begin"), [(OFTEN, 10, 9), (0.0, 10, 10), (OFTEN, 0, 20)])
def test_batches_leave_the_last_slots_to_readers_where_engines_are_lost(
    lost_share: float, read: int, begin: int
) -> None:
    """Mutations seen to fail here: everybody keeps out; no reserve; one where nobody reads."""
    harness = fleet(lost_share=lost_share, read=read)
    assert batch(harness, 20) == begin


def test_readers_take_what_is_kept_and_batches_say_what_they_wait_for() -> None:
    """Mutation seen to fail here: readers keep out too."""
    harness = fleet(lost_share=OFTEN, read=10)
    batch(harness, 10)
    waiting = harness.scheduler.waiting_for(TaskId("batch-9"), harness.now)
    assert waiting is not None
    assert waiting.reason is WaitingFor.RESERVE
    assert any(isinstance(command, c.Assign) for command in harness.submit(task_spec("reader")))


def test_a_lost_answer_goes_on_in_the_reserve() -> None:
    harness = fleet(lost_share=OFTEN, read=10)
    batch(harness, 12)
    commands = harness.disconnect("node-0")
    resumed = [one.spec.task_id for one in commands if isinstance(one, c.Assign)]
    assert resumed == ["read-0"]


def test_what_is_kept_keeps_nobody_out_for_ever() -> None:
    """A standard task waits for five seconds. Mutation seen to fail here: who has waited so long spares others too."""
    harness = fleet(lost_share=OFTEN, read=10)
    batch(harness, 10)
    harness.submit(task_spec("standard", service_class=ServiceClass.STANDARD))
    alive = [f"node-{number}" for number in range(10)]
    task = harness.scheduler.tasks[TaskId("standard")]
    harness.pass_time(4.5, alive=alive)
    assert task.attempt is None
    harness.pass_time(1.0, alive=alive)
    assert task.attempt is not None


@given(st.lists(st.tuples(st.sampled_from(["read", "batch", "end", "lose", "join"]), st.integers(0, 9)), max_size=40))
def test_readers_and_their_engines_are_counted_rightly_whatever_happens(steps: list[tuple[str, int]]) -> None:
    """Mutations seen to fail here: an engine that goes keeps its readers; the second reader counts as an engine."""
    harness = fleet(lost_share=OFTEN, read=0)
    for number, (what, which) in enumerate(steps):
        name = f"node-{which}"
        connected = NodeId(name) in harness.scheduler.nodes
        if what in ("read", "batch"):
            service_class = ServiceClass.INTERACTIVE if what == "read" else ServiceClass.BATCH
            harness.submit(task_spec(f"{what}-{number}", service_class=service_class))
        elif what == "end" and connected:
            for task_id in list(harness.scheduler.nodes[NodeId(name)].tasks)[:1]:
                harness.feed(e.TaskCancelled(task_id))
        elif what == "lose" and connected:
            harness.disconnect(name)
        elif what == "join" and not connected:
            harness.connect(name, engine_view(slots=2))
        pool = harness.scheduler.router.pool(task_spec().manifest_digest)
        read = [engine.interactive for node in harness.scheduler.nodes.values() for engine in node.placed.values()]
        counted = (pool.answers_read, pool.engines_read) if pool is not None else (0, 0)
        assert counted == (sum(read), sum(count > 0 for count in read))
