"""Canaries: an honest answer passes up to where it parts from the reference, any other is charged for the parting."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from inference.calibration import CalibrationError
from inference.canaries import Canary, CanaryBank, encode_bank, make_canary, read_bank
from inference.rescoring import MARGIN_CLIP, FailureKind, rescore
from inference.sampler_noise import POSITION_HASH, VLLM_GUMBEL
from inference.sampling import choose
from inference.task import FinishReason, ManifestDigest, PositionLogprobs, Sampling, TokenLogprob, pack_token_ids

VOCABULARY, TOP, STOP, COUNT = 100, 20, 7, 12
PROMPT = [11, 12, 13]
DIGEST = ManifestDigest("sha256:" + "0" * 64)
LOGPROBS = np.log(np.random.default_rng(1).dirichlet(np.full(VOCABULARY, 0.1), COUNT) + 1e-12)
# At position 5 two ids are nearly as likely.
ORDER = np.argsort(-LOGPROBS, axis=1)
LOGPROBS[5, ORDER[5, 1]] = LOGPROBS[5, ORDER[5, 0]] - 0.02


def canary(sampling: Sampling) -> Canary:
    output = [choose(line.astype(np.float32), sampling, len(PROMPT) - 1 + i) for i, line in enumerate(LOGPROBS)]
    reference = [
        PositionLogprobs(
            TokenLogprob(chosen, float(line[chosen]), 1),
            tuple(TokenLogprob(int(id_), float(line[id_]), rank) for rank, id_ in enumerate(order[:TOP], start=1)),
        )
        for line, order, chosen in zip(LOGPROBS, ORDER, output, strict=True)
    ]
    return make_canary(
        name="toy",
        prompt_ids=PROMPT,
        output_ids=output,
        sampling=sampling,
        sampler_profile=POSITION_HASH,
        max_tokens=COUNT,
        stop_token_ids=(STOP,),
        reference=reference,
    )


GREEDY = Sampling(temperature=0.0)
EXPECTED = [int(id_) for id_ in ORDER[:, 0]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=9)], ids=["greedy", "sampled"])
def test_the_reference_answer_has_no_margin(sampling: Sampling) -> None:
    item = canary(sampling)
    output = [choose(line.astype(np.float32), sampling, len(PROMPT) - 1 + i) for i, line in enumerate(LOGPROBS)]
    rescored = rescore(item.attempt(output, FinishReason.LENGTH))
    assert rescored.failures == ()
    assert rescored.margins == pytest.approx([0.0] * COUNT, abs=1e-5)


def test_an_answer_that_parts_where_two_ids_are_nearly_as_likely_is_charged_for_that_alone() -> None:
    # Mutation seen to fail: ids after the parting were compared as well.
    answer = [*EXPECTED[:5], int(ORDER[5, 1]), *([50] * 6)]
    rescored = rescore(canary(GREEDY).attempt(answer, FinishReason.LENGTH))
    assert rescored.failures == ()
    assert rescored.margins == pytest.approx([0.0] * 5 + [0.02], abs=1e-6)


def test_an_id_outside_the_list_is_charged_as_if_it_were_the_last_of_it() -> None:
    answer = [*EXPECTED[:3], int(ORDER[3, -1]), *([50] * 8)]
    rescored = rescore(canary(GREEDY).attempt(answer, FinishReason.LENGTH))
    assert rescored.tokens_checked == 4
    assert rescored.margins[-1] == MARGIN_CLIP
    assert rescored.worst_margin == pytest.approx(LOGPROBS[3, ORDER[3, 0]] - LOGPROBS[3, ORDER[3, TOP - 1]], abs=1e-5)


def test_an_answer_cut_short_is_a_false_stop_or_short_of_its_length() -> None:
    stopped = rescore(canary(GREEDY).attempt([*EXPECTED[:4], STOP], FinishReason.STOP))
    assert [failure.kind for failure in stopped.failures] == [FailureKind.FALSE_STOP]
    short = rescore(canary(GREEDY).attempt(EXPECTED[:4], FinishReason.LENGTH))
    assert [failure.kind for failure in short.failures] == [FailureKind.SHORT_OF_LENGTH]


def test_an_answer_ended_from_outside_is_judged_as_far_as_it_goes() -> None:
    rescored = rescore(canary(GREEDY).attempt(EXPECTED[:4], None))
    assert (rescored.tokens_checked, rescored.failures) == (4, ())


def test_an_empty_answer_says_nothing() -> None:
    assert rescore(canary(GREEDY).attempt([], None)).tokens_checked == 0


def test_a_sampled_canary_is_for_engines_that_draw_alike() -> None:
    assert canary(Sampling(seed=1)).fits(POSITION_HASH)
    assert not canary(Sampling(seed=1)).fits(VLLM_GUMBEL)
    assert canary(GREEDY).fits(VLLM_GUMBEL)


def bank(*canaries: Canary) -> CanaryBank:
    return CanaryBank(manifest_digest=DIGEST, verifier="numpy", canaries=canaries)


def prompted(number: int, whole: Canary) -> Canary:
    """Return the same with a prompt of its own."""
    return msgspec.structs.replace(whole, prompt=whole.prompt + pack_token_ids([number]))


WHOLE = bank(*(prompted(number, canary(Sampling(seed=1))) for number in range(9)))


def test_every_fourth_prompt_is_set_apart_for_scoring_whatever_the_order() -> None:
    assert (len(WHOLE.to_score), len(WHOLE.to_answer)) == (2, 7)
    assert not {one.prompt for one in WHOLE.to_score} & {one.prompt for one in WHOLE.to_answer}
    backwards = bank(*WHOLE.canaries[::-1])
    assert {one.prompt for one in backwards.to_score} == {one.prompt for one in WHOLE.to_score}


def test_a_prompt_that_is_set_apart_is_not_asked_greedily_either() -> None:
    both = bank(*WHOLE.canaries, *(prompted(number, canary(GREEDY)) for number in range(9)))
    assert (len(both.to_score), len(both.to_answer)) == (2, 14)


def test_a_bank_is_the_same_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "canaries.msgpack"
    path.write_bytes(encode_bank(WHOLE))
    assert read_bank(path, DIGEST) == WHOLE


def test_a_bank_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    path = tmp_path / "canaries.msgpack"
    with pytest.raises(CalibrationError, match=r"scripts/calibrate_model\.py"):
        read_bank(path, DIGEST)
    whole = canary(GREEDY)
    path.write_bytes(encode_bank(bank(whole))[:-5])
    with pytest.raises(CalibrationError, match="no valid bank"):
        read_bank(path, DIGEST)
    path.write_bytes(encode_bank(bank(make_short(whole))))
    with pytest.raises(CalibrationError, match="more or fewer"):
        read_bank(path, DIGEST)
    path.write_bytes(encode_bank(bank(*WHOLE.canaries[:3])))
    with pytest.raises(CalibrationError, match="too few prompts; make it anew from 4 or more"):
        read_bank(path, DIGEST)
    path.write_bytes(encode_bank(WHOLE))
    with pytest.raises(CalibrationError, match="was made for"):
        read_bank(path, ManifestDigest("sha256:" + "1" * 64))


def make_short(whole: Canary) -> Canary:
    """Return a canary whose last candidate is missing."""
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    return Canary(**fields | {"candidates": whole.candidates[:-4]})


def test_a_wrong_seed_shows_in_a_sampled_canary() -> None:
    # The node parts early and far; one canary is one parting.
    item = canary(Sampling(seed=9))
    other = replace(item.sampling, seed=10)
    answer = [choose(line.astype(np.float32), other, len(PROMPT) - 1 + i) for i, line in enumerate(LOGPROBS)]
    assert max(rescore(item.attempt(answer, FinishReason.LENGTH)).margins) > 0.1
