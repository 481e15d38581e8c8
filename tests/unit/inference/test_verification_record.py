"""The recorded runs of the real model: whole attempts are judged again, and the promised figures hold.

The calibration is fitted on tests/golden/verification; the figures are counted on tests/golden/held_out, answers to
other prompts. scripts/record_verification.py makes both.
"""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from verification_figures import (
    HONEST_VARIANTS,
    STAKES,
    Rate,
    Trials,
    calibrate,
    false_stops,
    honest_pool,
    read_variant,
)
from verification_prompts import PROMPTS_FILE, read_texts
from verify_power import HELD_OUT, RECORD, ROOT, TARGETS, Bench, Target, read_calibration_of_record

from inference.calibration import Calibration
from inference.evidence import ALARM, combined, log_capitals, log_evidence
from inference.launch import TORCH_SAMPLER_PROFILE, VLLM_CPU_SAMPLER_PROFILE, VLLM_GPU_SAMPLER_PROFILE
from inference.rescoring import MARGIN_CLIP, Attempt, FailureKind, Rescored, rescore
from inference.sampler_noise import POSITION_HASH, VLLM_GENERATOR, VLLM_GUMBEL
from inference.task import FinishReason, ManifestDigest, PositionLogprobs, Sampling, TokenLogprob

STOP_ID = 2
EXAMPLES = 2


@cache
def calibration() -> Calibration:
    return read_calibration_of_record()


def held_out() -> Bench:
    return Bench(calibration(), RECORD, HELD_OUT)


def example(name: str, index: int) -> Attempt:
    """Return a recorded attempt as a verifier got it."""
    with np.load(RECORD / f"{name}.npz") as arrays:
        fields = {field: arrays[f"example{index}_{field}"] for field in EXAMPLE_FIELDS}
    temperature, top_p, top_k = fields["sampling"].tolist()
    output = fields["output"].tolist()
    rows = zip(
        output, fields["chosen"].tolist(), fields["rank"].tolist(), fields["top_ids"], fields["top"], strict=True
    )
    return Attempt(
        prompt_ids=fields["prompt"].tolist(),
        output_ids=output,
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=int(top_k), seed=int(fields["seed"])),
        sampler_profile=str(fields["profile"]),
        stop_token_ids=(STOP_ID,),
        max_tokens=int(fields["max_tokens"]),
        finish_reason=FinishReason.STOP if fields["stopped"] else FinishReason.LENGTH,
        reference=[
            PositionLogprobs(
                TokenLogprob(token_id, chosen, rank),
                tuple(
                    TokenLogprob(id_, logprob, place)
                    for place, (id_, logprob) in enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True), start=1)
                ),
            )
            for token_id, chosen, rank, ids, logprobs in rows
        ],
    )


EXAMPLE_FIELDS = (
    "prompt", "output", "seed", "profile", "sampling", "max_tokens", "stopped", "chosen", "rank", "top_ids", "top",
)  # fmt: skip


def evidence(name: str) -> float:
    """Return the evidence of a variant's two whole attempts together."""
    capitals = [log_capitals(rescore(example(name, index)), calibration()) for index in range(EXAMPLES)]
    return combined(np.sum(capitals, axis=0).tolist())


@pytest.mark.parametrize("name", [variant.name for variant in HONEST_VARIANTS])
def test_honest_attempts_pass(name: str) -> None:
    for index in range(EXAMPLES):
        rescored = rescore(example(name, index))
        assert (rescored.could_not_measure, rescored.failures) == (None, ())
    assert evidence(name) < ALARM / 2


@pytest.mark.parametrize("name", ["canned", "repeated", "int4", "dropped-layer", "t0.7"])
def test_gross_cheats_fail(name: str) -> None:
    # Mutation seen to fail: MARGIN_CLIP at 0.05, with which a changed model looks like rounding.
    # Two attempts; those of the model without a layer are the ones that stopped first, after 11 ids together.
    assert evidence(name) > (3 if name == "dropped-layer" else ALARM)


def test_wrong_seed_fail() -> None:
    attempt = example("honest-bf16", 0)
    other = Sampling(seed=attempt.sampling.seed + 1)
    fields = {name: getattr(attempt, name) for name in Attempt.__slots__}
    assert log_evidence(rescore(Attempt(**fields | {"sampling": other})), calibration()) > ALARM


def test_truncation_with_a_false_stop_fail() -> None:
    attempt = max((example("honest-bf16", index) for index in range(EXAMPLES)), key=lambda one: len(one.output_ids))
    cut = len(attempt.output_ids) // 2
    reference = [*attempt.reference[:cut]]
    # What the reference says of a stop there is not in the record; it is no more likely than the last candidate.
    last = attempt.reference[cut].top[-1]
    reference.append(
        PositionLogprobs(
            TokenLogprob(STOP_ID, last.logprob, len(attempt.reference[cut].top) + 1), attempt.reference[cut].top
        )
    )
    fields = {name: getattr(attempt, name) for name in Attempt.__slots__}
    shortened = {
        "output_ids": [*attempt.output_ids[:cut], STOP_ID],
        "reference": reference,
        "finish_reason": FinishReason.STOP,
    }
    rescored = rescore(Attempt(**fields | shortened))
    assert [failure.kind for failure in rescored.failures] == [FailureKind.FALSE_STOP]
    assert log_evidence(rescored, calibration()) > log_evidence(rescore(attempt), calibration()) + ALARM / 2


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.variant + "-" + target.field)
def test_every_cheat_is_found_within_its_tokens(target: Target) -> None:
    """By a rule that alarms 1 % of honest nodes at most: at any time, but for temperature 0.9 in one look."""
    # 1,000 nodes each. Mutations seen to fail: bets on margins instead of their squares (both temperatures); half of
    # the bound (false alarms beside 8-bit weights).
    power = held_out().measure(target, target.tokens)
    look = power.one_look if target.variant == "t0.9" else power.any_time
    assert look.found.trials >= 300
    assert look.found.share >= target.power
    assert look.false_alarms.share <= 0.01
    # Of temperature 0.9, 0.979 at any time.
    assert power.any_time.found.share >= 0.97
    assert power.any_time.false_alarms.share <= 0.01


