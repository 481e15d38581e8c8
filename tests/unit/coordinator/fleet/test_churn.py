"""How long nodes stay lent: known hazards are found again, and predictions come true as often as they say."""

import math
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleet.churn import (
    LOSSES,
    PRIOR_LENT_H,
    PRIOR_LOSSES,
    CameBack,
    Churn,
    Departure,
    LossRetracted,
    WentAway,
)
from coordinator.fleet.week_counts import (
    BUCKET_S,
    BUCKETS,
    DAY_S,
    HALF_LIFE_S,
    HOUR_S,
    WEEK_S,
    WeekCounts,
    rhythm,
    second_of_week,
)
from inference.task import NodeId

# A Monday, 0:00 UTC.
MONDAY_S = 4 * DAY_S + 2900 * WEEK_S
NODE, OTHER = NodeId("node-1"), NodeId("node-2")
PRIOR_PER_H = PRIOR_LOSSES / PRIOR_LENT_H

durations_s = st.floats(min_value=0.0, max_value=4 * WEEK_S)
moments_s = st.floats(min_value=MONDAY_S, max_value=MONDAY_S + 2 * WEEK_S)
sessions_h = st.lists(st.tuples(st.floats(0.1, 80.0), st.sampled_from(list(Departure))), max_size=12)


def lived(sessions: list[tuple[float, Departure]], node_id: NodeId = NODE) -> tuple[Churn, float]:
    """Return what is known after sessions of so many hours, each with an hour between, and the time then."""
    churn, now_s = Churn(MONDAY_S), MONDAY_S
    for hours, reason in sessions:
        churn.handle(CameBack(node_id, now_s))
        now_s += hours * HOUR_S
        churn.handle(WentAway(node_id, now_s, reason))
        now_s += HOUR_S
    return churn, now_s


class TestCounts:
    def test_a_week_begins_with_monday(self) -> None:
        assert second_of_week(MONDAY_S) == 0.0
        assert time.strftime("%a %H:%M", time.gmtime(MONDAY_S)) == "Mon 00:00"

    @given(start_s=moments_s, hours=st.floats(0.0, 1000.0), engines=st.integers(1, 8))
    def test_lent_hours_are_all_counted_and_none_twice(self, start_s: float, hours: float, engines: int) -> None:
        # Mutation seen to fail: whole weeks left out.
        counts = WeekCounts(start_s, "d")
        counts.add_lent(start_s, start_s + hours * HOUR_S, engines)
        assert math.fsum(counts.lent_h) == pytest.approx(hours * engines, abs=1e-6)
        assert max(counts.lent_h) - min(counts.lent_h) <= engines * BUCKET_S / HOUR_S + 1e-6

    def test_an_hour_is_counted_where_it_lies(self) -> None:
        # Mutation seen to fail: two hours at a time, wherever they begin.
        counts = WeekCounts(MONDAY_S)
        counts.add_lent(MONDAY_S + DAY_S + 11 * HOUR_S, MONDAY_S + DAY_S + 14.5 * HOUR_S, 1)
        assert {at: hours for at, hours in enumerate(counts.lent_h) if hours} == {17: 1.0, 18: 2.0, 19: 0.5}

    def test_what_is_four_weeks_old_counts_half(self) -> None:
        counts = WeekCounts(MONDAY_S)
        counts.add_lost(MONDAY_S, 8)
        counts.age(MONDAY_S + HALF_LIFE_S)
        assert counts.lost[0] == pytest.approx(4.0)

    @given(st.lists(st.floats(0.0, 50.0), min_size=BUCKETS, max_size=BUCKETS), st.floats(0.0, 40.0))
    def test_the_rhythm_of_what_was_expected_is_none(self, expected: list[float], scale: float) -> None:
        assert rhythm(expected, expected) == pytest.approx([1.0] * BUCKETS)
        factors = rhythm([scale] * BUCKETS, [scale] * BUCKETS)
        assert factors == pytest.approx([1.0] * BUCKETS)


