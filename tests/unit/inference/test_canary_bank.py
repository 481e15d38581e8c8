"""A bank has drawn answers for every sampler that can be recomputed; the one of the repository, by its own noise."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from audited_network import BANK
from canary_questions import questions
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduler.testing import DIGEST, VOCABULARY_SIZE
from coordinator.served_models import LoadedModel
from inference.canaries import Canary, CanaryBank
from inference.manifest import Manifest
from inference.rescoring import rescore
from inference.sampler_noise import POSITION_HASH, SAMPLER_PROFILES, candidate_noise
from inference.task import TaskKind, pack_token_ids, unpack_token_ids
from inference.text import Tokenizer

BANK_BYTES_MAX = 800_000


@pytest.fixture(scope="module")
def bank() -> CanaryBank:
    return msgspec.msgpack.decode(BANK.read_bytes(), type=CanaryBank)


prompts = st.lists(st.tuples(st.integers(3, 900), st.integers(3, 900)), min_size=4, max_size=40, unique=True)


@given(prompts)
def test_a_prompt_is_asked_under_every_sampler_and_one_that_is_set_apart_once(prompts: list[tuple[int, ...]]) -> None:
    """Fails when what is set apart is asked like the others, and when a profile is left out."""
    asked = questions(DIGEST, prompts)
    assert len({question.name for question in asked}) == len(asked)
    by_prompt = Counter(question.prompt_ids for question in asked)
    assert by_prompt.keys() == set(prompts)
    assert Counter(by_prompt.values()) == {1: len(prompts) // 4, 4: len(prompts) - len(prompts) // 4}
    for prompt, count in by_prompt.items():
        drawn = [one.sampler_profile for one in asked if one.prompt_ids == prompt and not one.sampling.greedy]
        assert drawn == ([POSITION_HASH] if count == 1 else list(SAMPLER_PROFILES))


def test_the_banks_own_split_is_the_one_that_it_was_asked_by(bank: CanaryBank) -> None:
    """Fails when `questions` sets other prompts apart than the bank does."""
    answers = Counter(canary.prompt for canary in bank.to_answer)
    scores = Counter(canary.prompt for canary in bank.to_score)
    assert set(answers.values()) == {1 + len(SAMPLER_PROFILES)}
    assert set(scores.values()) == {1}
    asked = questions(bank.manifest_digest, [tuple(unpack_token_ids(prompt)) for prompt in (*answers, *scores)])
    assert Counter(pack_token_ids(one.prompt_ids) for one in asked) == answers + scores


def test_the_bank_of_the_repository_is_small_and_serves_all_profiles_alike(bank: CanaryBank) -> None:
    fitting = {p: {c.prompt for c in bank.to_answer if c.drawn and c.fits(p)} for p in SAMPLER_PROFILES}
    assert len(set(map(frozenset, fitting.values()))) == 1
    assert len(fitting[POSITION_HASH]) == 18
    assert not any(canary.drawn for canary in bank.to_answer if canary.fits("nobody knows"))
    assert BANK.stat().st_size < BANK_BYTES_MAX


def margins(canary: Canary) -> tuple[float, ...]:
    rescored = rescore(canary.attempt(list(unpack_token_ids(canary.output)), None))
    assert rescored.failures == ()
    return rescored.margins


def test_every_answer_of_the_bank_was_drawn_with_its_own_samplers_noise(bank: CanaryBank) -> None:
    """And no two samplers draw alike: under another name each answer has margins."""
    for canary in bank.canaries:
        assert max(margins(canary)) < 1e-3, canary.name
    for canary in bank.canaries:
        if canary.drawn and len(unpack_token_ids(canary.output)) == canary.max_tokens:
            for profile in set(SAMPLER_PROFILES) - {canary.sampler_profile}:
                other = msgspec.structs.replace(canary, sampler_profile=profile)
                rescored = rescore(other.attempt(list(unpack_token_ids(canary.output)), None))
                assert rescored.mean_margin > 0.1, (canary.name, profile)


def test_a_node_is_timed_by_no_prompt_that_is_set_apart(bank: CanaryBank, smollm2: Tokenizer) -> None:
    manifest = Manifest(
        digest=DIGEST,
        name="m",
        revision="1",
        architecture="a",
        licence="Apache-2.0",
        dtype="float32",
        context_tokens=1000,
        vocabulary_size=VOCABULARY_SIZE,
        stop_token_ids=(),
        files=(),
        origin="",
        kind=TaskKind.GENERATE,
    )
    timed = [pack_token_ids(ids) for ids in LoadedModel(manifest, smollm2, 0, None, bank).prompts]
    assert sorted(timed) == sorted({canary.prompt for canary in bank.to_answer})
    assert not {canary.prompt for canary in bank.to_score} & set(timed)


@given(st.sampled_from(SAMPLER_PROFILES), st.integers(0, 2**63 - 1), st.integers(1, 500), st.integers(1, 9), st.data())
def test_noise_from_the_middle_of_an_attempt_is_that_of_the_whole(
    profile: str, seed: int, prompt_tokens: int, count: int, data: st.DataObject
) -> None:
    """Fails when the generator does not skip what was drawn before, and when a position hash begins anew."""
    first = data.draw(st.integers(0, count - 1))
    ids = np.arange(5 * count, dtype=np.uint64).reshape(count, 5)
    whole = candidate_noise(profile, seed, prompt_tokens, ids)
    assert np.array_equal(candidate_noise(profile, seed, prompt_tokens, ids[first:], first=first), whole[first:])
