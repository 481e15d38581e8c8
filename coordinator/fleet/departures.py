"""Which engines of a node are lent, why one is not any more, and whether that was our own doing. Pure."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from coordinator.fleet.churn import CameBack, Departure, Event, LossRetracted, WentAway
from coordinator.fleet.registry import BANNED, OFFLINE, NodeView
from inference.task import EngineId, NodeId
from protos.slackwater.common.v1 import capability_pb2

# A stream that died with the line is noticed within 30 s (the keepalive of the node port).
NOTICED_WITHIN_S = 30.0
# So many streams, and half of all that there were, do not end within that time by the will of their owners.
MASS_NODES_MIN = 5
MASS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class SeenEngine:
    status: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """What the fleet list says of a node, as far as lending goes. Args: lent: its engines that are lent."""

    status: str = OFFLINE
    drained_by_operator: bool = False
    engines: Mapping[EngineId, SeenEngine] = field(default_factory=dict)
    lent: frozenset[EngineId] = frozenset()


NEVER_SEEN = SeenNode()


def see(view: NodeView, before: SeenNode) -> SeenNode:
    """Return how a node is now. Args: before: how it was."""
    engines = {
        EngineId(engine.engine_id): SeenEngine(engine.status, engine.restarts)
        for engine in (view.report.engines if view.report else ())
    }
    lent: frozenset[EngineId] = frozenset()
    # "draining" is the owner's word, or the operator's.
    if view.status == "online":
        lent = frozenset(one for one, engine in engines.items() if _is_lent(engine.status, one in before.lent))
    return SeenNode(status=view.status, drained_by_operator=view.row.draining, engines=engines, lent=lent)


def changes(node_id: NodeId, before: SeenNode, after: SeenNode, at_s: float) -> Iterator[Event]:
    """Yield what became of a node's engines."""
    for engine_id in sorted(before.lent - after.lent):
        yield WentAway(node_id, at_s, _why_gone(engine_id, before, after))
    for engine_id in sorted(before.lent & after.lent):
        was, now = before.engines[engine_id], after.engines[engine_id]
        if was.status == capability_pb2.ENGINE_STATUS_READY and now.restarts > was.restarts:
            yield WentAway(node_id, at_s, Departure.CRASHED)
            yield CameBack(node_id, at_s)
    if came := after.lent - before.lent:
        yield CameBack(node_id, at_s, len(came))


def _is_lent(status: int, was_lent: bool) -> bool:
    if status == capability_pb2.ENGINE_STATUS_STARTING:
        # One that is loaded because work waits, or that restarts; the first start of an engine may never end well.
        return was_lent
    return status in (capability_pb2.ENGINE_STATUS_READY, capability_pb2.ENGINE_STATUS_UNLOADED)


def _why_gone(engine_id: EngineId, before: SeenNode, after: SeenNode) -> Departure:
    if after.status == BANNED:
        return Departure.BANNED
    if after.drained_by_operator:
        return Departure.DRAINED
    if after.status == OFFLINE:
        return Departure.DISCONNECTED
    engine = after.engines.get(engine_id)
    if engine is not None and engine.status == capability_pb2.ENGINE_STATUS_FAILED:
        was_ready = before.engines[engine_id].status == capability_pb2.ENGINE_STATUS_READY
        return Departure.CRASHED if was_ready else Departure.NEVER_READY
    # Given back, stopped, taken out of the configuration, or the owner drains the machine.
    return Departure.OWNER_RETURNED


class OwnOutages:
    """Keeps losses of streams from being held against nodes where the line or this process was at fault."""

    def __init__(self) -> None:
        # Disconnections of the last moments: when, and the engines that were told as lost.
        self._recent: deque[WentAway] = deque()
        self._ours_until_s = 0.0

    def judged(self, event: Event, connected: int) -> Iterator[Event]:
        """Yield the event as it counts, and what it shows about earlier ones.

        Args:
            connected: the nodes that are connected after the event.
        """
        if not isinstance(event, WentAway) or event.reason is not Departure.DISCONNECTED:
            yield event
            return
        if event.at_s <= self._ours_until_s:
            yield WentAway(event.node_id, event.at_s, Departure.OUR_OUTAGE, event.engines)
            return
        yield event
        self._recent.append(event)
        self._forget(event.at_s)
        gone = len({one.node_id for one in self._recent})
        if gone >= MASS_NODES_MIN and gone >= MASS_SHARE * (connected + gone):
            yield from self.outage(event.at_s - NOTICED_WITHIN_S, event.at_s)

    def outage(self, began_s: float, ended_s: float) -> Iterator[Event]:
        """Take back the losses of an outage of ours; what is still noticed of it later does not count either."""
        self._ours_until_s = max(self._ours_until_s, ended_s + NOTICED_WITHIN_S)
        for event in self._recent:
            if event.at_s >= began_s:
                yield LossRetracted(event.node_id, event.at_s, event.engines)
        self._recent.clear()

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0].at_s < now_s - NOTICED_WITHIN_S:
            self._recent.popleft()
