"""Asking a further verifier, and what becomes of a request that nobody could measure. Pure."""

from dataclasses import replace

from coordinator.verification.commands import RequestAudit
from coordinator.verification.dispute import REQUESTS_MAX, Dispute
from coordinator.verification.events import Purpose
from coordinator.verification.record import Record
from inference.task import ManifestDigest, NodeId


def asked_again(pair: tuple[NodeId, ManifestDigest], record: Record, about: str) -> tuple[Record, list[RequestAudit]]:
    """Return the record after a verifier could not measure, and whom to ask now; the same record if nobody asked."""
    node_id, digest = pair
    dispute = record.dispute(about)
    if dispute is not None:
        again = dispute.not_measured()
        if again is None:
            return record.without_dispute(about), []
        return record.with_dispute(again), [confirm_request(node_id, digest, again)]
    if record.appeal_requests and about == record.verdict_id:
        if record.appeal_requests >= REQUESTS_MAX:
            # Nobody can measure it now. It was not lost, so the owner may ask again at once.
            return replace(record, appeal_requests=0), []
        record = replace(record, appeal_requests=record.appeal_requests + 1)
        return record, [appeal_request(node_id, digest, record)]
    return record, []


def confirm_request(node_id: NodeId, manifest_digest: ManifestDigest, dispute: Dispute) -> RequestAudit:
    return RequestAudit(
        node_id=node_id,
        manifest_digest=manifest_digest,
        purpose=Purpose.CONFIRM,
        answers=dispute.audit_id,
        audit_ids=(dispute.audit_id,),
        besides=dispute.verifiers,
        attempt=dispute.requests,
    )


def appeal_request(node_id: NodeId, manifest_digest: ManifestDigest, record: Record) -> RequestAudit:
    return RequestAudit(
        node_id=node_id,
        manifest_digest=manifest_digest,
        purpose=Purpose.APPEAL,
        answers=record.verdict_id,
        audit_ids=record.evidence,
        besides=frozenset(record.accused_by),
        attempt=record.appeal_requests,
    )
