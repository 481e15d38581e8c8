"""What `Verdicts` wants done. Data alone; everything to store out of one event belongs into one transaction."""

from dataclasses import dataclass

from coordinator.verification.events import AuditMeasured, AuditNotMeasured, Mode, Purpose, Use, VerdictState
from coordinator.verification.record import Record
from inference.task import ManifestDigest, NodeId, OwnerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A change of state, with what it stands on."""

    verdict_id: str
    node_id: NodeId
    owner_id: OwnerId
    manifest_digest: ManifestDigest
    state: VerdictState
    previous: VerdictState
    # For people: one sentence.
    reason: str
    # Ids of the audits that speak against the node, newest last.
    audit_ids: tuple[str, ...]
    log_evidence: float
    # What a rule in shadow would have done; nothing follows from it.
    shadow: bool
    at_ms: int


@dataclass(frozen=True, slots=True)
class StoreAudit:
    """`counted` is false where the audit changed nothing: in shadow, in an outage, repeated."""

    audit: AuditMeasured | AuditNotMeasured
    counted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord:
    """The whole state of a pair, replacing what was stored. `shadow`: as if every rule counted; None for the same."""

    node_id: NodeId
    manifest_digest: ManifestDigest
    active: Record
    shadow: Record | None


@dataclass(frozen=True, slots=True)
class StoreVerdict:
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class StoreMode:
    rule: str
    mode: Mode


@dataclass(frozen=True, slots=True)
class SetNodeStanding:
    """What the scheduler may use the node for with this manifest; under `NODE_WIDE`, with any."""

    node_id: NodeId
    manifest_digest: ManifestDigest
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAudit:
    """Ask a verifier that is none of `besides`, and of another owner than the node.

    Args:
        audit_ids: what is to be repeated.
        answers: the audit (`AuditMeasured.confirms`) or the verdict (`AppealMeasured.verdict_id`) in question.
        attempt: from 1; a request that could not be measured is made again with the next number.
    """

    node_id: NodeId
    manifest_digest: ManifestDigest
    purpose: Purpose
    answers: str
    audit_ids: tuple[str, ...]
    besides: frozenset[str]
    attempt: int


@dataclass(frozen=True, slots=True)
class NotifyNode:
    """Tell the node, so that its owner sees it; the reason is in the verdict."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class BanNode:
    """Shut the node out: its owner's quarantines repeat."""

    node_id: NodeId
    reason: str


Command = StoreAudit | StoreRecord | StoreVerdict | StoreMode | SetNodeStanding | RequestAudit | NotifyNode | BanNode
