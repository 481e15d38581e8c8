"""Noticing that the machine was asleep."""

from hypothesis import given
from hypothesis import strategies as st

from agent.cards.suspend import SLEEP_S_MIN, SuspendWatch


def test_sleep_is_what_one_clock_is_ahead_of_the_other_and_is_told_once() -> None:
    watch = SuspendWatch()
    assert watch.slept_s(1000.0, 900.0) == 0.0, "what was before the start is nobody's business"
    assert watch.slept_s(1010.0, 910.0) == 0.0
    assert watch.slept_s(4610.0, 911.0) == 3599.0
    assert watch.slept_s(4611.0, 912.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 0.01)), max_size=30))
def test_clocks_that_are_read_one_after_the_other_are_no_sleep(steps: list[tuple[float, float]]) -> None:
    """Mutation tried: SLEEP_S_MIN of 0 restarts every engine at each reading."""
    watch = SuspendWatch()
    boot_s = 0.0
    for step_s, late_s in steps:
        boot_s += step_s
        assert watch.slept_s(boot_s, boot_s - late_s) == 0.0
    assert SLEEP_S_MIN > 0.01
