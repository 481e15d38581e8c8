"""The agent's companion in a user's session: tells the agent when that user was last seen, and nothing else.

    python -m agent.session_companion [--socket PATH]

Runs as a systemd --user unit. The agent itself is a hardened system service,
which sees neither X nor Wayland nor a session bus. The companion needs no right
of its own, takes no command, and sends one line (`agent.signals.companion_report`)
whenever something changes and every five seconds. Where the agent does not
listen it waits for it.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Literal

import structlog

from agent.clock import monotonic_s
from agent.owner.events import BusyObserved, InputObserved, OwnerEvent, Unknown
from agent.signals.companion_report import (
    IDLE_MS_MAX,
    REPORT_PERIOD_S,
    TEXT_CHARACTERS_MAX,
    BusyReport,
    InputReport,
    Report,
    encode_report,
)
from agent.signals.desktop import DesktopInhibitorSource, GameModeSource, MutterSource
from agent.signals.printable import printable
from agent.signals.settings import RUNTIME_DIRECTORY, SOCKET_NAME
from agent.signals.source import Pace, Source, run_sources
from agent.signals.wayland import WaylandSource
from agent.signals.x11 import X11Source

# An owner who was away for so long and is back is news that does not wait for the next report.
RETURN_S = 1.5
# Changes that follow each other closely go out together: at most five reports a second.
GATHER_S = 0.2
# The agent restarts within seconds and is updated within minutes.
RECONNECT_S = 1.0
RECONNECT_MAX_S = 30.0
# An agent that takes nothing for so long hangs; the connection is made anew.
SEND_TIMEOUT_S = 10.0

log = structlog.get_logger()


class Session:
    """What all sources of this session saw last, and whether that is news."""

    def __init__(self, now: Callable[[], float] = monotonic_s) -> None:
        self._now = now
        # With the time of each sighting, since idle time goes on growing until it is sent.
        self._inputs: dict[str, tuple[InputObserved, float]] = {}
        self._busy: dict[str, BusyObserved] = {}
        self.news = asyncio.Event()

    def observe(self, event: OwnerEvent) -> None:
        """Take what a source saw."""
        if isinstance(event, InputObserved):
            before = self._inputs.get(event.source)
            self._inputs[event.source] = (event, self._now())
            if before is None or self._is_news(before, event):
                self.news.set()
        elif isinstance(event, BusyObserved):
            if self._busy.get(event.source) != event:
                self.news.set()
            self._busy[event.source] = event

    def report(self, *, leaving: bool = False) -> Report:
        """Return the whole of it as of now."""
        inputs = tuple(self._input_report(event, seen_at) for event, seen_at in self._inputs.values())
        busy = tuple(
            BusyReport(source=event.source, unknown=_why(event.what))
            if isinstance(event.what, Unknown)
            else BusyReport(source=event.source, what=printable(event.what, TEXT_CHARACTERS_MAX))
            for event in self._busy.values()
        )
        return Report(version=1, input=inputs, busy=busy, leaving=leaving)

    def _is_news(self, before: tuple[InputObserved, float], event: InputObserved) -> bool:
        earlier, seen_at = before
        if isinstance(earlier.idle_s, Unknown) or isinstance(event.idle_s, Unknown):
            return earlier.idle_s != event.idle_s
        return event.idle_s + RETURN_S < earlier.idle_s + (self._now() - seen_at)

    def _input_report(self, event: InputObserved, seen_at: float) -> InputReport:
        detail = printable(event.detail, TEXT_CHARACTERS_MAX)
        if isinstance(event.idle_s, Unknown):
            return InputReport(source=event.source, unknown=_why(event.idle_s), detail=detail)
        idle_ms = round(1000 * (event.idle_s + self._now() - seen_at))
        return InputReport(source=event.source, idle_ms=min(max(0, idle_ms), IDLE_MS_MAX), detail=detail)


def _why(unknown: Unknown) -> Literal["absent", "broken"]:
    return "absent" if unknown is Unknown.ABSENT else "broken"


async def send_reports(session: Session, path: Path, leaving: asyncio.Event) -> None:
    """Report to the agent until the session ends; connect anew whenever that fails."""
    wait_s = RECONNECT_S
    complained = ""
    while not leaving.is_set():
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            if str(error) != complained:
                complained = str(error)
                log.warning("the agent does not listen yet", socket=str(path), detail=complained)
        else:
            try:
                async with contextlib.aclosing(_lines(session, leaving, reader)) as lines:
                    async for line in lines:
                        writer.write(line)
                        async with asyncio.timeout(SEND_TIMEOUT_S):
                            await writer.drain()
                        wait_s, complained = RECONNECT_S, ""
            except (OSError, TimeoutError) as error:
                log.warning("the agent ended the connection", socket=str(path), detail=str(error))
            finally:
                writer.close()
        with contextlib.suppress(TimeoutError):  # the usual case: the session goes on
            async with asyncio.timeout(wait_s):
                await leaving.wait()
        wait_s = min(2 * wait_s, RECONNECT_MAX_S)


async def _lines(session: Session, leaving: asyncio.Event, reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Yield a line now, at each change, every few seconds, and a last one.

    Raises:
        ConnectionError: the agent closed the connection. It never sends anything.
    """
    closed = asyncio.create_task(reader.read(1))
    ending = asyncio.create_task(leaving.wait())
    try:
        while not ending.done():
            session.news.clear()
            yield encode_report(session.report())
            news = asyncio.create_task(session.news.wait())
            try:
                await asyncio.wait({closed, ending, news}, timeout=REPORT_PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if closed.done():
                closed.result()
                raise ConnectionResetError("closed by the agent")
            await asyncio.sleep(GATHER_S)
        yield encode_report(session.report(leaving=True))
    finally:
        closed.cancel()
        ending.cancel()


async def run_companion(sources: Sequence[Source], path: Path, leaving: asyncio.Event) -> None:
    """Run sources and report what they see, until `leaving` is set and the agent has been told."""
    session = Session()
    pace = Pace()
    # It is not told whether anything is lent, so it always looks fast.
    pace.lend(True)
    watching = asyncio.create_task(run_sources(sources, session.observe, pace))
    reporting = asyncio.create_task(send_reports(session, path, leaving))
    try:
        done, _ = await asyncio.wait({watching, reporting}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (watching, reporting):
            task.cancel()
        await asyncio.gather(watching, reporting, return_exceptions=True)


def session_sources() -> list[Source]:
    """Return what can be seen from inside a session."""
    return [WaylandSource(), MutterSource(), X11Source(), DesktopInhibitorSource(), GameModeSource()]


async def _run_until_signalled(path: Path) -> None:
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, leaving.set)
    await run_companion(session_sources(), path, leaving)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the companion until its session ends."""
    parser = argparse.ArgumentParser(prog="agent.session_companion", description=(__doc__ or "").split("\n")[0])
    usual = Path(RUNTIME_DIRECTORY, SOCKET_NAME)
    parser.add_argument("--socket", type=Path, default=usual, help="where the agent listens")
    asyncio.run(_run_until_signalled(parser.parse_args(arguments).socket))
    return 0


if __name__ == "__main__":
    sys.exit(main())
