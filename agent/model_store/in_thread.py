"""Blocking work that must not be left behind."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Callable[[], T]) -> T:
    """Run blocking work in a thread; where the caller is cancelled, wait for the thread all the same.

    A thread that still writes while its files are closed and removed would
    write into whatever has their descriptors next.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        # Nobody is there to whom a failure could be told any more.
        running.exception()
        raise
