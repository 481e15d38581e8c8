"""What is seen of the machine, its cards and the signs of its owner: tells the owner's policy and the agent's state."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

import structlog

from agent import events as e
from agent.cards import hardware
from agent.cards.hardware import HardwareMonitor, Pace
from agent.cards.use import CardReading
from agent.clock import monotonic_s
from agent.energy.card import CardSample, card_sample
from agent.energy.rapl import Rapl
from agent.host import read_host
from agent.owner import events as o
from agent.owner.driver import OwnerDriver
from agent.owner.events import CPU_CARD
from agent.owner.giveback import CardMemory
from agent.owner.policy import Cause
from agent.signals.settings import SignalSettings
from agent.signals.source import Pace as SignalPace
from agent.signals.watch import watch_signals
from protos.slackwater.common.v1 import capability_pb2

# Free memory of the machine, for people who look at a fleet table, and the energy of its processor.
HOST_PERIOD_S = 5.0
# Somebody is there: reading cards costs the machine something, and nothing is lent anyway.
_PRESENT = frozenset({Cause.INPUT, Cause.BUSY, Cause.PROGRAM, Cause.PAUSED, Cause.MODE_NEVER})

log = structlog.get_logger()


class MachineWatch:
    """Reads cards and signals for as long as `run` runs.

    Args:
        owner: returns the owner's side, which is made after this.
        feed: takes what the fleet is told of, from the event loop.
        on_readings: takes every listing of the cards.
    """

    def __init__(
        self,
        *,
        marker: str,
        signals: SignalSettings,
        owner: Callable[[], OwnerDriver],
        feed: Callable[[e.Event], None],
        on_readings: Callable[[Sequence[CardReading]], None],
    ) -> None:
        self._hardware = HardwareMonitor(hardware.DEFAULT_CHILD, marker=f"{marker}/", on_resumed=self._resumed)
        self._signals = signals
        self._signal_pace = SignalPace()
        self._owner = owner
        self._feed = feed
        self._on_readings = on_readings
        self._rapl = Rapl()
        self._host_read_at = float("-inf")
        self._cards: tuple[str, ...] = ()
        # When each card was read that the meter was told of; one entry per card that was ever seen.
        self._sampled_at: dict[str, float] = {}

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards of this machine, or its processor where it has none; nothing before they were listed."""
        return self._cards

    @property
    def hardware(self) -> HardwareMonitor:
        return self._hardware

    async def run(self) -> None:
        """Watch until cancellation."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_cards())
                group.create_task(watch_signals(self._observe, self._signals, pace=self._signal_pace))
        finally:
            await self._hardware.aclose()

    def follow_lending(self) -> None:
        """Look as often as what is lent now demands."""
        decisions = self._owner().policy.decisions.values()
        lent = any(decision.lent for decision in decisions)
        self._signal_pace.lend(lent)
        if any(decision.giving_back for decision in decisions):
            pace = Pace.CONFIRMING
        elif lent and self._cards != (CPU_CARD,):
            pace = Pace.WORKING
        elif any(decision.cause in _PRESENT for decision in decisions):
            pace = Pace.OWNER_ACTIVE
        else:
            pace = Pace.IDLE
        self._hardware.set_pace(pace)

    async def read_card(self, card: str) -> CardMemory | None:
        """Ask the driver about a card now; None where it does not answer."""
        await self._hardware.snapshot()
        for reading in self._hardware.readings:
            if reading.uuid == card and reading.details is not None and reading.details.processes is not None:
                free = reading.gpu.memory_free_bytes
                known = free.status == capability_pb2.READING_STATUS_OK
                return CardMemory(frozenset(reading.our_pids), int(free.value) if known else None)
        return None

    async def _watch_cards(self) -> NoReturn:
        while True:
            gpus = tuple(await self._hardware.snapshot())
            known = {sample.card: sample for gpu in gpus if (sample := card_sample(gpu)) is not None}
            # A listing that was not taken anew says nothing about the time since.
            samples = [known[one.uuid] for one in self._hardware.readings if one.uuid in known and self._fresh(one)]
            if monotonic_s() - self._host_read_at >= HOST_PERIOD_S:
                self._host_read_at = monotonic_s()
                host, processor = await asyncio.to_thread(self._read_host)
                self._feed(e.HardwareChanged(host, gpus))
                samples.append(processor)
            cards = tuple(known) or (CPU_CARD,)
            if cards != self._cards:
                self._cards = cards
                self._owner().list_cards(cards)
            for event in self._hardware.observe():
                self._observe(event)
            self._on_readings(self._hardware.readings)
            self._feed(e.CardsSampled(tuple(samples)))
            self.follow_lending()
            await self._hardware.wait()

    def _fresh(self, reading: CardReading) -> bool:
        before = self._sampled_at.get(reading.uuid)
        self._sampled_at[reading.uuid] = reading.read_at
        return before != reading.read_at

    def _read_host(self) -> tuple[capability_pb2.Host, CardSample]:
        return read_host(self._hardware.gpu_note), self._rapl.sample()

    def _observe(self, event: o.OwnerEvent) -> None:
        self._owner().feed(event)
        if isinstance(event, o.LocalTimeObserved):
            self._feed(e.LocalTimeKnown(event))

    def _resumed(self, slept_s: float) -> None:
        self._feed(e.MachineResumed(slept_s))
