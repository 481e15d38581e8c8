"""How far a fetch is: for the status file, `slackwater-agent models` and progress bars."""

from collections import deque
from dataclasses import dataclass
from enum import Enum

# Long enough to be readable, short enough to show a change.
RATE_WINDOW_S = 10.0
# Samples closer together than this count as one, so that the window stays small.
RATE_SAMPLE_S = 0.25


class FetchPhase(Enum):
    CHECKING_SPACE = "checking_space"
    # Another process of this machine fetches the same model.
    WAITING_FOR_OTHER = "waiting_for_other"
    FETCHING = "fetching"
    # No source answers; each is tried again after its back-off.
    RETRYING = "retrying"
    # The owner or the network does not allow it now.
    PAUSED = "paused"
    DISK_FULL = "disk_full"
    VERIFYING = "verifying"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """A fetch at one moment. `bytes_done` counts chunks that are checked and on the disk."""

    name: str
    digest: str
    phase: FetchPhase
    bytes_done: int
    bytes_total: int
    rate_bytes_per_s: float
    # None where nothing arrives.
    eta_s: float | None
    # Those that bytes come from at the moment.
    sources: tuple[str, ...] = ()
    # Why, where it does not go on; for people.
    detail: str = ""


class RateMeter:
    """Bytes per second over the last RATE_WINDOW_S. Pure."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._sum_bytes = 0
        self._started_at: float | None = None

    def add(self, count_bytes: int, now: float) -> None:
        if self._started_at is None:
            self._started_at = now
        if self._samples and now - self._samples[-1][0] < RATE_SAMPLE_S:
            at, before = self._samples[-1]
            self._samples[-1] = (at, before + count_bytes)
        else:
            self._samples.append((now, count_bytes))
        self._sum_bytes += count_bytes

    def rate(self, now: float) -> float:
        while self._samples and now - self._samples[0][0] > RATE_WINDOW_S:
            self._sum_bytes -= self._samples.popleft()[1]
        if self._started_at is None:
            return 0.0
        return self._sum_bytes / min(RATE_WINDOW_S, max(RATE_SAMPLE_S, now - self._started_at))
