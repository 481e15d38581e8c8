"""How far scores are from a reference's, and what is bet on it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.score_check import DISTANCE_MAX, FAILED_LOG, PASSED_LOG, score_distance, score_evidence
from inference.task import PositionLogprobs, TokenLogprob

# Of each 10,000 honest texts, one may be beyond; see scripts/score_distances.py for how far they are.
HONEST_FAILURES = 1e-4


def position(chosen: int, *probabilities: float) -> PositionLogprobs:
    """Return what is said of an id that is the likeliest of some."""
    listed = tuple(
        TokenLogprob(chosen + rank - 1, math.log(probability), rank)
        for rank, probability in enumerate(probabilities, start=1)
    )
    return PositionLogprobs(listed[0], listed)


REFERENCE = [position(7, 0.5, 0.25, 0.125), position(40, 0.4, 0.3, 0.2), position(90, 0.6, 0.1)]


NAMED = [7, 8, 9, 40, 41, 90, 5000]


def test_the_reference_itself_has_no_distance() -> None:
    assert score_distance(REFERENCE, REFERENCE) == 0.0


def test_the_distance_is_the_mean_of_total_variations() -> None:
    """By hand: (|0.4 - 0.5| + |0.25 - 0.25| + |0.225 - 0.125|) / 2 = 0.1, and nothing in what is left over."""
    claimed = [position(7, 0.4, 0.25, 0.225), *REFERENCE[1:]]
    assert score_distance(claimed, REFERENCE) == pytest.approx(0.1 / 3)


def test_what_is_left_over_counts() -> None:
    """0.125 of the first is on no listed id; who claims 0.625 for the best has all of that there."""
    claimed = [position(7, 0.625, 0.25, 0.125), *REFERENCE[1:]]
    assert score_distance(claimed, REFERENCE) == pytest.approx(0.125 / 3)


def test_a_longer_list_changes_nothing() -> None:
    """A verifier names 64 rivals, a bank 20."""
    longer = [replace(one, top=(*one.top, TokenLogprob(5000, -6.0, 9))) for one in REFERENCE]
    assert score_distance(longer, REFERENCE) == 0.0


def test_the_id_itself_counts_where_it_is_on_no_list() -> None:
    """By hand: nothing said of two rivals, and so 0.25 + 0.125 too much left over: (0.375 + 0.375) / 2."""
    claimed = [PositionLogprobs(REFERENCE[0].chosen, ())]
    assert score_distance(claimed, REFERENCE[:1]) == pytest.approx(0.375)


@pytest.mark.parametrize("logprob", [0.0, -1.0, -5.0, 3.0, math.nan, math.inf, -math.inf])
def test_one_number_for_everything_is_far_away(logprob: float) -> None:
    claimed = [
        PositionLogprobs(
            TokenLogprob(one.chosen.token_id, logprob, 1), tuple(TokenLogprob(id_, logprob, 1) for id_ in range(64))
        )
        for one in REFERENCE
    ]
    assert DISTANCE_MAX < score_distance(claimed, REFERENCE) <= 1.0


def test_scores_of_other_ids_are_as_far_as_can_be() -> None:
    assert score_distance(REFERENCE[1:], REFERENCE) == score_distance(REFERENCE[::-1], REFERENCE) == 1.0
    assert score_distance([], REFERENCE) == 1.0


def test_without_a_reference_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        score_distance([], [])


@given(
    st.lists(st.tuples(st.sampled_from(NAMED), st.floats(allow_nan=True, allow_infinity=True)), min_size=0, max_size=8)
)
def test_whatever_a_node_says_the_distance_is_between_0_and_1(said: list[tuple[int, float]]) -> None:
    listed = tuple(TokenLogprob(token_id, logprob, 0) for token_id, logprob in said)
    claimed = [PositionLogprobs(TokenLogprob(one.chosen.token_id, -1.0, 0), listed) for one in REFERENCE]
    assert 0.0 <= score_distance(claimed, REFERENCE) <= 1.0


def test_the_bet_is_fair_to_an_honest_node() -> None:
    mean = HONEST_FAILURES * math.exp(FAILED_LOG) + (1 - HONEST_FAILURES) * math.exp(PASSED_LOG)
    assert mean <= 1.0
    assert (score_evidence(0.2, 0.2), score_evidence(0.2 + 1e-9, 0.2)) == (PASSED_LOG, FAILED_LOG)
