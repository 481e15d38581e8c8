"""What this machine needs to know of a card beyond what the fleet is told: its processes, limits and reasons.

It travels from the NVML child to the agent as JSON and goes no further: whose
programs use a card is nobody's business but the owner's.
"""

import msgspec


class GpuProcess(msgspec.Struct, frozen=True):
    """A process with a context on a card.

    Args:
        name: as the kernel names it, at most 15 characters; empty where it is hidden from us.
        kind: "compute", "graphics", or "both".
        memory_bytes: None where the driver does not tell (WDDM).
        ours: it belongs to an engine of this agent.
    """

    pid: int
    name: str
    kind: str
    memory_bytes: int | None
    ours: bool


class CardDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of one card at one time; None stands for what is not known.

    Args:
        processes_note: why the list is not known.
        processes_absent: there is no such list on this machine, as against one that failed now.
        memory_used_bytes: of everybody; the lower of two looks, one before the processes were listed and one after,
            so that an engine that takes or frees memory in between does not look like somebody else.
        slowdown_c: where the card slows down by itself.
        shutdown_c: where it turns itself off.
        clock_event_reasons: nvmlClocksEventReasons, a bit mask.
        power_limit_set_w: the limit as somebody set it; what is enforced may be lower.
        power_limit_default_w: as the maker set it.
    """

    processes: tuple[GpuProcess, ...] | None = None
    processes_note: str = ""
    processes_absent: bool = False
    memory_used_bytes: int | None = None
    slowdown_c: float | None = None
    shutdown_c: float | None = None
    clock_event_reasons: int | None = None
    power_limit_set_w: float | None = None
    power_limit_default_w: float | None = None


# Of a card that sleeps: nothing has a context on it, or it would not.
SLEEPING = CardDetails(processes=())


class LimitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Set a card's power limit, but only while it is what the caller believes it to be."""

    uuid: str
    limit_mw: int
    # None sets it whatever it is.
    expected_mw: int | None = None


class LimitOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a LimitRequest.

    Args:
        result: "ok", "denied", "unsupported", "out_of_range", "changed" (it was not what was expected, and was left),
            "lost", "timeout" or "error".
        limit_w: as the card tells it afterwards; None where it does not.
        detail: for people; empty with "ok".
    """

    result: str
    limit_w: float | None = None
    detail: str = ""
