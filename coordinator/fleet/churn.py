"""How long a node stays lent: survival from its own history, and from the fleet's while that is short. Pure.

Theory of operation. Losses are counted per lent hour of an engine, in buckets of
the week (`week_counts`), for each node and for the fleet. The fleet has a rate
for each bucket. A node has a multiple of it, drawn from a Gamma distribution of
mean 1, and a rhythm of its own. So the chance that an engine is still there
after some time is the Gamma-Poisson predictive distribution,

    survival = (1 + H / b) ** -a,   a = A + losses,   b = A + losses expected at the fleet's rates,

where H is the fleet's hazard in that time, in the node's rhythm, and A what the
opinion "a node like any other" is worth in losses (the distribution of the waiting
time is a Lomax one; Johnson, Kotz and Balakrishnan, Continuous Univariate
Distributions, volume 1, chapter 20). With a long history it is `exp(-rate * time)`;
with a short one it is wider, because a node that nobody knows may be a bad one.

Time is Unix seconds, always an argument. An hour's opinion is kept for the hour.
"""

import math
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from coordinator.fleet.week_counts import BUCKET_S, BUCKETS, HOUR_S, WEEK_S, WeekCounts, rhythm, second_of_week
from inference.task import NodeId

# The prior of a fleet that has seen nothing: 1.1 losses an hour over 100 machines, which a fleet of consumer cards
# published (Salad, 2025: 182 reallocations of 100 instances in 7 days). It weighs as much as 100 lent hours.
PRIOR_LOSSES = 1.1
PRIOR_LENT_H = 100.0
# How much nodes differ: a Gamma distribution of this shape with that mean leaves 25 of 100 nodes without any loss in
# 7 days, as was published beside it: (1 + 168 * 0.011 / 2.5) ** -2.5 = 0.25.
NODE_PRIOR_LOSSES = 2.5
# How long an engine takes until it is up again, on the whole: vLLM loads and compiles for one or two minutes.
RELOAD_S = 90.0


class Departure(Enum):
    """Why an engine is not lent any more."""

    OWNER_RETURNED = "owner_returned"
    CRASHED = "crashed"
    DISCONNECTED = "disconnected"
    # By the operator of the fleet, who knows what runs there.
    DRAINED = "drained"
    BANNED = "banned"
    # It was coming up, and nothing ran on it.
    NEVER_READY = "never_ready"
    # The coordinator, or its line, was not there itself.
    OUR_OUTAGE = "our_outage"


LOSSES = frozenset({Departure.OWNER_RETURNED, Departure.CRASHED, Departure.DISCONNECTED})


@dataclass(frozen=True, slots=True)
class CameBack:
    """Engines of a node are lent from now on."""

    node_id: NodeId
    at_s: float
    engines: int = 1


@dataclass(frozen=True, slots=True)
class WentAway:
    """Engines of a node are not lent any more."""

    node_id: NodeId
    at_s: float
    reason: Departure
    engines: int = 1


@dataclass(frozen=True, slots=True)
class LossRetracted:
    """What was told as a loss was none of the node's."""

    node_id: NodeId
    at_s: float
    engines: int = 1


Event = CameBack | WentAway | LossRetracted


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """What is kept of a node. Args: lent_h, lost: 84 little-endian float32 each, as of `as_of_s`."""

    node_id: NodeId
    lent_h: bytes
    lost: bytes
    as_of_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """A node as its history shows it, for people. Args: observed_lent_h: on which it stands, the newest count most."""

    losses_per_h: float
    expected_lent_s: float
    observed_lent_h: float


