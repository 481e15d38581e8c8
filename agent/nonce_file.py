"""Nonces that were used, on disk, so that no restart lets a header run twice.

An append-only file of fixed records. Records are flushed to the disk, many
with one flush, before `append` returns: the caller lets nothing of the work
out before. A record cut short by a crash belongs to work that nobody saw.
"""

import asyncio
import errno
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from agent import events as e
from agent.assignments import NONCES_MAX, NonceUse

_RECORD = struct.Struct("<16sq")
# The year 2109 in Unix milliseconds. No clock says so, and what does is no record: it would be kept for ever.
_VOID_FROM_MS_MAX = 2**42
# Twice what can be in force: then at least half of the records are void and rewriting pays.
RECORDS_MAX = 2 * NONCES_MAX

log = structlog.get_logger()


class NonceFile:
    """One agent's file. The methods block: call them in a thread, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def load(self) -> list[NonceUse]:
        """Return every record; drop a last one that was cut short, and what can be none."""
        data = self._path.read_bytes()
        whole = len(data) - len(data) % _RECORD.size
        os.ftruncate(self._descriptor, whole)
        self._records = whole // _RECORD.size
        uses = [
            NonceUse(nonce, void_from_ms)
            for nonce, void_from_ms in _RECORD.iter_unpack(data[:whole])
            if 0 < void_from_ms < _VOID_FROM_MS_MAX
        ]
        if dropped := -(-len(data) // _RECORD.size) - len(uses):
            log.warning(
                "the file of used nonces was damaged, as by a crash in mid-write: what is no record was dropped",
                path=str(self._path),
                dropped=dropped,
                kept=len(uses),
            )
        return uses

    def append(self, uses: Iterable[NonceUse]) -> None:
        """Add records and return when they are on the disk.

        Raises:
            OSError: the disk is full or broken; none of the uses counts as recorded.
        """
        packed = _pack(uses)
        try:
            _write_through(self._descriptor, packed, self._path)
        except OSError:
            # A full disk may have taken a part; the next record would begin in mid-record.
            os.ftruncate(self._descriptor, self._records * _RECORD.size)
            raise
        self._records += len(packed) // _RECORD.size

    @property
    def worth_rewriting(self) -> bool:
        return self._records > RECORDS_MAX

    def rewrite(self, uses: Iterable[NonceUse]) -> None:
        """Replace all records by those still in force."""
        packed = _pack(uses)
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_through(descriptor, packed, fresh)
        except OSError:
            os.close(descriptor)
            raise
        fresh.replace(self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._records = len(packed) // _RECORD.size

    def close(self) -> None:
        os.close(self._descriptor)


class NonceRecorder:
    """Writes nonces off the event loop, all that have come in the meantime with one flush.

    Args:
        in_force: returns the nonces that a rewritten file must hold.
        on_event: told what became of each order to record, from the event loop.
    """

    def __init__(
        self, file: NonceFile, in_force: Callable[[], list[NonceUse]], on_event: Callable[[e.Event], None]
    ) -> None:
        self._file = file
        self._in_force = in_force
        self._on_event = on_event
        # At most one for each attempt that the node takes on.
        self._waiting: list[e.RecordNonce] = []
        self._filled = asyncio.Event()

    def record(self, command: e.RecordNonce) -> None:
        self._waiting.append(command)
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._file.append, [command.use for command in batch])
                if self._file.worth_rewriting:
                    await asyncio.to_thread(self._file.rewrite, self._in_force())
            except OSError as error:
                log.error("cannot record nonces, so no task may begin", error=str(error))
                for command in batch:
                    self._on_event(e.NonceNotRecorded(command.key, f"cannot record the nonce: {error.strerror}"))
            else:
                for command in batch:
                    self._on_event(e.NonceRecorded(command.key, command.use))


def _pack(uses: Iterable[NonceUse]) -> bytes:
    return b"".join(_RECORD.pack(use.nonce, use.void_from_ms) for use in uses)


def _write_through(descriptor: int, data: bytes, path: Path) -> None:
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, f"{path} took a part of the data only; is the disk full?")
    os.fdatasync(descriptor)
