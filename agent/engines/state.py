"""When an engine process is started, killed, restarted or given up on. Pure: no process is touched here.

`EngineState.handle(event, now)` returns the commands of the moment. The driver
(`agent.engines.supervisor`) carries them out in order and reports every outcome as an
event, so a history of events explains every start and every kill.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from agent.engines.crash import PATIENCE, CrashCause, CrashPatience


class State(Enum):
    """What the engine is, seen from outside."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ProcessFate(Enum):
    """What is known of the newest process; a new one is started at `GONE` only."""

    GONE = "gone"
    ALIVE = "alive"
    DYING = "dying"  # a Kill is out, its outcome is not in yet
    UNKILLABLE = "unkillable"  # SIGKILL did not help


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The patience of the supervisor with one engine; all durations in seconds."""

    start_deadline_s: float
    # Restarts within the window; three in ten minutes tells a bad model or driver from bad luck.
    restart_budget: int = 3
    restart_window_s: float = 600.0
    # The pause before the first restart of a window; it doubles with each further one.
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    # The pause after the budget is spent. Never shorter than the window, so that the budget holds over it too.
    failed_pause_s: float = 600.0
    # Between SIGTERM and SIGKILL at an orderly stop. An owner who came back does not wait for this.
    stop_grace_s: float = 2.0


@dataclass(frozen=True, slots=True)
class StartRequested:
    """Somebody wants the engine up."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the engine gone; `grace_s` overrides the limits' between SIGTERM and SIGKILL."""

    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Spawned:
    """Outcome of Spawn: a process runs, though it may not answer yet."""

    start: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """Outcome of Spawn: there is no process."""

    start: int
    reason: str


@dataclass(frozen=True, slots=True)
class BecameReady:
    """The process generated real tokens."""

    start: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """The process runs and does not work: a canary got no token."""

    start: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended by itself; children of it may live on."""

    start: int
    reason: str
    cause: CrashCause = CrashCause.UNKNOWN


@dataclass(frozen=True, slots=True)
class Cleared:
    """Outcome of Kill: no member of the start is left."""

    start: int


@dataclass(frozen=True, slots=True)
class KillFailed:
    """Outcome of Kill: these processes survived SIGKILL."""

    start: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see `EngineState.wake_at`."""


Event = (
    StartRequested
    | StopRequested
    | Spawned
    | SpawnFailed
    | BecameReady
    | Unhealthy
    | Exited
    | Cleared
    | KillFailed
    | Tick
)


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process; answered by Spawned or SpawnFailed."""

    start: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End every process of that start, if any; answered by Cleared or KillFailed."""

    start: int
    grace_s: float


Command = Spawn | Kill


