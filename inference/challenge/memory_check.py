"""The verifier of the memory challenge: rows of what was opened, recomputed in numpy.

`inference/challenge/memory.py` tells the protocol and what the check is worth.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference.challenge.arithmetic import NumpyArithmetic
from inference.challenge.commitment import Opening, check_openings
from inference.challenge.compute import SECRET_BYTES
from inference.challenge.context import ChallengeContext, ProofRejected, key_from
from inference.challenge.expansion import CENTRE, Residues, expand, expand_rows
from inference.challenge.memory import STATE_COLUMNS, MemorySize, states_asked, walk_path
from protos.merkle import leaf_hash

_ARITHMETIC: Final = NumpyArithmetic()
# Rows recomputed at a time: 512 of n = 4096 are 2 MiB, and 8 MiB as float32.
_ROWS_AT_A_TIME: Final = 512


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """What a prover committed to, and what it was asked to open.

    Args:
        walk_nonce: as sent after the fill's root was received.
        steps: drawn after the walk's root was received, as are the blocks.
    """

    fill_root: bytes
    walk_nonce: bytes
    walk_root: bytes
    steps: tuple[int, ...]
    blocks: tuple[int, ...]


def verify_memory(
    context: ChallengeContext,
    size: MemorySize,
    claim: MemoryClaim,
    states: Sequence[Opening],
    sketches: Sequence[Opening],
    *,
    rows: int,
    secret: bytes,
) -> None:
    """Check the walk at the steps drawn and the fill at the blocks drawn.

    Recomputes `rows` rows of every block that a drawn step read, and of every
    drawn block: 2 n^2 operations each.

    Args:
        secret: 32 bytes from the system's random source, drawn after the openings were received; picks the rows.

    Raises:
        ProofRejected: the openings do not show that walk over that fill.
        ValueError: nothing is drawn, or the secret is short.
    """
    if not claim.steps or not claim.blocks or rows < 1 or len(secret) < SECRET_BYTES:
        raise ValueError(
            f"{len(claim.steps)} steps, {len(claim.blocks)} blocks, {rows} rows, {len(secret)} secret bytes: "
            f"at least 1, 1, 1 and {SECRET_BYTES} are needed"
        )
    lengths = {"content_bytes": size.state_bytes}
    asked = states_asked(claim.steps)
    check_openings("state", states, asked, leaves=size.states, root=claim.walk_root, **lengths)
    check_openings("sketch", sketches, claim.blocks, leaves=size.blocks, root=claim.fill_root, **lengths)
    by_index = {opening.index: _columns("state", opening, size) for opening in states}
    hashes = {opening.index: leaf_hash(opening.content) for opening in states}
    path = walk_path(context, size, claim.walk_nonce, claim.fill_root)
    if not np.array_equal(by_index[0], expand(path.start_key(), 0, STATE_COLUMNS, size.columns)):
        raise ProofRejected("the walk does not start where its nonce says")

    drawn = _rows(secret, size.columns, rows, len(claim.steps) + len(claim.blocks))
    chosen = [path.chosen(step, hashes[step]) for step in claim.steps]
    read = [*chosen, *([block] for block in claim.blocks)]
    found = _rows_read(context, size, read, drawn)
    for step, picks, parts in zip(claim.steps, drawn, found, strict=False):
        after = _ARITHMETIC.multiply_sum(_ARITHMETIC.plus_one(by_index[step]), parts)
        if not np.array_equal(after, by_index[step + 1][:, picks]):
            raise ProofRejected(f"step {step} of the walk does not lead to the state that follows it")
    weights = expand(key_from(size.seed(context), "sketch"), 0, STATE_COLUMNS, size.columns)
    places = len(claim.steps)
    for opening, picks, [part] in zip(sketches, drawn[places:], found[places:], strict=True):
        sketch = _columns("sketch", opening, size)[:, picks]
        if not np.array_equal(_ARITHMETIC.multiply(weights, part), sketch):
            raise ProofRejected(f"the sketch of block {opening.index} is not that of the block")


def _rows_read(
    context: ChallengeContext, size: MemorySize, read: Sequence[Sequence[int]], drawn: NDArray[np.int64]
) -> list[list[Residues]]:
    """Return the rows drawn of all blocks that were read, at each place; recomputed together, which is faster."""
    wanted = [
        block * size.columns + int(row)
        for blocks, rows in zip(read, drawn, strict=True)
        for block in blocks
        for row in rows
    ]
    found = iter(np.split(block_rows(context, size, np.array(wanted, dtype=np.uint64)), len(wanted) // drawn.shape[1]))
    return [[next(found) for _ in blocks] for blocks in read]


def block_rows(context: ChallengeContext, size: MemorySize, rows: NDArray[np.uint64]) -> Residues:
    """Return rows of the fill; row r is row r mod n of block r // n."""
    seed = size.seed(context)
    right = expand(key_from(seed, "right"), 0, size.columns, size.columns)
    left_key = key_from(seed, "left")
    parts = [
        _ARITHMETIC.cube(
            _ARITHMETIC.multiply(expand_rows(left_key, rows[at : at + _ROWS_AT_A_TIME], size.columns), right)
        )
        for at in range(0, len(rows), _ROWS_AT_A_TIME)
    ]
    return np.concatenate(parts)


def _columns(what: str, opening: Opening, size: MemorySize) -> Residues:
    entries = np.frombuffer(opening.content, dtype=np.int8).reshape(STATE_COLUMNS, size.columns)
    if int(entries.min()) < -CENTRE or int(entries.max()) > CENTRE:
        raise ProofRejected(f"{what} {opening.index} has entries outside -{CENTRE} to {CENTRE}")
    return entries


def _rows(secret: bytes, columns: int, rows: int, places: int) -> NDArray[np.int64]:
    """Return row numbers for every place, drawn by the secret from 64 bits, so that none is likelier to speak of."""
    stream = np.frombuffer(hashlib.shake_256(secret).digest(8 * rows * places), dtype="<u8")
    return (stream % np.uint64(columns)).astype(np.int64).reshape(places, rows)
