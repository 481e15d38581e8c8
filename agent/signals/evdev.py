"""That somebody touched a keyboard, mouse, touchpad, pen or gamepad, from the kernel's event devices.

Privacy: these devices tell every key. What is read is looked at for one thing,
whether a person did something, and forgotten at once; no key, button or
position is kept, compared with another, logged or sent. The only positions in
memory are the last ones of sticks and similar axes, to tell a push from drift.
"""

import asyncio
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from agent.clock import monotonic_s
from agent.owner.events import InputObserved, OwnerEvent, Unknown
from agent.signals.source import Pace, SourceAbsent, SourceBroken, Tell

# How often plugged-in devices are looked for. Most have a key, and pressing the first one can wait that long.
RESCAN_S = 10.0
# A mouse sends a thousand events a second. After a sign of life a device is left alone for this long.
QUIET_AFTER_INPUT_S = 1.0
# Sticks tremble at hundreds of events a second. The kernel's buffer, 64 events at least, covers this pause.
QUIET_AFTER_DRIFT_S = 0.05
# More event devices than any machine has.
DEVICES_MAX = 64
READ_BYTES = 64 * 24
# Readings at once; a device that still has more keeps it until the next turn.
READS_MAX = 16
# Of an axis' range: what is less than this may be drift, a trembling stick or a warming sensor.
AXIS_SHARE = 1 / 8
# The range of an axis that does not tell its own: 16 bits, as most gamepads have.
AXIS_RANGE = 65535

# struct input_event of 64-bit kernels; EVIOCGABS reads struct input_absinfo. See linux/input.h.
_EVENT = struct.Struct("llHHi")
_ABSINFO = struct.Struct("6i")
_EVIOCGABS = 0x80184540
_EV_KEY, _EV_REL, _EV_ABS = 1, 2, 3
# INPUT_PROP_ACCELEROMETER: laptops' and controllers' motion sensors send without pause.
_PROPERTY_ACCELEROMETER = 1 << 6


def axis_range(descriptor: int, axis: int) -> int:
    """Return how far an absolute axis of an open device reaches."""
    try:
        answer = fcntl.ioctl(descriptor, _EVIOCGABS | axis, bytes(_ABSINFO.size))
    except OSError:
        # Not every driver answers, and what is no event device never does.
        return AXIS_RANGE
    _, least, most, *_ = _ABSINFO.unpack(answer)
    return int(max(1, most - least))


class EventReader:
    """Finds out of a device's bytes whether a person did something.

    Args:
        reach: the range of an axis, by its number.
    """

    def __init__(self, reach: Callable[[int], int]) -> None:
        self._reach = reach
        self._rest = b""
        # Per axis: how much counts, and the position from which it is counted.
        self._axes: dict[int, tuple[float, int]] = {}

    def feed(self, data: bytes) -> bool:
        """Take bytes as they come; return whether they tell of a person."""
        data = self._rest + data
        whole = len(data) - len(data) % _EVENT.size
        self._rest = data[whole:]
        human = False
        for _, _, kind, code, value in _EVENT.iter_unpack(data[:whole]):
            if kind in (_EV_KEY, _EV_REL) or (kind == _EV_ABS and self._moved(code, value)):
                human = True
        return human

    def _moved(self, axis: int, value: int) -> bool:
        # An axis' code has six bits.
        axis &= 0x3F
        if axis not in self._axes:
            self._axes[axis] = (self._reach(axis) * AXIS_SHARE, value)
            return False
        counts, position = self._axes[axis]
        if abs(value - position) < counts:
            return False
        self._axes[axis] = (counts, value)
        return True


class _Device:
    """One open event device."""

    def __init__(self, path: str, kind: str, on_input: Callable[[str], None], quiet_s: float) -> None:
        self.path = path
        self.kind = kind
        self.open = True
        self._on_input = on_input
        self._quiet_s = quiet_s
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._reader = EventReader(lambda axis: axis_range(self._descriptor, axis))
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._readable)

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._descriptor)
        if self._timer is not None:
            self._timer.cancel()
        os.close(self._descriptor)

    def _readable(self) -> None:
        human = self._drain()
        if human:
            self._on_input(self.kind)
        if self.open:
            self._loop.remove_reader(self._descriptor)
            pause_s = self._quiet_s if human else min(self._quiet_s, QUIET_AFTER_DRIFT_S)
            self._timer = self._loop.call_later(pause_s, self._listen)

    def _drain(self) -> bool:
        human = False
        for _ in range(READS_MAX):
            try:
                data = os.read(self._descriptor, READ_BYTES)
            except BlockingIOError:
                return human
            except OSError:
                # ENODEV: it was unplugged. The next scan finds what is there.
                data = b""
            if not data:
                self.close()
                return human
            human = self._reader.feed(data) or human
        return human

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._descriptor, self._readable)


