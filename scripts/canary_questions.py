"""What the reference model is asked for a bank of canaries. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from verification_prompts import seed_of

from inference.canaries import set_apart
from inference.sampler_noise import POSITION_HASH, SAMPLER_PROFILES
from inference.task import ManifestDigest, Sampling, pack_token_ids

# A cheat that a canary can find at all, it finds within so many ids; more only make the bank larger.
CANARY_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Question:
    """One canary before its answer."""

    name: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    sampler_profile: str


def questions(digest: ManifestDigest, prompts: Sequence[tuple[int, ...]]) -> list[Question]:
    """Return each prompt greedily and with the noise of every sampler; of one that is set apart no more than is used.

    A prompt has one seed: a node that gets it again learns from the seed no more than from the words.
    """
    apart = set_apart(pack_token_ids(prompt) for prompt in prompts)
    asked = []
    for index, prompt in enumerate(prompts):
        greedy, drawn = (Sampling(temperature=t, seed=seed_of(digest, index, prompt)) for t in (0.0, 1.0))
        if pack_token_ids(prompt) in apart:
            # A score says nothing of who drew what is scored.
            asked.append(Question(f"{index}-t1-{POSITION_HASH}", prompt, drawn, POSITION_HASH))
            continue
        asked.append(Question(f"{index}-t0", prompt, greedy, POSITION_HASH))
        asked += [Question(f"{index}-t1-{profile}", prompt, drawn, profile) for profile in SAMPLER_PROFILES]
    return asked
