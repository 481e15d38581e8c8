"""Each router that ours is held against chooses as its name says, and nothing else of the scheduler is another."""

import pytest

from coordinator.planning.simulation.baselines import (
    BASELINES,
    Baseline,
    LeastDrainTime,
    LeastRequests,
    PowerOfTwo,
    RoundRobin,
    scheduler_with,
)
from coordinator.scheduler import commands as c
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import PrivacyClass, ServiceClass


def fleet(router: type[Baseline], *engines: tuple[int, float]) -> SchedulerHarness:
    """Return nodes a, b, c ... Args: `engines` are slots and tokens a second of one answer."""
    harness = SchedulerHarness()
    harness.scheduler = scheduler_with(router)(Limits(), harness.asks)
    for name, (slots, tokens_per_second) in zip("abcdefgh", engines, strict=False):
        harness.connect(name, engine_view(slots=slots, tokens_per_second=tokens_per_second))
    return harness


def takers(harness: SchedulerHarness, count: int, first: int = 0) -> str:
    """Return the names of the nodes that so many tasks go to; a dot for one that waits."""
    names = ""
    for number in range(first, first + count):
        commands = harness.submit(task_spec(f"t{number}", service_class=ServiceClass.BATCH))
        orders = [command for command in commands if isinstance(command, c.Assign)]
        names += orders[0].node_id if orders else "."
    return names


def test_round_robin_takes_one_after_the_other_and_passes_over_the_full() -> None:
    """Fails when it begins at the first one each time, or stops at a full one."""
    assert takers(fleet(RoundRobin, (1, 100.0), (3, 10.0), (2, 50.0)), 7) == "abcbcb."


def test_least_requests_goes_by_answers_for_each_slot() -> None:
    """Fails when it counts answers and not shares of the slots."""
    assert takers(fleet(LeastRequests, (2, 100.0), (8, 10.0)), 6) == "abbbba"


def test_power_of_two_takes_the_emptier_of_the_two_that_it_draws() -> None:
    """Fails when it takes the fuller one, or the first one drawn."""
    assert takers(fleet(PowerOfTwo, (4, 100.0), (4, 10.0)), 8).count("a") == 4
    pairs = takers(fleet(PowerOfTwo, (4, 100.0), (4, 10.0)), 8)
    assert all(set(pairs[at : at + 2]) == {"a", "b"} for at in range(0, 8, 2))


def test_power_of_two_draws_two_and_not_all_and_the_same_ones_each_time() -> None:
    """Fails when all are looked at, and when the generator has no seed."""
    engines = [(32, 100.0)] * 8
    taken = takers(fleet(PowerOfTwo, *engines), 64)
    assert taken == takers(fleet(PowerOfTwo, *engines), 64)
    assert any(taken.count(name) != 8 for name in "abcdefgh"), "eight each is what looking at all of them gives"


def test_least_drain_time_takes_the_one_that_is_done_first_whatever_it_asks() -> None:
    """Fails when the slowest is taken; and when what runs on an engine is left out, the fast one takes all."""
    taken = takers(fleet(LeastDrainTime, (64, 100.0), (64, 90.0)), 40)
    assert taken.startswith("aaaa")
    assert "b" in taken
    assert taken.count("a") > taken.count("b")


@pytest.mark.parametrize("router", BASELINES.values(), ids=BASELINES)
def test_whoever_chooses_nobody_gets_more_than_its_slots_or_what_it_may_not_read(router: type[Baseline]) -> None:
    """Fails when full engines are not left out, and when trust is not looked at."""
    harness = fleet(router, (2, 100.0), (1, 10.0))
    private = task_spec("private", privacy_class=PrivacyClass.TRUSTED_OWNERS)
    assert not any(isinstance(command, c.Assign) for command in harness.submit(private))
    names = takers(harness, 5)
    assert (names.count("a"), names.count("b"), names.count(".")) == (2, 1, 2)


@pytest.mark.parametrize("router", BASELINES.values(), ids=BASELINES)
def test_what_a_node_has_failed_it_does_not_get_again_at_once(router: type[Baseline]) -> None:
    """Fails when nodes that a task avoids are not left out."""
    harness = fleet(router, (4, 100.0), (4, 100.0))
    first = takers(harness, 1)
    again = [command for command in harness.fail(first, 1, "engine_error", task="t0") if isinstance(command, c.Assign)]
    assert [order.node_id for order in again] == ["b" if first == "a" else "a"]
