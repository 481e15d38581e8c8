"""What tells whether the owner needs the machine, and what `agent.owner.policy` makes of it: its vocabulary.

Signals are facts as a reader saw them; a reader that cannot see says so, since
"no input for an hour" and "input cannot be observed here" must lead to
different decisions. Nothing here does anything.

A card is named by its NVML uuid; the processor of a machine counts as one more
card, `CPU_CARD`, for engines that use none.
"""

from dataclasses import dataclass
from enum import Enum

# The card of engines that run on the processor.
CPU_CARD = "cpu"


class Unknown(Enum):
    """Why a signal has no value."""

    # The reader does not exist on this machine (no X server, no logind, ...): no sign of anything.
    ABSENT = "absent"
    # It exists and cannot be read now: the owner may be there and unseen.
    BROKEN = "broken"


# ---- signals about the whole machine


@dataclass(frozen=True, slots=True)
class InputObserved:
    """When a person last touched this machine, as one source sees it.

    Args:
        source: "logind", "x11", "wayland", "mutter", "tty", "evdev", "gamepad", ...
        idle_s: seconds since the last input; or why it is not known.
        detail: for people: what was seen, or what kept it from being seen.
    """

    source: str
    idle_s: float | Unknown
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BusyObserved:
    """Something that says "do not disturb" without any input: full screen, a game mode, a film's or call's inhibitor.

    Args:
        what: who asks for it, in words ("Firefox: playing video"); empty where nobody does; or why it is not known.
    """

    source: str
    what: str | Unknown


@dataclass(frozen=True, slots=True)
class BatteryObserved:
    """Whether the machine runs on its battery. A machine without one is never on it."""

    on_battery: bool | Unknown


@dataclass(frozen=True, slots=True)
class MeteredObserved:
    """Whether the network is paid by volume."""

    metered: bool | Unknown


@dataclass(frozen=True, slots=True)
class LocalTimeObserved:
    """The wall clock of the owner.

    Args:
        weekday: 0 is Monday.
        minute: since midnight, local time.
        day: for example "2026-12-02", local; a new one starts the daily counts again.
    """

    weekday: int
    minute: int
    day: str


@dataclass(frozen=True, slots=True)
class PriceObserved:
    """What electricity costs now, in the owner's currency per kWh."""

    price_per_kwh: float | Unknown


# ---- signals about one card


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on a card that is none of ours."""

    pid: int
    name: str
    # "compute", "graphics", or both.
    kind: str
    # None where the driver does not tell (WSL, WDDM).
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class CardUseObserved:
    """Who else uses a card.

    Args:
        processes: those that are not ours, and not on the list of desktop programs that are always there;
            or why the list is not known.
        foreign_memory_bytes: memory of the card that is not ours; None where it cannot be told.
        free_memory_bytes: None where it cannot be told.
    """

    card: str
    processes: tuple[ForeignProcess, ...] | Unknown
    foreign_memory_bytes: int | None
    free_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class TemperatureObserved:
    """How hot a card is.

    Args:
        temperature_c: core temperature; or why it is not known.
        slowdown_c: where the card itself slows down; None where it does not say.
        throttled: the card slows down because of heat now.
    """

    card: str
    temperature_c: float | Unknown
    slowdown_c: float | None
    throttled: bool


# ---- what the owner does, and what became of a give-back


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """The owner pressed pause, or resume.

    Args:
        paused: nothing is lent.
        until_ms: Unix milliseconds at which the pause ends by itself; None for a pause without end.
    """

    paused: bool
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CardsListed:
    """The cards there are to lend, whenever that changes. One that left is given back."""

    cards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Outcome of a give-back: no process of ours is left on the card, and its memory is free."""

    card: str


@dataclass(frozen=True, slots=True)
class GiveBackFailed:
    """Outcome of a give-back: processes of ours survive their kill. The card is in quarantine from now on."""

    card: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""

    now_ms: int


OwnerEvent = (
    InputObserved
    | BusyObserved
    | BatteryObserved
    | MeteredObserved
    | LocalTimeObserved
    | PriceObserved
    | CardUseObserved
    | TemperatureObserved
    | PauseChanged
    | CardsListed
    | GivenBack
    | GiveBackFailed
    | Tick
)


# ---- what comes out


@dataclass(frozen=True, slots=True)
class Lend:
    """The card may be used from now on."""

    card: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The card must be free at once; outcome GivenBack or GiveBackFailed.

    Args:
        reason: in words that an owner understands, for `status` and for the fleet.
    """

    card: str
    reason: str


OwnerCommand = Lend | GiveBack
