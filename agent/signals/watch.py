"""Runs every source of signals that a daemon can read itself."""

from collections.abc import Callable, Sequence
from pathlib import Path

from agent.owner.events import OwnerEvent
from agent.signals.battery import BatterySource
from agent.signals.companion_socket import CompanionSource
from agent.signals.evdev import EvdevSource
from agent.signals.local_time import LocalTimeSource
from agent.signals.logind import LogindSource
from agent.signals.metered import MeteredSource
from agent.signals.price import PriceSource
from agent.signals.settings import SignalSettings, default_companion_socket
from agent.signals.sight import SessionSight
from agent.signals.source import Pace, Source, run_sources
from agent.signals.tty import TtySource


def daemon_sources(settings: SignalSettings, logind: LogindSource) -> list[Source]:
    """Return the sources of a daemon on this machine."""
    sources: list[Source] = [
        logind,
        TtySource(),
        EvdevSource(),
        BatterySource(),
        MeteredSource(),
        LocalTimeSource(),
        PriceSource(settings),
    ]
    named = settings.companion_socket
    socket = default_companion_socket() if named is None else Path(named) if named else None
    if socket is not None:
        sources.append(CompanionSource(socket, uids=settings.companion_uids))
    return sources


async def watch_signals(
    on_event: Callable[[OwnerEvent], None],
    settings: SignalSettings,
    *,
    pace: Pace,
    sources: Sequence[Source] | None = None,
) -> None:
    """Tell everything that is seen of the owner; runs until it is cancelled.

    What one source does never ends the others: a broken one says
    `Unknown.BROKEN` and is tried again, an absent one says `Unknown.ABSENT` once
    and is looked for every minute.

    Args:
        on_event: called on the event loop, one event at a time; must not block.
        pace: the daemon tells it whether anything is lent.
        sources: instead of this machine's own.

    Raises:
        Exception: what `on_event` raised.
    """
    logind = LogindSource(inhibitors_ignored=settings.inhibitors_ignored)
    sight = SessionSight(lambda: logind.desktop_uids)

    def tell(event: OwnerEvent) -> None:
        on_event(event)
        unseen = sight.observe(event)
        if unseen is not None:
            on_event(unseen)

    await run_sources(daemon_sources(settings, logind) if sources is None else sources, tell, pace)
