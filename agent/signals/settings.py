"""What an owner may set about signals: `[signals]` in the agent's configuration."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
# "24:00" ends a day.
_CLOCK = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]|24:00", re.ASCII)
# Electricity has been sold below zero and at several currency units per kWh; beyond this it is a typing error.
Price = Annotated[float, Meta(ge=-100.0, le=1000.0)]

# Made by the service manager (RuntimeDirectory=) for the machine's agent; that of a person lies below /run/user.
RUNTIME_DIRECTORY = "/run/slackwater-agent"
SOCKET_NAME = "signals.sock"


def default_companion_socket() -> Path:
    """Return where this process, as systemd started it, has its companions report."""
    return Path(os.environ.get("RUNTIME_DIRECTORY", RUNTIME_DIRECTORY).partition(":")[0], SOCKET_NAME)


class PriceWindow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price at certain hours, local time. `until` before `start` reaches into the next day.

    Raises:
        ValueError: a time that no clock shows; msgspec adds the table.
    """

    price_per_kwh: Price
    start: str
    until: str
    days: tuple[Day, ...] = DAYS

    def __post_init__(self) -> None:
        for key, clock in (("start", self.start), ("until", self.until)):
            if not _CLOCK.fullmatch(clock):
                raise ValueError(f'{key} must be a time from "00:00" to "24:00", such as "22:30", not {clock!r}')


class SignalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[signals]`."""

    companion_socket: Annotated[
        Annotated[str, Meta(max_length=100)] | None,
        Meta(
            description="Unix socket on which companions in users' sessions report; empty for none; "
            "left out: signals.sock in the service's runtime directory",
        ),
    ] = None
    companion_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=2**32 - 2)], ...],
        Meta(max_length=64, description="users whose companion is heard although they are not logged in to a desktop"),
    ] = ()
    inhibitors_ignored: Annotated[
        tuple[str, ...],
        Meta(max_length=64, description='programs whose "keep awake" says nothing about you, as in `systemd-inhibit`'),
    ] = ()
    price_per_kwh: Annotated[
        Price | None, Meta(description="electricity price outside all windows, in your currency")
    ] = None
    price_windows: Annotated[
        tuple[PriceWindow, ...], Meta(max_length=200, description="prices by hour and weekday; the first match counts")
    ] = ()
    price_file: Annotated[
        str, Meta(description="CSV or JSON lines of start,price_per_kwh, which something else keeps up to date")
    ] = ""
