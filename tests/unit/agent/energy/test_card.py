"""Joules of one card, from readings that may be absent, stuck, reset or absurd."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.energy.card import (
    POWER_GAP_S_MAX,
    WINDOW_S_MAX,
    WINDOW_S_MIN,
    CardEnergy,
    CardSample,
    EnergyMethod,
    Window,
    apportion,
    card_sample,
    weaker,
)
from protos.slackwater.common.v1 import capability_pb2

PERIOD_S = 5.0


def reading(energy_mj: float | None = None, power_w: float | None = None, limit_w: float | None = 300.0) -> CardSample:
    return CardSample(card="gpu", energy_mj=energy_mj, power_w=power_w, limit_w=limit_w)


def windows(card: CardEnergy, *samples: CardSample, period_s: float = PERIOD_S) -> list[Window | None]:
    """Feed one sample per period, the first at once."""
    return [card.sampled(sample, number * period_s) for number, sample in enumerate(samples)]


def methods(*samples: CardSample) -> list[EnergyMethod]:
    """The methods of the windows of a card that works all the time."""
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    return [window.method for window in windows(card, *samples) if window is not None]


def trapezoid_mj(samples: list[tuple[float, float]]) -> float:
    """The textbook rule over (seconds, watts), as a reference."""
    return sum((t1 - t0) * (w0 + w1) / 2 * 1000 for (t0, w0), (t1, w1) in itertools.pairwise(samples))


# ---- the counter, and what is wrong with counters


def test_a_moving_counter_is_used_to_the_millijoule() -> None:
    card = CardEnergy(None, 0.0)
    card.running_changed(2, 0.0)
    _, window = windows(card, reading(1_000_000, 10.0), reading(1_500_123, 10.0))
    # Mutation: dividing task_s by the number of tasks fails this.
    assert window == Window(
        work_mj=500_123, idle_mj=0, work_s=PERIOD_S, task_s=2 * PERIOD_S, method=EnergyMethod.COUNTER
    )


def test_a_window_is_long_enough_for_a_counter_that_moves_in_steps() -> None:
    card = CardEnergy(None, 0.0)
    assert card.sampled(reading(0, 100.0), 0.0) is None
    assert card.sampled(reading(0, 100.0), WINDOW_S_MIN / 2) is None
    window = card.sampled(reading(200_000, 100.0), WINDOW_S_MIN)
    # Mutation: closing at every sample makes two windows, the first by power.
    assert window is not None
    assert (window.idle_mj, window.method) == (200_000, EnergyMethod.COUNTER)


def test_a_counter_that_stands_still_is_replaced_by_power() -> None:
    flat = [reading(7_000, 200.0)] * 4
    # Mutation: accepting a difference of 0 gives COUNTER with 0 joules, as codecarbon did for old cards.
    assert methods(*flat) == [EnergyMethod.INTEGRATED_POWER] * 3


def test_a_counter_that_moves_late_is_not_counted_twice() -> None:
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    closed = windows(card, reading(0, 100.0), reading(0, 100.0), reading(1_000_000, 100.0), reading(1_500_000, 100.0))
    # The second difference makes up for the first window, which power has accounted for already.
    # Mutation: trusting every sound difference gives 500 + 1000 + 500 J for 15 s at 100 W.
    assert sum(window.work_mj for window in closed if window is not None) == 500_000 + 500_000 + 500_000
    assert [window.method for window in closed if window is not None] == [
        EnergyMethod.INTEGRATED_POWER,
        EnergyMethod.INTEGRATED_POWER,
        EnergyMethod.COUNTER,
    ]


def test_a_counter_that_starts_again_with_the_driver_is_replaced_by_power() -> None:
    assert methods(
        reading(9_000_000, 200.0),
        reading(10_000_000, 200.0),
        reading(1_000, 200.0),
        reading(1_001_000, 200.0),
        reading(2_001_000, 200.0),
    ) == [
        EnergyMethod.COUNTER,
        EnergyMethod.INTEGRATED_POWER,
        EnergyMethod.INTEGRATED_POWER,
        EnergyMethod.COUNTER,
    ]


def test_a_difference_that_no_card_can_draw_is_not_used() -> None:
    beyond = 300.0 * PERIOD_S * 1000 * 2
    assert methods(reading(0, 250.0), reading(beyond, 250.0)) == [EnergyMethod.INTEGRATED_POWER]
    # Without a known limit the bound is that of any card.
    assert methods(reading(0, 250.0, None), reading(beyond, 250.0, None)) == [EnergyMethod.COUNTER]
    assert methods(reading(0, 250.0, None), reading(1e9, 250.0, None)) == [EnergyMethod.INTEGRATED_POWER]


def test_a_cap_that_is_lowered_within_a_window_does_not_make_its_joules_absurd() -> None:
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    card.sampled(reading(0, 290.0, 300.0), 0.0)
    window = card.sampled(reading(290.0 * PERIOD_S * 1000, 100.0, 100.0), PERIOD_S)
    # Mutation: taking the newest limit only makes this INTEGRATED_POWER.
    assert window is not None
    assert window.method is EnergyMethod.COUNTER


def test_one_failed_sample_is_bridged_by_the_counter() -> None:
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    closed = windows(card, reading(0, 100.0), reading(), reading(1_000_000, 100.0))
    assert closed[1] is None
    assert closed[2] is not None
    assert (closed[2].work_mj, closed[2].method) == (1_000_000, EnergyMethod.COUNTER)


# ---- power


@given(
    st.lists(
        st.tuples(st.floats(0.05, POWER_GAP_S_MAX - 0.1), st.floats(0.0, 450.0)),
        min_size=2,
        max_size=30,
    )
)
def test_integrated_power_is_the_trapezoid_over_the_same_samples(steps: list[tuple[float, float]]) -> None:
    now, recorded, closed = 0.0, [], []
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    for number, (gap_s, watts) in enumerate(steps):
        now += gap_s if number else 0.0
        recorded.append((now, watts))
        window = card.sampled(reading(None, watts, None), now)
        if window is not None:
            assert window.method is EnergyMethod.INTEGRATED_POWER
            closed.append((window, list(recorded)))
            recorded = recorded[-1:]
    for window, samples in closed:
        # Mutation: the rectangle rule (the newest reading times the gap) fails this.
        assert window.work_mj == pytest.approx(trapezoid_mj(samples), abs=1.0)


# Watts of a card under a load that rises and falls, each 100 ms apart; the reference integrates all of them.
RAMP = [60.0] * 20 + [60.0 + 2.4 * step for step in range(100)] + [300.0] * 100 + [120.0] * 30


def test_sparse_samples_come_close_to_the_densely_recorded_energy() -> None:
    dense = [(number * 0.1, watts) for number, watts in enumerate(RAMP)]
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    total_mj = 0
    for now, watts in dense[::10] + dense[-1:]:
        window = card.sampled(reading(None, watts, None), now)
        total_mj += window.work_mj if window is not None else 0
    # The last sample lies within WINDOW_S_MIN of its predecessor, so that nothing is closed there.
    assert total_mj == pytest.approx(trapezoid_mj(dense[: len(dense) - 10]), rel=0.05)


def test_a_gap_in_the_power_is_not_bridged_by_a_straight_line() -> None:
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    card.sampled(reading(None, 100.0), 0.0)
    gap_s = POWER_GAP_S_MAX + 1
    window = card.sampled(reading(None, 100.0), gap_s)
    # Mutation: a longer gap gives INTEGRATED_POWER from two readings.
    assert window is not None
    assert (window.work_mj, window.method) == (round(300.0 * gap_s * 1000), EnergyMethod.ESTIMATE)


# ---- estimates, and nothing


def test_a_card_that_tells_only_its_limit_is_estimated_while_it_works() -> None:
    card = CardEnergy(None, 0.0)
    card.sampled(reading(), 0.0)
    card.running_changed(1, 10.0)
    card.running_changed(0, 14.0)
    window = card.sampled(reading(), WINDOW_S_MAX + 1)
    # Longer than any gap: nobody knows what went on.
    assert window is not None
    assert (window.work_mj, window.idle_mj, window.method) == (0, 0, EnergyMethod.NONE)
    card.running_changed(1, WINDOW_S_MAX + 10)
    assert card.extrapolate(WINDOW_S_MAX + 14) == (4 * 300 * 1000, EnergyMethod.ESTIMATE)


def test_the_owners_figure_wins_over_the_limit() -> None:
    card = CardEnergy(200.0, 0.0)
    card.sampled(reading(), 0.0)
    card.running_changed(1, 0.0)
    assert card.extrapolate(5.0) == (5 * 200 * 1000, EnergyMethod.ESTIMATE)


def test_nothing_known_is_nothing_claimed() -> None:
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    assert card.extrapolate(5.0) == (0, EnergyMethod.NONE)
    assert card.lapsed(50.0).method is EnergyMethod.NONE


def test_a_machine_that_slept_is_not_charged_for_the_night() -> None:
    card = CardEnergy(450.0, 0.0)
    card.running_changed(1, 0.0)
    # Mutation: estimating without the bound books eight hours at 450 W.
    assert card.lapsed(8 * 3600.0).work_mj == 0


# ---- idle and work


def test_what_a_card_draws_before_its_first_task_is_idle() -> None:
    card = CardEnergy(None, 0.0)
    card.sampled(reading(0, 50.0), 0.0)
    card.sampled(reading(250_000, 50.0), 5.0)
    card.running_changed(1, 9.0)
    window = card.sampled(reading(250_000 + 4 * 50_000 + 250_000, 250.0), 10.0)
    # The card idled at 50 W for 4 s, and drew the rest in the second in which it worked.
    # Mutation: a split by time gives 360 J to idling, and 90 J to a second at 250 W.
    assert window is not None
    assert (window.work_mj, window.idle_mj) == (250_000, 200_000)


def test_a_card_that_idled_under_somebody_elses_load_takes_no_joules_from_work() -> None:
    card = CardEnergy(None, 0.0)
    card.sampled(reading(0, 290.0), 0.0)
    card.sampled(reading(1_450_000, 290.0), 5.0)
    card.running_changed(1, 7.5)
    window = card.sampled(reading(1_450_000 + 500_000, 100.0), 10.0)
    assert window is not None
    assert (window.work_mj, window.idle_mj) == (250_000, 250_000)


def test_the_open_window_is_extrapolated_by_the_power_of_earlier_work_not_of_idling() -> None:
    card = CardEnergy(None, 0.0)
    card.running_changed(1, 0.0)
    card.sampled(reading(0, 200.0), 0.0)
    card.sampled(reading(1_000_000, 200.0), 5.0)
    card.running_changed(0, 5.0)
    card.sampled(reading(1_250_000, 50.0), 10.0)
    card.running_changed(1, 11.0)
    # Mutation: the newest reading would charge 50 J.
    assert card.extrapolate(12.0) == (200_000, EnergyMethod.COUNTER)


# ---- histories

maybe = st.none() | st.floats(0, 1e12)
step = st.tuples(
    st.floats(0.0, 200.0),
    st.builds(
        CardSample,
        card=st.just("gpu"),
        energy_mj=maybe,
        power_w=st.none() | st.floats(0, 3000),
        limit_w=st.none() | st.floats(0, 1500),
    ),
    st.integers(0, 5),
)


@given(st.lists(step, max_size=40))
def test_no_history_gives_negative_joules_or_more_than_a_card_can_draw(
    history: list[tuple[float, CardSample, int]],
) -> None:
    now = 0.0
    card = CardEnergy(None, now)
    opened_at = now
    for gap_s, sample, running in history:
        now += gap_s
        card.running_changed(running, now)
        extrapolated_mj, _ = card.extrapolate(now)
        assert extrapolated_mj >= 0
        window = card.sampled(sample, now)
        if window is not None:
            duration_s, opened_at = now - opened_at, now
            # Mutation: without the bounds on readings or differences this fails.
            assert window.work_mj >= 0
            assert window.idle_mj >= 0
            assert window.work_mj + window.idle_mj <= 3000 * 1.5 * duration_s * 1000 + 1
            assert window.work_s <= duration_s + 1e-6
            assert math.isfinite(window.task_s)
            assert window.method is not EnergyMethod.NONE or window.work_mj == window.idle_mj == 0
        elif now == card.opened_at:
            opened_at = now


# ---- readings and splits


def test_readings_that_cannot_be_are_no_readings() -> None:
    ok, lost = capability_pb2.READING_STATUS_OK, capability_pb2.READING_STATUS_LOST
    gpu = capability_pb2.Gpu()
    gpu.uuid.status, gpu.uuid.value = ok, "GPU-1"
    gpu.energy_mj.status, gpu.energy_mj.value = lost, 5.0
    gpu.power_draw_w.status, gpu.power_draw_w.value = ok, 4294967.295
    gpu.power_limit_w.status, gpu.power_limit_w.value = ok, 320.0
    assert card_sample(gpu) == CardSample(card="GPU-1", limit_w=320.0)
    gpu.uuid.status = lost
    assert card_sample(gpu) is None


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_parts_add_up_to_the_whole_and_follow_the_weights(whole: int, weights: list[int]) -> None:
    parts = apportion(whole, weights, [whole] * len(weights))
    total = sum(weights)
    # Mutation: dropping the remainder fails this.
    assert sum(parts) == (whole if total else 0)
    assert all(abs(part - whole * weight / total) < 1.01 for part, weight in zip(parts, weights, strict=True) if total)
    assert all(part == 0 for part, weight in zip(parts, weights, strict=True) if weight == 0)


def test_nobody_gets_more_than_his_most_and_the_others_take_the_rest_by_weight() -> None:
    # Mutation: handing what is over to the first only, or to nobody.
    assert apportion(100, [8, 1, 1], [20, 100, 100]) == [20, 40, 40]
    assert apportion(100, [80, 19, 1], [20, 30, 100]) == [20, 30, 50]
    # No room: it is split all the same.
    assert sum(apportion(100, [1, 1], [10, 10])) == 100


def test_the_weaker_method_counts() -> None:
    assert weaker(EnergyMethod.ESTIMATE, EnergyMethod.COUNTER) is EnergyMethod.ESTIMATE
    assert weaker(EnergyMethod.COUNTER, EnergyMethod.NONE) is EnergyMethod.NONE
