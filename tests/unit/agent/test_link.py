"""The coordinator's time, from messages that took their time."""

from hypothesis import given
from hypothesis import strategies as st

from agent.link import SAMPLES_MAX, CoordinatorClock

TRIPS = st.lists(
    st.tuples(st.floats(0, 2), st.floats(0, 1)),
    min_size=1,
    max_size=SAMPLES_MAX,
)


@given(TRIPS)
def test_the_error_is_at_most_half_of_the_quickest_round_trip(trips: list[tuple[float, float]]) -> None:
    """Each answer was stamped anywhere within its round trip, by a clock 5,000 s ahead of ours."""
    clock = CoordinatorClock()
    now = 100.0
    for round_trip, share in trips:
        stamped_at = now + round_trip * share
        clock.observe(round((stamped_at + 5000) * 1000), asked_at=now, now=now + round_trip)
        now += round_trip + 1
    error_ms = abs(clock.now_ms(now) - (now + 5000) * 1000)
    assert error_ms <= min(round_trip for round_trip, _ in trips) * 500 + 2


# Mutation seen to fail: `restart` without forgetting.
def test_a_new_connection_forgets_what_another_machine_said() -> None:
    clock = CoordinatorClock()
    clock.observe(1_000_000, asked_at=0, now=0)
    clock.restart(9_000_000, asked_at=0, now=1)
    assert clock.now_ms(1) == 9_000_500
