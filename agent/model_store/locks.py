"""Locks between processes: files that `flock` holds, which end with whoever holds them, however they end.

The time of last change of a model's lock file is when the model was last used,
so that this survives a restart.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared(path: Path) -> Iterator[int]:
    """Hold a lock together with others; waits for one who holds it alone. Yields its descriptor."""
    descriptor = _lock(path, fcntl.LOCK_SH)
    assert descriptor is not None, "without LOCK_NB it waits"
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(path: Path) -> Iterator[int]:
    """Hold a lock alone; waits for others."""
    descriptor = _lock(path, fcntl.LOCK_EX)
    assert descriptor is not None, "without LOCK_NB it waits"
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_exclusive(path: Path) -> int | None:
    """Return the descriptor of a lock that is ours alone until it is closed; None where somebody has it."""
    return _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)


def held(path: Path) -> bool:
    """Whether anybody holds a lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(path: Path, how: int) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, how)
            # Whoever removed the file while we waited has left us a lock that nobody else sees.
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            os.close(descriptor)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
