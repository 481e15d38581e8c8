"""What the readings of a card say about its owner: who uses it, and how hot it is. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agent.cards.details import CardDetails, GpuProcess
from agent.owner.events import CardUseObserved, ForeignProcess, OwnerEvent, TemperatureObserved, Unknown
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_OK,
    READING_STATUS_UNSUPPORTED,
    Gpu,
    NumberReading,
)

# The programs that draw a desktop: there whenever somebody has logged in, whether or not anybody sits there. Games,
# browsers and players are not among them. As the kernel names them, which is at most 15 characters.
DESKTOP_PROGRAMS = frozenset(
    name[:15]
    for name in (
        *("X", "Xorg", "Xorg.bin", "Xwayland"),
        *("gnome-shell", "mutter", "mutter-x11-frames", "gnome-session-binary", "gsd-xsettings", "gjs"),
        *(
            "kwin_wayland",
            "kwin_x11",
            "plasmashell",
            "ksmserver",
            "kded5",
            "kded6",
            "krunner",
            "polkit-kde-authentication-agent-1",
        ),
        *("sway", "Hyprland", "hyprland", "weston", "labwc", "wayfire", "river", "niri", "cosmic-comp", "cosmic-panel"),
        *("xfwm4", "marco", "cinnamon", "muffin", "budgie-wm", "enlightenment", "compiz", "picom", "i3", "openbox"),
        *("xdg-desktop-portal", "xdg-desktop-portal-gnome", "xdg-desktop-portal-kde", "xdg-desktop-portal-gtk"),
        *("gdm-session-worker", "sddm-greeter", "sddm-greeter-qt6", "lightdm-gtk-greeter", "gnome-initial-setup"),
        *("nvidia-persistenced", "nvidia-powerd"),
    )
)

# nvmlClocksEventReasons: the core is above its highest operating temperature or, which nothing else in NVML tells,
# its memory is (software); or it is so hot that the clock is halved or worse (hardware).
_SOFTWARE_THERMAL_SLOWDOWN = 0x20
_HARDWARE_THERMAL_SLOWDOWN = 0x40
THERMAL_REASONS = _SOFTWARE_THERMAL_SLOWDOWN | _HARDWARE_THERMAL_SLOWDOWN

# The driver gives a killed process's memory back 0.5 to 1.5 s later; until then it looks like somebody else's.
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class CardReading:
    """One card of a snapshot; without details where it did not answer.

    Args:
        read_at: when the snapshot began (`agent.clock.monotonic_s`).
    """

    gpu: Gpu
    details: CardDetails | None
    read_at: float = 0.0

    @property
    def uuid(self) -> str:
        return self.gpu.uuid.value

    @property
    def our_pids(self) -> tuple[int, ...]:
        """Processes of this agent's engines that still have a context on the card."""
        processes = self.details.processes if self.details is not None else None
        return tuple(process.pid for process in processes or () if process.ours)


def desktop_uuids(cards: Sequence[CardReading]) -> list[str] | None:
    """Return the cards that draw a desktop; None where some card does not tell."""
    found = []
    for card in cards:
        if card.details is None or card.details.processes is None:
            return None
        if any(process.kind != "compute" or process.name in DESKTOP_PROGRAMS for process in card.details.processes):
            found.append(card.uuid)
    return found


class CardWatch:
    """Makes owner events of readings; remembers from one to the next which processes of ours there were.

    Args:
        ignored: further programs of the owner's that may be on a card while it is lent, as the kernel names them.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._desktop = DESKTOP_PROGRAMS | {name[:15] for name in ignored}
        self._ignored = frozenset(name[:15] for name in ignored)
        self._ours: dict[str, frozenset[int]] = {}
        self._settled_at: dict[str, float] = {}

    def observe(self, card: CardReading, now: float) -> list[OwnerEvent]:
        """Return what a reading of one card tells; nothing of a card that never told its uuid."""
        if card.gpu.uuid.status != READING_STATUS_OK:
            return []
        ours = frozenset(card.our_pids)
        if self._ours.get(card.uuid, frozenset()) - ours:
            self._settled_at[card.uuid] = now + SETTLE_S
        self._ours[card.uuid] = ours
        settled = now >= self._settled_at.get(card.uuid, now)
        return [self._use(card, settled), _temperature(card)]

    def _use(self, card: CardReading, settled: bool) -> CardUseObserved:
        details = card.details
        if details is None:
            return CardUseObserved(card.uuid, Unknown.BROKEN, None, None)
        processes: tuple[ForeignProcess, ...] | Unknown
        if details.processes is None:
            processes = Unknown.ABSENT if details.processes_absent else Unknown.BROKEN
        else:
            processes = tuple(
                ForeignProcess(one.pid, one.name or f"process {one.pid}", one.kind, one.memory_bytes)
                for one in details.processes
                if not one.ours and not self._is_always_there(one)
            )
        free = _value(card.gpu.memory_free_bytes)
        return CardUseObserved(
            card.uuid,
            processes,
            foreign_memory_bytes=_foreign_memory(details) if settled else None,
            free_memory_bytes=None if free is None else int(free),
        )

    def _is_always_there(self, process: GpuProcess) -> bool:
        # A desktop draws; a program of that name that computes is something else.
        return process.name in (self._desktop if process.kind == "graphics" else self._ignored)


def _foreign_memory(details: CardDetails) -> int | None:
    if details.memory_used_bytes is None or details.processes is None:
        return None
    ours = [process.memory_bytes for process in details.processes if process.ours]
    known = [used for used in ours if used is not None]
    return max(0, details.memory_used_bytes - sum(known)) if len(known) == len(ours) else None


def _temperature(card: CardReading) -> TemperatureObserved:
    reading = card.gpu.temperature_c
    temperature_c: float | Unknown = reading.value
    if reading.status != READING_STATUS_OK:
        temperature_c = Unknown.ABSENT if reading.status == READING_STATUS_UNSUPPORTED else Unknown.BROKEN
    details = card.details or CardDetails()
    return TemperatureObserved(
        card.uuid,
        temperature_c,
        slowdown_c=details.slowdown_c,
        throttled=bool((details.clock_event_reasons or 0) & THERMAL_REASONS),
    )


def _value(reading: NumberReading) -> float | None:
    return reading.value if reading.status == READING_STATUS_OK else None
