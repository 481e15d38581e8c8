"""Merkle trees over things that are committed to first and opened later (RFC 6962 hashes, protos/merkle.py).

A tree over a number of leaves that is no power of two is filled up with the
hash of an empty leaf, which is no content of any challenge.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from inference.challenge.context import ProofRejected
from protos.merkle import ProofInvalid, leaf_hash, node_hash, verify_inclusion

EMPTY_LEAF = leaf_hash(b"")


@dataclass(frozen=True, slots=True)
class Opening:
    """One leaf of a tree: its place, its content, and the hashes that lead to the root."""

    index: int
    content: bytes
    proof: tuple[bytes, ...]


class CommitmentTree:
    """The tree over leaves whose hashes are given."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        padding = padded_size(len(leaves)) - len(leaves)
        self._levels: list[list[bytes]] = [[*leaves, *[EMPTY_LEAF] * padding]]
        while len(self._levels[-1]) > 1:
            below = self._levels[-1]
            self._levels.append([node_hash(below[i], below[i + 1]) for i in range(0, len(below), 2)])

    @property
    def root(self) -> bytes:
        return self._levels[-1][0]

    def opening(self, index: int, content: bytes) -> Opening:
        proof = tuple(level[(index >> height) ^ 1] for height, level in enumerate(self._levels[:-1]))
        return Opening(index, content, proof)


def padded_size(leaves: int) -> int:
    """Return the next power of two, which is the number of leaves of the tree."""
    return 1 << max(leaves - 1, 0).bit_length()


def check_openings(
    what: str, openings: Sequence[Opening], asked: Sequence[int], *, leaves: int, content_bytes: int, root: bytes
) -> None:
    """Check that exactly the leaves asked for are opened, in that order, each with its content under the root.

    Raises:
        ProofRejected: they are not.
    """
    found = [opening.index for opening in openings]
    if found != list(asked):
        raise ProofRejected(f"{what}: {list(asked)} were asked for, {found} were opened")
    for opening in openings:
        if len(opening.content) != content_bytes:
            raise ProofRejected(f"{what} {opening.index} has {len(opening.content)} bytes, not {content_bytes}")
        try:
            verify_inclusion(leaf_hash(opening.content), opening.index, padded_size(leaves), list(opening.proof), root)
        except ProofInvalid as error:
            raise ProofRejected(f"{what} {opening.index} is not what was committed to: {error}") from error
