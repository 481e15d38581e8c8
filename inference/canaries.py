"""Prompts whose answers are known: a coordinator without a GPU checks a node with them. Pure.

A bank is made once on a trusted machine: for each prompt the reference model's
own answer, and at each of its positions the log-probabilities of the 20 most
likely ids. A node gets a canary as an ordinary task. Its answer is compared up
to the first id that differs, and that id is judged by its margin, as in any
re-scoring: two honest engines part where two ids are nearly as likely. What
comes after it has another past than the reference and cannot be judged.

A node that knows a bank answers its prompts honestly and cheats on the rest.
So a bank is the secret of the coordinator that uses it, and a canary is spent
on a node once before all are; the bank in this repository is for tests and the
demo. One prompt in four is set apart: nobody is asked for its answer, and nodes
get both to score.

What an engine draws at a seed depends on its sampler, so each of the other
prompts has one drawn answer for every profile whose noise can be recomputed.
"""

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from inference.calibration import CalibrationError
from inference.model_files import CANARIES_FILE
from inference.rescoring import Attempt
from inference.task import (
    FinishReason,
    ManifestDigest,
    PositionLogprobs,
    Sampling,
    TokenLogprob,
    pack_token_ids,
    unpack_token_ids,
)

__all__ = [
    "CANARIES_FILE",
    "CANARY_TOKENS_MAX",
    "Canary",
    "CanaryBank",
    "encode_bank",
    "make_canary",
    "read_bank",
    "set_apart",
]

# A canary's answer is no longer than what a cheat is found in; more would only make the bank larger.
CANARY_TOKENS_MAX: Final = 1024
CANARY_NAME_MAX: Final = 80
# Of these one is set apart.
PROMPTS_MIN: Final = 4
_TokensMax = Annotated[int, msgspec.Meta(ge=1, le=CANARY_TOKENS_MAX)]


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task and what the reference model makes of it.

    Attributes:
        sampler_profile: a sampled canary is for engines of this profile alone; of a greedy one it says nothing.
        prompt, output: packed ids.
        candidates: packed ids, `top` for each id of the output, from the most likely down.
        logprobs: of the candidates, float32, little-endian.
    """

    # Named in the evidence of a verdict, which its owner sees.
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=CANARY_NAME_MAX)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sampler_profile: str
    max_tokens: _TokensMax
    stop_token_ids: tuple[int, ...]
    prompt: bytes
    output: bytes
    candidates: bytes
    logprobs: bytes
    top: Annotated[int, msgspec.Meta(ge=1, le=64)]

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)

    @property
    def drawn(self) -> bool:
        """Whether a sampler's noise is in the answer."""
        return self.temperature > 0.0

    def fits(self, sampler_profile: str) -> bool:
        """Whether an engine of this profile draws what the reference drew."""
        return not self.drawn or sampler_profile == self.sampler_profile

    def attempt(self, output_ids: "list[int]", finish_reason: FinishReason | None) -> Attempt:
        """Return a node's answer with the reference as far as it reaches, for `rescore`.

        An id that departs from the reference and is not among the candidates is given the log-probability of the
        least likely one, so that its margin is too small rather than too large.
        """
        expected = unpack_token_ids(self.output)
        shared = next(
            (index for index, pair in enumerate(zip(output_ids, expected, strict=False)) if pair[0] != pair[1]),
            min(len(output_ids), len(expected)),
        )
        # Up to the departing id, which the reference of its position judges; nothing follows the reference's last.
        judged = min(shared + 1, len(output_ids), len(expected))
        departed_early = judged < len(output_ids)
        return Attempt(
            prompt_ids=unpack_token_ids(self.prompt),
            output_ids=output_ids[:judged],
            sampling=self.sampling,
            sampler_profile=self.sampler_profile,
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.max_tokens,
            finish_reason=None if departed_early else finish_reason,
            reference=[self._position(index, output_ids[index]) for index in range(judged)],
        )

    def _position(self, index: int, chosen: int) -> PositionLogprobs:
        width = 4 * self.top
        ids = unpack_token_ids(self.candidates[index * width : (index + 1) * width])
        logprobs = struct.unpack_from(f"<{self.top}f", self.logprobs, index * width)
        listed = tuple(
            TokenLogprob(id_, logprob, rank)
            for rank, (id_, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1)
        )
        unlisted = TokenLogprob(chosen, logprobs[-1], self.top + 1)
        return PositionLogprobs(next((item for item in listed if item.token_id == chosen), unlisted), listed)


class CanaryBank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All canaries of one manifest."""

    manifest_digest: ManifestDigest
    verifier: str
    canaries: tuple[Canary, ...]

    @property
    def to_score(self) -> list[Canary]:
        """Drawn answers to the prompts that are set apart. Of a greedy answer it is easier to say likely numbers."""
        apart = self._set_apart()
        return [canary for canary in self.canaries if canary.prompt in apart and canary.drawn]

    @property
    def to_answer(self) -> list[Canary]:
        """All canaries to the other prompts: whoever has scored knows no answer to any of them."""
        apart = self._set_apart()
        return [canary for canary in self.canaries if canary.prompt not in apart]

    def _set_apart(self) -> frozenset[bytes]:
        return set_apart(canary.prompt for canary in self.canaries)


def set_apart(prompts: Iterable[bytes]) -> frozenset[bytes]:
    """Return the packed prompts that are for scoring alone: they need no answer but one."""
    ordered = sorted(set(prompts), key=lambda prompt: hashlib.sha256(prompt).digest())
    return frozenset(ordered[PROMPTS_MIN - 1 :: PROMPTS_MIN])


def make_canary(
    *,
    name: str,
    prompt_ids: "list[int]",
    output_ids: "list[int]",
    sampling: Sampling,
    sampler_profile: str,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    reference: "list[PositionLogprobs]",
) -> Canary:
    """Pack a reference model's answer and its candidates."""
    top = len(reference[0].top)
    return Canary(
        name=name,
        temperature=sampling.temperature,
        seed=sampling.seed,
        sampler_profile=sampler_profile,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        prompt=pack_token_ids(prompt_ids),
        output=pack_token_ids(output_ids),
        candidates=b"".join(pack_token_ids([item.token_id for item in position.top]) for position in reference),
        logprobs=b"".join(struct.pack(f"<{top}f", *(item.logprob for item in p.top)) for p in reference),
        top=top,
    )


def encode_bank(bank: CanaryBank) -> bytes:
    return msgspec.msgpack.encode(bank)


def read_bank(path: Path, digest: ManifestDigest) -> CanaryBank:
    """Return a bank from its file.

    Raises:
        CalibrationError: unreadable, malformed, or made for another manifest.
    """
    try:
        bank = msgspec.msgpack.decode(path.read_bytes(), type=CanaryBank)
    except OSError as error:
        raise CalibrationError(
            f"{path} cannot be read ({error.strerror}); make it with scripts/calibrate_model.py"
        ) from error
    except msgspec.DecodeError as error:
        raise CalibrationError(f"{path} is no valid bank of canaries: {error}") from error
    for canary in bank.canaries:
        expected = len(canary.output) * canary.top
        if not canary.output or not len(canary.candidates) == len(canary.logprobs) == expected:
            raise CalibrationError(f"{path}: canary {canary.name} has candidates for more or fewer ids than its answer")
    if not bank.to_score or not bank.to_answer:
        raise CalibrationError(f"{path} has too few prompts; make it anew from {PROMPTS_MIN} or more")
    if bank.manifest_digest != digest:
        raise CalibrationError(f"{path} was made for {bank.manifest_digest}, the model is {digest}")
    return bank
