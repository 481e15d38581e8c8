"""What a node may be used for, as verification has found. Pure."""

from collections.abc import Iterable

from coordinator.verification.events import NODE_WIDE, Use
from inference.task import ManifestDigest, NodeId, PrivacyClass, TaskSpec


class Standings:
    """The use of each node with each model.

    Of a model that is audited, a node is used for public work alone until
    something better is known of it. Of a model that is not, nothing can be
    known of a node, and its owner's word stands.

    Args:
        verified_only: whether a node also has to show what its cards can do before it is used for more than public
            work. Where nobody asks it to, its owner's word stands.
    """

    def __init__(self, verified_only: bool = False) -> None:
        self._unshown = Use.PUBLIC_ONLY if verified_only else Use.EVERYTHING
        self._shown: set[NodeId] = set()
        self._uses: dict[tuple[NodeId, ManifestDigest], Use] = {}
        self._audited: frozenset[ManifestDigest] = frozenset()

    def audit(self, manifests: Iterable[ManifestDigest]) -> None:
        """Say which models are audited, all of them."""
        self._audited = frozenset(manifests)

    def set(self, node_id: NodeId, manifest_digest: ManifestDigest, use: Use) -> None:
        self._uses[node_id, manifest_digest] = use

    def set_shown(self, node_id: NodeId, shown: bool) -> None:
        """Say whether a node has shown what each of its cards can do."""
        (self._shown.add if shown else self._shown.discard)(node_id)

    def use(self, node_id: NodeId, manifest_digest: ManifestDigest) -> Use:
        """Return the narrowest of what is known of the node with this model, of the node as a whole, of its cards."""
        unknown = Use.PUBLIC_ONLY if manifest_digest in self._audited else Use.EVERYTHING
        own = self._uses.get((node_id, manifest_digest), unknown)
        cards = Use.EVERYTHING if node_id in self._shown else self._unshown
        return max(own, self._uses.get((node_id, NODE_WIDE), Use.EVERYTHING), cards)

    def allows(self, node_id: NodeId, spec: TaskSpec) -> bool:
        """Whether a node may be given a task: one that is meant for it alone, or one that its standing is good for."""
        use = self.use(node_id, spec.manifest_digest)
        if spec.only_node is not None:
            return spec.only_node == node_id and use < Use.NOTHING
        if use is Use.PUBLIC_ONLY:
            return spec.privacy_class is PrivacyClass.PUBLIC
        return use is Use.EVERYTHING
