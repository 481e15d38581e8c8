"""What is known of one pair of a node and a manifest, and how one audit changes it. Pure.

The test is an e-detector (Shin, Ramdas and Rinaldo, "E-detectors: a
nonparametric framework for sequential change detection", 2022): a CUSUM of
e-values, M = max(M, 1) * e, which an honest node takes over c once in c audits
at most, wherever one stops looking, and which notices a node that turns bad
after a thousand good audits as fast as one that was bad from the start. Here it
is kept as its logarithm and never below 0, which crosses at the same audits.

Each gambler (inference/evidence.py) has a CUSUM of its own, M_k, and what
crosses is their mean by the gamblers' shares, M = Σ w_k M_k: whoever bets right
is not held back in the next audit by who bet wrong. A CUSUM is at most the
Shiryaev-Roberts sum R = (R + 1) * e, whose mean after n audits is n at most; so
is that of Σ w_k R_k, as the shares make 1, and M crosses c within n audits with
probability n / c. Answers that are drawn and greedy ones have each their M.
That costs nothing: an audit moves one of them, so that the chances n_1 / c and
n_2 / c make n / c together.

So with QUARANTINE_LOG = log(10^7), n audits of an honest node quarantine it
with probability n / 10^7 at most: a fleet of 10,000 nodes with 20 audits a day
each sees one false quarantine in 50 days, and that one has an appeal.
"""

import math
from dataclasses import dataclass, replace

from coordinator.verification.dispute import Dispute, Outcome
from coordinator.verification.events import (
    COORDINATOR,
    EXACT_KINDS,
    NODE_WIDE,
    OUTPUT_KINDS,
    SCORED,
    AuditMeasured,
    VerdictState,
)
from inference.evidence import combined
from inference.task import ManifestDigest, OwnerId

