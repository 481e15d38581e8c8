"""What happens to a fetch and what it does: the vocabulary of `agent.model_store.fetch_state`."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class FailureKind(Enum):
    # It does not have this file, or does not give it to us: 404, 403.
    MISSING = "missing"
    # What it has under this name is another file.
    WRONG = "wrong"
    # It asks to be left alone for a while: 429, 503 with Retry-After.
    BUSY = "busy"
    # It sends whole files only: the bytes before the wanted ones come too.
    NO_RANGES = "no_ranges"
    # Unreachable, silent, cut off, an error of its own.
    BROKEN = "broken"


# --- events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class PermissionChanged:
    """Whether fetching is allowed now; a reason says why not."""

    veto: str | None


@dataclass(frozen=True, slots=True)
class SpaceFound:
    """Quota and disk have room for all that is still to come."""


@dataclass(frozen=True, slots=True)
class SpaceMissing:
    """They have not, or a write was refused for want of space."""

    detail: str


@dataclass(frozen=True, slots=True)
class BytesArrived:
    count_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """A whole chunk is in memory; what becomes of it is told by one of the next three."""

    run_id: int
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """Checked, and on the disk for good."""

    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkRefused:
    """Its bytes did not have its hash."""

    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkNotWritten:
    """The disk was full."""

    chunk: int
    detail: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A source gave all that was asked."""

    run_id: int


@dataclass(frozen=True, slots=True)
class RunFailed:
    """A source did not; `jitter` is a random number in [0, 1), drawn by the driver."""

    run_id: int
    kind: FailureKind
    detail: str
    retry_after_s: float | None
    jitter: float


Event: TypeAlias = (
    Tick
    | PermissionChanged
    | SpaceFound
    | SpaceMissing
    | BytesArrived
    | ChunkReceived
    | ChunkStored
    | ChunkRefused
    | ChunkNotWritten
    | RunEnded
    | RunFailed
)

# --- commands


@dataclass(frozen=True, slots=True)
class CheckSpace:
    """Ask for room for all that is still to come; the answer is SpaceFound or SpaceMissing."""


@dataclass(frozen=True, slots=True)
class StartRun:
    """Fetch chunks that follow each other from one source."""

    run_id: int
    source: int
    chunk: int
    count: int
    # The source ignores ranges: read over what comes before.
    whole_file: bool


@dataclass(frozen=True, slots=True)
class StopRun:
    """Break a run off; no event of it is expected any more, except for chunks already received."""

    run_id: int


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the log."""

    message: str
    source: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Every chunk is there."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No source is left; for people."""

    detail: str


Command: TypeAlias = CheckSpace | StartRun | StopRun | Report | Finish | GiveUp
