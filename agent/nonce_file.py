"""Nonces that were used, on disk, so that no restart lets a header run twice.

An append-only file of fixed records. Records are flushed to the disk, many
with one flush, before `append` returns: the caller begins no work before. A
record cut short by a crash belongs to work that had not begun.
"""

import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from agent.assignments import NONCES_MAX, NonceUse

_RECORD = struct.Struct("<16sq")
# Twice what can be in force: then at least half of the records are void and rewriting pays.
RECORDS_MAX = 2 * NONCES_MAX


class NonceFile:
    """One agent's file. The methods block: call them in a thread, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def load(self) -> list[NonceUse]:
        """Return every record and drop a last one that was cut short."""
        data = self._path.read_bytes()
        whole = len(data) - len(data) % _RECORD.size
        os.ftruncate(self._descriptor, whole)
        self._records = whole // _RECORD.size
        return [NonceUse(nonce, void_from_ms) for nonce, void_from_ms in _RECORD.iter_unpack(data[:whole])]

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


def _pack(uses: Iterable[NonceUse]) -> bytes:
    return b"".join(_RECORD.pack(use.nonce, use.void_from_ms) for use in uses)


def _write_through(descriptor: int, data: bytes, path: Path) -> None:
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, f"{path} took a part of the data only; is the disk full?")
    os.fdatasync(descriptor)
