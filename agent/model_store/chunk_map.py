"""Which chunks of a model are on the disk for good: one bit each, in a file beside the sparse files.

The order is what makes it survive a crash at any point: a chunk is written and
synced before its bit is, so that a set bit always stands for bytes that are
there. A bit that was lost costs one chunk.
"""

import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path

MAGIC = b"SWCHUNK1"
# Magic, digest of the manifest, count of chunks.
_HEADER = struct.Struct("<8s32sI")


class ChunkMap:
    """The bitmap of one model. `add` may be called from several threads.

    Raises:
        OSError: from everything that writes; what was durable before stays so.
    """

    def __init__(self, path: Path, manifest_sha256: bytes, count: int) -> None:
        self._header = _HEADER.pack(MAGIC, manifest_sha256, count)
        self._path = path
        self._count = count
        self._lock = threading.Lock()
        self._bits = self._load() or bytearray((count + 7) // 8)
        self._write_whole()
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def __contains__(self, chunk: int) -> bool:
        return bool(self._bits[chunk >> 3] & (1 << (chunk & 7)))

    def add(self, chunk: int) -> None:
        """Record that a chunk's bytes are checked and synced; durable on return."""
        with self._lock:
            byte = self._bits[chunk >> 3] | (1 << (chunk & 7))
            os.pwrite(self._file, bytes([byte]), _HEADER.size + (chunk >> 3))
            self._bits[chunk >> 3] = byte
        os.fdatasync(self._file)

    def discard(self, chunks: Iterable[int]) -> None:
        """Forget chunks whose bytes are not there after all; durable on return."""
        with self._lock:
            for chunk in chunks:
                self._bits[chunk >> 3] &= ~(1 << (chunk & 7)) & 0xFF
            os.pwrite(self._file, self._bits, _HEADER.size)
        os.fdatasync(self._file)

    def fill(self) -> None:
        """Take every chunk for present, until somebody has looked; not durable."""
        with self._lock:
            for chunk in range(self._count):
                self._bits[chunk >> 3] |= 1 << (chunk & 7)

    def close(self) -> None:
        os.close(self._file)

    def _load(self) -> bytearray | None:
        """Return the bits on the disk; None where there are none, or they are those of another model."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != len(self._header) + (self._count + 7) // 8 or not content.startswith(self._header):
            return None
        return bytearray(content[len(self._header) :])

    def _write_whole(self) -> None:
        scratch = self._path.with_name(self._path.name + ".new")
        with scratch.open("wb") as stream:
            stream.write(self._header + self._bits)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(self._path)
