"""What an engine costs beside its ask: energy as the operator weighs it, and answers that will not end there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.prices import Price
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.speeds import JOULES_STEP, UNMEASURED_JOULES, Speeds
from coordinator.scheduler.stays import LOSSES_PER_H_MIN, LOSSES_STEP, Stays
from coordinator.scheduler.testing import DIGEST, SchedulerHarness, engine_view, task_spec
from inference.task import NodeId, ServiceClass

STEADY, UNSTEADY = NodeId("steady"), NodeId("unsteady")
# Asks for a tenth less.
CHEAP, DEAR = Price(90_000, 360_000), Price(100_000, 400_000)


def chosen(commands: list[c.Command]) -> str:
    return next(command.node_id for command in commands if isinstance(command, c.Assign))


def churning_fleet(unsteady: Price) -> SchedulerHarness:
    """Two engines of 100 tokens a second; one is lost twice an hour."""
    harness = SchedulerHarness()
    for name, ask in (("unsteady", unsteady), ("steady", DEAR)):
        harness.connect(name, engine_view(ask=ask))
    harness.feed(e.StayExpected(STEADY, 0.01))
    harness.feed(e.StayExpected(UNSTEADY, 2.0))
    return harness


@pytest.mark.parametrize(("max_tokens", "node"), [(100, "unsteady"), (60_000, "steady")])
def test_a_long_answer_goes_where_it_will_end_and_a_short_one_where_it_is_cheap(max_tokens: int, node: str) -> None:
    """Ten minutes at two losses an hour cost a third more. Mutation seen to fail: losses weigh nothing."""
    harness = churning_fleet(CHEAP)
    spec = task_spec(max_tokens=max_tokens, service_class=ServiceClass.BATCH)
    assert chosen(harness.submit(spec)) == node


def test_what_is_paid_is_the_ask_alone() -> None:
    """Mutation seen to fail: the weighed cost is written down."""
    harness = churning_fleet(DEAR)
    commands = harness.submit(task_spec(max_tokens=60_000, service_class=ServiceClass.BATCH))
    (order,) = (command for command in commands if isinstance(command, c.Assign))
    assert order.node_id == STEADY
    assert order.choice.cost_micro == DEAR.earned_micro(3, 60_000)


def test_an_opinion_reaches_engines_that_are_connected_and_those_that_come() -> None:
    """Mutation seen to fail: the router is not told of a change."""
    harness = churning_fleet(DEAR)
    harness.disconnect("steady")
    harness.connect("steady", engine_view(ask=DEAR))
    long_task = {"max_tokens": 60_000, "service_class": ServiceClass.BATCH}
    assert chosen(harness.submit(task_spec("one", **long_task))) == "steady"
    harness.feed(e.StayExpected(STEADY, 8.0))
    harness.feed(e.StayExpected(UNSTEADY, 0.01))
    assert chosen(harness.submit(task_spec("two", **long_task))) == "unsteady"


@given(st.floats(0.0, 1e3))
def test_what_is_believed_is_within_a_factor_of_two_of_what_was_said(losses_per_h: float) -> None:
    stays = Stays()
    stays.set(STEADY, losses_per_h)
    said = max(LOSSES_PER_H_MIN, losses_per_h)
    assert said / LOSSES_STEP**0.5 <= stays.losses_per_h(STEADY) * (1 + 1e-9)
    assert stays.losses_per_h(STEADY) <= said * LOSSES_STEP**0.5 * (1 + 1e-9)
    assert not stays.set(STEADY, losses_per_h), "the same opinion is no news"


def measured_fleet(micro_per_joule: float) -> SchedulerHarness:
    """A fast engine that takes 8 J a token beside a slower one that takes 2."""
    harness = SchedulerHarness(micro_per_joule=micro_per_joule)
    for name, rate, joules in (("thirsty", 100.0, 8.0), ("frugal", 80.0, 2.0)):
        harness.connect(name, engine_view(tokens_per_second=rate, ask=DEAR))
        harness.feed(e.RateMeasured(NodeId(name), DIGEST, rate, joules))
    return harness


@pytest.mark.parametrize(("micro_per_joule", "node"), [(0.0, "thirsty"), (10.0, "frugal")])
def test_energy_counts_as_the_operator_weighs_it(micro_per_joule: float, node: str) -> None:
    """Mutations seen to fail: energy weighs nothing; the more of it the better."""
    assert chosen(measured_fleet(micro_per_joule).submit(task_spec())) == node


def test_a_low_ask_outweighs_little_energy() -> None:
    harness = measured_fleet(10.0)
    harness.connect("cheap", engine_view(tokens_per_second=80.0, ask=Price(50_000, 200_000)))
    harness.feed(e.RateMeasured(NodeId("cheap"), DIGEST, 80.0, 8.0))
    assert chosen(harness.submit(task_spec())) == "cheap"


def test_who_does_not_tell_its_energy_is_taken_for_thirsty() -> None:
    """Mutation seen to fail: what is not known is nothing."""
    harness = measured_fleet(10.0)
    harness.connect("silent", engine_view(tokens_per_second=120.0, ask=DEAR))
    assert chosen(harness.submit(task_spec())) == "frugal"
    speeds = Speeds(verified_only=False)
    assert speeds.joules_per_token(STEADY, DIGEST) == pytest.approx(UNMEASURED_JOULES, rel=JOULES_STEP - 1)
