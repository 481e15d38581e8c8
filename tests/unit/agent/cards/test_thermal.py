"""When a card is too hot to be lent, and when it is cool again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cards.thermal import COOL_S, CORE_LIMIT_DEFAULT_C, HYSTERESIS_C, THROTTLED_S_MAX, ThermalGuard
from agent.owner.events import TemperatureObserved, Unknown


def seen(
    temperature_c: float | Unknown, *, slowdown_c: float | None = 90.0, throttled: bool = False
) -> TemperatureObserved:
    return TemperatureObserved("GPU-1", temperature_c, slowdown_c, throttled)


def test_a_card_is_too_hot_five_degrees_below_its_slowdown_and_not_before() -> None:
    """Mutation tried: `>` for `>=` in `handle` lets 85 C pass."""
    guard = ThermalGuard()
    assert not guard.handle(seen(84.9), 0.0)
    assert guard.handle(seen(85.0), 1.0)
    assert "85 C" in guard.heat.reason


@pytest.mark.parametrize("slowdown_c", [None, 0.0, 255.0])
def test_a_card_that_names_no_credible_limit_has_a_careful_one(slowdown_c: float | None) -> None:
    guard = ThermalGuard()
    assert not guard.handle(seen(CORE_LIMIT_DEFAULT_C - 1, slowdown_c=slowdown_c), 0.0)
    assert guard.handle(seen(CORE_LIMIT_DEFAULT_C, slowdown_c=slowdown_c), 1.0)


def test_the_owners_limit_lowers_the_cards_and_never_raises_it() -> None:
    assert ThermalGuard(limit_c=70.0).handle(seen(70.0), 0.0)
    assert ThermalGuard(limit_c=120.0).handle(seen(85.0), 0.0)


def test_a_hot_card_is_cool_again_ten_degrees_below_and_after_five_minutes_of_it() -> None:
    """Mutation tried: not resetting `_cool_since` in `_cool_down` counts the minute in which it was warm again."""
    guard = ThermalGuard()
    guard.handle(seen(86.0), 0.0)
    assert guard.handle(seen(76.0), 1000.0), "ten degrees below 85 are 75"
    assert guard.handle(seen(75.0), 1001.0)
    assert guard.handle(seen(76.0), 1100.0), "warm again: the five minutes begin anew"
    assert guard.handle(seen(60.0), 1200.0)
    assert guard.handle(seen(60.0), 1200.0 + COOL_S - 1)
    assert "1 min" in guard.heat.reason
    assert not guard.handle(seen(60.0), 1200.0 + COOL_S)
    assert guard.heat.reason == ""


def test_hardware_that_slows_down_because_of_heat_counts_after_ten_seconds_of_it() -> None:
    guard = ThermalGuard()
    assert not guard.handle(seen(70.0, throttled=True), 0.0)
    assert not guard.handle(seen(70.0, throttled=True), THROTTLED_S_MAX)
    assert not guard.handle(seen(70.0), THROTTLED_S_MAX + 1)
    assert not guard.handle(seen(70.0, throttled=True), THROTTLED_S_MAX + 2), "the ten seconds begin anew"
    assert guard.handle(seen(Unknown.ABSENT, throttled=True), 2 * THROTTLED_S_MAX + 3)


@pytest.mark.parametrize("unknown", list(Unknown))
def test_an_unknown_temperature_neither_heats_nor_cools(unknown: Unknown) -> None:
    guard = ThermalGuard()
    assert not guard.handle(seen(unknown), 0.0)
    guard.handle(seen(90.0), 1.0)
    assert guard.handle(seen(40.0), 2.0)
    assert guard.handle(seen(unknown), COOL_S + 10)
    assert guard.handle(seen(40.0), COOL_S + 11), "it was not seen to be cool all the time"


@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 200.0),
            st.one_of(st.floats(20.0, 110.0), st.just(Unknown.BROKEN)),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_a_card_is_never_called_cool_within_five_minutes_of_being_warm(
    history: list[tuple[float, float | Unknown, bool]],
) -> None:
    """Mutation tried: COOL_S from the first hot sample on, instead of the first cool one."""
    guard = ThermalGuard()
    now, warm_at, was_hot = 0.0, float("-inf"), False
    for step_s, temperature_c, throttled in history:
        now += step_s
        hot = guard.handle(seen(temperature_c, throttled=throttled), now)
        if isinstance(temperature_c, Unknown) or temperature_c > 85.0 - HYSTERESIS_C or throttled:
            warm_at = now
        if not isinstance(temperature_c, Unknown) and temperature_c >= 85.0:
            assert hot
        if was_hot and not hot:
            assert now - warm_at >= COOL_S
        assert bool(guard.heat.reason) == hot
        was_hot = hot
