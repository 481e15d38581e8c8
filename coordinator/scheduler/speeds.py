"""How fast an engine is, as far as it may be believed. Pure."""

from coordinator.scheduler.events import EngineView
from inference.task import ManifestDigest, NodeId

# Tokens a second of an engine that nobody has measured: slower than any that is worth asking, so that it gets what the
# measured ones have no slot for.
UNMEASURED = 0.1


class Speeds:
    """Tokens a second that nodes have made of one answer while the coordinator looked at its clock.

    Args:
        verified_only: whether nodes are measured at all. Where they are not, their owners are trusted by whoever
            switched it off, and what a node without a figure says of itself counts.
    """

    def __init__(self, verified_only: bool) -> None:
        self._verified_only = verified_only
        self._measured: dict[tuple[NodeId, ManifestDigest], float] = {}

    def set(self, node_id: NodeId, manifest_digest: ManifestDigest, tokens_per_second: float | None) -> None:
        """Note what was measured of a node with a model; None where that is too long ago."""
        if tokens_per_second is None:
            self._measured.pop((node_id, manifest_digest), None)
        else:
            self._measured[node_id, manifest_digest] = tokens_per_second

    def of(self, node_id: NodeId, engine: EngineView) -> float:
        """Return tokens a second, at least `UNMEASURED`."""
        measured = self._measured.get((node_id, engine.manifest_digest))
        if measured is None:
            measured = UNMEASURED if self._verified_only else engine.tokens_per_second
        return max(measured, UNMEASURED)
