"""The machine's graphics cards, read through a child process that may crash, hang and be replaced.

NVML was seen to crash its caller when a card was lost and to hang in the
driver. So a child asks it (`agent.nvml_child`), each listing has a deadline, and
a child that misses it is killed. The child says which card it touches; a card
that took it down is left out for a while, so that the others stay visible.
"""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from agent.clock import monotonic_s
from agent.nvml import ReadingStatus, blank_card, set_status
from agent.nvml_child import CARD, END, HEADER, NOTE, TOUCHING
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_ERROR,
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_TIMEOUT,
    READING_STATUS_UNSUPPORTED,
)

logger = structlog.get_logger()

# Twenty readings of eight cards take well under 100 ms; an H100 that leaves persistence takes two seconds to open.
SNAPSHOT_DEADLINE_S = 5.0
# Children replaced within the window before NVML is left alone for as long.
RESTART_BUDGET = 5
RESTART_WINDOW_S = 600.0
BACKOFF_S = 1.0
BACKOFF_MAX_S = 60.0
# How long a card that took a child down is left out.
QUARANTINE_S = 600.0
# No driver, or one that waits for a reboot: the answer changes when somebody installs or reboots.
LASTING_RETRY_S = 300.0
TRANSIENT_RETRY_S = 15.0
# A laptop's card falls asleep about 6 s after the last handle on it closes; read no more often than this, it can.
SLEEPER_PERIOD_S = 60.0
# More than any child writes for one card; a longer frame is no frame.
FRAME_BYTES_MAX = 64 * 1024

# What a card is, as against what it does: stays known while the card does not answer.
_IDENTITY = frozenset({"uuid", "name", "compute_capability", "driver_version", "memory_total_bytes", "unified_memory"})
_READINGS = {field.name for field in capability_pb2.Gpu.DESCRIPTOR.fields} - _IDENTITY

_NVIDIA_VENDOR = "0x10de"
# PCI class of display controllers: VGA (0x0300) and 3D (0x0302).
_DISPLAY_CLASS = "0x03"

DEFAULT_CHILD = (sys.executable, "-m", "agent.nvml_child")


class _ChildFailed(Exception):
    """The child ended, broke the protocol or missed its deadline; `status` is what its card's readings get."""

    def __init__(self, reason: str, status: ReadingStatus) -> None:
        super().__init__(reason)
        self.status = status


