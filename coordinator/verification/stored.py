"""Verdicts as rows of the store, and back. Pure."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from coordinator.store.verification_port import (
    AuditRow,
    ModeRow,
    StandingRow,
    VerdictRow,
    VerificationBatch,
)
from coordinator.verification.commands import (
    Command,
    StoreAudit,
    StoreMode,
    StoreRecord,
    StoreVerdict,
    Verdict,
)
from coordinator.verification.dispute import Dispute
from coordinator.verification.events import SAMPLED, AuditMeasured, VerdictState
from coordinator.verification.record import Detector, Record
from coordinator.verification.verdicts import Pair, Tracks

# The logarithm of the smallest number there is: JSON has no way to write that of 0.
LOG_EVIDENCE_MIN = -745.0


def batch_of(commands: Iterable[Command]) -> VerificationBatch:
    """Return what these commands want stored; of what replaces, the newest."""
    audits: dict[str, AuditRow] = {}
    verdicts: dict[str, VerdictRow] = {}
    standings: dict[Pair, StandingRow] = {}
    modes: dict[str, ModeRow] = {}
    for command in commands:
        match command:
            case StoreAudit(audit=audit):
                audits.setdefault(audit.audit_id, audit_row(command))
            case StoreVerdict(verdict=verdict):
                verdicts[verdict.verdict_id] = verdict_row(verdict)
            case StoreRecord():
                standings[command.node_id, command.manifest_digest] = standing_row(command)
            case StoreMode():
                modes[command.rule] = ModeRow(rule=command.rule, mode=command.mode.value)
            case _:
                continue
    return VerificationBatch(
        audits=list(audits.values()),
        verdicts=list(verdicts.values()),
        standings=list(standings.values()),
        modes=list(modes.values()),
    )


def audit_row(command: StoreAudit) -> AuditRow:
    audit = command.audit
    measured = audit if isinstance(audit, AuditMeasured) else None
    return AuditRow(
        audit_id=audit.audit_id,
        node_id=audit.node_id,
        manifest_digest=audit.manifest_digest,
        kind=audit.kind.value,
        verifier="" if measured is None else measured.verifier,
        counted=command.counted,
        tokens=0 if measured is None else measured.tokens,
        log_evidence=0.0 if measured is None else max(measured.log_evidence, LOG_EVIDENCE_MIN),
        hard=None if measured is None else measured.hard,
        not_measured=audit.reason if not isinstance(audit, AuditMeasured) else None,
        confirms=audit.confirms,
        detail=json.dumps({} if measured is None else dict(measured.detail), allow_nan=False),
        at_ms=audit.at_ms,
    )


def verdict_row(verdict: Verdict) -> VerdictRow:
    return VerdictRow(
        verdict_id=verdict.verdict_id,
        node_id=verdict.node_id,
        owner_id=verdict.owner_id,
        manifest_digest=verdict.manifest_digest,
        state=verdict.state.word,
        previous=verdict.previous.word,
        reason=verdict.reason,
        audit_ids=json.dumps(verdict.audit_ids),
        log_evidence=verdict.log_evidence,
        shadow=verdict.shadow,
        at_ms=verdict.at_ms,
    )


def standing_row(command: StoreRecord) -> StandingRow:
    shadow = None if command.shadow is None else asdict(command.shadow)
    return StandingRow(
        node_id=command.node_id,
        manifest_digest=command.manifest_digest,
        state=command.active.state.word,
        body=json.dumps({"active": asdict(command.active), "shadow": shadow}, allow_nan=False),
    )


def read_standing(row: StandingRow) -> tuple[Pair, Tracks]:
    """Return the pair of a row and what was known of it."""
    body = json.loads(row.body)
    shadow = None if body["shadow"] is None else _record(body["shadow"])
    return (row.node_id, row.manifest_digest), Tracks(_record(body["active"]), shadow)


def _record(told: dict[str, Any]) -> Record:
    """JSON knows lists for tuples, and numbers for states. A field that an older release lacks has a default."""
    disputes = tuple(
        Dispute(**{**one, "votes": tuple((verifier, vote) for verifier, vote in one["votes"])})
        for one in told["disputes"]
    )
    tuples = {name: tuple(told[name]) for name in ("accusers", "evidence", "accused_by")}
    remembered = tuple((at_ms, audit_id) for at_ms, audit_id in told["remembered"])
    state = VerdictState(told["state"])
    # Before there were detectors, one number stood for all gamblers and modes.
    given = told.get("detectors") or [{"mode": SAMPLED, "log_ms": [told["log_m"]]}]
    detectors = tuple(Detector(mode=one["mode"], log_ms=tuple(one["log_ms"])) for one in given)
    return Record(
        **{**told, **tuples, "state": state, "disputes": disputes, "remembered": remembered, "detectors": detectors}
    )
