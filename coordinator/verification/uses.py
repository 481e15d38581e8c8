"""What a verdict lets a node do. Pure."""

from typing import Final

from coordinator.verification.events import NODE_WIDE, Use, VerdictState
from inference.task import ManifestDigest

_USE: Final = {
    VerdictState.OK: Use.EVERYTHING,
    VerdictState.PROBATION: Use.PUBLIC_ONLY,
    VerdictState.WATCH: Use.PUBLIC_ONLY,
    VerdictState.QUARANTINED: Use.CANARIES_ONLY,
    VerdictState.BANNED: Use.NOTHING,
}


def use_of(state: VerdictState, manifest_digest: ManifestDigest) -> Use:
    """Return what a state lets a node do; a node as a whole is free until something speaks against it."""
    if manifest_digest == NODE_WIDE and state is VerdictState.PROBATION:
        return Use.EVERYTHING
    return _USE[state]