class HardwareMonitor:
    """Lists the cards of this machine; `gpu_note` says why there is no list where there is none.

    Args:
        child: command line of the NVML child; the id of this process is added to it.
        sysfs: the kernel's list of PCI devices.
        dev: the directory of device files.
    """

    def __init__(
        self,
        child: Sequence[str] = DEFAULT_CHILD,
        *,
        sysfs: Path = Path("/sys/bus/pci/devices"),
        dev: Path = Path("/dev"),
        deadline_s: float = SNAPSHOT_DEADLINE_S,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self.gpu_note = ""
        self._child_argv = child
        self._sysfs = sysfs
        self._dev = dev
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._touching: int | None = None
        # By uuid, as last read in full; one entry per card that was ever seen.
        self._known: dict[str, capability_pb2.Gpu] = {}
        self._cards: list[capability_pb2.Gpu] = []
        # Index in NVML's list -> (until when the card is left out, status of its readings).
        self._quarantine: dict[int, tuple[float, ReadingStatus]] = {}
        self._failed_at: deque[float] = deque(maxlen=RESTART_BUDGET)
        self._retry_at = float("-inf")

    @property
    def cards(self) -> list[capability_pb2.Gpu]:
        """The newest listing, without asking for another."""
        return list(self._cards)

    async def start(self) -> None:
        """Take the first listing, so that `gpu_note` is known."""
        await self.snapshot()

    async def snapshot(self) -> list[capability_pb2.Gpu]:
        """Return all cards with their readings, within the deadline; never raises for anything a card does."""
        async with self._lock:
            if self._clock() >= self._retry_at:
                self._cards = await self._take_snapshot()
            return list(self._cards)

    async def aclose(self) -> None:
        """End the child."""
        async with self._lock:
            await self._end_child()

    async def _take_snapshot(self) -> list[capability_pb2.Gpu]:
        asleep, sleepers, awake = await asyncio.to_thread(read_power_states, self._sysfs)
        if asleep and not awake:
            # Even an open handle keeps a laptop's card awake, at 5 to 25 W.
            await self._end_child()
            self.gpu_note = "the card is asleep and is not woken for a reading"
            return self._age(READING_STATUS_UNSUPPORTED)
        found: list[capability_pb2.Gpu] = []
        try:
            async with asyncio.timeout(self._deadline_s):
                note = await self._list_cards(asleep, found)
        except TimeoutError:
            error = _ChildFailed(f"NVML gave no answer within {self._deadline_s:g} s", READING_STATUS_TIMEOUT)
            return await self._survive(error, found)
        except _ChildFailed as error:
            return await self._survive(error, found)
        if note is not None:
            await self._end_child()
            self.gpu_note = note
            return self._age(READING_STATUS_LOST)
        self.gpu_note = self._explain_empty() if not found and not self._known else ""
        cards = self._merge(found)
        if sleepers:
            await self._end_child()
            self._retry_at = self._clock() + SLEEPER_PERIOD_S
        return cards

    async def _list_cards(self, asleep: frozenset[str], found: list[capability_pb2.Gpu]) -> str | None:
        """Have the child list the cards into `found`; return the note that came instead, if any."""
        if self._child is None:
            self._child = await self._start_child()
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        now = self._clock()
        self._quarantine = {index: entry for index, entry in self._quarantine.items() if entry[0] > now}
        request = {"skipped": sorted(self._quarantine), "asleep": sorted(asleep)}
        self._touching = None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            await child.stdin.drain()
            while True:
                tag, size = HEADER.unpack(await child.stdout.readexactly(HEADER.size))
                if size > FRAME_BYTES_MAX:
                    raise _ChildFailed("the NVML child sent what is no frame", READING_STATUS_ERROR)
                payload = await child.stdout.readexactly(size)
                if tag == TOUCHING:
                    self._touching = int(payload)
                elif tag == CARD:
                    found.append(capability_pb2.Gpu.FromString(payload))
                elif tag == END:
                    return None
                elif tag == NOTE:
                    return self._heed(json.loads(payload))
                else:
                    raise _ChildFailed("the NVML child sent an unknown frame", READING_STATUS_ERROR)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            status = await child.wait()
            raise _ChildFailed(f"the NVML child ended with status {status}", READING_STATUS_ERROR) from error
        except (DecodeError, ValueError, KeyError, TypeError) as error:
            raise _ChildFailed(f"the NVML child sent what cannot be read: {error!r}", READING_STATUS_ERROR) from error

    def _heed(self, note: dict[str, object]) -> str:
        """Take a note that came instead of a listing, and plan when to ask again."""
        text = str(note["note"])
        self._retry_at = self._clock() + (LASTING_RETRY_S if note["lasting"] else TRANSIENT_RETRY_S)
        if text != self.gpu_note:
            logger.warning("no list of GPUs", reason=text)
        return text

    async def _survive(self, error: _ChildFailed, found: list[capability_pb2.Gpu]) -> list[capability_pb2.Gpu]:
        """Replace the child, leave out the card it died of, and answer with what is known."""
        now = self._clock()
        await self._end_child()
        self._failed_at.append(now)
        recent = sum(1 for failed_at in self._failed_at if failed_at > now - RESTART_WINDOW_S)
        if recent >= RESTART_BUDGET:
            self._retry_at = now + RESTART_WINDOW_S
        else:
            self._retry_at = now + min(BACKOFF_S * 2 ** (recent - 1), BACKOFF_MAX_S)
        if self._touching is not None:
            self._quarantine[self._touching] = (now + QUARANTINE_S, error.status)
        self.gpu_note = "" if found or self._known else str(error)
        logger.error("NVML failed", reason=str(error), card_index=self._touching, failures=recent)
        return self._merge(found, error.status)

    def _merge(
        self, found: list[capability_pb2.Gpu], missing_status: ReadingStatus = READING_STATUS_LOST
    ) -> list[capability_pb2.Gpu]:
        """Join a listing with what was known before, by uuid.

        A card of old that is not in the listing stays, without readings: the status is that of a card that did not
        tell its uuid, or of one in quarantine, else `missing_status`.
        """
        named = [card for card in found if card.uuid.status == READING_STATUS_OK]
        nameless = [card for card in found if card.uuid.status != READING_STATUS_OK]
        self._known.update({card.uuid.value: card for card in named})
        present = {card.uuid.value for card in named}
        reasons = [card.uuid.status for card in nameless] + [status for _, status in self._quarantine.values()]
        missing = [card for uuid, card in self._known.items() if uuid not in present]
        aged = [
            _without_readings(card, reasons[place] if place < len(reasons) else missing_status)
            for place, card in enumerate(missing)
        ]
        strangers = [blank_card(status) for status in reasons[len(missing) :]]
        return named + aged + strangers

    def _age(self, status: ReadingStatus) -> list[capability_pb2.Gpu]:
        return [_without_readings(card, status) for card in self._known.values()]

    def _explain_empty(self) -> str:
        if any(self._dev.glob("nvidia[0-9]*")):
            return "NVML lists no card though /dev has one: recreate the container, or reboot"
        return "the NVIDIA driver lists no card"

    async def _start_child(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._child_argv,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise _ChildFailed(f"cannot start the NVML child: {error}", READING_STATUS_ERROR) from error

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            child.kill()
        # One stuck in the driver stays until the driver lets go of it; it must not hold up the agent.
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await child.wait()


def read_power_states(sysfs: Path) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the PCI addresses of NVIDIA's cards that sleep now, that have ever slept, and that are awake.

    Reads the kernel's files only, which wakes nothing.
    """
    asleep: set[str] = set()
    sleepers: set[str] = set()
    awake: set[str] = set()
    for device in sysfs.iterdir() if sysfs.is_dir() else ():
        if _read(device / "vendor") != _NVIDIA_VENDOR or not _read(device / "class").startswith(_DISPLAY_CLASS):
            continue
        (asleep if _read(device / "power/runtime_status") == "suspended" else awake).add(device.name)
        if _read(device / "power/control") == "auto" and _read(device / "power/runtime_suspended_time") not in (
            "",
            "0",
        ):
            sleepers.add(device.name)
    return frozenset(asleep), frozenset(sleepers), frozenset(awake)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        # Not every kernel and bus has every file.
        return ""


def _without_readings(card: capability_pb2.Gpu, status: ReadingStatus) -> capability_pb2.Gpu:
    aged = capability_pb2.Gpu()
    aged.CopyFrom(card)
    set_status(aged, status, _READINGS)
    return aged