class TestSurvival:
    @given(sessions=sessions_h, now=moments_s, durations=st.tuples(durations_s, durations_s))
    @settings(max_examples=200)
    def test_is_a_probability_that_falls_with_time(
        self, sessions: list[tuple[float, Departure]], now: float, durations: tuple[float, float]
    ) -> None:
        # Mutation seen to fail: whole weeks left out of the hazard.
        churn, ended_s = lived(sessions)
        now_s = max(now, ended_s)
        short_s, long_s = sorted(durations)
        assert churn.survival(NODE, now_s, 0.0) == 1.0
        short, long = churn.survival(NODE, now_s, short_s), churn.survival(NODE, now_s, long_s)
        assert 0.0 <= long <= short + 1e-6 <= 1.0 + 1e-6

    @given(sessions=sessions_h, extra=st.integers(1, 20), duration_s=st.floats(60.0, WEEK_S))
    def test_is_lower_after_more_losses_in_the_same_hours(
        self, sessions: list[tuple[float, Departure]], extra: int, duration_s: float
    ) -> None:
        # Mutation seen to fail: the opinion of the hour kept after a loss.
        churn, now_s = lived([(30.0, Departure.DRAINED), *sessions])
        before = churn.survival(NODE, now_s, duration_s)
        churn.handle(CameBack(NODE, now_s, extra))
        churn.handle(WentAway(NODE, now_s, Departure.CRASHED, extra))
        assert churn.survival(NODE, now_s, duration_s) < before

    @given(now=moments_s, duration_s=durations_s)
    def test_without_a_history_is_the_fleets(self, now: float, duration_s: float) -> None:
        churn, ended_s = lived([(100.0, Departure.OWNER_RETURNED)] * 4, OTHER)
        now_s = max(now, ended_s)
        unknown = churn.survival(NODE, now_s, duration_s)
        churn.handle(CameBack(NODE, now_s))
        assert churn.survival(NODE, now_s, duration_s) == pytest.approx(unknown)
        # The fleet has lost an engine every 100 hours, and the prior says much the same.
        assert churn.fleet_loss_rate_per_h(now_s) == pytest.approx(0.01, rel=0.7)

    def test_of_an_unknown_fleet_is_the_published_one(self) -> None:
        """25 of 100 consumer machines ran for 7 days without a loss, at 1.1 losses an hour among them."""
        churn = Churn(MONDAY_S)
        assert churn.fleet_loss_rate_per_h(MONDAY_S) == pytest.approx(0.011)
        assert churn.survival(NODE, MONDAY_S, WEEK_S) == pytest.approx(0.25, abs=0.01)

    @pytest.mark.parametrize("reason", list(Departure))
    def test_what_is_not_the_nodes_doing_is_no_loss(self, reason: Departure) -> None:
        # Mutations seen to fail: every departure a loss; the shape without the losses.
        churn, now_s = lived([(10.0, reason)] * 5)
        rate = churn.outlook(NODE, now_s).losses_per_h
        assert (rate > 0.05) == (reason in LOSSES)
        assert churn.outlook(NODE, now_s).observed_lent_h == pytest.approx(50.0, rel=0.15)

    def test_a_loss_that_was_ours_is_taken_back(self) -> None:
        churn, now_s = lived([(10.0, Departure.DISCONNECTED)] * 5)
        innocent, _ = lived([(10.0, Departure.OUR_OUTAGE)] * 5)
        for session in range(5):
            churn.handle(LossRetracted(NODE, MONDAY_S + (session * 11 + 10) * HOUR_S))
        assert churn.survival(NODE, now_s, DAY_S) == pytest.approx(innocent.survival(NODE, now_s, DAY_S), rel=1e-3)

    def test_hours_that_still_run_count(self) -> None:
        churn = Churn(MONDAY_S)
        churn.handle(CameBack(NODE, MONDAY_S))
        before = churn.survival(NODE, MONDAY_S, DAY_S)
        assert churn.survival(NODE, MONDAY_S + 20 * DAY_S, DAY_S) > before

    def test_engines_of_one_node_are_lent_and_lost_one_by_one(self) -> None:
        churn = Churn(MONDAY_S)
        churn.handle(CameBack(NODE, MONDAY_S, 4))
        churn.handle(WentAway(NODE, MONDAY_S + 10 * HOUR_S, Departure.OWNER_RETURNED))
        churn.handle(WentAway(NODE, MONDAY_S + 20 * HOUR_S, Departure.DRAINED, 3))
        assert churn.outlook(NODE, MONDAY_S + 20 * HOUR_S).observed_lent_h == pytest.approx(70.0)

    def test_the_expected_time_is_the_area_under_survival(self) -> None:
        """Mutation seen to fail: the first week alone."""
        for hours, count in ((3.0, 40), (100.0, 6)):
            churn, now_s = lived([(hours, Departure.OWNER_RETURNED)] * count)
            step_s = HOUR_S
            area_s = math.fsum(churn.survival(NODE, now_s, (step + 0.5) * step_s) for step in range(40_000)) * step_s
            assert churn.expected_lent_s(NODE, now_s) == pytest.approx(area_s, rel=0.02)
            assert churn.outlook(NODE, now_s).expected_lent_s == churn.expected_lent_s(NODE, now_s)


