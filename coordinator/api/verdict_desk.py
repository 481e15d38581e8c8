"""Verdicts as both ports show them, and appeals: what an owner sees of its own nodes, an administrator of all."""

import asyncio
import json
from collections.abc import Iterable, Sequence

from coordinator.errors import Reason, SlackwaterError
from coordinator.store.port import NodeRow, Store
from coordinator.store.verification_port import AuditRow, VerdictRow
from coordinator.verification.events import Mode
from coordinator.verification.service import Verification
from inference.task import NodeId
from protos.slackwater.common.v1 import verdict_pb2


class VerdictDesk:
    def __init__(self, store: Store, verification: Verification) -> None:
        self._store = store
        self._verification = verification

    async def of_node(self, node_id: NodeId) -> list[verdict_pb2.Verdict]:
        """Return what the owner of a node may see: what counts, and not who measured it."""
        return await asyncio.to_thread(read_verdicts, self._store, node_id, in_full=False)

    async def in_full(self, node_id: NodeId) -> list[verdict_pb2.Verdict]:
        """Return every verdict on a node.

        Raises:
            SlackwaterError: NODE_NOT_FOUND.
        """
        return await asyncio.to_thread(read_all_verdicts, self._store, node_id)

    async def appeal_of_node(self, node_id: NodeId, verdict_id: str) -> verdict_pb2.Verdict:
        """Take up an appeal; otherwise as `Verification.appeal`."""
        row = await self._verification.appeal(node_id, verdict_id)
        return await asyncio.to_thread(_with_evidence, self._store, row, in_full=False)

    async def appeal(self, verdict_id: str) -> verdict_pb2.Verdict:
        """Take up an appeal for whichever node the verdict is on; otherwise as `Verification.appeal`."""
        found = await asyncio.to_thread(self._store.find_verdict, verdict_id)
        if found is None:
            raise SlackwaterError(
                Reason.VERDICT_NOT_FOUND, f"there is no verdict {verdict_id[:64]!r}", param="verdict_id"
            )
        row = await self._verification.appeal(found.node_id, verdict_id)
        return await asyncio.to_thread(_with_evidence, self._store, row, in_full=True)

    async def release(self, verdict_id: str, reason: str) -> verdict_pb2.Verdict:
        """Take back what a verdict found; otherwise as `Verification.release`.

        Raises:
            SlackwaterError: NODE_BANNED.
        """
        found = await asyncio.to_thread(self._store.find_verdict, verdict_id)
        node = None if found is None else await asyncio.to_thread(self._store.find_node, found.node_id)
        if node is not None and node.banned_at_ms is not None:
            # Its verdict stays as it was, and what is held back of its earnings stays with the platform.
            raise SlackwaterError(Reason.NODE_BANNED, "the node is banned, which is for good", param="verdict_id")
        row = await self._verification.release(verdict_id, reason)
        return await asyncio.to_thread(_with_evidence, self._store, row, in_full=True)

    async def ban(self, node: NodeRow) -> None:
        """Make a verdict of a ban that is in the node's row; of one that a verdict has led to there is one already."""
        assert node.banned_at_ms is not None, "the row of a node that is banned"
        await self._verification.ban(node.node_id, node.owner_id, node.ban_reason or "", node.banned_at_ms)

    async def set_mode(self, rule: str, mode: Mode) -> list[str]:
        """Return the rules that only look on now, by name; raises as `Verification.set_mode`."""
        return sorted(await self._verification.set_mode(rule, mode))


def read_all_verdicts(store: Store, node_id: NodeId) -> list[verdict_pb2.Verdict]:
    """Return every verdict on a node, newest first. Blocks.

    Raises:
        SlackwaterError: NODE_NOT_FOUND.
    """
    if store.find_node(node_id) is None:
        raise SlackwaterError(Reason.NODE_NOT_FOUND, f"there is no node {node_id[:64]!r}", param="node_id")
    return read_verdicts(store, node_id, in_full=True)


def read_verdicts(store: Store, node_id: NodeId, *, in_full: bool) -> list[verdict_pb2.Verdict]:
    """Return the verdicts on a node, newest first, with their evidence. Blocks."""
    rows = [row for row in store.verdicts_of(node_id) if in_full or not row.shadow]
    named = {audit_id for row in rows for audit_id in _audit_ids(row)}
    audits = {audit.audit_id: audit for audit in store.audits_of(sorted(named))}
    return [_to_wire(row, _found(row, audits.values()), in_full=in_full) for row in rows]


def _with_evidence(store: Store, row: VerdictRow, *, in_full: bool) -> verdict_pb2.Verdict:
    return _to_wire(row, store.audits_of(_audit_ids(row)), in_full=in_full)


def _audit_ids(row: VerdictRow) -> list[str]:
    return [str(audit_id) for audit_id in json.loads(row.audit_ids)]


def _found(row: VerdictRow, audits: Iterable[AuditRow]) -> list[AuditRow]:
    wanted = set(_audit_ids(row))
    return [audit for audit in audits if audit.audit_id in wanted]


def _to_wire(row: VerdictRow, audits: Sequence[AuditRow], *, in_full: bool) -> verdict_pb2.Verdict:
    return verdict_pb2.Verdict(
        verdict_id=row.verdict_id,
        node_id=row.node_id,
        manifest_digest=row.manifest_digest,
        state=row.state,
        previous=row.previous,
        reason=row.reason,
        log_evidence=row.log_evidence,
        at_ms=row.at_ms,
        shadow=row.shadow,
        evidence=[_evidence_to_wire(audit, in_full=in_full) for audit in audits],
    )


def _evidence_to_wire(audit: AuditRow, *, in_full: bool) -> verdict_pb2.AuditEvidence:
    return verdict_pb2.AuditEvidence(
        audit_id=audit.audit_id,
        kind=audit.kind,
        # An owner that knew who accused its node could take revenge on it, or agree with it.
        verifier=audit.verifier if in_full else "",
        tokens=audit.tokens,
        log_evidence=audit.log_evidence,
        hard=audit.hard or "",
        detail=audit.detail,
        at_ms=audit.at_ms,
    )
