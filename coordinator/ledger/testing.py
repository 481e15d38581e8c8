"""A store of the log's hashes in memory. For tests only."""

from collections.abc import Iterable, Mapping, Sequence

from protos.merkle import Frontier, Position, extend


class MemoryHashStore:
    """Keeps to `coordinator.ledger.port.HashStore`, and counts the hashes that are read."""

    def __init__(self) -> None:
        self._hashes: dict[Position, bytes] = {}
        self.hashes_read = 0

    def insert(self, hashes: Mapping[Position, bytes]) -> None:
        for position, value in hashes.items():
            if self._hashes.setdefault(position, value) != value:
                raise ValueError(f"another hash is stored at {position}")

    def log_size(self) -> int:
        return sum(1 for position in self._hashes if position.level == 0)

    def log_hashes(self, positions: Sequence[Position]) -> list[bytes]:
        self.hashes_read += len(positions)
        return [self._hashes[position] for position in positions]


def filled_store(entries: Iterable[bytes]) -> tuple[MemoryHashStore, Frontier]:
    """Return a store that holds the log of these entries, and its frontier."""
    store = MemoryHashStore()
    extension = extend(Frontier(), entries)
    store.insert(extension.made)
    return store, extension.frontier
