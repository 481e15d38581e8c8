"""The machine's graphics cards, read through a child process that may crash, hang and be replaced.

NVML was seen to crash its caller when a card was lost and to hang in the
driver. So a child asks it (`agent.cards.nvml_child`), each listing has a deadline, and
a child that misses it is killed. The child says which card it touches; a card
that took it down is left out for a while, so that the others stay visible.

A driver loses track of cards while the machine sleeps, and knows none that
came after it was opened. So a resume and a new card get a new child.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

import structlog

from agent.cards.details import SLEEPING, LimitOutcome, LimitRequest
from agent.cards.nvml import blank_card, set_status
from agent.cards.nvml_link import ChildFailed, Note, NvmlLink
from agent.cards.nvml_query import ReadingStatus
from agent.cards.pci_devices import read_power_states
from agent.cards.suspend import SuspendWatch
from agent.cards.use import CardReading, CardWatch
from agent.clock import awake_s, monotonic_s
from agent.owner.events import OwnerEvent
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.common.v1.capability_pb2 import (
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
# While nothing is due: how often it is looked whether the machine has slept.
RESUME_CHECK_S = 1.0

# What a card is, as against what it does: stays known while the card does not answer.
_IDENTITY = frozenset({"uuid", "name", "compute_capability", "driver_version", "memory_total_bytes", "unified_memory"})
_READINGS = {field.name for field in capability_pb2.Gpu.DESCRIPTOR.fields} - _IDENTITY

DEFAULT_CHILD = (sys.executable, "-m", "agent.cards.nvml_child")


class Pace(Enum):
    """How often the cards are read; the value is the period in seconds."""

    # The owner is there: nothing is lent, and every query costs the machine something.
    OWNER_ACTIVE = 30.0
    # Nobody is there, nothing is lent yet.
    IDLE = 5.0
    # Lent: one reading decides about a give-back.
    WORKING = 1.0
    # A give-back is being confirmed: as Ollama polls for memory to come back.
    CONFIRMING = 0.25


class HardwareMonitor:
    """Lists the cards of this machine; `gpu_note` says why there is no list where there is none.

    Args:
        child: command line of the NVML child; the id of this process is added to it.
        sysfs: the kernel's list of PCI devices.
        dev: the directory of device files.
        marker: how the markers of our engines' processes start, as given to `EngineSupervisor`, with a slash behind.
        ignored: programs of the owner's that may stay on a card while it is lent.
        on_resumed: told how many seconds the machine slept, as soon as that is noticed: a process with a context on a
            card has to start again then.
        clock, awake_clock: which goes on while the machine sleeps, and which stops (`agent.clock`).
    """

    def __init__(
        self,
        child: Sequence[str] = DEFAULT_CHILD,
        *,
        sysfs: Path = Path("/sys/bus/pci/devices"),
        dev: Path = Path("/dev"),
        deadline_s: float = SNAPSHOT_DEADLINE_S,
        marker: str = "",
        ignored: Collection[str] = (),
        on_resumed: Callable[[float], None] | None = None,
        clock: Callable[[], float] = monotonic_s,
        awake_clock: Callable[[], float] = awake_s,
    ) -> None:
        self.gpu_note = ""
        self.pace = Pace.OWNER_ACTIVE
        self._link = NvmlLink(child)
        self._sysfs = sysfs
        self._dev = dev
        self._deadline_s = deadline_s
        self._marker = marker
        self._on_resumed = on_resumed
        self._clock = clock
        self._awake_clock = awake_clock
        self._suspend = SuspendWatch()
        self._suspend.slept_s(clock(), awake_clock())
        self._watch = CardWatch(ignored)
        self._lock = asyncio.Lock()
        self._hurry = asyncio.Event()
        # By uuid, as last read in full; one entry per card that was ever seen.
        self._known: dict[str, capability_pb2.Gpu] = {}
        self._readings: list[CardReading] = []
        # Index in NVML's list -> (until when the card is left out, status of its readings).
        self._quarantine: dict[int, tuple[float, ReadingStatus]] = {}
        self._failed_at: deque[float] = deque(maxlen=RESTART_BUDGET)
        # The devices that there were when the child was started.
        self._devices: frozenset[str] = frozenset()
        self._read_at = self._retry_at = self._rest_until = float("-inf")
        # The child's view of the driver is from before the machine slept.
        self._stale = False

    @property
    def cards(self) -> list[capability_pb2.Gpu]:
        """The newest listing, without asking for another."""
        return [reading.gpu for reading in self._readings]

    @property
    def readings(self) -> list[CardReading]:
        """The newest listing with what this machine alone needs to know."""
        return list(self._readings)

    async def start(self) -> None:
        """Take the first listing, so that `gpu_note` is known."""
        await self.snapshot()

    async def snapshot(self) -> list[capability_pb2.Gpu]:
        """Return all cards with their readings, within the deadline; never raises for anything a card does.

        Takes a new listing, except while a driver that failed is left alone, or a laptop's card may fall asleep.
        """
        async with self._lock:
            await self._reopen_after_sleep()
            now = self._read_at = self._clock()
            if now >= self._retry_at and (now >= self._rest_until or self._busy):
                self._readings = [replace(card, read_at=now) for card in await self._take_snapshot()]
            return self.cards

    async def poll_now(self, uuid: str) -> CardReading | None:
        """Read the cards at once and return this one; None where it does not answer."""
        await self.snapshot()
        found = [reading for reading in self._readings if reading.uuid == uuid and reading.details is not None]
        return found[0] if found else None

    def observe(self) -> list[OwnerEvent]:
        """Return what the newest listing tells about the owner; call it once for each `snapshot`."""
        now = self._clock()
        return [event for reading in self._readings for event in self._watch.observe(reading, now)]

    def set_pace(self, pace: Pace) -> None:
        """Read more or less often from now on; a faster pace ends a `wait` that is going on."""
        hurry, self.pace = pace.value < self.pace.value, pace
        if hurry:
            self._hurry.set()

    async def wait(self) -> None:
        """Return when the next reading is due: its time has come, the pace went up, or the machine has slept."""
        self._hurry.clear()
        while not self._hurry.is_set() and not self._resumed():
            left_s = self._read_at + self.pace.value - self._clock()
            if left_s <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, RESUME_CHECK_S)):
                    await self._hurry.wait()

    async def set_power_limit(self, uuid: str, limit_w: float, expected_w: float | None = None) -> LimitOutcome:
        """Set a card's power limit, only while it is `expected_w` where that is given; never raises for what cards do.

        Takes effect on a sleeping card too, which it wakes; and is tried even while a driver that failed is left alone,
        since a limit that is not put back is worse.
        """
        request = LimitRequest(
            uuid=uuid,
            limit_mw=round(limit_w * 1000),
            expected_mw=None if expected_w is None else round(expected_w * 1000),
        )
        async with self._lock:
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await self._link.set_power_limit(request)
            except TimeoutError:
                outcome = LimitOutcome(result="timeout", detail=f"NVML gave no answer within {self._deadline_s:g} s")
            except ChildFailed as error:
                outcome = LimitOutcome(result="error", detail=str(error))
            self._link.touching = None
            await self._replace_child(outcome.detail)
            return outcome

    async def aclose(self) -> None:
        """End the child."""
        async with self._lock:
            await self._link.end()

    @property
    def _busy(self) -> bool:
        """Whether a card is in use by us, which keeps it awake anyway."""
        return self.pace in (Pace.WORKING, Pace.CONFIRMING)

    def _resumed(self) -> bool:
        """Whether the machine has slept since this was last asked; tells the daemon."""
        slept_s = self._suspend.slept_s(self._clock(), self._awake_clock())
        if not slept_s:
            return False
        logger.warning("the machine has slept", slept_s=round(slept_s))
        self._stale = True
        if self._on_resumed is not None:
            self._on_resumed(slept_s)
        return True

    async def _reopen_after_sleep(self) -> None:
        self._resumed()
        if self._stale:
            self._stale = False
            await self._link.end()
            self._quarantine.clear()
            self._retry_at = self._rest_until = float("-inf")

    async def _take_snapshot(self) -> list[CardReading]:
        asleep, sleepers, awake = await asyncio.to_thread(read_power_states, self._sysfs)
        if asleep and not awake:
            # Even an open handle keeps a laptop's card awake, at 5 to 25 W.
            await self._link.end()
            self.gpu_note = "the card is asleep and is not woken for a reading"
            return [replace(aged, details=SLEEPING) for aged in self._age(READING_STATUS_UNSUPPORTED)]
        if self._link.up and asleep | awake != self._devices:
            await self._link.end()
        self._devices = asleep | awake
        now = self._clock()
        self._quarantine = {index: entry for index, entry in self._quarantine.items() if entry[0] > now}
        found: list[CardReading] = []
        try:
            async with asyncio.timeout(self._deadline_s):
                note = await self._link.list_cards(sorted(self._quarantine), sorted(asleep), self._marker, found)
        except TimeoutError:
            error = ChildFailed(f"NVML gave no answer within {self._deadline_s:g} s", READING_STATUS_TIMEOUT)
            return await self._survive(error, found)
        except ChildFailed as error:
            return await self._survive(error, found)
        if note is not None:
            await self._link.end()
            self._heed(note)
            return self._age(READING_STATUS_LOST)
        self.gpu_note = self._explain_empty() if not found and not self._known else ""
        merged = self._merge(found)
        if sleepers and not self._busy:
            await self._link.end()
            self._rest_until = self._clock() + SLEEPER_PERIOD_S
        return merged

    def _heed(self, note: Note) -> None:
        """Take a note that came instead of a listing, and plan when to ask again."""
        self._retry_at = self._clock() + (LASTING_RETRY_S if note.lasting else TRANSIENT_RETRY_S)
        if note.note != self.gpu_note:
            logger.warning("no list of GPUs", reason=note.note)
        self.gpu_note = note.note

    async def _survive(self, error: ChildFailed, found: list[CardReading]) -> list[CardReading]:
        """Replace the child, leave out the card it died of, and answer with what is known."""
        await self._replace_child(str(error))
        if self._link.touching is not None:
            self._quarantine[self._link.touching] = (self._clock() + QUARANTINE_S, error.status)
        self.gpu_note = "" if found or self._known else str(error)
        return self._merge(found, error.status)

    async def _replace_child(self, reason: str) -> None:
        """End a child that failed; the next request starts another, after a pause that grows with each failure."""
        now = self._clock()
        await self._link.end()
        self._failed_at.append(now)
        recent = sum(1 for failed_at in self._failed_at if failed_at > now - RESTART_WINDOW_S)
        if recent >= RESTART_BUDGET:
            self._retry_at = now + RESTART_WINDOW_S
        else:
            self._retry_at = now + min(BACKOFF_S * 2 ** (recent - 1), BACKOFF_MAX_S)
        logger.error("NVML failed", reason=reason, card_index=self._link.touching, failures=recent)

    def _merge(
        self, found: list[CardReading], missing_status: ReadingStatus = READING_STATUS_LOST
    ) -> list[CardReading]:
        """Join a listing with what was known before, by uuid.

        A card of old that is not in the listing stays, without readings: the status is that of a card that did not
        tell its uuid, or of one in quarantine, else `missing_status`.
        """
        named = [self._keep_identity(card) for card in found if card.gpu.uuid.status == READING_STATUS_OK]
        nameless = [card for card in found if card.gpu.uuid.status != READING_STATUS_OK]
        self._known.update({card.uuid: card.gpu for card in named if card.details != SLEEPING})
        present = {card.uuid for card in named}
        reasons = [card.gpu.uuid.status for card in nameless] + [status for _, status in self._quarantine.values()]
        missing = [gpu for uuid, gpu in self._known.items() if uuid not in present]
        aged = [
            CardReading(_without_readings(gpu, reasons[place] if place < len(reasons) else missing_status), None)
            for place, gpu in enumerate(missing)
        ]
        strangers = [CardReading(blank_card(status), None) for status in reasons[len(missing) :]]
        return named + aged + strangers

    def _keep_identity(self, card: CardReading) -> CardReading:
        """Give a card that sleeps, of which only the uuid may be read, the identity it had when it was awake."""
        if card.details != SLEEPING or card.uuid not in self._known:
            return card
        return CardReading(_without_readings(self._known[card.uuid], READING_STATUS_UNSUPPORTED), SLEEPING)

    def _age(self, status: ReadingStatus) -> list[CardReading]:
        return [CardReading(_without_readings(gpu, status), None) for gpu in self._known.values()]

    def _explain_empty(self) -> str:
        if any(self._dev.glob("nvidia[0-9]*")):
            return "NVML lists no card though /dev has one: recreate the container, or reboot"
        return "the NVIDIA driver lists no card"


def _without_readings(card: capability_pb2.Gpu, status: ReadingStatus) -> capability_pb2.Gpu:
    aged = capability_pb2.Gpu()
    aged.CopyFrom(card)
    set_status(aged, status, _READINGS)
    return aged
