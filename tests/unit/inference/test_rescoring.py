"""Re-scoring: honest draws pass whatever the sampler's settings, cheats do not, and what is unknown is no fault."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.rescoring import (
    HARD_MARGIN,
    MARGIN_CLIP,
    Attempt,
    FailureKind,
    Rescored,
    reference_of,
    rescore,
)
from inference.sampler_noise import POSITION_HASH, VLLM_GENERATOR, VLLM_GUMBEL, candidate_noise
from inference.sampling import choose, penalised, truncated
from inference.task import FinishReason, PositionLogprobs, Sampling, TokenLogprob

VOCABULARY, TOP, STOP = 300, 20, 7
PROMPT = (11, 12, 13, 14)

Logits = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    seed=st.integers(0, 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
)


def model(count: int, seed: int, spread: float = 3.0) -> Logits:
    """Stand-in for a model: logits for each position, whatever the ids before."""
    logits = np.random.default_rng(seed).normal(0, spread, (count, VOCABULARY)).astype(np.float32)
    logits[:, STOP] -= 20
    return logits


def draws(logits: Logits, sampling: Sampling) -> list[int]:
    output: list[int] = []
    for index, line in enumerate(logits):
        output.append(choose(line, sampling, len(PROMPT) - 1 + index, PROMPT, output))
    return output


def reference(logits: Logits, output: Sequence[int], top: int = TOP) -> tuple[PositionLogprobs, ...]:
    positions = []
    for line, chosen in zip(logits.astype(np.float64), output, strict=True):
        logprobs = line - np.log(np.exp(line - line.max()).sum()) - line.max()
        order = np.argsort(-logprobs)
        ranks = {int(id_): rank for rank, id_ in enumerate(order, start=1)}
        positions.append(
            PositionLogprobs(
                TokenLogprob(chosen, float(logprobs[chosen]), ranks[chosen]),
                tuple(TokenLogprob(int(id_), float(logprobs[id_]), ranks[int(id_)]) for id_ in order[:top]),
            )
        )
    return tuple(positions)


def attempt(
    logits: Logits,
    output: Sequence[int],
    sampling: Sampling,
    finish: FinishReason | None = FinishReason.LENGTH,
    max_tokens: int | None = None,
    top: int = TOP,
) -> Attempt:
    return Attempt(
        prompt_ids=PROMPT,
        output_ids=output,
        sampling=sampling,
        sampler_profile=POSITION_HASH,
        stop_token_ids=(STOP,),
        max_tokens=len(output) if max_tokens is None else max_tokens,
        finish_reason=finish,
        reference=reference(logits, output, top),
    )


def kinds(rescored: Rescored) -> list[FailureKind]:
    return [failure.kind for failure in rescored.failures]


@given(samplings, st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_an_exact_engine_is_never_charged(sampling: Sampling, seed: int) -> None:
    # Mutations seen to fail: rivals below the top-p cut counted; penalties counted the position's own id.
    logits = model(12, seed)
    rescored = rescore(attempt(logits, draws(logits, sampling), sampling))
    assert rescored.could_not_measure is None
    assert rescored.failures == ()
    assert rescored.margins == pytest.approx([0.0] * 12, abs=1e-5)


@given(samplings, st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_an_engine_with_small_errors_is_charged_no_more_than_twice_its_largest_error(
    sampling: Sampling, seed: int
) -> None:
    # Mutation seen to fail: margins in units of the noise, which grow without bound at low temperatures.
    error = 0.05
    logits = model(40, seed, spread=1.0)
    noisy = logits + np.random.default_rng(seed + 1).uniform(-error, error, logits.shape).astype(np.float32)
    rescored = rescore(attempt(logits, draws(noisy, sampling), sampling))
    assert rescored.failures == ()
    assert rescored.worst_margin <= 2 * error + 1e-5


@given(samplings, st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_a_margin_is_never_larger_than_over_the_whole_vocabulary(sampling: Sampling, seed: int) -> None:
    # The lower bound that makes a list of 20 safe. Mutation seen to fail: a rival as likely as the 20th with
    # the largest noise of 3,000 ids.
    sampling = replace(sampling, top_k=0, top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    logits = model(8, seed)
    output = np.random.default_rng(seed).integers(8, VOCABULARY, 8).tolist()
    listed = rescore(attempt(logits, output, sampling))
    whole = rescore(attempt(logits, output, sampling, top=VOCABULARY))
    assert all(few <= all_ + 1e-9 for few, all_ in zip(listed.margins, whole.margins, strict=True))


@pytest.mark.parametrize("profile", [POSITION_HASH, VLLM_GUMBEL, VLLM_GENERATOR])
def test_draws_of_every_profile_pass_with_their_seed_and_fail_with_another(profile: str) -> None:
    sampling = Sampling(seed=2**62 + 5)
    logits = model(60, 1)
    ids = np.broadcast_to(np.arange(VOCABULARY, dtype=np.uint64), logits.shape)
    output = np.argmax(logits + candidate_noise(profile, sampling.seed, len(PROMPT), ids), axis=1).tolist()
    honest = replace(attempt(logits, output, sampling), sampler_profile=profile)
    assert rescore(honest).mean_margin < 1e-5
    other = replace(honest, sampling=replace(sampling, seed=sampling.seed + 1))
    assert rescore(other).mean_margin > 0.2


def test_as_many_ids_come_from_outside_the_list_as_their_rates_say() -> None:
    # 2,000 draws; 4 standard deviations. Mutation seen to fail: rates without the noise of the best listed id.
    sampling = Sampling(seed=12)
    logits = model(2000, 8, spread=1.5)
    rescored = rescore(attempt(logits, draws(logits, sampling), sampling))
    chances = -np.expm1(-np.array(rescored.unlisted_rates))
    spread = float(np.sqrt((chances * (1 - chances)).sum()))
    assert 200 < chances.sum() < 1800
    assert abs(sum(rescored.unlisted) - float(chances.sum())) < 4 * spread
    # The rates know which draws: those with a chance above one half are from outside more often than not.
    likely = chances > 0.5
    assert np.array(rescored.unlisted)[likely].mean() > 0.5 > np.array(rescored.unlisted)[~likely].mean()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7),
        Sampling(top_k=50),
        Sampling(top_p=0.9),
        Sampling(presence_penalty=1.0),
    ],
)
def test_where_the_rest_of_a_list_is_not_known_no_rate_is_given(sampling: Sampling) -> None:
    logits = model(10, 5)
    rescored = rescore(attempt(logits, draws(logits, sampling), sampling))
    assert (len(rescored.unlisted), rescored.unlisted_rates) == (10, ())


def test_a_resumed_attempt_is_judged_by_the_positions_it_continues_from() -> None:
    # Mutation seen to fail: positions counted from the start of the attempt.
    sampling = Sampling(seed=3)
    logits = model(30, 2)
    output = draws(logits, sampling)
    whole = attempt(logits, output, sampling)
    resumed = replace(
        whole, prompt_ids=(*PROMPT, *output[:10]), output_ids=output[10:], reference=whole.reference[10:], max_tokens=20
    )
    assert rescore(resumed).margins == (0.0,) * 20


def test_margins_are_clipped_and_the_worst_is_kept() -> None:
    sampling = Sampling(temperature=0.0)
    logits = model(5, 3)
    output = draws(logits, sampling)
    output[2] = int(np.argsort(-logits[2])[10])
    rescored = rescore(attempt(logits, output, sampling))
    assert rescored.margins[2] == MARGIN_CLIP
    assert rescored.worst_margin == pytest.approx(float(logits[2].max() - logits[2][output[2]]), abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=4)], ids=["greedy", "sampled"])
def test_an_id_that_the_model_cannot_have_meant_is_a_hard_failure(sampling: Sampling) -> None:
    logits = model(5, 3)
    output = draws(logits, sampling)
    output[3] = int(np.argmin(np.where(np.arange(VOCABULARY) == STOP, np.inf, logits[3])))
    (failure,) = rescore(attempt(logits, output, sampling)).failures
    assert (failure.kind, failure.index) == (FailureKind.IMPOSSIBLE_ID, 3)
    assert failure.nats > HARD_MARGIN


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.5}], ids=["top-k", "top-p"])
def test_a_node_that_ignores_the_cut_is_caught_by_what_it_lets_through(cut: dict[str, float]) -> None:
    # Mutation seen to fail: the cut at its exact place, which an honest engine misses by a rounding.
    plain, sampling = Sampling(seed=5), replace(Sampling(seed=5), **cut)
    logits = model(200, 4, spread=2.0)
    assert kinds(rescore(attempt(logits, draws(logits, sampling), sampling))) == []
    assert kinds(rescore(attempt(logits, draws(logits, plain), sampling))).count(FailureKind.EXCLUDED_ID) > 5


def test_a_stop_that_would_not_have_been_drawn_is_a_false_stop() -> None:
    sampling = Sampling(seed=6)
    logits = model(10, 5)
    output = [*draws(logits, sampling)[:9], STOP]
    cut = attempt(logits, output, sampling, FinishReason.STOP, max_tokens=50)
    (failure,) = rescore(cut).failures
    assert (failure.kind, failure.index) == (FailureKind.FALSE_STOP, 9)


def test_a_rare_stop_that_the_sampler_did_draw_is_none() -> None:
    # Mutation seen to fail: stops less likely than 0.02 counted as false.
    logits = model(10, 5)
    ids = np.arange(VOCABULARY, dtype=np.uint64)[None, :]
    position = len(PROMPT) - 1 + 9
    noises = {seed: candidate_noise(POSITION_HASH, seed, position + 1, ids)[0] for seed in range(3000)}
    # The seed that favours the stop most, so that it is drawn though it is rare.
    seed, noise = max(
        noises.items(), key=lambda item: float(item[1][STOP] - np.delete(logits[9] + item[1], STOP).max())
    )
    logits[9, STOP] = np.delete(logits[9] + noise, STOP).max() - noise[STOP] + 0.01
    sampling = Sampling(seed=seed)
    output = draws(logits, sampling)
    stopped = attempt(logits, output, sampling, FinishReason.STOP, max_tokens=50)
    assert output[9] == STOP
    assert stopped.reference[9].chosen.logprob < np.log(0.02)
    assert rescore(stopped).failures == ()


@pytest.mark.parametrize(
    ("finish", "max_tokens", "ending", "kind"),
    [
        (FinishReason.STOP, 50, [], FailureKind.NO_STOP_ID),
        (FinishReason.LENGTH, 50, [], FailureKind.SHORT_OF_LENGTH),
        (FinishReason.LENGTH, 5, [], FailureKind.TOO_LONG),
        (FinishReason.LENGTH, 10, [STOP, 20], FailureKind.IDS_AFTER_STOP),
    ],
)
def test_endings_that_no_engine_makes(
    finish: FinishReason, max_tokens: int, ending: list[int], kind: FailureKind
) -> None:
    sampling = Sampling(seed=6)
    logits = model(10, 5)
    output = draws(logits, sampling)
    output = [*output[: 10 - len(ending)], *ending]
    assert kind in kinds(rescore(attempt(logits, output, sampling, finish, max_tokens)))


@pytest.mark.parametrize(("finish", "max_tokens"), [(None, 50), (FinishReason.LENGTH, 10)])
def test_endings_that_honest_engines_make(finish: FinishReason | None, max_tokens: int) -> None:
    # None: the attempt was ended from outside and another one went on.
    sampling = Sampling(seed=6)
    logits = model(10, 5)
    assert rescore(attempt(logits, draws(logits, sampling), sampling, finish, max_tokens)).failures == ()


def unmeasurable() -> dict[str, Attempt]:
    sampling = Sampling(seed=6)
    logits = model(10, 5)
    whole = attempt(logits, draws(logits, sampling), sampling)
    broken = replace(whole.reference[0], chosen=TokenLogprob(whole.output_ids[0], float("nan"), 1))
    other = replace(whole.reference[0], chosen=TokenLogprob(whole.output_ids[0] + 1, -1.0, 1))
    return {
        "no reference": replace(whole, reference=()),
        "short reference": replace(whole, reference=whole.reference[:9]),
        "other ids": replace(whole, reference=(other, *whole.reference[1:])),
        "no numbers": replace(whole, reference=(broken, *whole.reference[1:])),
        "no candidates": attempt(logits, whole.output_ids, sampling, top=0),
        "few for a penalty": attempt(logits, whole.output_ids, replace(sampling, presence_penalty=1.0), top=10),
        "repetition penalty": replace(whole, sampling=replace(sampling, repetition_penalty=1.1)),
        "unknown profile": replace(whole, sampler_profile="other-v1"),
    }


@pytest.mark.parametrize("name", sorted(unmeasurable()))
def test_what_cannot_be_measured_is_no_fault(name: str) -> None:
    rescored = rescore(unmeasurable()[name])
    assert rescored.could_not_measure is not None
    assert (rescored.margins, rescored.failures) == ((), ())


def test_greedy_output_of_an_unknown_profile_can_be_measured() -> None:
    sampling = Sampling(temperature=0.0)
    logits = model(10, 5)
    greedy = replace(attempt(logits, draws(logits, sampling), sampling), sampler_profile="other-v1")
    assert rescore(greedy).margins == (0.0,) * 10
    assert rescore(greedy).unlisted_rates == ()


def test_an_attempt_without_output_says_nothing() -> None:
    assert rescore(attempt(model(0, 1), [], Sampling(), None)) == Rescored(temperature=1.0)


def test_the_reference_of_an_output_is_the_end_of_a_score_over_prompt_and_output() -> None:
    # A SCORE answer begins with the second id.
    scores = [PositionLogprobs(TokenLogprob(id_, -1.0, 1)) for id_ in (12, 13, 14, 20, 21)]
    assert [position.chosen.token_id for position in reference_of(scores, len(PROMPT))] == [20, 21]


def test_the_toy_model_draws_as_the_engine_does() -> None:
    # The fixtures of this file are worth something only if they go through the sampler's own steps.
    sampling = Sampling(temperature=0.5, top_k=3, presence_penalty=1.0, seed=1)
    logits = model(1, 9)
    scores = truncated(penalised(logits[0].astype(np.float64), sampling, PROMPT, []) / 0.5, 3, 1.0)
    assert draws(logits, sampling)[0] in np.flatnonzero(np.isfinite(scores))
