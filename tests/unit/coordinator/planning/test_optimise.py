"""The cheapest plan, against counting all of them."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.optimise import Option, cheapest
from coordinator.planning.rows import Configuration

KINDS = ("A", "B")


def option(demand: int, kind: str, cards: int, rate: float, availability: float, usd: float, busy: float) -> Option:
    return Option(
        demand=demand,
        configuration=Configuration("model", kind, cards),
        requests_per_second=rate,
        availability=availability,
        # The first demand must not wait, the second one may.
        present_probability=0.95 if demand == 0 else 0.0,
        engine_usd_per_hour=usd * cards,
        busy_usd_per_hour=busy,
    )


def options_for(demands: st.SearchStrategy[int]) -> st.SearchStrategy[Option]:
    return st.builds(
        option,
        demands,
        st.sampled_from(KINDS),
        st.integers(1, 2),
        st.sampled_from([1.0, 1.5, 3.0]),
        st.sampled_from([0.7, 0.9, 1.0]),
        st.floats(0.1, 3.0),
        st.floats(0.0, 0.5),
    )


# At least one for each of the two demands.
OPTIONS = st.builds(
    lambda first, second, more: [first, second, *more],
    options_for(st.just(0)),
    options_for(st.just(1)),
    st.lists(options_for(st.integers(0, 1)), max_size=1),
)
LOADS = st.tuples(st.floats(0.5, 3.0), st.floats(0.5, 3.0))
ENGINES_MOST = 6


def counted_on(one: Option, engines: int) -> int:
    """How many of the engines are there with the wanted probability: the binomial's definition, counted upwards."""
    if one.waits:
        return engines

    def there(count: int) -> float:
        p = one.availability
        return sum(math.comb(engines, up) * p**up * (1 - p) ** (engines - up) for up in range(count, engines + 1))

    return max(count for count in range(engines + 1) if count == 0 or there(count) >= one.present_probability)


def filling_cost(options: list[Option], engines: tuple[int, ...], demand: int, load: float, headroom: float) -> float:
    """What the busy time costs at least, with these engines: the cheapest per request is filled first."""
    rooms = sorted(
        (
            one.busy_usd_per_hour / one.requests_per_second,
            counted_on(one, count) * one.requests_per_second * (one.availability if demand == 1 else 1.0) / headroom,
        )
        for one, count in zip(options, engines, strict=True)
        if one.demand == demand
    )
    usd = 0.0
    for price, room in rooms:
        taken = min(room, load)
        usd += price * taken
        load -= taken
    return usd if load < 1e-9 else math.inf


def cheapest_by_counting(
    options: list[Option], loads: tuple[float, float], headroom: float, cards_max: dict[str, int]
) -> float:
    best = math.inf
    for engines in itertools.product(range(ENGINES_MOST + 1), repeat=len(options)):
        cards = dict.fromkeys(KINDS, 0)
        for one, count in zip(options, engines, strict=True):
            cards[one.configuration.card] += count * one.configuration.cards
        if any(cards[kind] > most for kind, most in cards_max.items()):
            continue
        usd = sum(count * one.engine_usd_per_hour for one, count in zip(options, engines, strict=True))
        if usd < best:
            usd += sum(filling_cost(options, engines, demand, load, headroom) for demand, load in enumerate(loads))
            best = min(best, usd)
    return best


@settings(max_examples=80, deadline=None)
@given(OPTIONS, LOADS, st.sampled_from([1.0, 1.25]), st.dictionaries(st.sampled_from(KINDS), st.integers(0, 5)))
def test_it_is_what_counting_all_plans_finds(
    options: list[Option], loads: tuple[float, float], headroom: float, cards_max: dict[str, int]
) -> None:
    """Mutations that this failed on: free spares; no losses where work waits."""
    found = cheapest(options, loads, headroom, cards_max)
    expected = cheapest_by_counting(options, loads, headroom, cards_max)
    if found is None:
        assert expected == math.inf
        return
    counts = [0] * len(options)
    for one in found.chosen:
        counts[next(place for place, of in enumerate(options) if of is one.option)] = one.engines
    if max(counts) <= ENGINES_MOST:
        assert found.usd_per_hour == pytest.approx(expected, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(OPTIONS, LOADS, st.floats(1.0, 3.0))
def test_it_never_gets_cheaper_with_load_or_headroom(
    options: list[Option], loads: tuple[float, float], factor: float
) -> None:
    base = cheapest(options, loads, 1.0, {})
    if base is None:
        return
    more = cheapest(options, [factor * load for load in loads], 1.0, {})
    wider = cheapest(options, loads, factor, {})
    assert more is not None
    assert wider is not None
    assert more.usd_per_hour >= base.usd_per_hour * (1 - 1e-5)
    assert wider.usd_per_hour >= base.usd_per_hour * (1 - 1e-5)
