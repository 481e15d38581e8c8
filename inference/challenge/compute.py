"""The compute challenge: chains of int8 products mod 251, committed to on the clock, then checked by Freivalds' method.

The question is a number of chains over one n x n matrix A, each with an m x n start Y0 and k diagonals D1..Dk of its
own, all expanded from the challenge's context:

    Yi = Y(i-1) A^T Di  mod 251        i = 1..k

The prover sends the Merkle root over the results Yk of all chains; that stops the clock. The verifier then draws some
chains, receives their *whole* results, and only then draws 8 secret vectors R for each chain (n x 8, uniform mod 251):

    Yk R  =  Y0 A^T D1 A^T D2 ... A^T Dk R        multiplied from the right: n x n times n x 8, k times

A wrong Yk passes with probability at most 251^-8 (6e-20). The vectors are never revealed: against known vectors the
right side alone, which is cheap, would make an answer. Neither is a prover ever asked for Yk R.

What the work is, and what it is not:

- Products associate. With m <= n, which `ComputeSize` demands, multiplying the start through is the cheapest order:
  2 k m n^2 operations a chain. With more rows than columns it would pay to multiply the factors first (2 k n^3).
- One A serves all steps, so that the verifier expands n^2 numbers and not k n^2; the diagonals are what forbids raising
  A to a power by repeated squaring. No chain's factors help another chain. All of it depends on the nonce.
- Strassen's algorithm saves an eighth of the products per level. Who writes better kernels than torch's gains their
  factor (the reductions mod 251 are passes over memory in torch, and cost as much as the products on a card): what is
  measured is a lower bound of what the machine can do, so this only flatters the clever.
- Chains are independent: several cards of one machine, or elsewhere, can share them. Hence barriers (schedule.py).
- Where fewer chains are drawn than there are, who leaves out a share s of them passes with (1 - s)^drawn. All chains
  are drawn for processors. For a card that would cost the verifier more than 2 s: a card does 10^4 times the operations
  of a core, and the result's m n bytes have to be sent.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray

from inference.challenge.arithmetic import FLOAT32_TERMS_MAX, INT32_TERMS_MAX, Arithmetic, Matrix, nonzero
from inference.challenge.commitment import CommitmentTree, Opening, check_openings
from inference.challenge.context import ChallengeContext, ProofRejected, key_from
from inference.challenge.expansion import BYTES_PER_WORD, CENTRE, MODULUS, Residues, expand
from protos.merkle import leaf_hash

SECRET_VECTORS: Final = 8
# What a driver draws for every check, after the results are there.
SECRET_BYTES: Final = 32
# int8 tensor cores take multiples of 8, and no left factor of 16 rows or fewer.
_ROWS_MIN: Final = 24
# A result travels in one message; a gateway would refuse larger ones.
RESULT_BYTES_MAX: Final = 64 << 20
# Below this the results are kept until they are asked for; above it those drawn are computed again, which is cheap.
_KEPT_BYTES_MAX: Final = 256 << 20
# Hashing takes 0.7 s a GiB and thread; the card goes on meanwhile. Results that wait to be hashed are in memory.
_HASHING_THREADS: Final = 4
_WAITING_MAX: Final = 8
# Rows of a start that the verifier expands at a time: 8 MiB at n = 2048.
_START_ROWS: Final = 4096

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ComputeSize:
    """How much is computed.

    Args:
        columns: n, a multiple of 8.
        rows: m, a multiple of 8, from 24 to n.
        products: k, in every chain.
        chains: how many.

    Raises:
        ValueError: a number is outside its limits.
    """

    columns: int
    rows: int
    products: int
    chains: int

    def __post_init__(self) -> None:
        if self.columns % BYTES_PER_WORD or not _ROWS_MIN <= self.columns <= INT32_TERMS_MAX:
            raise ValueError(f"{self.columns} columns: not a multiple of 8 from {_ROWS_MIN} to {INT32_TERMS_MAX}")
        if self.rows % BYTES_PER_WORD or not _ROWS_MIN <= self.rows <= self.columns:
            raise ValueError(f"{self.rows} rows: not a multiple of 8 from {_ROWS_MIN} to {self.columns}, the columns")
        if self.products < 1 or self.chains < 1:
            raise ValueError(f"{self.products} products in {self.chains} chains: both must be at least 1")
        if self.result_bytes > RESULT_BYTES_MAX:
            raise ValueError(f"a result of {self.result_bytes} bytes is larger than {RESULT_BYTES_MAX}")

    @property
    def result_bytes(self) -> int:
        return self.rows * self.columns

    @property
    def operations(self) -> int:
        """Multiplications and additions in the cheapest order known, without Strassen's savings."""
        return 2 * self.columns**2 * self.rows * self.products * self.chains

    def seed(self, context: ChallengeContext) -> bytes:
        numbers = (self.columns, self.rows, self.products, self.chains)
        return context.seed("compute", *(number.to_bytes(8, "little") for number in numbers))


