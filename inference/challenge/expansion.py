"""From a key to a matrix mod 251: the same bytes in numpy and torch, on every machine, any row by itself.

Word c of a matrix is splitmix64's finaliser over start + c * increment (mod
2^64), where both numbers come from SHA-256. A word is eight entries, lowest
byte first; a byte b stands for (b mod 251) - 125. So entries are the int8
numbers from -125 to 125, five of which (-125 to -121) come twice as often as
the rest. That does no harm here: these are the matrices of the question, which
the prover knows. What a verifier keeps secret is drawn without bias.

A hash like SHAKE gives 0.5 GB/s on a core and nothing on a card; this gives the
same work to both, in operations that every tensor library has.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference.challenge.context import Key
from inference.sampling import LAST_SHIFT, MIX

Residues = NDArray[np.int8]

MODULUS: Final = 251
# Residues are kept centred, so that they fit an int8 and products stay small.
CENTRE: Final = MODULUS // 2
BYTES_PER_WORD: Final = 8
# 256 KiB of words at a time stay in a core's own cache through the twelve passes over them.
_WORDS_AT_A_TIME: Final = 1 << 15


def expand(key: Key, first_row: int, rows: int, columns: int) -> Residues:
    """Return rows of a key's matrix.

    Args:
        columns: of the whole matrix; a multiple of 8.
    """
    words = columns // BYTES_PER_WORD
    first, total = first_row * words, rows * words
    out = np.empty(rows * columns, dtype=np.uint8)
    for done in range(0, total, _WORDS_AT_A_TIME):
        count = min(_WORDS_AT_A_TIME, total - done)
        start = done * BYTES_PER_WORD
        counters = np.arange(first + done, first + done + count).astype(np.uint64)
        out[start : start + count * BYTES_PER_WORD] = _entries(key, counters)
    return out.view(np.int8).reshape(rows, columns)


def expand_rows(key: Key, rows: NDArray[np.uint64], columns: int) -> Residues:
    """Return chosen rows of a key's matrix, in the order given."""
    words = columns // BYTES_PER_WORD
    counters = rows[:, None] * np.uint64(words) + np.arange(words).astype(np.uint64)
    return _entries(key, counters.reshape(-1)).view(np.int8).reshape(len(rows), columns)


def _entries(key: Key, value: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return the entries of the words with these counters, as bytes; the counters are overwritten."""
    value *= np.uint64(key.increment)
    value += np.uint64(key.start)
    for shift, multiplier in MIX:
        value ^= value >> np.uint64(shift)
        value *= np.uint64(multiplier)
    value ^= value >> np.uint64(LAST_SHIFT)
    entries = value.astype("<u8", copy=False).view(np.uint8)
    # On uint8 both lines wrap around, as they do in torch.
    entries -= (entries >= MODULUS).view(np.uint8) * np.uint8(MODULUS)
    entries -= np.uint8(CENTRE)
    return entries
