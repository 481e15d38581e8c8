"""Small challenges for tests, and provers that cheat."""

import hashlib
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import numpy as np

from inference.challenge.arithmetic import INT32_TERMS_MAX, Arithmetic, Matrix, NumpyArithmetic
from inference.challenge.commitment import CommitmentTree, Opening
from inference.challenge.compute import ComputeProver, ComputeSize
from inference.challenge.context import ChallengeContext, Key
from inference.challenge.expansion import CENTRE, Residues
from inference.challenge.memory import STATE_COLUMNS, MemoryProver, MemorySize
from inference.challenge.memory_check import MemoryClaim
from protos.merkle import leaf_hash

CONTEXT = ChallengeContext(b"a nonce of the coordinator's", "node-1", "boot-1", bytes(range(32)))
OTHERS = {
    "nonce": replace(CONTEXT, nonce=b"a later nonce of the same"),
    "node": replace(CONTEXT, node_id="node-2"),
    "boot": replace(CONTEXT, boot_id="boot-2"),
    "certificate": replace(CONTEXT, certificate_sha256=bytes(32)),
}
COMPUTE_SIZE = ComputeSize(columns=64, rows=40, products=4, chains=5)
MEMORY_SIZE = MemorySize(columns=64, blocks=24, blocks_per_step=3, steps=63)
WALK_NONCE = b"a nonce of the walk's start"
SECRET = b"thirty-two bytes nobody has seen"


def leave_out_binding() -> None:
    """Have this process derive the same questions for every nonce, node, boot and certificate."""

    def seed(self: ChallengeContext, purpose: str, *parts: bytes) -> bytes:
        return hashlib.sha256(
            b"".join(len(part).to_bytes(8, "little") + part for part in (purpose.encode(), *parts))
        ).digest()

    ChallengeContext.seed = seed  # type: ignore[method-assign]  # That is the check that is left out.


def committed(contents: Sequence[bytes]) -> CommitmentTree:
    """Return the tree over contents, as a prover of any of them would commit to it."""
    return CommitmentTree([leaf_hash(content) for content in contents])


def computed(context: ChallengeContext = CONTEXT, size: ComputeSize = COMPUTE_SIZE) -> list[bytes]:
    """Return the true results of all chains."""
    prover = ComputeProver(context, size, NumpyArithmetic())
    prover.commit()
    return [opening.content for opening in prover.open(range(size.chains))]


def opened(contents: Sequence[bytes], drawn: Sequence[int]) -> tuple[bytes, list[Opening]]:
    """Return the root over contents and the openings of those drawn."""
    tree = committed(contents)
    return tree.root, [tree.opening(index, contents[index]) for index in drawn]


class ForgetfulArithmetic(NumpyArithmetic):
    """numpy on a machine with less memory than it says: the blocks numbered in `lost` are computed, and then gone."""

    def __init__(self, lost: Container[int]) -> None:
        self._lost = lost
        self._filled = 0
        self._gone: list[Residues] = []

    def cube(self, matrix: Residues) -> Residues:
        block = super().cube(matrix)
        if self._filled in self._lost:
            self._gone.append(block)
        self._filled += 1
        return block

    def multiply_sum(self, left: Residues, rights: Sequence[Residues]) -> Residues:
        kept = [np.zeros_like(right) if any(right is gone for gone in self._gone) else right for right in rights]
        return super().multiply_sum(left, kept)


class StartFromElsewhere(NumpyArithmetic):
    """numpy for a prover that chose its walk's start before it knew the nonce."""

    def __init__(self) -> None:
        self._narrow = 0

    def expand(self, key: Key, first_row: int, rows: int, columns: int) -> Residues:
        # Two matrices have 8 rows: the weights of the sketches, and then the walk's start.
        self._narrow += rows == STATE_COLUMNS
        chosen = Key(1, 3) if rows == STATE_COLUMNS and self._narrow > 1 else key
        return super().expand(chosen, first_row, rows, columns)


def walked(
    prover: MemoryProver[Residues], steps: tuple[int, ...], blocks: tuple[int, ...]
) -> tuple[MemoryClaim, list[Opening], list[Opening]]:
    """Return what a prover commits to and opens."""
    fill_root = prover.fill()
    walk_root = prover.walk(WALK_NONCE)
    states, sketches = prover.open(steps, blocks)
    return MemoryClaim(fill_root, WALK_NONCE, walk_root, steps, blocks), states, sketches


# 1,104 columns: sums in more than one float32 part, and no power of two.
PATH_COMPUTE = ComputeSize(columns=1104, rows=40, products=3, chains=3)
PATH_MEMORY = MemorySize(columns=1104, blocks=5, blocks_per_step=3, steps=15)


def path_digests(arithmetic: Arithmetic[Matrix], matrix: Callable[[Residues], Matrix]) -> dict[str, str]:
    """Return digests of all that an arithmetic computes, which are the same for every one of them.

    Args:
        matrix: takes a matrix of numpy's to where the arithmetic has its own.
    """
    prover = ComputeProver(CONTEXT, PATH_COMPUTE, arithmetic)
    filler = MemoryProver(CONTEXT, PATH_MEMORY, arithmetic)
    # As long as an int32 lasts, and a multiple of 8.
    largest = np.full((32, INT32_TERMS_MAX // 8 * 8), CENTRE, dtype=np.int8)
    longest, opposite = matrix(largest), matrix(-largest)
    # Odd sums, which a float32 past 2^24 has not.
    uneven = matrix(np.random.default_rng(3).integers(122, 126, largest.shape).astype(np.int8))
    # Past 2^63, where unsigned numbers and signed ones part.
    entries = arithmetic.expand(Key(2**63 + 5, 2**64 - 3), 2**40, 24, 4096)
    made = {
        "expand": entries,
        "longest sum": arithmetic.multiply(longest, longest),
        "longest negative sum": arithmetic.multiply(longest, opposite),
        "uneven sum": arithmetic.multiply(uneven, uneven),
        "few rows": arithmetic.multiply(arithmetic.expand(Key(7, 9), 0, 8, 4096), entries),
        "cube": arithmetic.cube(entries),
        "plus one": arithmetic.plus_one(entries),
        "scaled": arithmetic.scale_columns(entries, entries, 1),
    }
    digests = {name: hashlib.sha256(arithmetic.to_bytes(matrix)).hexdigest() for name, matrix in made.items()}
    digests["compute root"] = prover.commit().hex()
    digests["compute result"] = hashlib.sha256(prover.open([1])[0].content).hexdigest()
    return digests | {"fill root": filler.fill().hex(), "walk root": filler.walk(WALK_NONCE).hex()}


def numpy_digests() -> dict[str, str]:
    return path_digests(NumpyArithmetic(), lambda matrix: matrix)
