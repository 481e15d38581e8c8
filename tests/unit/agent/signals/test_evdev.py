"""Event devices tell that a person is there; drift, sensors and garbage do not. FIFOs and a pty stand for devices."""

import asyncio
import os
import pty
import struct
import tty
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.owner.events import InputObserved, Unknown
from agent.signals import evdev
from agent.signals.evdev import AXIS_SHARE, EvdevSource, EventReader
from agent.signals.source import SourceAbsent
from agent.signals.testing import NoPace, ScriptedPace, Seen

EV_SYN, EV_KEY, EV_REL, EV_ABS, EV_MSC, EV_SW, EV_LED = 0, 1, 2, 3, 4, 5, 0x11


def event(kind: int, code: int, value: int) -> bytes:
    return struct.pack("llHHi", 1_780_000_000, 0, kind, code, value)


KEY = event(EV_KEY, 30, 1) + event(EV_SYN, 0, 0)
NOISE = event(EV_MSC, 4, 30) + event(EV_LED, 0, 1) + event(EV_SW, 0, 1) + event(EV_SYN, 3, 0)


def reader(reach: int = 256) -> EventReader:
    return EventReader(lambda axis: reach)


def test_keys_and_movements_are_signs_of_a_person_and_the_rest_is_not() -> None:
    assert reader().feed(KEY) is True
    assert reader().feed(event(EV_REL, 0, -1)) is True
    assert reader().feed(NOISE) is False


@pytest.mark.parametrize("size", [1, 7, 24, 25])
def test_bytes_in_pieces_tell_the_same(size: int) -> None:
    """Mutation: forgetting the rest of an event loses it, or reads a stranger's middle as its type."""
    data, one, told = NOISE * 3 + KEY, reader(), []
    for start in range(0, len(data), size):
        told.append(one.feed(data[start : start + size]))
    assert told.count(True) == 1
    assert one.feed(NOISE) is False


def test_a_stick_that_drifts_is_nobody_and_a_stick_that_is_pushed_is_somebody() -> None:
    """Mutation: counting every EV_ABS, a worn gamepad on the shelf keeps the card from being lent for ever."""
    one = reader()
    counts = int(256 * AXIS_SHARE)
    assert one.feed(event(EV_ABS, 0, 128)) is False  # where it rests is learned, not judged
    assert not any(one.feed(event(EV_ABS, 0, 128 + offset)) for offset in (3, -3, counts - 1, 1 - counts))
    assert one.feed(event(EV_ABS, 1, 255)) is False  # another axis
    assert one.feed(event(EV_ABS, 0, 128 + counts)) is True
    assert one.feed(event(EV_ABS, 0, 128 + counts)) is False  # held


@given(st.lists(st.binary(max_size=100)))
def test_garbage_raises_nothing_and_holds_less_than_one_event(pieces: list[bytes]) -> None:
    one = reader()
    for piece in pieces:
        one.feed(piece)
    assert len(one._rest) < 24
    assert len(one._axes) <= 64


class Devices:
    """A /dev/input of FIFOs, and what the kernel says of them."""

    def __init__(self, root: Path) -> None:
        self.dev, self.sysfs = root / "input", root / "sysfs"
        self.dev.mkdir()
        self.now = 100.0
        self.pace, self.seen = NoPace(), Seen()
        self.source = EvdevSource(self.dev, self.sysfs, now=lambda: self.now, quiet_s=0.0)

    def add(self, name: str, *, sticks: bool = False, properties: str = "0") -> None:
        os.mkfifo(self.dev / name)
        device = self.sysfs / name / "device"
        device.mkdir(parents=True)
        (device / "properties").write_text(properties + "\n")
        if sticks:
            (device / "js0").mkdir()

    def press(self, name: str, data: bytes = KEY) -> int:
        descriptor = os.open(self.dev / name, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, data)
        return descriptor

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.source.watch(self.seen, self.pace))
        try:
            await self.seen.until(lambda: self.seen.last("gamepad") is not None or task.done())
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def tick(self, seconds: float) -> None:
        self.now += seconds
        before = len(self.seen.events)
        self.pace.ticks.release()
        await self.seen.until(lambda: len(self.seen.events) >= before + 2)