# Restricts a node to public work, and is wrong once in 1,000 audits of an honest one.
WATCH_LOG = math.log(1e3)
# See above. At 16.1, evidence of 1.6 an audit quarantines after ten.
QUARANTINE_LOG = math.log(1e7)
# So little is no evidence: of some gambler's luck there is always a rest.
SPENT_LOG = math.log(2)
# What one audit may say against a node. An e-value that is cut stays one; and no verifier quarantines by one audit.
AUDIT_LOG_MAX = math.log(1e4)
# An audit this much against a node ends its row of good ones; an honest node has one in 100 at most (Markov).
SUSPICIOUS_LOG = math.log(100)
# BOINC trusts a host after ten valid results in a row (sched_config, `set_trust`).
PROBATION_AUDITS = 10
# The least that any method needs for a 4-bit model: 0.99 power at 300 tokens in our reference measurements.
PROBATION_TOKENS = 300
# 1/(1 + n) alone would invite whoever behaves for long and cheats then.
AUDIT_RATE_MIN = 0.02
# Audits of a pair that may be under way at once, and replayed: older ones are refused by their time.
REMEMBERED_AUDITS_MAX = 64
# Audits that a verdict names; a quarantine needs two at least, and rarely over twenty.
EVIDENCE_AUDITS_MAX = 32
# Two are enough to know.
ACCUSERS_MAX = 2
# Accusations that wait for a second verifier at once. Further ones of the same kind and verifier would add nothing.
DISPUTES_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """The evidence of one mode of decoding: log(max(M_k, 1)) of each gambler, see the module."""

    mode: str
    log_ms: tuple[float, ...]

    @property
    def log_m(self) -> float:
        # Rounded, it may be below the floor of each.
        return max(0.0, combined(self.log_ms))

    def after(self, capitals: tuple[float, ...]) -> "Detector":
        """Return it after an audit.

        Where the gamblers are others than before (another calibration, a record of an earlier release), each goes on
        with what all had together: their mean stays what it was.
        """
        before = self.log_ms if len(self.log_ms) == len(capitals) else (self.log_m,) * len(capitals)
        moved = (log_m + min(capital, AUDIT_LOG_MAX) for log_m, capital in zip(before, capitals, strict=True))
        return replace(self, log_ms=tuple(max(0.0, log_m) for log_m in moved))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The state of one pair. `log_m` is the largest of its detectors."""

    owner_id: OwnerId
    state: VerdictState = VerdictState.PROBATION
    log_m: float = 0.0
    detectors: tuple[Detector, ...] = ()
    # Who spoke against the node since there was last no evidence, the first two.
    accusers: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    # Audits of an output in a row that were good, and the ids in them.
    good_in_a_row: int = 0
    good_tokens: int = 0
    audits: int = 0
    tokens: int = 0
    disputes: tuple[Dispute, ...] = ()
    # (time, id) of the newest audits, oldest first; whatever is not newer than `forgotten_until_ms` is a replay.
    remembered: tuple[tuple[int, str], ...] = ()
    forgotten_until_ms: int = -1
    # Of the verdict in force, empty before the first.
    verdict_id: str = ""
    verdict_at_ms: int = 0
    # Who measured what the quarantine in force stands on; an appeal goes to somebody else.
    accused_by: tuple[str, ...] = ()
    # Since when two verifiers stand behind the quarantine in force.
    confirmed_at_ms: int | None = None
    # Verifiers that were asked for the appeal which is being measured; 0 where there is none.
    appeal_requests: int = 0
    appeal_allowed_from_ms: int = 0

    def repeats(self, audit_id: str, at_ms: int) -> bool:
        """Whether an audit was told before, or is too old to know."""
        return at_ms <= self.forgotten_until_ms or any(known == audit_id for _, known in self.remembered)

    def dispute(self, audit_id: str) -> Dispute | None:
        return next((dispute for dispute in self.disputes if dispute.audit_id == audit_id), None)

    def log_m_of(self, mode: str) -> float:
        return next((detector.log_m for detector in self.detectors if detector.mode == mode), 0.0)

    @property
    def has_scored(self) -> bool:
        """Whether a score of the node was known, and compared. One that failed would have it watched."""
        return any(detector.mode == SCORED for detector in self.detectors)

    def with_evidence(self, audit: AuditMeasured) -> "Record":
        """Add what an audit says to the detector of its mode."""
        known = {detector.mode: detector for detector in self.detectors}
        detector = known.get(audit.mode, Detector(mode=audit.mode, log_ms=(0.0,)))
        known[audit.mode] = detector.after(audit.log_capitals or (audit.log_evidence,))
        detectors = tuple(known.values())
        return replace(self, detectors=detectors, log_m=max(one.log_m for one in detectors))

    def without_evidence_over(self, log_m: float) -> "Record":
        """Give up what goes beyond; of each gambler, and so of all together."""
        detectors = tuple(
            replace(one, log_ms=tuple(min(known, log_m) for known in one.log_ms)) for one in self.detectors
        )
        return replace(self, detectors=detectors, log_m=min(self.log_m, log_m))

    def without_dispute(self, audit_id: str) -> "Record":
        return replace(self, disputes=tuple(one for one in self.disputes if one.audit_id != audit_id))

    def with_dispute(self, dispute: Dispute) -> "Record":
        """Add a dispute, or replace the one about the same audit."""
        known = any(one.audit_id == dispute.audit_id for one in self.disputes)
        if not known:
            return replace(self, disputes=(*self.disputes, dispute))
        return replace(
            self, disputes=tuple(dispute if one.audit_id == dispute.audit_id else one for one in self.disputes)
        )


def audit_rate(good_in_a_row: int) -> float:
    """Return the share of a node's tasks that is audited after so many good audits in a row."""
    return max(AUDIT_RATE_MIN, 1.0 / (1 + good_in_a_row))


