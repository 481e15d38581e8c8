"""Which unloaded engine is asked for when tasks wait. Pure.

An agent unloads an engine that nobody uses, since a loaded model on an idle card
draws power. Whoever needs it again says so with `DesiredState.engines_wanted`,
as often as it takes, until it is ready or the agent says that it will not be.
"""

from collections.abc import Iterable, Iterator
from enum import Enum

from coordinator.ledger.asks import Asks
from coordinator.scheduler.events import EngineView
from coordinator.scheduler.records import Node
from inference.task import EngineId, ManifestDigest


class Capacity(Enum):
    """What there is for a task that waits."""

    NONE = "none"
    # An engine that was asked for and is not up yet.
    WAKING = "waking"
    READY = "ready"


def capacity(willing: Iterable[Node], digest: ManifestDigest, asks: Asks) -> Capacity:
    """Return the best that the nodes have for a model."""
    found = Capacity.NONE
    for node, engine in serving(willing, digest, asks):
        if engine.ready:
            return Capacity.READY
        if engine.engine_id in node.wanted:
            found = Capacity.WAKING
    return found


def engine_to_wake(
    willing: Iterable[Node], digest: ManifestDigest, asks: Asks, waiting: int
) -> tuple[Node, EngineId] | None:
    """Return one more engine to ask for, where the slots of those that are coming up do not do for the tasks.

    Args:
        willing: nodes that may take such tasks.
        waiting: tasks for this model for which no slot is free.
    """
    engines = list(serving(willing, digest, asks))
    if sum(engine.slots for node, engine in engines if engine.engine_id in node.wanted) >= waiting:
        return None
    asleep = [one for one in engines if one[1].unloaded and one[1].engine_id not in one[0].wanted]
    if not asleep:
        return None
    # The largest first; ties fall to the smaller node id, so that a replay decides alike.
    node, engine = min(asleep, key=lambda one: (-one[1].slots, one[0].node_id, one[1].engine_id))
    return node, engine.engine_id


def serving(willing: Iterable[Node], digest: ManifestDigest, asks: Asks) -> Iterator[tuple[Node, EngineView]]:
    """Yield the engines with a model that may be paid what they ask."""
    for node in willing:
        for engine in node.engines.values():
            if engine.manifest_digest == digest and asks.in_force(engine) is not None:
                yield node, engine


def settle_wanted(node: Node) -> bool:
    """Forget what is up, or will not come up; return whether the node has not heard yet what is wanted of it."""
    engines = node.engines
    node.wanted &= {engine_id for engine_id, engine in engines.items() if engine.unloaded or engine.starting}
    return any(engines[engine_id].unloaded for engine_id in node.wanted)