class _Hazard:
    """The chance of losing an engine, as of one hour.

    Args:
        per_h: the fleet's rate in each bucket, in the node's rhythm.
        shape, weight: a and b of the module's formula.
    """

    __slots__ = ("cumulative", "hour", "shape", "weight")

    def __init__(self, hour: int, per_h: Iterable[float], shape: float, weight: float) -> None:
        self.hour = hour
        self.shape = shape
        self.weight = weight
        sums = [0.0]
        for rate in per_h:
            sums.append(sums[-1] + rate * BUCKET_S / HOUR_S)
        self.cumulative = array("f", sums)

    def between(self, from_s: float, duration_s: float) -> float:
        """Return H of the module's formula."""
        cumulative = self.cumulative
        start = second_of_week(from_s) / BUCKET_S
        end = start + duration_s / BUCKET_S
        first, last = int(start), int(end)
        if first == last:
            return (end - start) * (cumulative[first + 1] - cumulative[first])
        weeks, last_of_week = divmod(last, BUCKETS)
        begun = cumulative[first] + (start - first) * (cumulative[first + 1] - cumulative[first])
        in_last = (end - last) * (cumulative[last_of_week + 1] - cumulative[last_of_week])
        return max(0.0, weeks * cumulative[BUCKETS] + cumulative[last_of_week] + in_last - begun)

    def survival(self, from_s: float, duration_s: float) -> float:
        return math.pow(1.0 + self.between(from_s, duration_s) / self.weight, -self.shape)

    def expected_s(self, from_s: float) -> float:
        """Return the mean of the waiting time: the first week by buckets, what is beyond it at the week's mean rate."""
        # Simpson's rule, with a step of half a bucket.
        at = [self.survival(from_s, step * BUCKET_S / 2) for step in range(2 * BUCKETS + 1)]
        first_week_s = (math.fsum(at[:-1:2]) + math.fsum(at[2::2]) + 4 * math.fsum(at[1::2])) * BUCKET_S / 6
        per_s = self.cumulative[BUCKETS] / WEEK_S
        # The integral of the Lomax survival from a week on; a > 1, or it would have no mean.
        left = math.pow(1 + WEEK_S * per_s / self.weight, 1 - self.shape)
        beyond_s = self.weight / (per_s * (self.shape - 1)) * left
        return first_week_s + beyond_s


class _Node:
    __slots__ = ("counted_until_s", "counts", "engines", "hazard", "written")

    def __init__(self, counts: WeekCounts, now_s: float) -> None:
        self.counts = counts
        # Lent now, and since when that stands in no bucket yet.
        self.engines = 0
        self.counted_until_s = now_s
        self.hazard: _Hazard | None = None
        self.written = False


