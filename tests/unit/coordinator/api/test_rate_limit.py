"""Token buckets, under any history."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.api import rate_limit
from coordinator.api.rate_limit import RateLimits


@given(
    # Few calls a minute, so that a history is long enough to spend the burst.
    per_minute=st.integers(1, 10),
    pauses=st.lists(st.floats(0, 10, allow_nan=False), min_size=20, max_size=100),
)
def test_nobody_gets_more_than_a_burst_and_the_rate(per_minute: int, pauses: list[float]) -> None:
    # Mutation seen to fail: a refill of per_minute a second.
    limits, now, allowed = RateLimits(), 0.0, 0
    for pause in pauses:
        now += pause
        allowed += limits.take("a", "m", per_minute, now) == 0.0
        assert allowed <= per_minute + now * per_minute / 60 + 1e-6


@given(per_minute=st.integers(1, 1000))
def test_waiting_as_told_is_enough(per_minute: int) -> None:
    # Mutation seen to fail: the wait computed for half a call.
    limits, now = RateLimits(), 0.0
    for _ in range(per_minute):
        assert limits.take("a", "m", per_minute, now) == 0.0
    wait = limits.take("a", "m", per_minute, now)
    assert wait > 0.0
    assert limits.take("a", "m", per_minute, now + wait + 1e-6) == 0.0


def test_callers_and_methods_do_not_share() -> None:
    limits = RateLimits()
    assert limits.take("a", "m", 1, 0.0) == 0.0
    assert limits.take("a", "m", 1, 0.0) > 0.0
    assert limits.take("b", "m", 1, 0.0) == 0.0
    assert limits.take("a", "n", 1, 0.0) == 0.0


def test_the_memory_is_bounded() -> None:
    # Mutation seen to fail: `popitem` left out.
    limits = RateLimits()
    for number in range(rate_limit.BUCKETS_MAX + 100):
        limits.take(str(number), "m", 1, 0.0)
    assert len(limits._buckets) == rate_limit.BUCKETS_MAX
