"""What an engine did is learned; what was known before counts until then."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduler.rates import TAIL_MAX, Line, Rate

SEED = 20261202


def test_a_line_is_the_prior_until_something_is_seen_and_then_what_is_seen() -> None:
    """Mutation seen to fail here: old observations keep their weight."""
    line = Line(scale=8.0)
    line.prior = (1.0, 0.5)
    assert line.fit() == pytest.approx((1.0, 0.5))
    for true in ((0.2, 0.004), (2.0, 0.2)):
        for number in range(400):
            x = 1 + number % 16
            line.add(x, true[0] + true[1] * x)
        a, b = line.fit()
        # The prior, of 5 s there, still pulls with the weight of one observation among some fifty.
        assert a + 8 * b == pytest.approx(true[0] + 8 * true[1], abs=0.25)


@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.floats(0.0, 1e3)), max_size=50), st.floats(1e-3, 10.0))
def test_neither_part_of_a_line_is_negative_whatever_is_seen(points: list[tuple[float, float]], step_s: float) -> None:
    """Mutation seen to fail here: the slope is not held at zero."""
    line = Line(scale=8.0)
    line.prior = (step_s, step_s / 50)
    for x, y in points:
        line.add(x, y)
    a, b = line.fit()
    assert a >= 0.0
    assert b >= 0.0


def test_a_slow_engine_is_found_out_by_its_answers() -> None:
    rate = Rate(100.0)
    assert rate.step_s(1) == pytest.approx(0.01)
    for _ in range(200):
        rate.saw_steps(8, 0.1)
    assert rate.step_s(8) == pytest.approx(0.1, rel=0.05)


def test_the_tail_is_where_one_in_twenty_is_later() -> None:
    """Mutation seen to fail here: both steps of the tail are alike."""
    draws = random.Random(SEED)
    rate = Rate(100.0)
    late = 0
    for number in range(6000):
        took_s = 0.06 * draws.lognormvariate(0.0, 0.5)
        if number >= 1000:
            late += took_s > rate.tail * rate.first_token_s(100, 1)
        rate.saw_first_token(100, 1, took_s)
    assert 0.03 < late / 5000 < 0.07
    assert 1.0 <= rate.tail <= TAIL_MAX
