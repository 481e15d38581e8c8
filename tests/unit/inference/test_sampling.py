"""The position-hash sampler: right distribution, and noise that depends on seed, position and id alone."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.sampling import choose, gumbel_noise, penalised, truncated
from inference.task import Sampling

seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**31)
logit_lists = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=50)


def logits_of(values: list[float]) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.array(values, dtype=np.float32)


def test_drawn_ids_follow_the_softmax() -> None:
    # Mutation seen to fail: the noise was uniform, not Gumbel. 4,000 draws from 8 ids; chi-square with 7 degrees
    # of freedom exceeds 24.3 once in a thousand seeds, and the seed is fixed.
    logits = logits_of([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.25])
    draws = 4000
    counts = np.zeros(len(logits))
    for position in range(draws):
        counts[choose(logits, Sampling(seed=11), position)] += 1
    expected = draws * np.exp(logits) / np.exp(logits).sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


def test_neighbouring_seeds_positions_and_ids_have_unrelated_noise() -> None:
    # Mutation seen to fail: the position was added to the id before mixing, so that noise slid along the ids.
    size = 4096
    base = gumbel_noise(5, 100, size)
    others = [gumbel_noise(6, 100, size), gumbel_noise(5, 101, size), np.roll(base, 1), np.roll(base, 7)]
    others += [np.roll(gumbel_noise(5, 101, size), shift) for shift in (-1, 1)]
    for other in others:
        # Five standard deviations of a correlation of 4096 pairs.
        assert abs(float(np.corrcoef(base, other)[0, 1])) < 5 / math.sqrt(size)


@given(seeds, positions)
@settings(max_examples=50)
def test_noise_is_finite_and_does_not_depend_on_how_many_ids_there_are(seed: int, position: int) -> None:
    noise = gumbel_noise(seed, position, 300)
    assert np.isfinite(noise).all()
    assert (gumbel_noise(seed, position, 10) == noise[:10]).all()


def test_the_noise_is_what_it_always_was() -> None:
    # Written down: verifiers recompute the noise of other releases.
    assert gumbel_noise(1, 2, 3).tolist() == pytest.approx([0.70124902, -0.49012061, -1.528016363])


@given(logit_lists, seeds, positions)
def test_where_the_prompt_ends_does_not_change_a_draw(values: list[float], seed: int, position: int) -> None:
    logits = logits_of(values)
    sampling = Sampling(seed=seed, temperature=0.8, top_p=0.9, top_k=20)
    undisturbed = choose(logits, sampling, position, prompt_ids=[0], output_ids=[1, 1])
    assert choose(logits, sampling, position, prompt_ids=[0, 1, 1], output_ids=[]) == undisturbed


@given(logit_lists, seeds, positions)
def test_temperature_zero_is_the_likeliest_id_whatever_the_seed(values: list[float], seed: int, position: int) -> None:
    logits = logits_of(values)
    assert choose(logits, Sampling(temperature=0.0, seed=seed), position) == int(np.argmax(logits))


@given(logit_lists, st.integers(1, 10), st.floats(0.01, 0.99), positions)
def test_draws_stay_within_top_k_and_nucleus(values: list[float], top_k: int, top_p: float, position: int) -> None:
    logits = logits_of(values)
    drawn = choose(logits, Sampling(top_k=top_k, top_p=top_p), position)
    above = logits > logits[drawn]
    weights = np.exp(logits.astype(np.float64) - logits.max())
    kept = np.sort(logits)[::-1][: min(top_k, len(logits))]
    assert above.sum() < top_k
    inside = weights[logits >= kept[-1]].sum()
    assert weights[above].sum() < top_p * inside + 1e-9


def test_the_nucleus_is_the_fewest_ids_that_hold_the_share() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    assert np.isfinite(truncated(logits, 0, 0.75)).tolist() == [True, True, False, False]
    assert np.isfinite(truncated(logits, 0, 0.85)).tolist() == [True, True, True, False]
    assert np.isfinite(truncated(logits, 0, 0.0001)).tolist() == [True, False, False, False]


def test_ids_that_tie_with_the_kth_stay() -> None:
    assert np.isfinite(truncated(np.array([1.0, 2.0, 1.0, 0.0]), 2, 1.0)).tolist() == [True, True, True, False]


def test_penalties_count_what_they_say_they_count() -> None:
    logits = np.array([2.0, -2.0, 1.0, 1.0])
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # 0 in the prompt; 1 twice in the output; 2 in both; 3 nowhere.
    result = penalised(logits, sampling, prompt_ids=[0, 2], output_ids=[1, 1, 2])
    assert result.tolist() == [1.0, -4.0 - 0.5 - 0.5, 0.5 - 0.5 - 0.25, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 1.0]
