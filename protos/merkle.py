"""Merkle tree hashes of an append-only log, and the two proofs about it (RFC 6962, RFC 9162 section 2.1).

Pure arithmetic over SHA-256, for whoever checks a log that somebody else
keeps: an inclusion proof shows that an entry is in the tree of a given root,
a consistency proof that a later tree begins with every entry of an earlier
one. Sizes are bound by the signed checkpoint that names them with the root,
never by a proof alone.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

HASH_BYTES = 32
# Sizes and indexes fit a signed 64-bit integer, in every database and language.
SIZE_MAX = (1 << 63) - 1
# A consistency proof has at most one hash for every level and one more; an inclusion proof has one fewer.
PROOF_HASHES_MAX = 64
# The root of a log without entries.
EMPTY_ROOT = hashlib.sha256(b"").digest()

# Different prefixes, so that no entry can pass as an inner node (RFC 6962, section 2.1).
_LEAF = b"\x00"
_NODE = b"\x01"


class ProofInvalid(Exception):
    """A proof does not show what it is said to show; the message says at which step it failed."""


class Position(NamedTuple):
    """A complete subtree: the one over the leaves [offset * 2^level, (offset + 1) * 2^level)."""

    level: int
    offset: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """All of a tree that appending needs: the roots of its complete subtrees, largest first."""

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def root(self) -> bytes:
        return fold(self.peaks)


@dataclass(frozen=True, slots=True)
class Extension:
    """A longer tree, and every complete subtree that it has and the shorter one had not."""

    frontier: Frontier
    made: dict[Position, bytes]


def leaf_hash(entry: bytes) -> bytes:
    return hashlib.sha256(_LEAF + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


def fold(peaks: Sequence[bytes]) -> bytes:
    """Return the root over subtrees that stand side by side, each larger than the next."""
    if not peaks:
        return EMPTY_ROOT
    root = peaks[-1]
    for peak in reversed(peaks[:-1]):
        root = node_hash(peak, root)
    return root


def extend(frontier: Frontier, entries: Iterable[bytes]) -> Extension:
    """Append entries; two hashes for each on the average, log2(size) at most."""
    size = frontier.size
    peaks = list(frontier.peaks)
    made: dict[Position, bytes] = {}
    for entry in entries:
        level, offset = 0, size
        subtree = leaf_hash(entry)
        made[Position(0, offset)] = subtree
        # As in binary addition: each set bit of the size is a complete subtree that waits for a sibling.
        while offset & 1:
            subtree = node_hash(peaks.pop(), subtree)
            level, offset = level + 1, offset >> 1
            made[Position(level, offset)] = subtree
        peaks.append(subtree)
        size += 1
    return Extension(Frontier(size, tuple(peaks)), made)


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that the leaf with this hash has this index in the tree (RFC 9162, section 2.1.3.2).

    Raises:
        ProofInvalid: it is not shown.
    """
    if not 0 <= index < size <= SIZE_MAX:
        raise ProofInvalid(f"index {index} is not in a tree of {size} entries")
    _check_hashes(proof, leaf, root)
    path, last = index, size - 1
    found = leaf
    for sibling in proof:
        if last == 0:
            raise ProofInvalid("the inclusion proof has more hashes than the tree has levels")
        if path & 1 or path == last:
            found = node_hash(sibling, found)
            # At the right edge, levels at which this subtree has no sibling are passed over.
            while path and not path & 1:
                path, last = path >> 1, last >> 1
        else:
            found = node_hash(found, sibling)
        path, last = path >> 1, last >> 1
    if last != 0:
        raise ProofInvalid("the inclusion proof has fewer hashes than the tree has levels")
    if found != root:
        raise ProofInvalid("the inclusion proof leads to another root")


def verify_consistency(old_size: int, old_root: bytes, new_size: int, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Check that the new tree begins with all entries of the old one (RFC 9162, section 2.1.4.2).

    Every tree extends the empty one; that, and a tree's consistency with
    itself, is shown by an empty proof.

    Raises:
        ProofInvalid: it is not shown.
    """
    if not 0 <= old_size <= new_size <= SIZE_MAX:
        raise ProofInvalid(f"a tree of {new_size} entries cannot extend one of {old_size}")
    _check_hashes(proof, old_root, new_root)
    if old_size in (0, new_size):
        if proof:
            raise ProofInvalid("nothing is to be shown, and the consistency proof is not empty")
        if old_root != (EMPTY_ROOT if old_size == 0 else new_root):
            raise ProofInvalid("the roots do not fit the sizes")
        if new_size == 0 and new_root != EMPTY_ROOT:
            raise ProofInvalid("the roots do not fit the sizes")
        return
    if not proof:
        raise ProofInvalid("the consistency proof is empty")
    old, new = _roots_shown(old_size, old_root, new_size, proof)
    if old != old_root:
        raise ProofInvalid("the consistency proof leads to another old root")
    if new != new_root:
        raise ProofInvalid("the consistency proof leads to another new root")


def _roots_shown(old_size: int, old_root: bytes, new_size: int, proof: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the old and the new root that a consistency proof leads to."""
    path, last = old_size - 1, new_size - 1
    while path & 1:
        path, last = path >> 1, last >> 1
    # Where the old tree is one complete subtree of the new one, its root is known and left out of the proof.
    first, rest = (proof[0], proof[1:]) if old_size & (old_size - 1) else (old_root, proof)
    old = new = first
    for sibling in rest:
        if last == 0:
            raise ProofInvalid("the consistency proof has more hashes than the tree has levels")
        if path & 1 or path == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while path and not path & 1:
                path, last = path >> 1, last >> 1
        else:
            new = node_hash(new, sibling)
        path, last = path >> 1, last >> 1
    if last != 0:
        raise ProofInvalid("the consistency proof has fewer hashes than the tree has levels")
    return old, new


def _check_hashes(proof: Sequence[bytes], *others: bytes) -> None:
    if len(proof) > PROOF_HASHES_MAX:
        raise ProofInvalid(f"a proof of {len(proof)} hashes; no tree needs more than {PROOF_HASHES_MAX}")
    for value in (*proof, *others):
        if len(value) != HASH_BYTES:
            raise ProofInvalid(f"a hash of {len(value)} bytes instead of {HASH_BYTES}")