def test_a_false_stop_at_a_place_of_chance_is_found() -> None:
    assert false_stops(HELD_OUT).share >= 0.95


def test_of_ten_thousand_honest_audits_hardly_one_raises_an_alarm_and_none_puts_a_node_under_watch() -> None:
    # Drawn from 74,000 recorded ids of nine honest variants. Ville's inequality allows 100 alarms; verdicts begin at
    # ln 1,000. Mutation seen to fail: a quarter of the bound.
    assert sum(variant.tokens for variant in honest_pool(HELD_OUT)) >= 60_000
    audits, largest = held_out().honest_audits()
    assert audits.trials == 10_000
    assert audits.hits <= 5
    assert largest < math.log(1000)


def test_detectors_quarantine_no_node_in_ten_thousand_honest_audits() -> None:
    # Mutation seen to fail: half of the bound.
    verdicts = held_out().honest_verdicts()
    assert (verdicts.audits, verdicts.over_quarantine) == (10_000, 0)
    # The bound: once in 1,000 audits, and it may stay there for some.
    assert verdicts.over_watch <= 10


@pytest.mark.parametrize(("variant", "most"), [("t0.9", 700), ("int8-bf16", 3_200), ("int8", 4_200)])
def test_slight_cheats_are_quarantined_by_the_evidence_of_many_audits(variant: str, most: int) -> None:
    """Nine tenths of them. Mutation seen to fail, for 8-bit weights: the audits' evidence added up, and not the
    gamblers' capitals."""
    (target,) = (one for one in TARGETS if one.variant == variant)
    assert held_out().ids_until_quarantine(target)[1] <= most


def test_honest_nodes_raise_an_alarm_at_most_once_in_a_hundred() -> None:
    # Mutation seen to fail: half of the bound.
    assert held_out().honest_nodes().share <= 0.01


def test_what_is_held_out_was_never_fitted() -> None:
    """No prompt is in both files, and no answer in both records. Mutation seen to fail: one file of the calibration's
    record in place of the other's."""
    fitted, judged = (
        [*read_texts(file, "chat"), *read_texts(file, "raw")]
        for file in (PROMPTS_FILE, ROOT / "scripts" / "held_out_prompts.toml")
    )
    assert len(set(judged)) == len(judged) == len(fitted)
    assert not set(judged) & set(fitted)
    rates = [
        {rates.tobytes() for variant in honest_pool(folder) for rates in variant.unlisted_rates if len(rates) > 16}
        for folder in (RECORD, HELD_OUT)
    ]
    assert min(map(len, rates)) > 300
    assert not rates[0] & rates[1]


@pytest.mark.parametrize("folder", [RECORD, HELD_OUT])
def test_no_honest_id_on_record_was_a_hard_failure(folder: Path) -> None:
    for variant in HONEST_VARIANTS:
        with np.load(folder / f"{variant.name}.npz") as arrays:
            assert int(arrays["failures"].sum()) == 0
            assert float(arrays["worst"].max()) < 1.0  # the margin that makes a stop false


def test_honest_ids_from_outside_the_list_are_as_many_as_expected() -> None:
    # The second bet is fair to bf16 too, on both engines.
    for name in ("honest-bf16", "honest-vllm-bf16"):
        variant = read_variant(HELD_OUT, name)
        chances = -np.expm1(-np.concatenate(variant.unlisted_rates).astype(np.float64))
        seen = float(np.concatenate(variant.unlisted).sum())
        spread = math.sqrt(float((chances * (1 - chances)).sum()))
        assert abs(seen - float(chances.sum())) < 3 * spread


def test_calibrating_twice_gives_the_same_bound_and_stakes_that_cannot_lose_everything() -> None:
    first, second = (
        calibration(),
        calibrate(honest_pool(RECORD), digest=ManifestDigest("x"), model="", dtype="", verifier=""),
    )
    assert first.bounds == second.bounds
    assert first.stakes == STAKES
    clean = Rescored(temperature=1.0, margins=(0.0,) * 4096)
    assert -math.inf < log_evidence(clean, first) < 0
    assert max(bound.mean_square for bound in first.bounds) < MARGIN_CLIP**2 / 100


def test_more_tokens_never_lower_the_chance_of_a_find() -> None:
    trials = Trials(read_variant(HELD_OUT, "int8-bf16"), calibration())
    shares = [trials.alarms(tokens, 200).share for tokens in (300, 1000, 3000)]
    assert shares == sorted(shares)


def test_wilsons_interval_holds_its_share_and_stays_a_share() -> None:
    for hits in (0, 1, 299, 300):
        low, high = Rate(hits, 300).interval
        assert 0 <= low <= hits / 300 <= high + 1e-12 <= 1 + 1e-9
    assert Rate(300, 300).interval[0] == pytest.approx(0.9874, abs=1e-4)


def test_profiles_are_named_as_the_engines_name_them() -> None:
    assert (POSITION_HASH, VLLM_GENERATOR, VLLM_GUMBEL) == (
        TORCH_SAMPLER_PROFILE,
        VLLM_CPU_SAMPLER_PROFILE,
        VLLM_GPU_SAMPLER_PROFILE,
    )
