"""The token bucket: never more than the limit and one second's worth."""

from hypothesis import given
from hypothesis import strategies as st

from agent.model_store.bandwidth import Bandwidth


@given(
    limit=st.integers(1000, 10**9),
    pieces=st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 5)), min_size=1, max_size=50),
)
def test_whoever_waits_as_told_stays_within_the_limit(limit: int, pieces: list[tuple[int, float]]) -> None:
    # Mutation seen to fail: nothing subtracted.
    bandwidth = Bandwidth(limit)
    now, total = 100.0, 0
    for count_bytes, idle_s in pieces:
        now += idle_s
        # What arrived before the last piece had its time; that piece itself may be a whole block.
        total += count_bytes
        now += bandwidth.take(count_bytes, now)
        assert total <= limit * (now - 100.0 + 1.0) * 1.000001 + 1


def test_a_long_rest_saves_up_no_more_than_a_second() -> None:
    # Mutation seen to fail: the bucket filled without a bound.
    bandwidth = Bandwidth(1000)
    bandwidth.take(1, 0.0)
    assert bandwidth.take(3000, 100.0) == 2.0


def test_without_a_limit_nobody_waits() -> None:
    assert Bandwidth(None).take(10**12, 0.0) == 0.0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bandwidth = Bandwidth(1000)
    bandwidth.take(1000, 50.0)
    assert bandwidth.take(500, 10.0) == 0.5
