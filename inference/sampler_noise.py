"""The noise of each sampler profile, recomputed in numpy for the few ids a verifier looks at.

A profile names how an engine makes a seeded draw. All of them add Gumbel noise
to the scaled logits and take the largest sum; they differ in where the noise
comes from:

  position-hash-v1   a hash of seed, position and id (`inference/sampling.py`; the torch engine)
  vllm-gumbel-v2     vLLM's V2 model runner: 32-bit MurmurHash3 of seed, position and id
  vllm-generator-v1  vLLM's CPU build: a Mersenne twister seeded once per attempt gives one 31-bit number
                     per output id, and a splitmix64 hash of that number and the id is the noise

Tests compare the last two with the installed wheel's own kernels.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference.sampling import MASK_64, MIX, POSITION_STEP, Floats, mix, noise_of_ids, position_key

POSITION_HASH: Final = "position-hash-v1"
VLLM_GUMBEL: Final = "vllm-gumbel-v2"
VLLM_GENERATOR: Final = "vllm-generator-v1"

Ids = NDArray[np.uint64]
_Words = NDArray[np.uint32]

# MurmurHash3's 32-bit constants, as published with it; vLLM's kernel uses them unchanged.
_MURMUR_C1: Final = np.uint32(0xCC9E2D51)
_MURMUR_C2: Final = np.uint32(0x1B873593)
_MURMUR_ADD: Final = np.uint32(0xE6546B64)
_MURMUR_F1: Final = np.uint32(0x85EBCA6B)
_MURMUR_F2: Final = np.uint32(0xC2B2AE35)
# Four words are mixed in: both halves of the seed, the position, the id.
_MURMUR_LENGTH: Final = np.uint32(16)

# vLLM's CPU kernel keeps 53 bits of a hash; its step between ids is splitmix64's own.
_KERNEL_BITS: Final = 53
_KERNEL_STEP: Final = np.uint64(POSITION_STEP)
# The numbers it is seeded with are below this.
_KERNEL_SEEDS: Final = 1 << 31


def candidate_noise(profile: str, seed: int, prompt_tokens: int, ids: Ids, first: int = 0) -> Floats:
    """Return the noise of candidate ids, one line per output id of an attempt.

    Args:
        profile: one of the names above.
        prompt_tokens: length of the attempt's own prompt; for a resumed attempt that counts the ids delivered before.
        ids: candidates of output id `first` + i in line i.
        first: how many output ids of the attempt come before.

    Raises:
        KeyError: no such profile.
    """
    return _PROFILES[profile](seed, prompt_tokens, ids, first)


def is_known(profile: str) -> bool:
    """Whether the noise of a profile can be recomputed here."""
    return profile in _PROFILES


def _position_hash(seed: int, prompt_tokens: int, ids: Ids, first: int) -> Floats:
    start = prompt_tokens - 1 + first
    keys = np.array([position_key(seed, start + index) for index in range(len(ids))], dtype=np.uint64)
    return noise_of_ids(keys[:, None], ids)


def _vllm_gumbel(seed: int, prompt_tokens: int, ids: Ids, first: int) -> Floats:
    start = prompt_tokens - 1 + first
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    hashed: _Words = np.zeros(ids.shape, dtype=np.uint32)
    for word in words:
        hashed = _murmur_step(hashed, np.full(1, word, dtype=np.uint32))
    hashed = _murmur_step(hashed, (positions & np.uint64(0xFFFFFFFF)).astype(np.uint32)[:, None])
    hashed = _murmur_step(hashed, ids.astype(np.uint32))
    hashed = _murmur_end(hashed ^ _MURMUR_LENGTH)
    uniform = (hashed.astype(np.float64) + 0.5) * 2.0**-32
    # The kernel takes the long tail from small numbers: the noise of u is that of 1 - u elsewhere.
    noise: Floats = -np.log(-np.log1p(-uniform))
    return noise


def _murmur_step(hashed: _Words, word: _Words) -> _Words:
    word = _rotated(word * _MURMUR_C1, 15) * _MURMUR_C2
    return _rotated(hashed ^ word, 13) * np.uint32(5) + _MURMUR_ADD


def _rotated(value: _Words, bits: int) -> _Words:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _murmur_end(value: _Words) -> _Words:
    value = (value ^ (value >> np.uint32(16))) * _MURMUR_F1
    value = (value ^ (value >> np.uint32(13))) * _MURMUR_F2
    return value ^ (value >> np.uint32(16))


def _vllm_generator(seed: int, prompt_tokens: int, ids: Ids, first: int) -> Floats:
    del prompt_tokens  # the generator starts with the attempt, wherever its prompt ends
    # The high half of a seed does not reach the twister: torch seeds it with 32 bits.
    twister = np.random.RandomState(seed & 0xFFFFFFFF)
    # A draw takes two 32-bit words; what is left of them below 2^31 is the second's low part.
    words = twister.randint(0, 1 << 32, size=2 * (first + len(ids)), dtype=np.uint64)
    draws = words[2 * first + 1 :: 2] % np.uint64(_KERNEL_SEEDS)
    keys = np.array([mix(int(draw) & MASK_64) for draw in draws], dtype=np.uint64)
    value = keys[:, None] + (ids + np.uint64(1)) * _KERNEL_STEP
    for shift, multiplier in MIX:
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(multiplier)
    value ^= value >> np.uint64(31)
    uniform = ((value >> np.uint64(64 - _KERNEL_BITS)).astype(np.float64) + 0.5) * 2.0**-_KERNEL_BITS
    noise: Floats = -np.log(-np.log(uniform))
    return noise


_PROFILES: Final[dict[str, Callable[[int, int, Ids, int], Floats]]] = {
    POSITION_HASH: _position_hash,
    VLLM_GUMBEL: _vllm_gumbel,
    VLLM_GENERATOR: _vllm_generator,
}

# All whose draws can be recomputed.
SAMPLER_PROFILES: Final = tuple(_PROFILES)
