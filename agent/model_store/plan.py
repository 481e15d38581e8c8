"""Which chunks a model has, numbered through all its files. Pure arithmetic."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from inference.model_chunks import CHUNK_BYTES, ManifestFile, chunk_count


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Chunks of one file that follow each other: what one request asks a source for."""

    file: ManifestFile
    # Index in the file of the first.
    first: int
    count: int

    @property
    def offset_bytes(self) -> int:
        return self.first * CHUNK_BYTES

    @property
    def length_bytes(self) -> int:
        return min(self.file.size_bytes, (self.first + self.count) * CHUNK_BYTES) - self.offset_bytes


class ChunkPlan:
    """The chunks of a model by number, in the order of its files."""

    def __init__(self, files: Sequence[ManifestFile]) -> None:
        self.files = tuple(files)
        # Number of the first chunk of each file, and behind the last one the count of all.
        self._starts = [0]
        for file in self.files:
            self._starts.append(self._starts[-1] + chunk_count(file.size_bytes))

    @property
    def count(self) -> int:
        return self._starts[-1]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def chunks_of(self, file_index: int) -> range:
        return range(self._starts[file_index], self._starts[file_index + 1])

    def file_index(self, chunk: int) -> int:
        if not 0 <= chunk < self.count:
            raise IndexError(f"chunk {chunk} of {self.count}")
        return bisect_right(self._starts, chunk) - 1

    def chunk_range(self, chunk: int, count: int = 1) -> ChunkRange:
        """Return `count` chunks from this one on; all must be of one file."""
        index = self.file_index(chunk)
        if count < 1 or chunk + count > self._starts[index + 1]:
            raise IndexError(f"chunks {chunk} to {chunk + count - 1} are not of one file")
        return ChunkRange(self.files[index], chunk - self._starts[index], count)

    def chunk_bytes(self, chunk: int) -> int:
        return self.chunk_range(chunk).length_bytes

    def chunk_sha256(self, chunk: int) -> bytes:
        one = self.chunk_range(chunk)
        return one.file.chunk_sha256[one.first]