class Churn:
    """Feed it what engines do; ask it how long they stay."""

    def __init__(self, now_s: float, histories: Iterable[NodeHistory] = ()) -> None:
        self._nodes: dict[NodeId, _Node] = {}
        self._fleet = WeekCounts(now_s, "d")
        self._fleet_engines = 0
        self._fleet_counted_until_s = now_s
        self._fleet_hazard: _Hazard | None = None
        self._fleet_per_h: list[float] = []
        for history in histories:
            counts = WeekCounts(history.as_of_s)
            counts.lent_h, counts.lost = _floats(history.lent_h), _floats(history.lost)
            counts.age(now_s)
            self._nodes[history.node_id] = node = _Node(counts, now_s)
            node.written = True
            self._fleet.add(counts)

    def handle(self, event: Event) -> None:
        """Take one event. Events of one node come in the order of their times; what is late counts as of the last."""
        node = self._nodes.get(event.node_id)
        if node is None:
            node = self._nodes[event.node_id] = _Node(WeekCounts(event.at_s), event.at_s)
        if isinstance(event, LossRetracted):
            self._count_lost(node, event.at_s, -event.engines)
            return
        self._count_lent(node, event.at_s)
        self._count_fleet_lent(event.at_s)
        match event:
            case CameBack():
                node.engines += event.engines
                self._fleet_engines += event.engines
            case WentAway():
                gone = min(event.engines, node.engines)
                node.engines -= gone
                self._fleet_engines -= gone
                if event.reason in LOSSES:
                    self._count_lost(node, event.at_s, gone)
            case _:
                assert_never(event)

    def survival(self, node_id: NodeId, now_s: float, duration_s: float) -> float:
        """Return the probability that an engine of a node, lent now, is still lent after that time."""
        node = self._nodes.get(node_id)
        hazard = None if node is None else node.hazard
        if hazard is None or hazard.hour != now_s // HOUR_S:
            hazard = self._hazard_of(node, now_s)
        return hazard.survival(now_s, duration_s)

    def expected_lent_s(self, node_id: NodeId, now_s: float) -> float:
        """Return how long an engine of a node, lent now, stays so on average."""
        return self._hazard_of(self._nodes.get(node_id), now_s).expected_s(now_s)

    def outlook(self, node_id: NodeId, now_s: float) -> Outlook:
        """Return what people are shown of a node: the mean rate of a week, and what follows from it."""
        node = self._nodes.get(node_id)
        hazard = self._hazard_of(node, now_s)
        per_h = hazard.cumulative[BUCKETS] * hazard.shape / hazard.weight / (WEEK_S / HOUR_S)
        return Outlook(
            losses_per_h=per_h,
            expected_lent_s=hazard.expected_s(now_s),
            observed_lent_h=math.fsum(node.counts.lent_h) if node else 0.0,
        )

    def fleet_loss_rate_per_h(self, now_s: float) -> float:
        """Return the losses per lent hour of an engine that the whole fleet has at this hour of the week."""
        self._refresh_fleet(now_s)
        return self._fleet_per_h[int(second_of_week(now_s) / BUCKET_S)]

    def losses_per_h(self, node_id: NodeId, now_s: float) -> float:
        """Return how often an engine of a node is expected to be lost: the rate that gives its survival of an hour."""
        return -math.log(self.survival(node_id, now_s, HOUR_S))

    def lost_share(self, horizon_s: float, now_s: float) -> float:
        """Return the probability that an engine of the fleet, lent now, is lost in that time."""
        self._refresh_fleet(now_s)
        assert self._fleet_hazard is not None
        return 1.0 - self._fleet_hazard.survival(now_s, horizon_s)

    def changed_histories(self, now_s: float) -> list[NodeHistory]:
        """Return what has changed since the last call, to be kept."""
        changed = []
        for node_id, node in self._nodes.items():
            if node.engines or not node.written:
                self._count_lent(node, now_s)
                lent_h, lost = _bytes(node.counts.lent_h), _bytes(node.counts.lost)
                changed.append(NodeHistory(node_id, lent_h, lost, node.counts.aged_at_s))
                node.written = True
        return changed

    # --- counting ------------------------------------------------------------------------------

    def _count_lent(self, node: _Node, now_s: float) -> None:
        """Add what was lent until now to the node's counts."""
        node.counts.age(now_s)
        if now_s > node.counted_until_s:
            if node.engines:
                node.counts.add_lent(node.counted_until_s, now_s, node.engines)
                node.written = False
            node.counted_until_s = now_s

    def _count_fleet_lent(self, now_s: float) -> None:
        """As for a node; apart, or every node would have to be visited for it."""
        self._fleet.age(now_s)
        if now_s > self._fleet_counted_until_s:
            self._fleet.add_lent(self._fleet_counted_until_s, now_s, self._fleet_engines)
            self._fleet_counted_until_s = now_s

    def _count_lost(self, node: _Node, at_s: float, engines: int) -> None:
        node.counts.add_lost(at_s, engines)
        self._fleet.add_lost(at_s, engines)
        node.hazard = None
        node.written = False

    # --- the opinion of an hour ----------------------------------------------------------------

    def _hazard_of(self, node: _Node | None, now_s: float) -> _Hazard:
        hour = int(now_s // HOUR_S)
        if node is None:
            self._refresh_fleet(now_s)
            assert self._fleet_hazard is not None
            return self._fleet_hazard
        if node.hazard is None or node.hazard.hour != hour:
            self._refresh_fleet(now_s)
            self._count_lent(node, now_s)
            node.hazard = self._make_hazard(node.counts, hour)
        return node.hazard

    def _make_hazard(self, counts: WeekCounts, hour: int) -> _Hazard:
        per_h = self._fleet_per_h
        expected = [rate * lent_h for rate, lent_h in zip(per_h, counts.lent_h, strict=True)]
        lost = math.fsum(counts.lost)
        shape = NODE_PRIOR_LOSSES + lost
        ratio = shape / (NODE_PRIOR_LOSSES + math.fsum(expected))
        factors = rhythm(counts.lost, [ratio * one for one in expected])
        expected_in_rhythm = math.fsum(one * factor for one, factor in zip(expected, factors, strict=True))
        in_rhythm = (rate * factor for rate, factor in zip(per_h, factors, strict=True))
        return _Hazard(hour, in_rhythm, shape, NODE_PRIOR_LOSSES + expected_in_rhythm)

    def _refresh_fleet(self, now_s: float) -> None:
        hour = int(now_s // HOUR_S)
        if self._fleet_hazard is not None and self._fleet_hazard.hour == hour:
            return
        self._count_fleet_lent(now_s)
        counts = self._fleet
        lent_h, lost = math.fsum(counts.lent_h), math.fsum(counts.lost)
        mean_per_h = (PRIOR_LOSSES + lost) / (PRIOR_LENT_H + lent_h)
        factors = rhythm(counts.lost, [mean_per_h * one for one in counts.lent_h])
        self._fleet_per_h = [mean_per_h * factor for factor in factors]
        self._fleet_hazard = _Hazard(hour, self._fleet_per_h, NODE_PRIOR_LOSSES, NODE_PRIOR_LOSSES)


def _floats(packed: bytes) -> "array[float]":
    """Unpack 84 little-endian float32.

    Raises:
        ValueError: they are not as many, or not numbers that a count can be.
    """
    floats = array("f", packed)
    if sys.byteorder == "big":
        floats.byteswap()
    if len(floats) != BUCKETS or not all(0.0 <= one < math.inf for one in floats):
        raise ValueError(f"a history of {len(packed)} bytes, not {BUCKETS} counts")
    return floats


def _bytes(floats: "array[float]") -> bytes:
    packed = array("f", floats)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
