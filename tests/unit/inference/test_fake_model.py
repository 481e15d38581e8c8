"""The fake model's promise: the next id depends on every id before it, on sampling and seed, and on nothing else."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.fake_model import FakeSequence, FakeVocabulary, expected_ids, fake_embedding, next_id
from inference.task import Sampling
from inference.testing import SMALL_VOCABULARY

ids = st.integers(min_value=0, max_value=999)
prompts = st.lists(ids, min_size=1, max_size=20)


@given(prompts, st.integers(0, 20), st.integers(0, 20))
def test_an_answer_resumed_from_its_delivered_ids_continues_as_if_undisturbed(
    prompt: list[int], delivered: int, more: int
) -> None:
    # Mutation seen to fail: the number of ids asked for was hashed into the key.
    whole = expected_ids(prompt, Sampling(seed=3), delivered + more, SMALL_VOCABULARY)
    resumed = expected_ids([*prompt, *whole[:delivered]], Sampling(seed=3), more, SMALL_VOCABULARY)
    assert resumed == whole[delivered:]


@given(st.lists(ids, min_size=2, max_size=20), st.data())
def test_one_id_lost_doubled_or_altered_changes_all_that_follows(prompt: list[int], data: st.DataObject) -> None:
    # Mutation seen to fail: only the last id was hashed.
    place = data.draw(st.integers(0, len(prompt) - 2))
    lost = prompt[:place] + prompt[place + 1 :]
    doubled = prompt[: place + 1] + prompt[place:]
    altered = [*prompt[:place], prompt[place] + 1, *prompt[place + 1 :]]
    right = expected_ids(prompt, Sampling(), 8, SMALL_VOCABULARY)
    for wrong in (lost, doubled, altered):
        assert expected_ids(wrong, Sampling(), 8, SMALL_VOCABULARY) != right


@pytest.mark.parametrize("other", [Sampling(temperature=0.5), Sampling(top_p=0.5), Sampling(top_k=5), Sampling(seed=1)])
def test_sampling_and_seed_change_the_answer(other: Sampling) -> None:
    assert expected_ids([5], other, 8, SMALL_VOCABULARY) != expected_ids([5], Sampling(), 8, SMALL_VOCABULARY)


def test_asking_for_logprobs_does_not_change_the_answer() -> None:
    plain, with_logprobs = Sampling(seed=9), Sampling(seed=9, logprobs=5)
    assert next_id([5], plain, SMALL_VOCABULARY) == next_id([5], with_logprobs, SMALL_VOCABULARY)


def test_the_first_ids_are_always_the_same() -> None:
    # Written down so that a change of the hash is noticed: fleets of two releases must agree.
    assert list(expected_ids([1, 2, 3], Sampling(seed=7), 4, SMALL_VOCABULARY)) == [671, 261, 501, 846]


@given(prompts)
def test_special_ids_are_never_drawn(prompt: list[int]) -> None:
    sequence = FakeSequence(prompt, Sampling(), SMALL_VOCABULARY)
    assert all(sequence.next_id() not in SMALL_VOCABULARY.special_ids for _ in range(20))


def test_a_vocabulary_holds_all_but_the_special_ids(tmp_path: Path) -> None:
    added = [{"id": 2, "content": "</s>", "special": True}, {"id": 3, "content": "<tool>", "special": False}]
    content = {"model": {"vocab": {"a": 0, "b": 1, "</s>": 2}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = FakeVocabulary.load(tmp_path / "tokenizer.json")
    assert (list(vocabulary.ids), vocabulary.special_ids, vocabulary.size) == ([0, 1, 3], (2,), 4)


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}}'])
def test_a_file_without_vocabulary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer"):
        FakeVocabulary.load(tmp_path / "tokenizer.json")


def test_embeddings_have_unit_length_and_depend_on_order() -> None:
    vector = fake_embedding([1, 2])
    assert sum(value * value for value in vector) == pytest.approx(1.0)
    assert vector != fake_embedding([2, 1])
