"""Engines that were unloaded and are asked for when tasks wait. Pure.

An agent unloads an engine that nobody uses, since a loaded model on an idle card
draws power. Whoever needs it again says so with `DesiredState.engines_wanted`,
as often as it takes, until it is ready or the agent says that it will not be.
"""

from enum import Enum

from coordinator.scheduler.records import Node


class Capacity(Enum):
    """What there is for a task that waits."""

    NONE = "none"
    # An engine that is to have the model, which placement says when.
    COMING = "coming"
    # An engine that was asked for and is not up yet.
    WAKING = "waking"
    READY = "ready"


def settle_wanted(node: Node) -> bool:
    """Forget what is up, or will not come up; return whether the node has not heard yet what is wanted of it."""
    engines = node.engines
    node.wanted &= {engine_id for engine_id, engine in engines.items() if engine.unloaded or engine.starting}
    return any(engines[engine_id].unloaded for engine_id in node.wanted)
