"""Sizes, deadlines and barriers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.challenge.schedule import (
    NETWORK_ALLOWANCE_MS,
    Card,
    DeviceClass,
    barrier_groups,
    compute_plan,
    memory_plan,
    per_second,
    sharing,
)

GIB = 1 << 30
# One core of 2024 in numpy, float32 (measured at 74 to 117); half of it as the verifier's allowance.
VERIFIER_OPERATIONS_PER_S = 40_000_000_000
VERIFIER_S = 2
SHOWN = {
    DeviceClass.CPU: 80_000_000_000,
    DeviceClass.CONSUMER_CARD: 45_000_000_000_000,
    DeviceClass.DATA_CENTRE_CARD: 300_000_000_000_000,
}
FREE = {DeviceClass.CPU: GIB // 2, DeviceClass.CONSUMER_CARD: 22 * GIB, DeviceClass.DATA_CENTRE_CARD: 138 * GIB}
ALL = pytest.mark.parametrize("device_class", list(DeviceClass))


@ALL
def test_a_compute_check_fits_two_seconds_of_one_core_and_a_tenth_of_the_prover_s_work(
    device_class: DeviceClass,
) -> None:
    plan = compute_plan(device_class)
    checking = plan.drawn * 16 * plan.size.products * plan.size.columns**2
    assert checking <= VERIFIER_OPERATIONS_PER_S * VERIFIER_S
    assert plan.size.operations >= 100 * checking
    assert plan.drawn <= plan.size.chains


def test_a_processor_s_chains_are_all_drawn() -> None:
    plan = compute_plan(DeviceClass.CPU)
    assert plan.drawn == plan.size.chains


@ALL
def test_a_memory_check_fits_two_seconds_of_one_core(device_class: DeviceClass) -> None:
    plan = memory_plan(device_class, FREE[device_class], SHOWN[device_class])
    rows = plan.rows_drawn * (plan.steps_drawn * plan.size.blocks_per_step + plan.blocks_drawn)
    assert rows * 2 * plan.size.columns**2 <= VERIFIER_OPERATIONS_PER_S * VERIFIER_S
    assert plan.size.fill_operations >= 10 * rows * 2 * plan.size.columns**2


@ALL
def test_nine_tenths_of_the_free_memory_are_filled_and_all_of_it_is_walked_over(device_class: DeviceClass) -> None:
    plan = memory_plan(device_class, FREE[device_class], SHOWN[device_class])
    assert 0.85 * FREE[device_class] < plan.size.fill_bytes <= 0.9 * FREE[device_class]
    # A block is missed by a walk of this length with e^-10 at most.
    assert plan.size.walk_bytes >= 10 * plan.size.fill_bytes


@ALL
def test_who_has_no_memory_and_computes_at_the_speed_shown_is_late_sixfold(device_class: DeviceClass) -> None:
    plan = memory_plan(device_class, FREE[device_class], SHOWN[device_class])
    recomputing_ms = 2 * plan.size.columns * plan.size.walk_bytes * 1000 // SHOWN[device_class]
    assert recomputing_ms > 6 * (plan.walk_deadline_ms - NETWORK_ALLOWANCE_MS)


@ALL
def test_the_slowest_of_a_class_is_in_time_and_a_processor_that_says_it_is_a_card_is_not(
    device_class: DeviceClass,
) -> None:
    plan = compute_plan(device_class)
    assert 2_000 < plan.commitment_deadline_ms < 90_000
    if device_class is not DeviceClass.CPU:
        # 16 cores of int8 instructions reach 5 TOPS here, reductions left out.
        assert plan.size.operations / 5e12 * 1000 > plan.commitment_deadline_ms


def test_too_little_memory_or_no_speed_shown_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks"):
        memory_plan(DeviceClass.CONSUMER_CARD, 1 << 20, 1)
    with pytest.raises(ValueError, match="after a compute challenge"):
        memory_plan(DeviceClass.CONSUMER_CARD, 8 * GIB, 0)


def test_a_rate_is_what_was_done_a_second() -> None:
    assert per_second(5_000, 2_500) == 2_000
    assert per_second(5, 0) == 5_000


def card(node: str, owner: str, network: str, card_id: str = "0") -> Card:
    return Card(node, card_id, owner, network)


def test_cards_linked_by_owner_or_network_are_one_group() -> None:
    # Mutation seen to fail: groups by owner only.
    linked = [card("a", "ann", "n1"), card("b", "bob", "n1"), card("c", "bob", "n2"), card("d", "dora", "n2")]
    alone = card("e", "eve", "n5")
    twice = [card("f", "fay", "n6"), card("f", "fay", "n6", "1")]
    assert barrier_groups([twice[0], linked[3], alone, linked[0], linked[2], linked[1], twice[1]]) == [
        tuple(linked),
        (alone,),
        tuple(twice),
    ]


CARDS = st.builds(
    Card,
    st.integers(0, 30).map(str),
    st.sampled_from("01"),
    st.integers(0, 8).map(str),
    st.integers(0, 8).map(str),
)


@given(st.lists(CARDS, unique=True, max_size=25))
def test_every_card_is_in_one_group_and_no_link_leads_out_of_it(cards: list[Card]) -> None:
    groups = barrier_groups(cards)
    assert sorted(member for group in groups for member in group) == sorted(cards)
    for link in ("owner_id", "network"):
        names = [{getattr(member, link) for member in group} for group in groups]
        assert sum(map(len, names)) == len(set().union(*names))


A, B, C = card("a", "ann", "n1"), card("b", "ann", "n1"), card("c", "ann", "n1")


def test_cards_that_slow_each_other_down_are_seen_inside_the_deadline() -> None:
    assert sharing({A: 1_000, B: 1_000}, {A: 2_000, B: 2_050, C: 900}) == [A, B]
    assert sharing({A: 1_000, B: 1_000}, {A: 1_000, B: 1_990}) == [B]
    assert sharing({A: 1_000, B: 1_000}, {A: 1_250, B: 1_300}) == []