def remember(record: Record, audit_id: str, at_ms: int) -> Record:
    """Note an audit, so that it counts once; in the order of time, whatever the order of arrival."""
    remembered = sorted((*record.remembered, (at_ms, audit_id)))
    forgotten = remembered[:-REMEMBERED_AUDITS_MAX]
    until_ms = max((record.forgotten_until_ms, *(moment for moment, _ in forgotten)))
    return replace(record, remembered=tuple(remembered[-REMEMBERED_AUDITS_MAX:]), forgotten_until_ms=until_ms)


def add_evidence(record: Record, audit: AuditMeasured) -> Record:
    """Return the record after a new audit, its state not judged yet."""
    before = record.log_m_of(audit.mode)
    record = record.with_evidence(audit)
    log_m, accuses = record.log_m, record.log_m_of(audit.mode) > before
    accusers, evidence = record.accusers, record.evidence
    if accuses or audit.hard is not None:
        evidence = (*evidence, audit.audit_id)[-EVIDENCE_AUDITS_MAX:]
    if accuses and audit.verifier not in accusers and len(accusers) < ACCUSERS_MAX:
        accusers = (*accusers, audit.verifier)
    if log_m <= SPENT_LOG and audit.hard is None:
        accusers, evidence = (), tuple(one.audit_id for one in record.disputes)
    suspicious = audit.hard is not None or audit.log_evidence >= SUSPICIOUS_LOG or log_m >= WATCH_LOG
    good_in_a_row, good_tokens = record.good_in_a_row, record.good_tokens
    if suspicious:
        good_in_a_row = good_tokens = 0
    elif audit.kind in OUTPUT_KINDS or audit.manifest_digest == NODE_WIDE:
        good_in_a_row, good_tokens = good_in_a_row + 1, good_tokens + audit.tokens
    return replace(
        record,
        accusers=accusers,
        evidence=evidence,
        good_in_a_row=good_in_a_row,
        good_tokens=good_tokens,
        audits=record.audits + 1,
        tokens=record.tokens + audit.tokens,
    )


def enough_accusers(accusers: tuple[str, ...]) -> bool:
    """Whether evidence of these may quarantine: one verifier that lies, or is broken, may not, unless it is ours."""
    return len(accusers) >= ACCUSERS_MAX or COORDINATOR in accusers


def independent(dispute: Dispute, audit: AuditMeasured) -> bool:
    """Whether a hard failure cannot have the cause of another one in a broken verifier."""
    if not dispute.hard or dispute.audit_id == audit.audit_id:
        return False
    return audit.verifier not in dispute.verifiers or audit.kind.value != dispute.kind or audit.kind in EXACT_KINDS


@dataclass(frozen=True, slots=True)
class Step:
    """Args: `request` is a dispute for which a further verifier is to be asked."""

    record: Record
    request: Dispute | None = None
    reason: str = ""


def measure(record: Record, audit: AuditMeasured) -> Step:
    """Return the record after a new audit that counts, judged."""
    after = add_evidence(record, audit)
    if record.state >= VerdictState.QUARANTINED:
        return Step(after)
    other = next((one for one in record.disputes if independent(one, audit)), None)
    if audit.hard is not None and other is not None:
        voters = tuple(dict.fromkeys((*(voter for voter, _ in other.votes), audit.verifier)))
        return Step(convict(after, voters, audit.at_ms), reason=f"two failures apart: {other.hard} and {audit.hard}")
    after = replace(after, state=judge(after, audit.manifest_digest))
    if after.state is VerdictState.QUARANTINED:
        confirmed_at_ms = audit.at_ms if len(after.accusers) >= ACCUSERS_MAX else None
        after = replace(after, accused_by=after.accusers, confirmed_at_ms=confirmed_at_ms)
        return Step(after, reason=f"the evidence of {len(after.evidence)} audits is {after.log_m:.1f} nats")
    asked = any(not one.hard for one in after.disputes)
    accuses = audit.hard is not None or (after.log_m >= QUARANTINE_LOG and not asked)
    if not accuses or len(after.disputes) >= DISPUTES_MAX:
        return Step(after, reason=f"the evidence of {len(after.evidence)} audits is {after.log_m:.1f} nats")
    dispute = Dispute(
        audit_id=audit.audit_id,
        kind=audit.kind.value,
        hard=audit.hard or "",
        log_m_before=record.log_m,
        votes=((audit.verifier, True),),
    )
    after = after.with_dispute(dispute)
    after = replace(after, state=judge(after, audit.manifest_digest))
    failed = f"{audit.kind.value} failed by {audit.hard or 'its evidence'}"
    if audit.kind in EXACT_KINDS:
        # Seen by ourselves, and gone: there is nothing that anybody could repeat. Until the next one it stands alone.
        return Step(after, reason=f"{failed}; another failure quarantines")
    return Step(after, dispute, f"{failed}; a second verifier is asked")


