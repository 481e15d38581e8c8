"""Where chunks come from: the port, and the directory as its simplest implementation.

A source needs no trust: every chunk is checked before it counts. So it only
has to say honestly why it gave nothing, and to give up by itself when nothing
comes any more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from agent.model_store.fetch_events import FailureKind
from agent.model_store.plan import ChunkRange

# Silence after which a source counts as stalled, and what it must give in such a time at least: a line of 1 KB/s
# would need three hours for one chunk.
STALL_S = 30.0
STALL_BYTES_MIN = 32 * 1024
# What is read at a time from a directory: a fraction of a chunk, so that a pause is prompt.
READ_BYTES = 1024 * 1024

T = TypeVar("T")


class SourceFailed(Exception):
    """A source gave not what was asked of it.

    `retry_after_s` is its own wish.
    """

    def __init__(self, kind: FailureKind, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s


class Source(Protocol):
    """Something that may have the files of a model."""

    @property
    def name(self) -> str:
        """For people: a host, a directory, a repository. Never a secret."""
        ...

    def fetch(self, wanted: ChunkRange, *, whole_file: bool) -> AsyncGenerator[bytes | memoryview, None]:
        """Yield the bytes of a range, in order; closing it breaks off.

        With `whole_file` a source without ranges may read and drop what comes
        before the range.

        Raises:
            SourceFailed: at any point, also after bytes have come.
        """
        ...


class DirectorySource:
    """Files under a local path: a mounted share of the neighbourhood, or the store of another machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def name(self) -> str:
        return f"file://{self._directory}"

    async def fetch(self, wanted: ChunkRange, *, whole_file: bool) -> AsyncGenerator[bytes | memoryview, None]:
        path = self._directory / wanted.file.path
        stream = await self._patiently(path, partial(self._open, path, wanted))
        try:
            left = wanted.length_bytes
            while left:
                block = await self._patiently(path, partial(stream.read, min(READ_BYTES, left)))
                if not block:
                    raise SourceFailed(FailureKind.BROKEN, f"{path} became shorter while it was read")
                left -= len(block)
                yield block
        finally:
            stream.close()

    def _open(self, path: Path, wanted: ChunkRange) -> BinaryIO:
        stream = path.open("rb")
        size_bytes = stream.seek(0, 2)
        if size_bytes != wanted.file.size_bytes:
            stream.close()
            detail = f"{path} has {size_bytes} bytes, not {wanted.file.size_bytes}"
            raise SourceFailed(FailureKind.WRONG, detail)
        stream.seek(wanted.offset_bytes)
        return stream

    async def _patiently(self, path: Path, work: Callable[[], T]) -> T:
        """Do what a share may take its time for."""
        try:
            async with asyncio.timeout(STALL_S):
                return await asyncio.to_thread(work)
        except TimeoutError as error:
            raise SourceFailed(FailureKind.BROKEN, f"{path}: nothing for {STALL_S:.0f} s") from error
        except FileNotFoundError as error:
            raise SourceFailed(FailureKind.MISSING, f"{path} does not exist") from error
        except OSError as error:
            raise SourceFailed(FailureKind.BROKEN, f"{path} cannot be read ({error.strerror})") from error
