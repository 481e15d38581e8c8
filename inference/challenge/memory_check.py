"""The verifier of the memory challenge: rows of what was opened, recomputed in numpy.

`inference/challenge/memory.py` tells the protocol and what the check is worth.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

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

    picks = _rows(secret, size.columns, rows * (len(claim.steps) + len(claim.blocks)))
    of_steps, of_blocks = np.split(picks, [rows * len(claim.steps)])
    chosen = [path.chosen(step, hashes[step]) for step in claim.steps]
    wanted = [
        block * size.columns + int(row)
        for blocks, drawn in zip(chosen, of_steps.reshape(-1, rows), strict=True)
        for block in blocks
        for row in drawn
    ]
    wanted += [
        block * size.columns + int(row)
        for block, drawn in zip(claim.blocks, of_blocks.reshape(-1, rows), strict=True)
        for row in drawn
    ]
    found = block_rows(context, size, np.array(wanted, dtype=np.uint64))
    per_step = rows * size.blocks_per_step
    for place, step in enumerate(claim.steps):
        read = found[place * per_step : (place + 1) * per_step].reshape(size.blocks_per_step, rows, size.columns)
        drawn = of_steps[place * rows : (place + 1) * rows]
        after = _ARITHMETIC.multiply_sum(_ARITHMETIC.plus_one(by_index[step]), list(read))
        if not np.array_equal(after, by_index[step + 1][:, drawn]):
            raise ProofRejected(f"step {step} of the walk does not lead to the state that follows it")
    weights = expand(key_from(size.seed(context), "sketch"), 0, STATE_COLUMNS, size.columns)
    rest = found[len(claim.steps) * per_step :].reshape(len(claim.blocks), rows, size.columns)
    for place, opening in enumerate(sketches):
        drawn = of_blocks[place * rows : (place + 1) * rows]
        sketch = _columns("sketch", opening, size)[:, drawn]
        if not np.array_equal(_ARITHMETIC.multiply(weights, rest[place]), sketch):
            raise ProofRejected(f"the sketch of block {opening.index} is not that of the block")


def block_rows(context: ChallengeContext, size: MemorySize, rows: np.typing.NDArray[np.uint64]) -> Residues:
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


def _rows(secret: bytes, columns: int, count: int) -> np.typing.NDArray[np.int64]:
    """Return row numbers drawn by the secret; from 64 bits, so that none is likelier to speak of."""
    stream = np.frombuffer(hashlib.shake_256(secret).digest(8 * count), dtype="<u8")
    return (stream % np.uint64(columns)).astype(np.int64)
