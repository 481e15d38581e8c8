"""What the ledger asks of the database.

Synchronous, like all of the store: drivers call it in threads.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from protos.merkle import Position


class HashStore(Protocol):
    """The hashes of the log's complete subtrees. None ever changes or goes."""

    def put(self, hashes: Mapping[Position, bytes]) -> None:
        """Add hashes, in the transaction that adds the entries below them."""
        ...

    def get(self, positions: Sequence[Position]) -> list[bytes]:
        """Return the hashes at these positions, in this order, with one query.

        Raises:
            KeyError: one of them is not stored.
        """
        ...
