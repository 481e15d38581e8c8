"""Models that no engine has ready and that one is to have: how long that takes, as placement says. Pure."""

from collections.abc import Mapping

from inference.task import ManifestDigest, PrivacyClass, TaskSpec


class Coming:
    """What was last said of models that are to come."""

    def __init__(self) -> None:
        self._ready_at: dict[ManifestDigest, float] = {}

    def set(self, waits_s: Mapping[ManifestDigest, float], now: float) -> None:
        self._ready_at = {digest: now + wait_s for digest, wait_s in waits_s.items()}

    def wait_s(self, spec: TaskSpec, now: float) -> float | None:
        """Return how long a task has to wait until an engine has its model; None where nobody is to have it.

        Nobody knows before whether the node that gets a model may read more than public prompts.
        """
        ready_at = self._ready_at.get(spec.manifest_digest)
        if ready_at is None or spec.only_node is not None or spec.privacy_class is not PrivacyClass.PUBLIC:
            return None
        return max(0.0, ready_at - now)