class ComputeProver(Generic[Matrix]):
    """Computes one challenge's chains and opens those drawn."""

    def __init__(self, context: ChallengeContext, size: ComputeSize, arithmetic: Arithmetic[Matrix]) -> None:
        self._size = size
        self._arithmetic = arithmetic
        self._seed = size.seed(context)
        self._factor = arithmetic.expand(key_from(self._seed, "factor"), 0, size.columns, size.columns)
        self._kept: dict[int, bytes] = {}
        self._tree: CommitmentTree | None = None

    def commit(self) -> bytes:
        """Compute all chains and return the root over their results."""
        size = self._size
        keep = size.chains * size.result_bytes <= _KEPT_BYTES_MAX
        hashes: list[Future[bytes]] = []
        with ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="hash") as hashing:
            for chain in range(size.chains):
                result = self._result(chain)
                if keep:
                    self._kept[chain] = result
                hashes.append(hashing.submit(leaf_hash, result))
                if chain >= _WAITING_MAX:
                    hashes[chain - _WAITING_MAX].result()
            self._tree = CommitmentTree([waiting.result() for waiting in hashes])
        return self._tree.root

    def open(self, drawn: Sequence[int]) -> list[Opening]:
        """Return the whole results of the chains drawn.

        Raises:
            ValueError: nothing is committed to, or there is no such chain.
        """
        if self._tree is None:
            raise ValueError("the results of a challenge are opened after they are committed to")
        if not all(0 <= chain < self._size.chains for chain in drawn):
            raise ValueError(f"chains {list(drawn)} are not all among the {self._size.chains} of the challenge")
        return [self._tree.opening(chain, self._kept.get(chain) or self._result(chain)) for chain in drawn]

    def _result(self, chain: int) -> bytes:
        size, arithmetic = self._size, self._arithmetic
        state = arithmetic.expand(key_from(self._seed, f"start {chain}"), 0, size.rows, size.columns)
        diagonals = arithmetic.expand(key_from(self._seed, f"diagonals {chain}"), 0, size.products, size.columns)
        for step in range(size.products):
            state = arithmetic.scale_columns(arithmetic.multiply(state, self._factor), diagonals, step)
        return arithmetic.to_bytes(state)