def count_vote(record: Record, dispute: Dispute, audit: AuditMeasured) -> Step:
    """Return the record after a further verifier repeated the audit in dispute."""
    against = audit.hard is not None or (not dispute.hard and audit.log_evidence >= SUSPICIOUS_LOG)
    voted = dispute.vote(audit.verifier, against)
    match voted.outcome:
        case Outcome.OPEN:
            asked = voted if voted is not dispute else None
            return Step(record.with_dispute(voted), asked, "two verifiers disagree; a third is asked")
        case Outcome.CONFIRMED:
            reason = f"{dispute.kind} failed by {dispute.hard or 'its evidence'}, confirmed by a second verifier"
            accusers = tuple(verifier for verifier, vote in voted.votes if vote)
            return Step(convict(record.without_dispute(dispute.audit_id), accusers, audit.at_ms), reason=reason)
        case Outcome.OVERTURNED:
            # Whatever came in after the false accusation is given up with it: less evidence is never unjust.
            cleared = record.without_evidence_over(dispute.log_m_before).without_dispute(dispute.audit_id)
            return Step(
                replace(cleared, state=judge(cleared, audit.manifest_digest)),
                reason="two of three verifiers deny the failure",
            )


def convict(record: Record, accusers: tuple[str, ...], at_ms: int) -> Record:
    """Quarantine by two verifiers, or by two failures that have no cause in common."""
    confirmed_at_ms = at_ms if record.confirmed_at_ms is None else record.confirmed_at_ms
    accused_by = tuple(dict.fromkeys((*record.accused_by, *accusers)))
    state = max(record.state, VerdictState.QUARANTINED)
    return replace(record, state=state, accused_by=accused_by, confirmed_at_ms=confirmed_at_ms)


def acquit(record: Record) -> Record:
    """Return the record after an appeal was won: in probation, with nothing against it, and its audits remembered."""
    return Record(
        owner_id=record.owner_id,
        audits=record.audits,
        tokens=record.tokens,
        remembered=record.remembered,
        forgotten_until_ms=record.forgotten_until_ms,
    )


def judge(record: Record, manifest_digest: ManifestDigest) -> VerdictState:
    """Return the state that a record's evidence asks for; a quarantine ends otherwise, by an appeal."""
    if record.state >= VerdictState.QUARANTINED:
        return record.state
    if record.log_m >= QUARANTINE_LOG and enough_accusers(record.accusers):
        return VerdictState.QUARANTINED
    if record.log_m >= WATCH_LOG or record.disputes:
        return VerdictState.WATCH
    # A challenge of the node itself has no tokens.
    tokens_needed = 0 if manifest_digest == NODE_WIDE else PROBATION_TOKENS
    proven = record.good_in_a_row >= PROBATION_AUDITS and record.good_tokens >= tokens_needed
    if record.state is VerdictState.OK or (proven and record.log_m <= SPENT_LOG):
        return VerdictState.OK
    return record.state