@pytest.fixture
def devices(tmp_path: Path) -> Devices:
    return Devices(tmp_path)


async def test_a_key_is_told_at_once_without_waiting_for_the_next_look(devices: Devices) -> None:
    devices.add("event0")
    async with devices.watched():
        assert devices.seen.last("evdev") == InputObserved("evdev", 0.0)
        await devices.tick(5)
        assert devices.seen.last("evdev") == InputObserved("evdev", 5.0)
        descriptor = devices.press("event0")
        await devices.seen.value("evdev", 0.0)
        await devices.tick(7)
        assert devices.seen.last("evdev") == InputObserved("evdev", 7.0)
        assert devices.seen.last("gamepad") == InputObserved("gamepad", Unknown.ABSENT, "none is plugged in")
        os.close(descriptor)


async def test_a_gamepad_is_told_as_one(devices: Devices) -> None:
    """Mutation: NiceHash counts keyboard and mouse only, and mines while its owner plays on the sofa."""
    devices.add("event0")
    devices.add("event1", sticks=True)
    async with devices.watched():
        await devices.tick(50)
        descriptor = devices.press("event1")
        await devices.seen.value("gamepad", 0.0)
        assert devices.seen.last("evdev") == InputObserved("evdev", 50.0)
        os.close(descriptor)


async def test_a_motion_sensor_is_not_opened(devices: Devices) -> None:
    devices.add("event0")
    devices.add("event1", properties="40")
    async with devices.watched():
        with pytest.raises(OSError, match="No such device"):
            devices.press("event1")


async def test_what_is_plugged_in_later_is_found_and_what_is_unplugged_does_no_harm(devices: Devices) -> None:
    devices.add("event0")
    async with devices.watched():
        devices.add("event5")
        await devices.tick(5)
        with pytest.raises(OSError, match="No such device"):
            devices.press("event5")
        await devices.tick(6)
        descriptor = devices.press("event5")
        await devices.seen.value("evdev", 0.0)
        os.close(descriptor)
        (devices.dev / "event5").unlink()
        await devices.tick(11)
        os.close(devices.press("event0"))
        await devices.seen.value("evdev", 0.0)


async def test_when_the_last_device_is_unplugged_its_last_input_is_remembered(devices: Devices) -> None:
    devices.add("event0")
    async with devices.watched():
        (devices.dev / "event0").unlink()
        await devices.tick(11)
        assert devices.seen.last("evdev") == InputObserved("evdev", 11.0, "unplugged")


async def test_a_terminal_in_the_place_of_a_device_is_read_to_its_end(devices: Devices) -> None:
    """A pty gives short reads and EIO at its end, as an unplugged device gives ENODEV."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    (devices.dev / "event0").symlink_to(os.ttyname(slave))
    async with devices.watched():
        await devices.tick(5)
        for byte in KEY:
            os.write(master, bytes([byte]))
        await devices.seen.value("evdev", 0.0)
        os.close(slave)
        os.close(master)
        await devices.tick(11)


async def test_no_directory_no_device_and_no_permission_are_absent_with_the_reason(
    tmp_path: Path, devices: Devices
) -> None:
    with pytest.raises(SourceAbsent, match="no event device"):
        await devices.source.watch(devices.seen, ScriptedPace())
    with pytest.raises(SourceAbsent, match="nowhere"):
        await EvdevSource(tmp_path / "nowhere").watch(devices.seen, ScriptedPace())


async def test_devices_that_may_not_be_read_are_absent_and_the_cure_is_named(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by a stand-in for opening, since root, who runs tests in containers, may read everything."""

    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(evdev, "_Device", refuse)
    devices.add("event0")
    with pytest.raises(SourceAbsent, match="group 'input'"):
        await devices.source.watch(devices.seen, ScriptedPace())


async def test_nothing_is_left_open_when_watching_ends(devices: Devices) -> None:
    devices.add("event0")
    before = len(os.listdir("/proc/self/fd"))
    async with devices.watched():
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