class TestWhatTheSchedulerIsTold:
    def test_the_rate_of_a_node_gives_its_survival_of_an_hour(self) -> None:
        """Mutation seen to fail: the mean rate of the week."""
        churn, now_s = lived([(3.0, Departure.OWNER_RETURNED)] * 40)
        assert math.exp(-churn.losses_per_h(NODE, now_s)) == pytest.approx(churn.survival(NODE, now_s, HOUR_S))
        assert churn.losses_per_h(NodeId("new"), now_s) < churn.losses_per_h(NODE, now_s)

    def test_the_lost_share_follows_the_measured_rate(self) -> None:
        calm, now_s = lived([(100.0, Departure.OWNER_RETURNED)] * 10)
        stormy, _ = lived([(5.0, Departure.OWNER_RETURNED)] * 200)
        assert stormy.lost_share(600.0, now_s) > calm.lost_share(600.0, now_s)
        fresh = Churn(MONDAY_S)
        assert fresh.lost_share(90.0, MONDAY_S) == pytest.approx(1 - math.exp(-PRIOR_PER_H * 90.0 / HOUR_S), rel=0.01)


def true_per_h(base_per_h: float, early: bool, at_s: float) -> float:
    """The hazard of a simulated owner: high on the evenings of working days, or, of an early one, on all mornings."""
    day, hour = divmod(second_of_week(at_s) / HOUR_S, 24)
    at_home = 6 <= hour < 10 if early else day < 5 and 18 <= hour < 22
    return base_per_h * (4.0 if at_home else 0.6)


def sessions(rng: random.Random, base_per_h: float, early: bool, until_s: float) -> Iterator[tuple[float, float]]:
    """Yield when a node is lent, by thinning; away times are log-normal with a median of 20 minutes."""
    at_s, most = MONDAY_S + rng.uniform(0, DAY_S), 4.0 * base_per_h
    while at_s < until_s:
        came_s = at_s
        while True:
            at_s += rng.expovariate(most) * HOUR_S
            if rng.random() < true_per_h(base_per_h, early, at_s) / most:
                break
        yield came_s, at_s
        at_s += min(DAY_S, math.exp(rng.gauss(math.log(1200.0), 1.0)))


SEED = 5
LEARNT_S = MONDAY_S + 8 * WEEK_S
RATES_PER_H = (0.03, 0.09)


@pytest.fixture(scope="module")
def lives() -> list[list[tuple[float, float]]]:
    rng = random.Random(SEED)
    return [list(sessions(rng, RATES_PER_H[at % 2], at % 4 >= 2, LEARNT_S + 2 * WEEK_S)) for at in range(200)]


