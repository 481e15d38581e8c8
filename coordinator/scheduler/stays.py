"""How often nodes are expected to be lost in the coming hour, as the churn model says. Pure."""

import math
from typing import Final

from inference.task import NodeId

# Of nodes of which nothing was said: published for a fleet of consumer cards (Salad, 2025), as in
# coordinator.fleet.churn. Whoever is lost less often is not told apart: an hour's answer is lost once in a hundred.
LOSSES_PER_H_MIN: Final = 0.011
# Nodes of one group differ by so much at most; opinions are not truer than that.
LOSSES_STEP: Final = 4.0


class Stays:
    """Remembers what was said of each node, also while it is away.

    Attributes:
        lost_share: of the fleet's engines, so many are lost while one is replaced; in [0, 1].
    """

    def __init__(self) -> None:
        self._steps: dict[NodeId, int] = {}
        self.lost_share = 0.0

    def set(self, node_id: NodeId, losses_per_h: float) -> bool:
        """Note an opinion; return whether it differs from the last one by more than opinions do."""
        ratio = max(losses_per_h, LOSSES_PER_H_MIN) / LOSSES_PER_H_MIN
        step = round(math.log(ratio, LOSSES_STEP))
        changed = step != self._steps.get(node_id, 0)
        self._steps[node_id] = step
        return changed

    def losses_per_h(self, node_id: NodeId) -> float:
        """Return what is believed of a node, to a factor of two."""
        return LOSSES_PER_H_MIN * LOSSES_STEP ** self._steps.get(node_id, 0)
