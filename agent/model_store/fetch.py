"""The driver of a fetch: carries out what `agent.model_store.fetch_state` decides and tells it what came of it."""

import asyncio
import errno
import random
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import structlog

from agent.clock import monotonic_s
from agent.model_store import fetch_events as e
from agent.model_store.bandwidth import Bandwidth
from agent.model_store.fetch_state import STREAMS_MAX, FetchState
from agent.model_store.in_thread import to_its_end
from agent.model_store.partial import ChunkWrong, PartialModel
from agent.model_store.progress import FetchProgress
from agent.model_store.sources import Source, SourceFailed
from inference.model_chunks import CHUNK_BYTES

# How soon an owner who comes back gets the line back, and how often progress is told.
TICK_S = 0.25
# Chunks in memory at once, arriving or on their way to the disk: what a kill at any moment loses.
BUFFERS_MAX = STREAMS_MAX
# What a full disk says: space, quota, and the largest file that is allowed.
DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

log = structlog.get_logger()

# Why fetching is not allowed now; None where it is.
Allowed = Callable[[], str | None]


class FetchFailed(Exception):
    """No source is left; the message names each and what is wrong with it."""


class SpaceShort(Exception):
    """Quota or disk have no room for a model; the message says how much is missing, and what to do."""


class Fetch:
    """Fetches what is missing of one model. `run` once.

    Args:
        find_space: blocks; raises SpaceShort where what is still to come does not fit.
        allowed: asked four times a second.
        on_progress: told as often, from the event loop.
    """

    def __init__(
        self,
        partial: PartialModel,
        sources: list[Source],
        *,
        find_space: Callable[[], None],
        allowed: Allowed,
        bandwidth: Bandwidth,
        on_progress: Callable[[FetchProgress], None],
        jitter: random.Random,
    ) -> None:
        self._partial = partial
        self._sources = sources
        self._find_space = find_space
        self._allowed = allowed
        self._bandwidth = bandwidth
        self._on_progress = on_progress
        self._jitter = jitter
        missing = set(partial.missing())
        present = (chunk for chunk in range(partial.plan.count) if chunk not in missing)
        self._state = FetchState(
            partial.manifest.name,
            partial.manifest.digest,
            partial.plan,
            present,
            [source.name for source in sources],
        )
        self._buffers = _Buffers()
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._events: deque[e.Event] = deque()
        self._feeding = False
        self._arrived_bytes = 0
        self._gave_up: str | None = None
        self._over = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Return when every chunk is there. May be cancelled: what is on the disk by then stays.

        Raises:
            FetchFailed: no source is left.
            OSError: the disk is broken.
        """
        try:
            async with asyncio.TaskGroup() as self._group:
                ticking = self._group.create_task(self._tick())
                await self._over.wait()
                ticking.cancel()
                for run in self._runs.values():
                    run.cancel()
        except* OSError as broken:
            raise broken.exceptions[0] from None
        self._on_progress(self._state.progress(monotonic_s()))
        if self._gave_up is not None:
            raise FetchFailed(self._gave_up)

    async def _tick(self) -> None:
        while True:
            self._feed(e.PermissionChanged(self._allowed()))
            if self._arrived_bytes:
                arrived_bytes, self._arrived_bytes = self._arrived_bytes, 0
                self._feed(e.BytesArrived(arrived_bytes))
            self._feed(e.Tick())
            self._on_progress(self._state.progress(monotonic_s()))
            await asyncio.sleep(TICK_S)

    def _feed(self, event: e.Event) -> None:
        """Have the state handle an event, and the events that follow from it, in order. Never blocks."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                for command in self._state.handle(self._events.popleft(), monotonic_s()):
                    self._execute(command)
        finally:
            self._feeding = False

    def _execute(self, command: e.Command) -> None:
        assert self._group is not None, "commands come while run() runs"
        match command:
            case e.StartRun():
                run = self._group.create_task(self._run(command))
                self._runs[command.run_id] = run
                run.add_done_callback(lambda _: self._runs.pop(command.run_id, None))
            case e.StopRun():
                stopped = self._runs.pop(command.run_id, None)
                if stopped is not None:
                    stopped.cancel()
            case e.CheckSpace():
                self._group.create_task(self._check_space())
            case e.Report():
                self._report(command)
            case e.Finish():
                self._over.set()
            case e.GiveUp():
                self._gave_up = command.detail
                self._over.set()

    def _report(self, report: e.Report) -> None:
        about = {"source": report.source} if report.source is not None else {}
        if report.detail:
            about["detail"] = report.detail
        log.warning(report.message, model=self._partial.manifest.name, **about)

    async def _check_space(self) -> None:
        try:
            await to_its_end(self._find_space)
        except SpaceShort as error:
            self._feed(e.SpaceMissing(str(error)))
        else:
            self._feed(e.SpaceFound())

    async def _run(self, command: e.StartRun) -> None:
        try:
            await self._receive(command)
        except SourceFailed as failed:
            self._feed(
                e.RunFailed(command.run_id, failed.kind, failed.detail, failed.retry_after_s, self._jitter.random())
            )
        else:
            self._feed(e.RunEnded(command.run_id))

    async def _receive(self, command: e.StartRun) -> None:
        """Fill one buffer after the other; each full one goes its own way to the disk."""
        wanted = self._partial.plan.chunk_range(command.chunk, command.count)
        chunk = command.chunk
        buffer: memoryview | None = None
        filled, size_bytes = 0, self._partial.plan.chunk_bytes(chunk)
        try:
            # The port promises a generator that can be closed.
            async with aclosing(self._sources[command.source].fetch(wanted, whole_file=command.whole_file)) as blocks:
                async for block in blocks:
                    view = memoryview(block)
                    while len(view):
                        if buffer is None:
                            buffer = await self._buffers.take()
                        count = min(len(view), size_bytes - filled)
                        buffer[filled : filled + count] = view[:count]
                        filled, view = filled + count, view[count:]
                        if filled == size_bytes:
                            full, buffer = buffer, None
                            self._hand_over(command.run_id, chunk, full, size_bytes)
                            chunk, filled = chunk + 1, 0
                            if chunk == command.chunk + command.count:
                                return
                            size_bytes = self._partial.plan.chunk_bytes(chunk)
                    self._arrived_bytes += len(block)
                    wait_s = self._bandwidth.take(len(block), monotonic_s())
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
        finally:
            if buffer is not None:
                self._buffers.give_back(buffer)
        raise SourceFailed(e.FailureKind.BROKEN, f"{wanted.file.path} ended early")

    def _hand_over(self, run_id: int, chunk: int, buffer: memoryview, size_bytes: int) -> None:
        if not self._state.expects(run_id):
            self._buffers.give_back(buffer)
            return
        assert self._group is not None, "runs live while run() runs"
        self._feed(e.ChunkReceived(run_id, chunk))
        # Not part of the run: a chunk that has arrived is kept, even if its source is stopped this moment.
        self._group.create_task(self._store(chunk, buffer, size_bytes))

    async def _store(self, chunk: int, buffer: memoryview, size_bytes: int) -> None:
        try:
            await to_its_end(partial(self._partial.store_chunk, chunk, buffer[:size_bytes]))
        except ChunkWrong:
            self._feed(e.ChunkRefused(chunk))
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            self._feed(e.ChunkNotWritten(chunk, f"{self._partial.directory}: {error.strerror}"))
        else:
            self._feed(e.ChunkStored(chunk))
        finally:
            self._buffers.give_back(buffer)


class _Buffers:
    """Memory for chunks, used again and again; who wants one waits until the disk has taken another."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._left = asyncio.Semaphore(BUFFERS_MAX)

    async def take(self) -> memoryview:
        await self._left.acquire()
        return self._free.pop() if self._free else memoryview(bytearray(CHUNK_BYTES))

    def give_back(self, buffer: memoryview) -> None:
        self._free.append(buffer)
        self._left.release()