class TestSimulatedOwners:
    """200 owners, eight weeks to learn and one to predict.

    Half of the nodes lose three times as much as the others, and half of each kind in the morning, not in the evening.
    """

    def learn(self, lives: list[list[tuple[float, float]]], until_s: float) -> Churn:
        events: list[CameBack | WentAway] = []
        for at, life in enumerate(lives):
            for came_s, went_s in life:
                events.append(CameBack(NodeId(f"n{at}"), came_s))
                events.append(WentAway(NodeId(f"n{at}"), went_s, Departure.OWNER_RETURNED))
        churn = Churn(MONDAY_S)
        for event in sorted(events, key=lambda one: one.at_s):
            if event.at_s < until_s:
                churn.handle(event)
        return churn

    def test_rates_are_found(self, lives: list[list[tuple[float, float]]]) -> None:
        """Mutation seen to fail: every node taken for one like any other."""
        churn = self.learn(lives, LEARNT_S)
        for at in range(4):
            base_per_h, early = RATES_PER_H[at % 2], at >= 2
            mean = sum(true_per_h(base_per_h, early, MONDAY_S + hour * HOUR_S) for hour in range(168)) / 168
            rates = [churn.outlook(NodeId(f"n{node}"), LEARNT_S).losses_per_h for node in range(at, 200, 4)]
            assert sum(rates) / len(rates) == pytest.approx(mean, rel=0.1), f"seed {SEED}"
            assert all(0.5 < rate / mean < 2.0 for rate in rates), f"seed {SEED}"

    def test_the_rhythm_of_each_week_is_found(self, lives: list[list[tuple[float, float]]]) -> None:
        """Mutations seen to fail: no rhythm of the node's own; none of the fleet."""
        tuesday_s = LEARNT_S + DAY_S
        evening_s, night_s, sunday_s = tuesday_s + 19.5 * HOUR_S, tuesday_s + 3 * HOUR_S, tuesday_s - 28.5 * HOUR_S
        by_evening, by_night = self.learn(lives, evening_s), self.learn(lives, night_s)
        # Of the fleet, half has an evening.
        fleet = by_evening.fleet_loss_rate_per_h(evening_s) / by_night.fleet_loss_rate_per_h(night_s)
        assert fleet == pytest.approx((4.0 + 0.6) / 2 / 0.6, rel=0.25), f"seed {SEED}"
        at_rest = self.learn(lives, sunday_s).fleet_loss_rate_per_h(sunday_s) / by_night.fleet_loss_rate_per_h(night_s)
        assert at_rest == pytest.approx(1.0, rel=0.25), f"seed {SEED}"
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for at in range(200):
            late = math.log(by_evening.survival(NodeId(f"n{at}"), evening_s, 60.0))
            night = math.log(by_night.survival(NodeId(f"n{at}"), night_s, 60.0))
            ratios[at % 4 >= 2].append(late / night)
        medians = {early: sorted(of_kind)[50] for early, of_kind in ratios.items()}
        assert medians[False] == pytest.approx(4.0 / 0.6, rel=0.3), f"seed {SEED}"
        # In truth 1; two losses of prior are much against the few that such a node has at any one hour.
        assert medians[True] < 0.55 * fleet, f"seed {SEED}"

    def test_predictions_come_true_as_often_as_they_say(self, lives: list[list[tuple[float, float]]]) -> None:
        """Of those that are predicted to survive with 0.8, some 80 % do: of all nodes, and of each kind.

        Mutations seen to fail: half the hazard; every node taken for one like any other.
        """
        rng = random.Random(SEED + 1)
        outcomes: dict[tuple[int, int], list[tuple[float, bool]]] = {}
        for day in range(7):
            asked_s = LEARNT_S + day * DAY_S + rng.uniform(0, DAY_S)
            churn = self.learn(lives, asked_s)
            for at, life in enumerate(lives):
                lent = [went_s for came_s, went_s in life if came_s <= asked_s < went_s]
                for duration_h in (0.5, 2.0, 6.0, 12.0, 24.0) if lent else ():
                    predicted = churn.survival(NodeId(f"n{at}"), asked_s, duration_h * HOUR_S)
                    survived = lent[0] > asked_s + duration_h * HOUR_S
                    outcomes.setdefault((at % 2, min(9, int(predicted * 10))), []).append((predicted, survived))
        errors = 0.0
        for (kind, decile), pairs in sorted(outcomes.items()):
            predicted = sum(one for one, _ in pairs) / len(pairs)
            observed = sum(survived for _, survived in pairs) / len(pairs)
            errors += abs(predicted - observed) * len(pairs)
            if len(pairs) >= 200:
                told = f"seed {SEED}, kind {kind}, decile {decile}, {len(pairs)} predictions"
                assert observed == pytest.approx(predicted, abs=0.1), told
        assert errors / sum(map(len, outcomes.values())) < 0.04, f"seed {SEED}"


class TestHistories:
    def test_survive_a_restart(self) -> None:
        """Mutation seen to fail: `lost` and `lent_h` exchanged."""
        churn, now_s = lived([(9.0, Departure.OWNER_RETURNED)] * 12)
        kept = churn.changed_histories(now_s)
        assert [len(one.lent_h) + len(one.lost) for one in kept] == [672]
        again = Churn(now_s, kept)
        for duration_s in (60.0, HOUR_S, DAY_S):
            expected = churn.survival(NODE, now_s, duration_s)
            assert again.survival(NODE, now_s, duration_s) == pytest.approx(expected, rel=1e-3)
        assert again.fleet_loss_rate_per_h(now_s) == pytest.approx(churn.fleet_loss_rate_per_h(now_s), rel=1e-3)

    def test_a_restart_is_no_loss_and_nobody_is_lent_through_it(self) -> None:
        churn = Churn(MONDAY_S)
        churn.handle(CameBack(NODE, MONDAY_S))
        (kept,) = churn.changed_histories(MONDAY_S + 5 * HOUR_S)
        again = Churn(MONDAY_S + 9 * HOUR_S, [kept])
        again.handle(CameBack(NODE, MONDAY_S + 10 * HOUR_S))
        outlook = again.outlook(NODE, MONDAY_S + 12 * HOUR_S)
        assert outlook.observed_lent_h == pytest.approx(7.0)
        assert outlook.losses_per_h < PRIOR_PER_H

    def test_only_what_changed_is_written(self) -> None:
        churn, now_s = lived([(9.0, Departure.OWNER_RETURNED)])
        churn.handle(CameBack(OTHER, now_s))
        assert {one.node_id for one in churn.changed_histories(now_s)} == {NODE, OTHER}
        assert [one.node_id for one in churn.changed_histories(now_s + 60)] == [OTHER]

    def test_a_history_that_is_none_is_refused(self) -> None:
        (kept,) = lived([(9.0, Departure.OWNER_RETURNED)])[0].changed_histories(MONDAY_S + DAY_S)
        for broken in (b"", kept.lost[:-4], b"\x00\x00\xc0\x7f" * BUCKETS):
            with pytest.raises(ValueError, match="history"):
                Churn(MONDAY_S, [type(kept)(NODE, kept.lent_h, broken, MONDAY_S)])
