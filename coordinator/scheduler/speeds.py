"""Which rate is believed of which node with which model. Pure."""

import math

from coordinator.scheduler.events import EngineView
from coordinator.scheduler.rates import Rate
from inference.task import ManifestDigest, NodeId

# Tokens a second of an engine that nobody has measured: slower than any that is worth asking, so that it gets what the
# measured ones have no slot for.
UNMEASURED = 0.1
# Joules per token of an answer alone, of an engine whose energy nobody knows: a card at 450 W that writes 45 tokens a
# second. At the upper end, so that nobody gets more work for not telling.
UNMEASURED_JOULES = 10.0
# Engines of one group differ by so much at most.
JOULES_STEP = 1.25


class Speeds:
    """What the coordinator has measured of nodes on its own clock: when it asked them for it, and at work.

    Args:
        verified_only: whether nodes are measured at all. Where they are not, their owners are trusted by whoever
            switched it off, and what a node without a figure says of itself counts until it has worked.
    """

    def __init__(self, verified_only: bool) -> None:
        self._verified_only = verified_only
        self._measured: dict[tuple[NodeId, ManifestDigest], float] = {}
        self._joules: dict[tuple[NodeId, ManifestDigest], float] = {}
        # Kept while a node is away: its card is the same when it comes back.
        self._rates: dict[tuple[NodeId, ManifestDigest], Rate] = {}

    def set(
        self,
        node_id: NodeId,
        manifest_digest: ManifestDigest,
        tokens_per_second: float | None,
        joules_per_token: float | None = None,
    ) -> None:
        """Note what was measured of a node with a model; None where that is too long ago, or not known."""
        key = (node_id, manifest_digest)
        for measured, figure in ((self._measured, tokens_per_second), (self._joules, joules_per_token)):
            if figure is None:
                measured.pop(key, None)
            else:
                measured[key] = figure

    def joules_per_token(self, node_id: NodeId, manifest_digest: ManifestDigest) -> float:
        """Return what a token of an answer takes of a node's cards, to a quarter of it."""
        joules = self._joules.get((node_id, manifest_digest), UNMEASURED_JOULES)
        return float(JOULES_STEP ** round(math.log(joules, JOULES_STEP)))

    def rate(self, node_id: NodeId, engine: EngineView) -> Rate:
        """Return what is believed now; the object learns, and stays the same for a node and model."""
        key = (node_id, engine.manifest_digest)
        known = self._measured.get(key)
        if known is None:
            known = UNMEASURED if self._verified_only else engine.tokens_per_second
        known = max(known, UNMEASURED)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = Rate(known)
        elif rate.tokens_per_second != known:
            rate.expect(known)
        return rate