def verify_compute(
    context: ChallengeContext,
    size: ComputeSize,
    root: bytes,
    drawn: Sequence[int],
    openings: Sequence[Opening],
    secret: bytes,
) -> None:
    """Check the results of the chains drawn, in 16 k n^2 operations a chain.

    Args:
        root: what the prover committed to.
        drawn: the chains that were asked for after that.
        secret: 32 bytes from the system's random source, drawn after the openings were received, used once.

    Raises:
        ProofRejected: they are not the products asked for.
        ValueError: nothing is drawn, or the secret is short.
    """
    if not drawn or len(secret) < SECRET_BYTES:
        raise ValueError(f"{len(drawn)} chains, {len(secret)} secret bytes: at least 1 and {SECRET_BYTES} are needed")
    check_openings("chain", openings, drawn, leaves=size.chains, content_bytes=size.result_bytes, root=root)
    results = [_entries(opening, size) for opening in openings]
    vectors = _secret_vectors(secret, size.columns, len(drawn))
    seed = size.seed(context)
    images = _through_the_chains(seed, size, drawn, vectors)
    for place, chain in enumerate(drawn):
        columns = slice(place * SECRET_VECTORS, (place + 1) * SECRET_VECTORS)
        found = _products(results[place], vectors[:, columns])
        key = key_from(seed, f"start {chain}")
        for first in range(0, size.rows, _START_ROWS):
            rows = min(_START_ROWS, size.rows - first)
            expected = _products(expand(key, first, rows, size.columns), images[:, columns])
            # Both are whole numbers below 2^24, so their difference mod 251 is exact.
            if np.any((found[first : first + rows] - expected) % MODULUS):
                raise ProofRejected(f"the result of chain {chain} is not the product that was asked for")


def _entries(opening: Opening, size: ComputeSize) -> Residues:
    entries = np.frombuffer(opening.content, dtype=np.int8).reshape(size.rows, size.columns)
    # One number must not have several spellings: -126 is 125 as well.
    if int(entries.min()) < -CENTRE or int(entries.max()) > CENTRE:
        raise ProofRejected(f"the result of chain {opening.index} has entries outside -{CENTRE} to {CENTRE}")
    return entries


def _through_the_chains(seed: bytes, size: ComputeSize, drawn: Sequence[int], vectors: Floats) -> Floats:
    """Return A^T D1 ... A^T Dk R for every chain drawn, side by side: one product serves them all."""
    # Transposed once: numpy's products of a transposed matrix with few columns take twice the time.
    factor = np.ascontiguousarray(expand(key_from(seed, "factor"), 0, size.columns, size.columns).T)
    wide = factor.astype(np.float32)
    scales = np.stack(
        [nonzero(expand(key_from(seed, f"diagonals {chain}"), 0, size.products, size.columns)) for chain in drawn],
        axis=2,
    ).astype(np.float32)
    images = vectors
    for step in reversed(range(size.products)):
        scaled = images.reshape(size.columns, len(drawn), SECRET_VECTORS) * scales[step][:, :, None]
        images = _products(wide, _reduced(scaled).reshape(size.columns, -1))
    return images


def _products(left: Residues | Floats, right: Floats) -> Floats:
    """Return left @ right mod 251, exact: float32 sums are cut before they reach 2^24."""
    total = np.zeros((left.shape[0], right.shape[1]), dtype=np.float32)
    for start in range(0, left.shape[1], FLOAT32_TERMS_MAX):
        end = start + FLOAT32_TERMS_MAX
        total += _reduced(left[:, start:end].astype(np.float32, copy=False) @ right[start:end])
    return _reduced(total)


def _reduced(values: Floats) -> Floats:
    """Return whole numbers below 2^24 as residues from -126 to 126; the quotient may be off by one at a half.

    126 * 125 * 1024 is still below 2^24.
    """
    quotients = np.rint(values * np.float32(1 / MODULUS))
    reduced: Floats = values - quotients * np.float32(MODULUS)
    return reduced


def _secret_vectors(secret: bytes, columns: int, chains: int) -> Floats:
    """Return 8 vectors a chain, side by side, each entry uniform mod 251: bytes above 250 are passed over."""
    wanted = columns * chains * SECRET_VECTORS
    # 251 of 256 bytes are taken; a sixteenth more, and 256 for small numbers, is never too few in practice, and if it
    # ever were, the reshape below would fail and not weaken the check.
    stream = np.frombuffer(hashlib.shake_256(secret).digest(wanted + wanted // 16 + 256), dtype=np.uint8)
    taken = stream[stream < MODULUS][:wanted]
    return (taken.astype(np.float32) - np.float32(CENTRE)).reshape(columns, -1)
