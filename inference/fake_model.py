"""The fake engine's model: the next id is a hash of all ids so far. Pure.

So an answer that was resumed from the delivered ids continues exactly as the
undisturbed one, and one id lost, doubled or altered changes all that follows.
The number of tokens asked for does not enter: a resumed attempt asks for fewer.
"""

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from inference.task import Sampling, pack_token_ids, token_array

# Length of the fake's vectors, that of common small embedding models.
EMBEDDING_DIMENSIONS = 384

_pack_id = struct.Struct("<I").pack
_unpack_draw = struct.Struct("<Q").unpack


@dataclass(frozen=True, slots=True)
class FakeVocabulary:
    """The ids a real tokenizer turns into text.

    Attributes:
        ids: ids that may be drawn: all but the special ones, so that no answer ends by accident.
        special_ids: ids that stand for no text, end of text among them.
        size: one more than the largest id.
    """

    ids: "array[int]"
    special_ids: tuple[int, ...]
    size: int

    @classmethod
    def load(cls, tokenizer_file: Path) -> "FakeVocabulary":
        """Read the vocabulary of a `tokenizer.json`.

        Raises:
            ValueError: the file holds no vocabulary.
        """
        content = json.loads(tokenizer_file.read_bytes())
        try:
            vocabulary = content["model"]["vocab"]
            added = content.get("added_tokens", [])
            special = {token["id"] for token in added if token["special"]}
            # Byte-pair vocabularies are a mapping, unigram ones a list whose index is the id.
            listed = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
            known = listed | {token["id"] for token in added}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{tokenizer_file} is no tokenizer.json: {error!r}") from error
        drawn = sorted(known - special)
        if not drawn:
            raise ValueError(f"{tokenizer_file} holds no id that stands for text")
        return cls(ids=token_array(drawn), special_ids=tuple(sorted(special)), size=max(known) + 1)


class FakeSequence:
    """One sequence of the fake model, fed id by id."""

    __slots__ = ("_count", "_hash", "_ids")

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, vocabulary: FakeVocabulary) -> None:
        self._ids = vocabulary.ids
        self._count = len(vocabulary.ids)
        self._hash = blake2b(pack_token_ids(prompt_ids), digest_size=8, key=_sampling_key(sampling))

    def next_id(self) -> int:
        """Draw the next id and take it in."""
        # A hash may be asked at any time and fed further, so each draw costs one block however long the text is.
        token_id: int = self._ids[_unpack_draw(self._hash.digest())[0] % self._count]
        self._hash.update(_pack_id(token_id))
        return token_id

    def take(self, token_id: int) -> None:
        """Take in an id that was not drawn."""
        self._hash.update(_pack_id(token_id))


def next_id(ids: Sequence[int], sampling: Sampling, vocabulary: FakeVocabulary) -> int:
    """Return the id that follows all of `ids`, prompt and answer alike."""
    return FakeSequence(ids, sampling, vocabulary).next_id()


def expected_ids(prompt_ids: Sequence[int], sampling: Sampling, count: int, vocabulary: FakeVocabulary) -> "array[int]":
    """Return the first `count` ids of the answer to a prompt."""
    sequence = FakeSequence(prompt_ids, sampling, vocabulary)
    return token_array([sequence.next_id() for _ in range(count)])


def fake_logprob(token_id: int, rank: int) -> float:
    """Return a log-probability that looks real: falls with the rank, differs by id."""
    return -0.5 * rank - (token_id % 251) / 1024


def fake_candidates(token_id: int, count: int, vocabulary: FakeVocabulary) -> list[tuple[int, float, int]]:
    """Return (id, logprob, rank) of an id that has rank 1 and of its `count` - 1 successors in the vocabulary."""
    ids = vocabulary.ids
    start = token_id * 2654435761
    rivals = [ids[(start + step) % len(ids)] for step in range(count + 1)]
    ranked = [token_id, *[rival for rival in rivals if rival != token_id][: max(count - 1, 0)]]
    return [(item, fake_logprob(item, rank), rank) for rank, item in enumerate(ranked, start=1)]


def fake_embedding(token_ids: Sequence[int]) -> list[float]:
    """Return a unit-length vector that depends on every id and its place."""
    seed = blake2b(pack_token_ids(token_ids)).digest()
    blocks = b"".join(blake2b(seed + _pack_id(block)).digest() for block in range(EMBEDDING_DIMENSIONS // 64))
    values = [byte - 127.5 for byte in blocks]
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values]


def _sampling_key(sampling: Sampling) -> bytes:
    fields = struct.pack("<ddQQ", sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    return blake2b(fields, digest_size=32).digest()
