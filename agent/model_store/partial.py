"""A model that is being fetched: sparse files of full length, and the map of the chunks that are in them.

Everything here blocks (writing, hashing, syncing): callers use threads.
"""

import hashlib
import os
from pathlib import Path

from agent.model_store.chunk_map import ChunkMap
from agent.model_store.plan import ChunkPlan
from inference.manifest import MANIFEST_FILE, Manifest
from inference.model_chunks import CHUNK_BYTES


class ChunkWrong(Exception):
    """The bytes of a chunk do not have its hash."""


class PartialModel:
    """The directory in which a model grows.

    Raises:
        OSError: the disk is full, broken or not writable.
    """

    def __init__(self, directory: Path, map_path: Path, manifest: Manifest, envelope: bytes) -> None:
        self.directory = directory
        self.manifest = manifest
        self.plan = ChunkPlan(manifest.files)
        directory.mkdir(mode=0o700, exist_ok=True)
        write_durably(directory / MANIFEST_FILE, envelope)
        self.map = ChunkMap(map_path, bytes.fromhex(manifest.digest.removeprefix("sha256:")), self.plan.count)
        try:
            for index, file in enumerate(self.plan.files):
                self._size_file(index, directory / file.path, file.size_bytes)
            sync_directory(directory)
            sync_directory(map_path.parent)
        except OSError:
            self.map.close()
            raise

    def missing(self) -> list[int]:
        """Return the numbers of the chunks that are not there yet."""
        return [chunk for chunk in range(self.plan.count) if chunk not in self.map]

    def store_chunk(self, chunk: int, content: memoryview) -> None:
        """Check a chunk, put it into its place, and record it; durable on return. Safe from several threads.

        Raises:
            ChunkWrong: it is not what the manifest says; nothing was written.
            OSError: the disk took it not, or not wholly; its bit is not set.
        """
        one = self.plan.chunk_range(chunk)
        if len(content) != one.length_bytes or hashlib.sha256(content).digest() != self.plan.chunk_sha256(chunk):
            raise ChunkWrong(f"chunk {one.first} of {one.file.path}")
        descriptor = os.open(self.directory / one.file.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], one.offset_bytes + written)
            # Before the bit, always: the order is the whole point.
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        self.map.add(chunk)

    def check_chunks(self) -> set[int]:
        """Hash everything; whatever the map said, only right chunks count afterwards. Return the wrong ones."""
        self.map.fill()
        wrong: set[int] = set()
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for index, file in enumerate(self.plan.files):
            with (self.directory / file.path).open("rb") as stream:
                for chunk in self.plan.chunks_of(index):
                    count = stream.readinto(buffer)
                    digest = hashlib.sha256(buffer[:count]).digest()
                    if digest != self.plan.chunk_sha256(chunk):
                        wrong.add(chunk)
        self.map.discard(wrong)
        return wrong

    def close(self) -> None:
        self.map.close()

    def _size_file(self, index: int, path: Path, size_bytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                # New, or cut by somebody: whatever the map says, those bytes are not there.
                if any(chunk in self.map for chunk in self.plan.chunks_of(index)):
                    self.map.discard(self.plan.chunks_of(index))
                os.ftruncate(descriptor, size_bytes)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a small file so that after a crash it is the old one or the new one."""
    scratch = path.with_name(path.name + ".new")
    with scratch.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    scratch.replace(path)


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable: those created, renamed and removed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
