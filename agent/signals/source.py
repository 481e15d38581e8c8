"""What a source of signals is, and what becomes of one that is missing or breaks."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import structlog

from agent.clock import until_next_s
from agent.owner.events import OwnerEvent, Unknown

# While something is lent an owner's return must be seen within a second (the give-back has two seconds in all).
LENDING_PERIOD_S = 1.0
# Otherwise nothing hurries: lending begins after minutes without input.
RESTING_PERIOD_S = 5.0
# How often a source that does not exist is looked for again: people plug things in and start desktops.
ABSENT_RETRY_S = 60.0
# A source that broke is tried again at once, then ever more seldom.
BROKEN_RETRY_S = 1.0
BROKEN_RETRY_MAX_S = 60.0
# Different complaints of one source that are logged; a source that invents ever new ones must not fill a disk.
COMPLAINTS_MAX = 16
# Events between two turns of the loop. Signals repeat, so that what falls off the far end comes again.
EVENTS_MAX = 1024

Tell = Callable[[OwnerEvent], None]

log = structlog.get_logger()


class SourceAbsent(Exception):
    """The source does not exist on this machine; the text says what was looked for."""


class SourceBroken(Exception):
    """The source exists and cannot be read now; the text says why."""


class Pace:
    """How often sources look, which depends on whether anything is lent. The daemon tells."""

    def __init__(self) -> None:
        self._lending = asyncio.Event()

    def lend(self, lending: bool) -> None:
        """Note whether any card is lent now; sources look faster from this moment on."""
        if lending:
            self._lending.set()
        else:
            self._lending.clear()

    async def tick(self) -> None:
        """Wait until it is time to look again."""
        if self._lending.is_set():
            await asyncio.sleep(until_next_s(LENDING_PERIOD_S))
            return
        try:
            async with asyncio.timeout(RESTING_PERIOD_S):
                await self._lending.wait()
        except TimeoutError:
            return

    async def rest(self, duration_s: float) -> None:
        """Wait for a fixed time."""
        await asyncio.sleep(duration_s)


class Source(Protocol):
    """One thing that tells about the owner."""

    # For logs; unique among the sources of one process.
    name: str

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        """Tell what is seen, at least every few seconds and at once when it matters, until the source fails.

        Raises:
            SourceAbsent: there is nothing to read here.
            SourceBroken: there is, and it cannot be read now.
        """
        ...

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        """Return what is told where the source cannot be read."""
        ...


async def run_sources(sources: Sequence[Source], on_event: Tell, pace: Pace) -> NoReturn:
    """Run sources for ever; whatever one of them does, the others go on.

    Raises:
        Exception: whatever `on_event` raises; nothing that a source raises.
    """
    waiting: deque[OwnerEvent] = deque(maxlen=EVENTS_MAX)
    arrived = asyncio.Event()

    def tell(event: OwnerEvent) -> None:
        waiting.append(event)
        arrived.set()

    async with asyncio.TaskGroup() as group:
        for source in sources:
            group.create_task(_keep_watching(source, tell, pace), name=f"signals: {source.name}")
        # Events are handed over here, outside of all sources, so that a fault of the receiver is not taken for theirs.
        while True:
            await arrived.wait()
            arrived.clear()
            while waiting:
                on_event(waiting.popleft())
    raise AssertionError("the loop above does not end")


async def _keep_watching(source: Source, tell: Tell, pace: Pace) -> NoReturn:
    complaints: set[tuple[Unknown, str]] = set()
    # What was said last; nothing once the source has told something.
    said: tuple[Unknown, str] | None = None
    retry_s = BROKEN_RETRY_S

    def told(event: OwnerEvent) -> None:
        nonlocal said
        said = None
        tell(event)

    while True:
        why, detail = await _watch_once(source, told, pace)
        if said is None:
            retry_s = BROKEN_RETRY_S
        if said != (why, detail):
            said = (why, detail)
            for event in source.unseen(why, detail):
                tell(event)
        if said not in complaints and len(complaints) < COMPLAINTS_MAX:
            complaints.add(said)
            if why is Unknown.BROKEN:
                log.warning("a signal cannot be read", source=source.name, detail=detail)
            else:
                log.info("a signal does not exist here", source=source.name, detail=detail)
        if why is Unknown.ABSENT:
            await pace.rest(ABSENT_RETRY_S)
        else:
            await pace.rest(retry_s)
            retry_s = min(2 * retry_s, BROKEN_RETRY_MAX_S)


async def _watch_once(source: Source, tell: Tell, pace: Pace) -> tuple[Unknown, str]:
    try:
        await source.watch(tell, pace)
    except SourceAbsent as error:
        return Unknown.ABSENT, str(error)
    except SourceBroken as error:
        return Unknown.BROKEN, str(error)
    except Exception as error:
        # A fault of ours in one reader must neither end the agent nor pass for "nobody is here".
        return Unknown.BROKEN, f"{type(error).__name__}: {error}"
