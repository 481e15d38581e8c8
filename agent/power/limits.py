"""Carries out what `agent.power.cap` decides: keeps owners' limits on the disk, and has NVML set limits."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from agent.cards.details import LimitOutcome
from agent.cards.hardware import HardwareMonitor
from agent.cards.use import CardReading
from agent.clock import monotonic_s
from agent.identity import write_private
from agent.power.cap import (
    CapStatus,
    CapUnwanted,
    CapWanted,
    Forget,
    LimitSeen,
    LimitSet,
    OwnersLimit,
    PowerCap,
    PowerCommand,
    PowerEvent,
    Remember,
    Remembered,
    RememberFailed,
    SetLimit,
)
from agent.power.settings import PowerSettings
from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_OK, NumberReading

POWER_FILE = "power_limits.json"
# A limit is set within milliseconds; the child that hangs at it is killed after five seconds.
RESTORE_S_MAX = 8.0

logger = structlog.get_logger()

# As `HardwareMonitor.set_power_limit`.
SetPowerLimit = Callable[[str, float, float | None], Awaitable[LimitOutcome]]


class PowerLimitFile:
    """The limits that owners had, by card uuid. Its methods block on the disk."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / POWER_FILE

    def load(self) -> dict[str, OwnersLimit]:
        """Return what an earlier run left; nothing where it put everything back."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        try:
            return msgspec.json.decode(data, type=dict[str, OwnersLimit])
        except msgspec.MsgspecError as error:
            aside = self._path.with_suffix(".damaged")
            self._path.replace(aside)
            logger.error(
                "the file of owners' power limits is damaged: compare with nvidia-smi -q -d POWER",
                moved_to=str(aside),
                error=str(error),
            )
            return {}

    def save(self, limits: Mapping[str, OwnersLimit]) -> None:
        """Replace the file, on the disk when this returns.

        Raises:
            OSError: the disk does not take it; the file before stands.
        """
        write_private(self._path, msgspec.json.encode(limits))


class PowerKeeper:
    """The power caps of a machine. The caller holds the lock of the state directory.

    Args:
        set_limit: `HardwareMonitor.set_power_limit`.
        on_change: called when `status` of a card may say something else.
    """

    def __init__(
        self,
        settings: PowerSettings,
        state_dir: Path,
        set_limit: SetPowerLimit,
        *,
        on_change: Callable[[], None] | None = None,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._file = PowerLimitFile(state_dir)
        self._limits = self._file.load()
        self._cap = PowerCap(settings, self._limits)
        self._set_limit = set_limit
        self._on_change = on_change
        self._clock = clock
        # At most a few for each card: a command follows the outcome of the one before.
        self._commands: asyncio.Queue[PowerCommand] = asyncio.Queue()
        self._executing = False
        self._changed = asyncio.Event()

    @property
    def remembered(self) -> Mapping[str, OwnersLimit]:
        """Owners' limits that are not back on their cards."""
        return self._limits

    def status(self, card: str) -> CapStatus:
        return self._cap.status(card)

    def see(self, readings: Sequence[CardReading]) -> None:
        """Take a snapshot of the cards; call it after each."""
        for reading in readings:
            if reading.details is not None and reading.gpu.uuid.status == READING_STATUS_OK:
                self._feed(limit_seen(reading))

    def want(self, card: str) -> None:
        """The card is lent: cap it as the settings say."""
        self._feed(CapWanted(card))

    def unwant(self, card: str) -> None:
        """The card goes back to its owner, and the owner's limit with it."""
        self._feed(CapUnwanted(card))

    def change_settings(self, settings: PowerSettings) -> None:
        """Follow other settings at once."""
        for command in self._cap.change_settings(settings):
            self._commands.put_nowait(command)
        if self._on_change is not None:
            self._on_change()

    async def run(self) -> None:
        """Carry out commands until cancellation."""
        while True:
            command = await self._commands.get()
            self._executing = True
            outcome = await self._execute(command)
            if outcome is not None:
                self._feed(outcome)
            self._executing = False
            self._changed.set()

    async def restore_all(self) -> None:
        """Put every owner's limit back and return, within `RESTORE_S_MAX`; `run` has to run meanwhile.

        What could not be put back stays on the disk, and is tried again at the next start.
        """
        for card in self._cap.cards:
            self.unwant(card)
        await self.settle()
        for card, owners in self._limits.items():
            logger.error(
                "the owner's power limit is not back on the card; the next start tries again",
                card=card,
                owners_limit_w=owners.original_w,
                cap_w=owners.cap_w,
            )

    async def settle(self) -> None:
        """Return when no outcome is waited for, within `RESTORE_S_MAX`; `run` has to run meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RESTORE_S_MAX):
                while self._executing or not (self._cap.settled and self._commands.empty()):
                    self._changed.clear()
                    await self._changed.wait()

    def _feed(self, event: PowerEvent) -> None:
        before = self._cap.status(event.card)
        for command in self._cap.handle(event, self._clock()):
            self._commands.put_nowait(command)
        after = self._cap.status(event.card)
        if after != before:
            logger.info("power cap changed", card=event.card, stage=after.stage.value, note=after.note)
            if self._on_change is not None:
                self._on_change()

    async def _execute(self, command: PowerCommand) -> PowerEvent | None:
        match command:
            case Remember(card, limit):
                try:
                    await self._save({**self._limits, card: limit})
                except OSError as error:
                    return RememberFailed(card, error.strerror or str(error))
                return Remembered(card)
            case Forget(card):
                try:
                    await self._save({name: limit for name, limit in self._limits.items() if name != card})
                except OSError as error:
                    logger.error("cannot remove a power limit from the disk", card=card, error=str(error))
                return None
            case SetLimit(card, limit_w, expected_w):
                outcome = await self._set_limit(card, limit_w, expected_w)
                return LimitSet(card, outcome.result, outcome.limit_w, outcome.detail)

    async def _save(self, limits: dict[str, OwnersLimit]) -> None:
        await asyncio.to_thread(self._file.save, limits)
        self._limits = limits


async def restore_leftovers(state_dir: Path, hardware: HardwareMonitor) -> list[str]:
    """Put back the owners' limits that a run which did not end in good order left; return what was done, in words.

    For a service's last step and for what works without the daemon. The caller holds the lock of the state directory.
    """
    keeper = PowerKeeper(PowerSettings(cap="off"), state_dir, hardware.set_power_limit)
    left = keeper.remembered
    if not left:
        return []
    await hardware.snapshot()
    work = asyncio.create_task(keeper.run())
    try:
        keeper.see(hardware.readings)
        await keeper.settle()
    finally:
        work.cancel()
    return [_told(card, owners, card in keeper.remembered, keeper.status(card)) for card, owners in left.items()]


def _told(card: str, owners: OwnersLimit, is_left: bool, status: CapStatus) -> str:
    if is_left:
        return f"{card}: {status.note}"
    return f"{card}: {status.note or f'power limit of {owners.original_w:.0f} W put back'}"


def limit_seen(reading: CardReading) -> LimitSeen:
    """Return the limits of a card that answered."""
    assert reading.details is not None
    return LimitSeen(
        card=reading.uuid,
        read_at=reading.read_at,
        limit_w=reading.details.power_limit_set_w,
        min_w=_value(reading.gpu.power_limit_min_w),
        max_w=_value(reading.gpu.power_limit_max_w),
        default_w=reading.details.power_limit_default_w,
    )


def _value(reading: NumberReading) -> float | None:
    return reading.value if reading.status == READING_STATUS_OK else None
