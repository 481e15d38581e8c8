"""How much one engine serves within targets, and how much of a fleet is there."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning import cost
from coordinator.planning.capacity import HALVINGS, Arrival, Targets, largest_rate, meets
from coordinator.planning.churn import Churn, at_least, covered
from coordinator.planning.curve_file import read_curves
from coordinator.planning.rows import Configuration
from coordinator.planning.traffic import poisson_traffic

CURVE = read_curves()[Configuration("DeepSeek-R1-Distill-Qwen-7B", "RTX-4090", 1)]
TRAFFIC = poisson_traffic(208, 208)
NONE = Targets(first_token_ms=None, token_ms=None, quantile=0.95)


def test_the_largest_rate_keeps_the_targets_and_a_little_more_does_not() -> None:
    targets = Targets(first_token_ms=300.0, token_ms=40.0, quantile=0.95)
    rate = largest_rate(CURVE, TRAFFIC, targets)
    assert meets(CURVE, TRAFFIC, targets, rate)
    step = largest_rate(CURVE, TRAFFIC, NONE) / 2**HALVINGS
    assert not meets(CURVE, TRAFFIC, targets, rate + 1.01 * step)


def test_the_quantile_is_the_share_that_must_be_in_time() -> None:
    """Mutation that this failed on: a fixed quantile."""
    # Each alone: nine short prompts are in time, a long one is not.
    arrivals = [Arrival(1.0, 1000 if place == 5 else 10, 20) for place in range(10)]
    first_token_ms = CURVE.request_ms + CURVE.step_ms(1, 1000) + CURVE.prefill_ms(500)
    for quantile, kept in ((0.5, True), (0.9, True), (0.91, False), (0.99, False)):
        targets = Targets(first_token_ms=first_token_ms, token_ms=None, quantile=quantile)
        assert meets(CURVE, arrivals, targets, 0.01) == kept


def test_tighter_targets_never_allow_more() -> None:
    rates = [
        largest_rate(CURVE, TRAFFIC, Targets(first_token_ms=first, token_ms=token, quantile=quantile))
        for first, token, quantile in (
            (None, None, 0.95),
            (2000.0, 60.0, 0.95),
            (400.0, 40.0, 0.95),
            (400.0, 40.0, 0.99),
        )
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1] > 0.0


def test_without_targets_the_throughput_is_that_of_a_full_batch() -> None:
    # Full: as many answers as there are slots, or as fit into memory, half written on the average (longer ones stay
    # longer, hence the tolerance). Prompts are as long as answers, so each step computes as many of their tokens.
    tokens = 208 + 208 / 2
    batch = round(min(CURVE.slots_max, CURVE.kv_tokens_max / tokens))
    step_ms = CURVE.step_ms(batch, batch * tokens) + CURVE.prefill_ms(batch)
    assert largest_rate(CURVE, TRAFFIC, NONE) == pytest.approx(1000.0 * batch / step_ms / 208, rel=0.25)


def test_an_engine_without_room_for_the_longest_request_serves_nothing() -> None:
    assert largest_rate(replace(CURVE, kv_tokens_max=500), TRAFFIC, NONE) == 0.0


def test_targets_that_one_request_alone_misses_allow_nothing() -> None:
    assert largest_rate(CURVE, TRAFFIC, Targets(first_token_ms=1.0, token_ms=None, quantile=0.5)) == 0.0


def test_traffic_has_the_asked_means_and_is_the_same_each_time() -> None:
    assert poisson_traffic(208, 208) == TRAFFIC
    assert sum(one.unit_gap for one in TRAFFIC) / len(TRAFFIC) == pytest.approx(1.0, abs=0.01)
    assert sum(one.prompt_tokens for one in TRAFFIC) / len(TRAFFIC) == pytest.approx(208, rel=0.01)
    assert sum(one.answer_tokens for one in TRAFFIC) / len(TRAFFIC) == pytest.approx(208, rel=0.01)


def test_availability_is_the_time_up_over_the_cycle() -> None:
    # A loss per hour, 30 minutes away each time (no spread), 30 minutes of reloading: half the time.
    churn = Churn(losses_per_hour=1.0, away_median_minutes=30.0, away_spread=0.0, reload_s=1800.0)
    assert churn.availability == pytest.approx(0.5)
    # The mean of a log-normal time is above its median.
    assert replace(churn, away_spread=1.0).availability < 0.5


@given(st.integers(0, 4), st.floats(0.5, 0.999), st.floats(0.5, 0.999))
def test_spare_machines_cover_as_many_as_the_binomial_says(spare: int, availability: float, probability: float) -> None:
    def there(count: int, machines: int) -> float:
        return sum(
            math.comb(machines, up) * availability**up * (1 - availability) ** (machines - up)
            for up in range(count, machines + 1)
        )

    found = covered(spare, availability, probability, 25)
    # The two sums round differently.
    assert found == 0 or there(found, found + spare) >= probability - 1e-9
    assert found == 25 or there(found + 1, found + 1 + spare) < probability + 1e-9


def test_thousands_of_machines_do_not_overflow() -> None:
    assert at_least(4900, 5000, 0.99) == pytest.approx(1.0, abs=1e-6)
    assert covered(0, 1.0, 0.99, 7000) == 7000


def test_money_energy_and_carbon_of_tokens() -> None:
    # 1000 tokens/s are 3.6 million per hour.
    assert cost.usd_per_million_tokens(3.6, 1000.0) == pytest.approx(1.0)
    assert cost.joules_per_million_tokens(350.0, 1000.0) == pytest.approx(350_000.0)
    assert cost.grams(3.6e6, 242.0) == pytest.approx(242.0)
    # 1 kW for an hour: 0.20 for electricity, 250 g at 80 $/t are 2 cents.
    assert cost.power_usd_per_hour(1000.0, 0.20, 250.0, 80.0) == pytest.approx(0.22)
