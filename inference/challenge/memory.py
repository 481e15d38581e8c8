"""The memory challenge: a fill that is dear to compute, and a walk over it whose way is known only step by step.

Four steps, the first two on the coordinator's clock:

1. Fill. Block j = 0..K-1 is Bj = S(Uj V^T) mod 251 with n x n matrices Uj and V expanded from the context and
   S(x) = x^3, a permutation of the residues. The prover keeps all blocks, and commits to them by the Merkle root over
   their sketches Bj W (W: 8 fixed vectors). A sketch cannot be had without its block: S lets no factor through.
2. Walk. A second nonce, sent after that commitment, gives the start x0 (n x 8). From the state xi and the hash of its
   bytes follow G blocks, and x(i+1) is the sum of their products with xi + 1. The prover commits to the Merkle root
   over all states. Every step reads G n^2 bytes, and which ones is not known before the step.
3. The verifier draws steps and blocks; the prover opens the states before and after each step, and the sketches.
4. The verifier draws rows, recomputes them from the context (2 n^2 operations a row), and compares
   (inference/challenge/memory_check.py).

Why a block that is not in memory costs: to read a byte takes a card 1 ps (1 TB/s), to compute it again 2 n operations,
12 ps on the fastest consumer card's data sheet at n = 4096 (RTX 4090: 660 TOPS of int8), and to fetch it from the
host's memory 40 ps (PCIe 4 x16). So who lacks a tenth of the blocks takes twice as long for the walk, who lacks half
six times. Blocks have 7.97 bits of entropy a byte, so packing them does not help. Who keeps only some rows of each
block has wrong states from the first step on, and passes with (1 - missing) ^ (steps drawn * rows drawn); who makes up
a share of the steps passes with (1 - share) ^ (steps drawn). A made-up step must not save
the steps after it: without the 1, a walk once at zero would stay there for nothing. With it a walk put at -1 goes to 0
for nothing and on from there by the blocks' row sums, which are few, and is then anywhere; so a third of the steps at
least has to be made up by who reads no memory at all. What a walk shows is memory reached at that bandwidth by
whoever answers, at that time: two fills cannot be in one memory at once, which is what barriers are for (schedule.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic

from inference.challenge.arithmetic import INT32_TERMS_MAX, Arithmetic, Matrix
from inference.challenge.commitment import CommitmentTree, Opening
from inference.challenge.context import NONCE_BYTES_MIN, SHA256_BYTES, ChallengeContext, Key, key_from
from inference.challenge.expansion import BYTES_PER_WORD
from protos.merkle import leaf_hash

# Columns of a state and of a sketch: the fewest that int8 tensor cores take. Every one of them needs the whole block.
STATE_COLUMNS: Final = 8
_COLUMNS_MIN: Final = 24
# Block indexes are drawn as 64-bit numbers mod K: for a million blocks, none is likelier by more than 1 in 10^13.
_INDEX_BYTES: Final = 8
BLOCKS_MAX: Final = 1 << 20
# All states are kept until they are opened, in the host's memory.
STATES_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class MemorySize:
    """How much memory, and how long a walk.

    Args:
        columns: n, a multiple of 8; a block is n x n bytes.
        blocks: K.
        blocks_per_step: G; n * G must stay below 137,438 so that the sums fit an int32.
        steps: of the walk; one less than a power of two, so that the states fill a Merkle tree.

    Raises:
        ValueError: a number is outside its limits.
    """

    columns: int
    blocks: int
    blocks_per_step: int
    steps: int

    def __post_init__(self) -> None:
        if self.columns % BYTES_PER_WORD or self.columns < _COLUMNS_MIN:
            raise ValueError(f"{self.columns} columns: not a multiple of 8 from {_COLUMNS_MIN}")
        if not 1 <= self.blocks <= BLOCKS_MAX:
            raise ValueError(f"{self.blocks} blocks: not from 1 to {BLOCKS_MAX}")
        if self.blocks_per_step < 1 or self.columns * self.blocks_per_step > INT32_TERMS_MAX:
            raise ValueError(f"{self.blocks_per_step} blocks a step of {self.columns} columns: sums would overflow")
        if self.steps < 1 or self.states & self.steps:
            raise ValueError(f"{self.steps} steps: not one less than a power of two")
        if self.states * self.state_bytes > STATES_BYTES_MAX:
            raise ValueError(f"{self.states} states of {self.state_bytes} bytes are more than {STATES_BYTES_MAX}")

    @property
    def states(self) -> int:
        return self.steps + 1

    @property
    def state_bytes(self) -> int:
        return STATE_COLUMNS * self.columns

    @property
    def fill_bytes(self) -> int:
        return self.blocks * self.columns**2

    @property
    def walk_bytes(self) -> int:
        """What the walk reads."""
        return self.steps * self.blocks_per_step * self.columns**2

    @property
    def fill_operations(self) -> int:
        return 2 * self.blocks * self.columns**3

    def seed(self, context: ChallengeContext) -> bytes:
        numbers = (self.columns, self.blocks, self.blocks_per_step, self.steps)
        return context.seed("memory", *(number.to_bytes(8, "little") for number in numbers))


@dataclass(frozen=True, slots=True)
class WalkPath:
    """Where a walk starts and how it goes on: both need the second nonce, and the fill that was committed to."""

    seed: bytes
    blocks: int
    blocks_per_step: int

    def start_key(self) -> Key:
        return key_from(self.seed, "start")

    def chosen(self, step: int, state_hash: bytes) -> list[int]:
        """Return the blocks that a step reads, given the hash of the state before it."""
        stream = hashlib.shake_128(self.seed + step.to_bytes(8, "little") + state_hash).digest(
            _INDEX_BYTES * self.blocks_per_step
        )
        return [
            int.from_bytes(stream[at : at + _INDEX_BYTES], "little") % self.blocks
            for at in range(0, len(stream), _INDEX_BYTES)
        ]


def walk_path(context: ChallengeContext, size: MemorySize, walk_nonce: bytes, fill_root: bytes) -> WalkPath:
    """Return the path of the walk that follows a fill.

    Raises:
        ValueError: the nonce is short, or the root is no SHA-256.
    """
    if len(walk_nonce) < NONCE_BYTES_MIN or len(fill_root) != SHA256_BYTES:
        raise ValueError(
            f"a walk's nonce of {len(walk_nonce)} bytes and a root of {len(fill_root)}: "
            f"at least {NONCE_BYTES_MIN} and exactly {SHA256_BYTES} are needed"
        )
    seed = context.seed("walk", size.seed(context), walk_nonce, fill_root)
    return WalkPath(seed, size.blocks, size.blocks_per_step)


def states_asked(steps: Sequence[int]) -> list[int]:
    """Return the states to open for the steps drawn: before and after each, and the start in any case."""
    return sorted({0, *steps, *(step + 1 for step in steps)})


class MemoryProver(Generic[Matrix]):
    """Holds one challenge's memory, from the fill until it is dropped."""

    def __init__(self, context: ChallengeContext, size: MemorySize, arithmetic: Arithmetic[Matrix]) -> None:
        self._context = context
        self._size = size
        self._arithmetic = arithmetic
        self._blocks: list[Matrix] = []
        self._sketches: list[bytes] = []
        self._states: list[bytes] = []
        self._fill: CommitmentTree | None = None
        self._walk: CommitmentTree | None = None

    def fill(self) -> bytes:
        """Fill the memory and return the root over the blocks' sketches.

        Raises:
            MemoryError, RuntimeError: numpy, torch: there is not that much memory.
        """
        n, arithmetic = self._size.columns, self._arithmetic
        seed = self._size.seed(self._context)
        right = arithmetic.expand(key_from(seed, "right"), 0, n, n)
        sketch = arithmetic.expand(key_from(seed, "sketch"), 0, STATE_COLUMNS, n)
        left_key = key_from(seed, "left")
        for block in range(self._size.blocks):
            left = arithmetic.expand(left_key, block * n, n, n)
            self._blocks.append(arithmetic.cube(arithmetic.multiply(left, right)))
            self._sketches.append(arithmetic.to_bytes(arithmetic.multiply(sketch, self._blocks[-1])))
        self._fill = CommitmentTree([leaf_hash(entries) for entries in self._sketches])
        return self._fill.root

    def walk(self, walk_nonce: bytes) -> bytes:
        """Walk over the blocks and return the root over the states, the start among them.

        Raises:
            ValueError: nothing is filled, or the nonce is short.
        """
        if self._fill is None:
            raise ValueError("a walk starts after the fill is committed to")
        size, arithmetic = self._size, self._arithmetic
        path = walk_path(self._context, size, walk_nonce, self._fill.root)
        state = arithmetic.expand(path.start_key(), 0, STATE_COLUMNS, size.columns)
        self._states = [arithmetic.to_bytes(state)]
        hashes = [leaf_hash(self._states[0])]
        for step in range(size.steps):
            chosen = path.chosen(step, hashes[-1])
            state = arithmetic.multiply_sum(arithmetic.plus_one(state), [self._blocks[block] for block in chosen])
            self._states.append(arithmetic.to_bytes(state))
            hashes.append(leaf_hash(self._states[-1]))
        self._walk = CommitmentTree(hashes)
        return self._walk.root

    def open(self, steps: Sequence[int], blocks: Sequence[int]) -> tuple[list[Opening], list[Opening]]:
        """Return the states around the steps drawn, and the sketches of the blocks drawn.

        Raises:
            ValueError: nothing is walked, or there is no such step or block.
        """
        if self._fill is None or self._walk is None:
            raise ValueError("states are opened after the walk is committed to")
        if not all(0 <= step < self._size.steps for step in steps):
            raise ValueError(f"steps {list(steps)} are not all among the {self._size.steps} of the walk")
        if not all(0 <= block < self._size.blocks for block in blocks):
            raise ValueError(f"blocks {list(blocks)} are not all among the {self._size.blocks} of the fill")
        states = [self._walk.opening(index, self._states[index]) for index in states_asked(steps)]
        return states, [self._fill.opening(block, self._sketches[block]) for block in blocks]