class EvdevSource:
    """Listens to every event device that may be read; tells input at once.

    Until something is touched, the time since listening began is told: less
    than the truth, so that a restarted agent lends nothing too early.

    Args:
        dev: where event* are.
        sysfs: what the kernel says of each (/sys/class/input).
        quiet_s: how long a device is left alone after a sign of life.
    """

    name = "evdev"

    def __init__(
        self,
        dev: Path = Path("/dev/input"),
        sysfs: Path = Path("/sys/class/input"),
        *,
        now: Callable[[], float] = monotonic_s,
        quiet_s: float = QUIET_AFTER_INPUT_S,
    ) -> None:
        self._dev = dev
        self._sysfs = sysfs
        self._now = now
        self._quiet_s = quiet_s
        self._devices: dict[str, _Device] = {}
        # By kind, "evdev" or "gamepad": the last input, or when listening began.
        self._last: dict[str, float] = {}

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        def on_input(kind: str) -> None:
            self._last[kind] = self._now()
            tell(InputObserved(kind, 0.0))

        scanned_at = -RESCAN_S
        denied = ""
        try:
            while True:
                now = self._now()
                if now - scanned_at >= RESCAN_S:
                    scanned_at = now
                    denied = self._scan(on_input)
                for event in self._observe(now, denied):
                    tell(event)
                await pace.tick()
        finally:
            for device in self._devices.values():
                device.close()
            self._devices.clear()

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [InputObserved(self.name, why, detail), InputObserved("gamepad", why, detail)]

    def _observe(self, now: float, denied: str) -> list[OwnerEvent]:
        open_kinds = {device.kind for device in self._devices.values() if device.open}
        events: list[OwnerEvent] = []
        for kind, missing in (("evdev", "no keyboard or mouse may be read"), ("gamepad", "none is plugged in")):
            if kind in open_kinds:
                last = self._last.setdefault(kind, now)
                events.append(InputObserved(kind, max(0.0, now - last), denied if kind == "evdev" else ""))
            elif kind in self._last:
                # What was unplugged was touched a moment ago.
                events.append(InputObserved(kind, max(0.0, now - self._last[kind]), "unplugged"))
            else:
                events.append(InputObserved(kind, Unknown.ABSENT, missing))
        return events

    def _scan(self, on_input: Callable[[str], None]) -> str:
        """Open what is new; return what may not be read, in words."""
        try:
            names = sorted(name for name in os.listdir(self._dev) if name.startswith("event"))[:DEVICES_MAX]
        except FileNotFoundError as error:
            raise SourceAbsent(f"no {self._dev}") from error
        except OSError as error:
            raise SourceBroken(f"cannot list {self._dev}: {error.strerror}") from error
        for name in [name for name, device in self._devices.items() if not device.open or name not in names]:
            self._devices.pop(name).close()
        denied = 0
        for name in names:
            if name in self._devices or self._is_sensor(name):
                continue
            try:
                self._devices[name] = _Device(str(self._dev / name), self._kind(name), on_input, self._quiet_s)
            except PermissionError:
                denied += 1
            except OSError:
                continue  # unplugged since it was listed
        if not self._devices and not self._last:
            if denied:
                raise SourceAbsent(
                    f"{denied} devices in {self._dev} may not be read; add the agent's user to the group 'input'"
                )
            raise SourceAbsent(f"no event device in {self._dev}")
        return f"{denied} devices may not be read" if denied else ""

    def _is_sensor(self, name: str) -> bool:
        try:
            properties = (self._sysfs / name / "device" / "properties").read_text().split()
            return bool(int(properties[-1], 16) & _PROPERTY_ACCELEROMETER)
        except (OSError, ValueError, IndexError):
            return False

    def _kind(self, name: str) -> str:
        try:
            siblings = os.listdir(self._sysfs / name / "device")
        except OSError:
            return self.name
        # The kernel gives a jsN beside eventN to whatever has sticks.
        return "gamepad" if any(sibling.startswith("js") for sibling in siblings) else self.name
