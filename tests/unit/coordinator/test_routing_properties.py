"""Whatever the fleet and the load: nobody waits for ever beside a free slot, and nobody pays more for the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.ledger.prices import Price
from coordinator.scheduler import commands as c
from coordinator.scheduler.records import Why
from coordinator.scheduler.targets import TARGETS
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from coordinator.scheduler.want import MARGIN, PATIENCE
from inference.task import ServiceClass

FLEETS = st.lists(
    st.tuples(st.integers(1, 4), st.floats(1.0, 200.0), st.sampled_from([100_000, 400_000, 700_000])),
    min_size=1,
    max_size=5,
)
READ = [ServiceClass.INTERACTIVE, ServiceClass.STANDARD]


def fleet_of(engines: list[tuple[int, float, int]]) -> SchedulerHarness:
    harness = SchedulerHarness()
    for number, (slots, tokens_per_second, micro) in enumerate(engines):
        ask = Price(micro // 4, micro)
        harness.connect(f"n{number}", engine_view(slots=slots, tokens_per_second=tokens_per_second, ask=ask))
    return harness


@settings(max_examples=60, deadline=None)
@given(FLEETS, st.lists(st.sampled_from(READ), min_size=1, max_size=12))
def test_nobody_waits_longer_than_its_patience_beside_a_free_slot(
    engines: list[tuple[int, float, int]], classes: list[ServiceClass]
) -> None:
    """Mutation seen to fail here: a task waits for its target for ever."""
    harness = fleet_of(engines)
    for number, service_class in enumerate(classes):
        harness.submit(task_spec(f"t{number}", service_class=service_class))
    patience_s = PATIENCE * TARGETS[ServiceClass.STANDARD].first_token_s
    harness.pass_time(patience_s + 0.2, alive=[f"n{number}" for number in range(len(engines))])
    scheduler = harness.scheduler
    free = any(engine.free for node in scheduler.nodes.values() for engine in node.placed.values())
    assert not (free and len(scheduler.queue)), "a task waits, and a slot is free"


@settings(max_examples=100, deadline=None)
@given(FLEETS, st.sampled_from(READ))
def test_of_the_engines_that_keep_the_target_the_cheapest_is_taken(
    engines: list[tuple[int, float, int]], service_class: ServiceClass
) -> None:
    """Mutation seen to fail here: the dearest first."""
    harness = fleet_of(engines)
    [order] = [
        command for command in harness.submit(task_spec(service_class=service_class)) if isinstance(command, c.Assign)
    ]
    pace_s = MARGIN * TARGETS[service_class].token_s
    able = [micro for _, tokens_per_second, micro in engines if 1.0 / tokens_per_second <= pace_s]
    if order.choice.why is Why.MEETS_TARGET:
        assert order.ask is not None
        assert order.ask.completion_micro == min(able)
    else:
        assert not able
