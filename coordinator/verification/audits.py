"""Which attempts are audited, and by whom. Pure.

The draw is made after the node has committed itself to a result, by its signed
hash, and depends on a secret and on that hash: a node cannot know beforehand
whether it will be looked at, nor try results until one is not. The secret of an
hour is derived from a key that stays here, so that it can be made again for as
long as a verdict needs it, and shown afterwards to prove that a draw was fair,
without telling those of other hours.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.verification.events import COORDINATOR
from inference.task import NodeId, OwnerId, PrivacyClass, TaskId

# Whoever gets hold of one secret knows the draws of an hour, and of no result that was committed before.
EPOCH_MS = 3_600_000
KEY_BYTES_MIN = 32

_DRAW = b"slackwater audit draw v1"
_CHOICE = b"slackwater verifier choice v1"
_EPOCH = b"slackwater audit epoch v1"


def epoch_of(at_ms: int) -> int:
    """Return the number of the epoch whose secret draws at this moment; to be stored with the audit."""
    return at_ms // EPOCH_MS


def epoch_secret(key: bytes, epoch: int) -> bytes:
    """Return the secret of an epoch.

    Raises:
        ValueError: the key is too short to be a secret.
    """
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"the audit key has {len(key)} bytes, fewer than {KEY_BYTES_MIN}")
    return _mac(key, _EPOCH, epoch.to_bytes(8, "big"))


def draw(secret: bytes, task_id: TaskId, attempt: int, result_sha256: bytes, rate: float) -> bool:
    """Return whether an attempt is audited. Args: `result_sha256` is what the node has signed; `rate` in [0, 1]."""
    mac = _mac(secret, _DRAW, task_id.encode(), attempt.to_bytes(4, "big"), result_sha256)
    return int.from_bytes(mac[:8], "big") < rate * 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Somebody who could measure.

    Args:
        verifier_id: `COORDINATOR` or a node id.
        owner_id: None for the coordinator.
        trusted: may read prompts of the class TRUSTED_OWNERS.
        network: the network it is seen from, such as "203.0.113.0/24"; None where that is not known.
        proven: its own verdict on this manifest is `ok`; nobody else judges.
    """

    verifier_id: str
    owner_id: OwnerId | None
    trusted: bool
    network: str | None
    proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose work is audited, and who may read it."""

    node_id: NodeId
    owner_id: OwnerId
    network: str | None
    privacy_class: PrivacyClass


def may_verify(verifier: Verifier, subject: Subject, besides: frozenset[str] = frozenset()) -> bool:
    """Whether somebody may measure this work: not of the same owner or network, and allowed to read the prompt."""
    if verifier.verifier_id in besides or verifier.verifier_id == subject.node_id:
        return False
    if verifier.verifier_id == COORDINATOR:
        # It has rendered the prompt, so it may read it.
        return True
    same_owner = verifier.owner_id is None or verifier.owner_id == subject.owner_id
    same_network = verifier.network is not None and verifier.network == subject.network
    if same_owner or same_network or not verifier.proven:
        return False
    match subject.privacy_class:
        case PrivacyClass.PUBLIC:
            return True
        case PrivacyClass.TRUSTED_OWNERS:
            return verifier.trusted
        case PrivacyClass.OWN_NODES:
            # Nobody but its owner's nodes may read it, and those do not judge each other.
            return False


def choose_verifier(
    verifiers: Iterable[Verifier],
    subject: Subject,
    secret: bytes,
    audit_id: str,
    besides: frozenset[str] = frozenset(),
) -> Verifier | None:
    """Return who measures: drawn by the secret, so that no node can arrange to be judged by a friend.

    Every owner is equally likely, however many nodes it has, and then every
    node of that owner. One that comes or goes moves the choice only where it
    was chosen itself. None where nobody may.
    """
    eligible = (verifier for verifier in verifiers if may_verify(verifier, subject, besides))

    def rank(verifier: Verifier) -> tuple[bytes, bytes]:
        owner = _mac(secret, _CHOICE, audit_id.encode(), b"owner", (verifier.owner_id or "").encode())
        return owner, _mac(secret, _CHOICE, audit_id.encode(), b"node", verifier.verifier_id.encode())

    return min(eligible, key=rank, default=None)


def _mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts, each with its length before it, so that no two lists give the same bytes."""
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, message, hashlib.sha256)