class EngineState:
    """One engine's life. At most one process exists at any time, whatever happens."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.state = State.STOPPED
        self.process = ProcessFate.GONE
        self.start = 0  # number of the newest start; outcomes of older ones are ignored
        self.pid = 0  # 0 where no process runs
        self.restarts = 0
        self.tokens_per_second = 0.0
        self.note = ""
        self._wanted = False
        # By cause, within the window, so never longer than the budget.
        self._restarted_at: dict[CrashCause, deque[float]] = {cause: deque() for cause in CrashCause}
        self._cause = CrashCause.UNKNOWN  # of the newest failure
        self._due_at = 0.0  # STARTING: the deadline; BACKING_OFF and FAILED: the next try

    @property
    def wake_at(self) -> float | None:
        """When a Tick is due, on the clock that `handle` is given; None where only an event can change anything."""
        if self.state is State.STARTING:
            return self._due_at
        if self.state in (State.BACKING_OFF, State.FAILED) and self.process is not ProcessFate.DYING:
            return self._due_at
        return None

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return what must be done now. Events of an older start, and those that fit no state, change nothing."""
        if not isinstance(event, StartRequested | StopRequested | Tick) and event.start != self.start:
            return []
        if isinstance(event, StartRequested | StopRequested):
            self._wanted = isinstance(event, StartRequested)
        handler = _TABLE.get((self.state, type(event)))
        return [] if handler is None else handler(self, event, now)

    def _begin(self, event: Event, now: float) -> list[Command]:
        if self.process is not ProcessFate.GONE:
            # The last one survived its kill: it has to go before another may come.
            self.state, self._due_at = State.FAILED, now
            return self._retry(event, now)
        self.state = State.STARTING
        self.process = ProcessFate.ALIVE
        self.start += 1
        self._due_at = now + self._limits.start_deadline_s
        return [Spawn(self.start)]

    def _note_pid(self, event: Event, now: float) -> list[Command]:
        assert isinstance(event, Spawned)
        self.pid = event.pid
        return []

    def _become_ready(self, event: Event, now: float) -> list[Command]:
        assert isinstance(event, BecameReady)
        self.state = State.READY
        self.tokens_per_second = event.tokens_per_second
        return []

    def _fail(self, event: Event, now: float) -> list[Command]:
        assert isinstance(event, SpawnFailed | Unhealthy | Exited)
        cause = event.cause if isinstance(event, Exited) else CrashCause.UNKNOWN
        return self._give_up_process(event.reason, now, cause)

    def _check_deadline(self, event: Event, now: float) -> list[Command]:
        if now < self._due_at:
            return []
        return self._give_up_process(f"not ready after {self._limits.start_deadline_s:g} s", now)

    def _give_up_process(self, reason: str, now: float, cause: CrashCause = CrashCause.UNKNOWN) -> list[Command]:
        """Kill what is left and plan the next start, within the budget of the cause."""
        self.note = reason
        self.process = ProcessFate.DYING
        self._cause = cause
        self._forget_old_restarts(now)
        spent = len(self._restarted_at[cause])
        if spent >= self._patience.restart_budget:
            self.state = State.FAILED
            self.note = f"{reason}; {self._patience.advice}"
            self._due_at = now + self._patience.pause_s
        else:
            self.state = State.BACKING_OFF
            self._due_at = now + min(self._limits.backoff_s * 2**spent, self._limits.backoff_max_s)
        return [Kill(self.start, 0.0)]

    def _retry(self, event: Event, now: float) -> list[Command]:
        if now < self._due_at or self.process is ProcessFate.DYING:
            return []
        if self.process is ProcessFate.UNKILLABLE:
            self.process = ProcessFate.DYING
            self._due_at = now + self._limits.failed_pause_s
            return [Kill(self.start, 0.0)]
        self._forget_old_restarts(now)
        restarted_at = self._restarted_at[self._cause]
        if restarted_at and len(restarted_at) >= self._patience.restart_budget:
            # A stop and a start came in between: the budget outlives them.
            self.state = State.FAILED
            self._due_at = restarted_at[0] + self._patience.window_s
            return []
        restarted_at.append(now)
        self.restarts += 1
        return self._begin(event, now)

    def _clear(self, event: Event, now: float) -> list[Command]:
        self._forget_process(ProcessFate.GONE)
        return self._retry(event, now)

    def _admit_survivors(self, event: Event, now: float) -> list[Command]:
        assert isinstance(event, KillFailed)
        self._forget_process(ProcessFate.UNKILLABLE)
        self.state = State.FAILED
        self.note = _describe_survivors(event.pids)
        self._due_at = now + self._limits.failed_pause_s
        return []

    def _stop(self, event: Event, now: float) -> list[Command]:
        assert isinstance(event, StopRequested)
        self.state = State.STOPPING
        if self.process is ProcessFate.DYING:
            return []
        if self.process is ProcessFate.GONE:
            return self._finish_stop(event, now)
        self.process = ProcessFate.DYING
        return [Kill(self.start, self._limits.stop_grace_s if event.grace_s is None else event.grace_s)]

    def _finish_stop(self, event: Event, now: float) -> list[Command]:
        self._forget_process(ProcessFate.GONE)
        self.state = State.STOPPED
        self.note = ""
        return self._begin(event, now) if self._wanted else []

    def _finish_stop_with_survivors(self, event: Event, now: float) -> list[Command]:
        assert isinstance(event, KillFailed)
        self._forget_process(ProcessFate.UNKILLABLE)
        self.state = State.STOPPED
        self.note = _describe_survivors(event.pids)
        return self._begin(event, now) if self._wanted else []

    def _forget_process(self, fate: ProcessFate) -> None:
        self.process = fate
        self.pid = 0
        self.tokens_per_second = 0.0

    @property
    def _patience(self) -> CrashPatience:
        """How often a start is tried again after what happened last."""
        patience = PATIENCE[self._cause]
        if self._cause is not CrashCause.UNKNOWN:
            return patience
        return replace(
            patience,
            restart_budget=self._limits.restart_budget,
            window_s=self._limits.restart_window_s,
            pause_s=self._limits.failed_pause_s,
        )

    def _forget_old_restarts(self, now: float) -> None:
        restarted_at, window_s = self._restarted_at[self._cause], self._patience.window_s
        while restarted_at and restarted_at[0] <= now - window_s:
            restarted_at.popleft()


def _describe_survivors(pids: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, pids))
    return f"processes {listed} survive SIGKILL (the driver holds them): reboot this machine"


# What is not listed changes nothing: a StartRequested while the engine is up, a late canary during a stop, and so on.
_TABLE: dict[tuple[State, type[Event]], Callable[[EngineState, Event, float], list[Command]]] = {
    (State.STOPPED, StartRequested): EngineState._begin,
    (State.STARTING, Spawned): EngineState._note_pid,
    (State.STARTING, BecameReady): EngineState._become_ready,
    (State.STARTING, SpawnFailed): EngineState._fail,
    (State.STARTING, Unhealthy): EngineState._fail,
    (State.STARTING, Exited): EngineState._fail,
    (State.STARTING, Tick): EngineState._check_deadline,
    (State.STARTING, StopRequested): EngineState._stop,
    (State.READY, Unhealthy): EngineState._fail,
    (State.READY, Exited): EngineState._fail,
    (State.READY, StopRequested): EngineState._stop,
    (State.BACKING_OFF, Cleared): EngineState._clear,
    (State.BACKING_OFF, KillFailed): EngineState._admit_survivors,
    (State.BACKING_OFF, Tick): EngineState._retry,
    (State.BACKING_OFF, StopRequested): EngineState._stop,
    (State.FAILED, Cleared): EngineState._clear,
    (State.FAILED, KillFailed): EngineState._admit_survivors,
    (State.FAILED, Tick): EngineState._retry,
    (State.FAILED, StopRequested): EngineState._stop,
    (State.STOPPING, Cleared): EngineState._finish_stop,
    (State.STOPPING, KillFailed): EngineState._finish_stop_with_survivors,
}
