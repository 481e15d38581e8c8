"""Stand-ins for the readers of signals: a pace without waiting, a collector of events, a source that a test scripts."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from agent.owner.events import BusyObserved, InputObserved, OwnerEvent, Unknown
from agent.signals.source import Pace, Tell

# How long a test waits for what must come before it fails.
PATIENCE_S = 20.0


class Finished(Exception):
    """The script of a `ScriptedPace` is over."""


class ScriptedPace(Pace):
    """Does one step of a script instead of each wait, then ends the source."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        super().__init__()
        self._steps = list(steps)
        # How long each wait would have taken where the source names it.
        self.rests: list[float] = []

    async def tick(self) -> None:
        await asyncio.sleep(0)
        if not self._steps:
            raise Finished
        self._steps.pop(0)()

    async def rest(self, duration_s: float) -> None:
        self.rests.append(duration_s)
        await self.tick()


class NoPace(Pace):
    """Does not wait: for sources that wait for events. `ticks` are waited for until the test gives one."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = asyncio.Semaphore(0)
        self.rests: list[float] = []

    async def tick(self) -> None:
        await self.ticks.acquire()

    async def rest(self, duration_s: float) -> None:
        self.rests.append(duration_s)
        await asyncio.sleep(0)


class Seen:
    """Collects events; a test waits for those it expects."""

    def __init__(self) -> None:
        self.events: list[OwnerEvent] = []
        self._more = asyncio.Event()

    def __call__(self, event: OwnerEvent) -> None:
        self.events.append(event)
        self._more.set()

    def last(self, source: str) -> InputObserved | BusyObserved | None:
        """Return the latest event of a source."""
        for event in reversed(self.events):
            if isinstance(event, InputObserved | BusyObserved) and event.source == source:
                return event
        return None

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until something holds that events bring about."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                self._more.clear()
                await self._more.wait()

    async def value(self, source: str, wanted: object) -> None:
        """Wait until a source's latest value is the wanted one."""

        def reached() -> bool:
            event = self.last(source)
            value = event.idle_s if isinstance(event, InputObserved) else event.what if event is not None else None
            return value == wanted

        await self.until(reached)


class FakeSource:
    """A source whose every attempt to watch is one function."""

    def __init__(self, name: str, *attempts: Callable[[Tell], Awaitable[None]]) -> None:
        self.name = name
        self._attempts = list(attempts)
        self.tried = 0

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        self.tried += 1
        if self._attempts:
            await self._attempts.pop(0)(tell)
        await asyncio.Event().wait()
        raise AssertionError("waits for ever")

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [InputObserved(self.name, why, detail)]


@asynccontextmanager
async def listening(
    path: Path, handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]
) -> AsyncIterator[None]:
    """Serve a Unix socket; when this ends no connection and no task is left."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (OSError, EOFError):
            writer.close()  # the client is gone, as tests have it
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A closed transport is let go of in the next turn of the loop.
        await asyncio.sleep(0)


class Sender:
    """Writes to a connection whole, or a few bytes per turn of the loop, so that the reader gets them one by one.

    Args:
        piece: how many bytes at once; None for all.
    """

    def __init__(self, writer: asyncio.StreamWriter, piece: int | None) -> None:
        self._writer = writer
        self._piece = piece
        self._waiting: deque[bytes] = deque()

    def write(self, data: bytes) -> None:
        if self._piece is None:
            self._writer.write(data)
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._step)
        self._waiting.extend(data[start : start + self._piece] for start in range(0, len(data), self._piece))

    def close(self) -> None:
        self._writer.close()

    def _step(self) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._step)
