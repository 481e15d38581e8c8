"""Verdicts as people and programs read them, the same at the coordinator and at an agent."""

import json
from datetime import UTC, datetime
from typing import Any

from protos.slackwater.common.v1.verdict_pb2 import AuditEvidence, Verdict


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as a JSON object; `detail` of an audit is an object of its own."""
    return {
        "verdict_id": verdict.verdict_id,
        "node_id": verdict.node_id,
        "manifest_digest": verdict.manifest_digest,
        "state": verdict.state,
        "previous": verdict.previous,
        "reason": verdict.reason,
        "log_evidence": verdict.log_evidence,
        "at_ms": verdict.at_ms,
        "shadow": verdict.shadow,
        "evidence": [
            {
                "audit_id": audit.audit_id,
                "kind": audit.kind,
                "verifier": audit.verifier,
                "tokens": audit.tokens,
                "log_evidence": audit.log_evidence,
                "hard": audit.hard,
                "detail": _detail(audit),
                "at_ms": audit.at_ms,
            }
            for audit in verdict.evidence
        ],
    }


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return a verdict in lines for a terminal: the verdict, then one line for each audit that it stands on."""
    shadow = " (in shadow: nothing followed)" if verdict.shadow else ""
    about = verdict.manifest_digest or "the node as a whole"
    return [
        f"{_moment(verdict.at_ms)}  {verdict.previous} -> {verdict.state}{shadow}  {verdict.verdict_id}",
        f"    {about}: {verdict.reason}",
        *(f"    {_audit_line(audit)}" for audit in verdict.evidence),
    ]


def _audit_line(audit: AuditEvidence) -> str:
    parts = [f"{_moment(audit.at_ms)}  {audit.audit_id}  {audit.kind}"]
    parts += [f"by {audit.verifier}"] if audit.verifier else []
    parts += [f"broke {audit.hard}"] if audit.hard else []
    parts.append(f"{audit.tokens} tokens, {audit.log_evidence:+.2f} nats")
    parts += [f"{name} {value}" for name, value in _detail(audit).items()]
    return ", ".join(parts)


def _detail(audit: AuditEvidence) -> dict[str, Any]:
    # An empty one came from nobody who had something to say.
    found: dict[str, Any] = json.loads(audit.detail or "{}")
    return found


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
