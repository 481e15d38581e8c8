"""Proofs about the ledger's log, made from stored hashes.

Every complete subtree of the log is stored once, when it comes to be: two
hashes an entry on the average, none of which ever changes. What a proof needs
is then either stored or folded from the stored subtrees at the right edge, so
that a proof about a million entries reads some twenty hashes, in one call of
the store, for any size that the log ever had.

Pure: a `HashStore` is handed in. What was appended is returned, for the
caller to store in the transaction that stores the entries.
"""

from collections.abc import Sequence

from coordinator.ledger.port import HashStore
from protos.merkle import Frontier, Position, fold

# The leaves [first, last + 1): first is a multiple of the largest power of two below the length.
_Range = tuple[int, int]


def load_frontier(store: HashStore, size: int) -> Frontier:
    """Return what appending to a log of `size` entries needs; for a start of the coordinator."""
    return Frontier(size, tuple(store.log_hashes(_subtrees(0, size))))


def prove_inclusion(store: HashStore, index: int, size: int) -> list[bytes]:
    """Return the proof that entry `index` is in the log of `size` entries (RFC 9162, section 2.1.3.1).

    Raises:
        ValueError: the log of this size has no such entry.
    """
    if not 0 <= index < size:
        raise ValueError(f"entry {index} is not in a log of {size} entries")
    siblings: list[_Range] = []
    start, end = 0, size
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            siblings.append((middle, end))
            end = middle
        else:
            siblings.append((start, middle))
            start = middle
    return _roots(store, siblings[::-1])


def prove_consistency(store: HashStore, old_size: int, new_size: int) -> list[bytes]:
    """Return the proof that the log of `new_size` begins with that of `old_size` (RFC 9162, section 2.1.4.1).

    Raises:
        ValueError: the old log is the longer one.
    """
    if not 0 <= old_size <= new_size:
        raise ValueError(f"a log of {new_size} entries does not begin with one of {old_size}")
    if old_size in (0, new_size):
        return []
    siblings: list[_Range] = []
    start, end = 0, new_size
    while end > old_size:
        middle = start + _split(end - start)
        if old_size <= middle:
            siblings.append((middle, end))
            end = middle
        else:
            siblings.append((start, middle))
            start = middle
    # The last subtree of the old tree. Where that is the whole old tree, its root is known to whoever asks.
    if start:
        siblings.append((start, end))
    return _roots(store, siblings[::-1])


def _split(leaves: int) -> int:
    """Return the largest power of two below `leaves`, which is at least 2."""
    return 1 << ((leaves - 1).bit_length() - 1)


def _subtrees(start: int, end: int) -> list[Position]:
    """Return the complete subtrees that make up a range of leaves, largest first."""
    found = []
    while start < end:
        level = (end - start).bit_length() - 1
        found.append(Position(level, start >> level))
        start += 1 << level
    return found


def _roots(store: HashStore, ranges: Sequence[_Range]) -> list[bytes]:
    """Return the root over each range, with one read of the store for all."""
    parts = [_subtrees(start, end) for start, end in ranges]
    hashes = iter(store.log_hashes([position for part in parts for position in part]))
    return [fold([next(hashes) for _ in part]) for part in parts]
