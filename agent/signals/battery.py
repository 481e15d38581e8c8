"""Whether the machine runs on its battery, from the kernel's list of power supplies."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from agent.owner.events import BatteryObserved, OwnerEvent, Unknown
from agent.signals.source import RESTING_PERIOD_S, Pace, SourceAbsent, SourceBroken, Tell

# More than any machine has; peripherals count among them.
SUPPLIES_MAX = 64
# An attribute of a supply is one word or a name.
ATTRIBUTE_BYTES_MAX = 256
# A desktop behind one of these is no laptop, although its driver may call it "Battery". That a mains failure
# should end lending too is the UPS monitor's to say, which shuts the machine down.
_UPS = re.compile(r"(^|[^a-z])ups([^a-z]|$)|american power|cyber ?power|eaton", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Supply:
    kind: str
    online: bool | None
    status: str


class BatterySource:
    """Reads /sys/class/power_supply every few seconds, in a thread: some firmware takes long over it."""

    name = "battery"

    def __init__(self, root: Path = Path("/sys/class/power_supply")) -> None:
        self._root = root

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        while True:
            tell(BatteryObserved(await asyncio.to_thread(read_on_battery, self._root)))
            await pace.rest(RESTING_PERIOD_S)

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [BatteryObserved(why)]


def read_on_battery(root: Path) -> bool:
    """Return whether the machine draws on a battery of its own; one without a battery never does.

    Raises:
        SourceAbsent: the kernel has no list of supplies.
        SourceBroken: the list cannot be read, or says neither yes nor no.
    """
    try:
        names = sorted(entry.name for entry in root.iterdir())[:SUPPLIES_MAX]
    except FileNotFoundError as error:
        raise SourceAbsent(f"no {root}") from error
    except OSError as error:
        raise SourceBroken(f"cannot list {root}: {error.strerror}") from error
    supplies = [supply for name in names if (supply := _read_supply(root / name)) is not None]
    batteries = [one for one in supplies if one.kind == "Battery"]
    chargers = [one for one in supplies if one.kind != "Battery" and one.online is not None]
    if not batteries:
        return False
    # A weak charger lets the battery sink, and yet the machine is plugged in.
    if any(one.online for one in chargers):
        return False
    statuses = {one.status for one in batteries}
    if "Discharging" in statuses:
        return True
    # Some firmware goes on saying "Full" for a while; a charger that is off is the better witness.
    if chargers:
        return True
    if statuses <= {"Unknown", ""}:
        raise SourceBroken("there is a battery, and neither it nor a charger says whether it is in use")
    return False


def _read_supply(directory: Path) -> _Supply | None:
    """Read one supply; None where it says nothing about this machine's power."""
    kind = _attribute(directory, "type")
    # Of a mouse, a headset, a gamepad.
    if _attribute(directory, "scope") == "Device":
        return None
    if kind == "Battery":
        names = (directory.name, _attribute(directory, "model_name"), _attribute(directory, "manufacturer"))
        if any(_UPS.search(name) for name in names) or _attribute(directory, "present") == "0":
            return None
    elif kind != "Mains" and not kind.startswith("USB") and kind != "Wireless":
        return None
    online = _attribute(directory, "online")
    return _Supply(kind, None if online == "" else online != "0", _attribute(directory, "status"))


def _attribute(directory: Path, name: str) -> str:
    """Return an attribute; empty where it does not exist or the driver does not answer."""
    try:
        with open(directory / name, "rb") as file:
            return file.read(ATTRIBUTE_BYTES_MAX).decode("utf-8", "replace").strip()
    except OSError:
        # Drivers answer ENODEV, ENODATA and EIO for what they do not know; `read_on_battery` judges that.
        return ""
