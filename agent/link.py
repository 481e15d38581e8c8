"""What an agent knows of its connection: heartbeats, silence, the coordinator's time. Pure."""

from collections import deque
from collections.abc import Sequence

from agent import events as e
from agent.owner.asks import EngineTerms

# Three times the longest heartbeat interval. A coordinator that was stopped for 10 s loses nothing.
COORDINATOR_SILENT_S_MAX = 30.0
# Ticks come every 0.1 s; after a longer gap it was we who slept, and the coordinator's messages wait unread.
ASLEEP_S = 2.0
# Heartbeats whose answers are awaited; at one a second this is beyond COORDINATOR_SILENT_S_MAX.
HEARTBEATS_OPEN_MAX = 64
# Samples of the coordinator's time. At one per second or slower eight of them span less than a drift that matters.
SAMPLES_MAX = 8


class CoordinatorClock:
    """The coordinator's time, as an offset to the monotonic clock. The best of the last samples counts."""

    def __init__(self) -> None:
        # (round trip in seconds, offset in milliseconds), oldest first.
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)

    @property
    def known(self) -> bool:
        return bool(self._samples)

    def restart(self, coordinator_time_ms: int, asked_at: float, now: float) -> None:
        """Take the time of a Welcome; the connection may be to another machine, so older samples go."""
        self._samples.clear()
        self.observe(coordinator_time_ms, asked_at, now)

    def observe(self, coordinator_time_ms: int, asked_at: float, now: float) -> None:
        """Take the time of an answer to something sent at `asked_at`."""
        # The coordinator read its clock somewhere in the round trip; the middle errs by half of it at most.
        middle = (asked_at + now) / 2
        self._samples.append((now - asked_at, coordinator_time_ms - middle * 1000))

    def now_ms(self, now: float) -> int:
        """Coordinator time, Unix milliseconds.

        Raises:
            ValueError: nothing was heard from the coordinator yet.
        """
        _, offset_ms = min(self._samples)
        return int(now * 1000 + offset_ms)


class Link:
    """One connection after the other to the coordinator, as seen by the decisions."""

    def __init__(self, now: float) -> None:
        self.clock = CoordinatorClock()
        self.up = False
        self.frame_delay_s = 0.0
        self.opened_at = now
        # As last told, over connections; None before.
        self.credits: e.NodeCredits | None = None
        self.terms: Sequence[EngineTerms] = ()
        self._heartbeat_busy_s = self._heartbeat_idle_s = 0.0
        # Grows over all connections, so that a late answer of an old one matches nothing.
        self._heartbeat_sequence = 0
        self._heartbeats_open: dict[int, float] = {}
        self._heartbeat_at = self._heard_at = self._ticked_at = now

    def opened(self, welcome: e.Connected, now: float) -> None:
        self.clock.restart(welcome.coordinator_time_ms, welcome.asked_at, now)
        self.frame_delay_s = welcome.frame_delay_s
        self._heartbeat_busy_s = welcome.heartbeat_busy_s
        self._heartbeat_idle_s = welcome.heartbeat_idle_s
        self._heartbeats_open.clear()
        self._heartbeat_at = self._heard_at = now
        self.opened_at = now
        self.up = True

    def closed(self) -> None:
        self.up = False

    def heard(self, now: float) -> None:
        """Any message is a sign of life."""
        self._heard_at = now

    def ticked(self, now: float) -> None:
        if now - self._ticked_at > ASLEEP_S:
            self._heard_at = now
        self._ticked_at = now

    def silent(self, now: float) -> bool:
        """Whether the coordinator must be taken for gone."""
        return now - self._heard_at > COORDINATOR_SILENT_S_MAX

    def heartbeat(self, busy: bool, now: float) -> e.SendHeartbeat | None:
        """Return the heartbeat that is due, if one is."""
        if now - self._heartbeat_at < (self._heartbeat_busy_s if busy else self._heartbeat_idle_s):
            return None
        return self.beat(now)

    def beat(self, now: float) -> e.SendHeartbeat:
        """Return a heartbeat that is sent whether one is due or not."""
        self._heartbeat_sequence += 1
        self._heartbeat_at = now
        if len(self._heartbeats_open) >= HEARTBEATS_OPEN_MAX:
            self._heartbeats_open.clear()
        self._heartbeats_open[self._heartbeat_sequence] = now
        return e.SendHeartbeat(self._heartbeat_sequence)

    def answered(self, event: e.HeartbeatReceived, now: float) -> None:
        asked_at = self._heartbeats_open.pop(event.sequence, None)
        if asked_at is not None:
            self.clock.observe(event.coordinator_time_ms, asked_at, now)
            self.credits, self.terms = event.credits, event.terms
