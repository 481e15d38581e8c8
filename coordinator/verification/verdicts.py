"""Which nodes may be trusted with what: audits in, verdicts out. Pure.

    probation ── ten good audits ──▶ ok ◀── ten good audits, no evidence left ── watch
        └───────────── evidence, or a hard failure not confirmed yet ─────────────▲
    any of them ── evidence over the threshold, or a failure that two stand behind ──▶ quarantined
    quarantined ── appeal won, or released ──▶ probation
    quarantined ── repetition ──▶ banned ◀── administrator ── any of them

How evidence is added up, and every threshold of it: record.py. What could not
be measured is no fault, what happened during an outage of our own does not
count, and an audit that is told twice counts once.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.verification.commands import (
    BanNode,
    Command,
    NotifyNode,
    RequestAudit,
    SetNodeStanding,
    StoreAudit,
    StoreMode,
    StoreRecord,
    StoreVerdict,
    Verdict,
)
from coordinator.verification.dispute import Dispute
from coordinator.verification.events import (
    EXACT_KINDS,
    NODE_WIDE,
    AppealAsked,
    AppealMeasured,
    AuditKind,
    AuditMeasured,
    AuditNotMeasured,
    BanAsked,
    Event,
    Mode,
    ModeChanged,
    OutageBegan,
    OutageEnded,
    ReleaseAsked,
    VerdictState,
)
from coordinator.verification.occasions import count_occasions
from coordinator.verification.record import (
    WATCH_LOG,
    Record,
    Step,
    acquit,
    audit_rate,
    convict,
    count_vote,
    measure,
    remember,
)
from coordinator.verification.requests import appeal_request, asked_again, confirm_request
from coordinator.verification.uses import use_of
from inference.task import ManifestDigest, NodeId

_DAY_MS = 24 * 3600 * 1000
# After an appeal that was lost; time to mend a wrong engine, and no use for trying again and again.
APPEAL_PAUSE_MS = _DAY_MS
# An owner whose nodes are quarantined, two verifiers each, on so many occasions does it on purpose.
BAN_OCCASIONS = 3
# What is older is forgiven.
BAN_WINDOW_MS = 90 * _DAY_MS
# Outages that late results may fall into.
OUTAGES_MAX = 32

Pair = tuple[NodeId, ManifestDigest]


@dataclass(frozen=True, slots=True)
class Tracks:
    """What counts of a pair, and what would if the rules in shadow counted too; None while that is the same."""

    active: Record
    shadow: Record | None = None


class Verdicts:
    """The verdicts on all nodes.

    Args:
        pairs: as stored by `StoreRecord`.
        shadow_rules: the rules in shadow, as stored by `StoreMode`.

    After a start, `requests` tells what was being asked when the last one ended. Outages are not stored: results that
    were under way end with the process.
    """

    def __init__(self, pairs: Mapping[Pair, Tracks] | None = None, shadow_rules: Iterable[str] = ()) -> None:
        self._pairs: dict[Pair, Tracks] = dict(pairs or {})
        self._shadow_rules = set(shadow_rules)
        self._outage_since_ms: int | None = None
        self._outages: deque[tuple[int, int]] = deque(maxlen=OUTAGES_MAX)

    def handle(self, event: Event) -> list[Command]:
        match event:
            case AuditMeasured():
                return self._measured(event)
            case AuditNotMeasured():
                return self._not_measured(event)
            case OutageBegan():
                earlier = self._outage_since_ms
                self._outage_since_ms = event.at_ms if earlier is None else min(earlier, event.at_ms)
                return []
            case OutageEnded():
                return self._outage_ended(event)
            case AppealAsked():
                return self._appeal_asked(event)
            case AppealMeasured():
                return self._appeal_measured(event)
            case ModeChanged():
                return self._mode_changed(event)
            case BanAsked():
                return self._ban_asked(event)
            case ReleaseAsked():
                return self._release_asked(event)

    # --- asked by others -------------------------------------------------------------------

    def record(self, node_id: NodeId, manifest_digest: ManifestDigest) -> Record | None:
        tracks = self._pairs.get((node_id, manifest_digest))
        return None if tracks is None else tracks.active

    def pairs(self) -> dict[Pair, Tracks]:
        """Return all pairs that are known."""
        return dict(self._pairs)

    def rate(self, node_id: NodeId, manifest_digest: ManifestDigest) -> float:
        """Return the share of the node's tasks that is audited; all of one that is not known."""
        record = self.record(node_id, manifest_digest)
        return audit_rate(0 if record is None else record.good_in_a_row)

    def shadow_rules(self) -> frozenset[str]:
        return frozenset(self._shadow_rules)

    def requests(self) -> list[RequestAudit]:
        """Return every request that waits for an answer."""
        found = []
        for (node_id, digest), tracks in self._pairs.items():
            record = tracks.active
            found += [
                confirm_request(node_id, digest, dispute)
                for dispute in record.disputes
                if AuditKind(dispute.kind) not in EXACT_KINDS
            ]
            if record.appeal_requests:
                found.append(appeal_request(node_id, digest, record))
        return found

    def appeal_refusal(self, event: AppealAsked) -> str | None:
        """Return why an appeal is not taken up, in words for the owner; None where it is."""
        record = self.record(event.node_id, event.manifest_digest)
        if record is None or record.verdict_id != event.verdict_id:
            return "this verdict is not the one in force; list the verdicts and appeal against the newest"
        if record.state is not VerdictState.QUARANTINED:
            return f"the verdict is {record.state.word}; only a quarantine can be appealed against"
        if record.appeal_requests:
            return "an appeal against it is being measured"
        if event.at_ms < record.appeal_allowed_from_ms:
            wait_h = (record.appeal_allowed_from_ms - event.at_ms) / 3_600_000
            return f"the last appeal was lost; the next one is possible in {wait_h:.1f} hours"
        return None

    def release_refusal(self, event: ReleaseAsked) -> str | None:
        """Return why a node cannot be released, in words for an administrator; None where it can."""
        record = self.record(event.node_id, event.manifest_digest)
        if record is None or record.verdict_id != event.verdict_id:
            return "this verdict is not the one in force; list the verdicts and name the newest"
        if record.state not in (VerdictState.QUARANTINED, VerdictState.WATCH):
            return f"the verdict is {record.state.word}; only a quarantine or a watch can be taken back"
        return None

    # --- audits ----------------------------------------------------------------------------

    def _measured(self, audit: AuditMeasured) -> list[Command]:
        pair = (audit.node_id, audit.manifest_digest)
        tracks = self._pairs.get(pair) or Tracks(Record(owner_id=audit.owner_id))
        if tracks.active.repeats(audit.audit_id, audit.at_ms):
            return []
        if self._in_outage(audit.at_ms):
            return [StoreAudit(audit, counted=False)]
        if audit.confirms is not None:
            return self._voted(pair, tracks, audit, audit.confirms)
        seen = self._that_counts(audit)
        before = remember(tracks.active, audit.audit_id, audit.at_ms)
        step = Step(before) if seen is None else measure(before, seen)
        commands: list[Command] = [StoreAudit(audit, counted=seen is not None)]
        commands += self._changed(pair, tracks, step, audit.audit_id, audit.at_ms)
        if seen is not audit or tracks.shadow is not None:
            self._look_on(pair, tracks, audit, commands)
        return commands + self._stored(pair) + self._bans(pair, tracks.active, audit.at_ms)

    def _look_on(self, pair: Pair, tracks: Tracks, audit: AuditMeasured, commands: list[Command]) -> None:
        """Tell an audit to the shadow of a pair; nobody is asked to confirm what does not count."""
        before = remember(tracks.shadow or tracks.active, audit.audit_id, audit.at_ms)
        step = measure(before, audit)
        active = self._pairs[pair].active
        self._pairs[pair] = Tracks(active, step.record)
        if step.record.state not in (before.state, active.state):
            verdict = _verdict(pair, before, step, audit.audit_id, audit.at_ms, shadow=True)
            commands.append(StoreVerdict(verdict))

    def _that_counts(self, audit: AuditMeasured) -> AuditMeasured | None:
        """Return an audit without what a rule in shadow says; None where nothing is left."""
        if audit.kind.value in self._shadow_rules:
            return None
        return replace(audit, hard=None) if self._shadow_rules.intersection(audit.rules) else audit

    def _voted(self, pair: Pair, tracks: Tracks, audit: AuditMeasured, about: str) -> list[Command]:
        dispute = tracks.active.dispute(about)
        if dispute is None or audit.verifier in dispute.verifiers:
            return [StoreAudit(audit, counted=False)]
        before = remember(tracks.active, audit.audit_id, audit.at_ms)
        step = count_vote(before, dispute, audit)
        commands: list[Command] = [StoreAudit(audit, counted=True)]
        commands += self._changed(pair, tracks, step, audit.audit_id, audit.at_ms)
        shadow = tracks.shadow
        shadowed = None if shadow is None else shadow.dispute(about)
        if shadow is not None and shadowed is not None:
            self._pairs[pair] = replace(self._pairs[pair], shadow=count_vote(shadow, shadowed, audit).record)
        return commands + self._stored(pair) + self._bans(pair, tracks.active, audit.at_ms)

    def _not_measured(self, audit: AuditNotMeasured) -> list[Command]:
        pair = (audit.node_id, audit.manifest_digest)
        tracks = self._pairs.get(pair)
        stored: list[Command] = [StoreAudit(audit, counted=False)]
        # In an outage nobody can measure; who is asked is asked again after it.
        if tracks is None or audit.confirms is None or self._in_outage(audit.at_ms):
            return stored
        record, requests = asked_again(pair, tracks.active, audit.confirms)
        if record is tracks.active:
            return stored
        self._pairs[pair] = replace(tracks, active=record)
        return [*stored, *requests, *self._stored(pair)]

    # --- outages ---------------------------------------------------------------------------

    def _outage_ended(self, event: OutageEnded) -> list[Command]:
        if self._outage_since_ms is None:
            return []
        self._outages.append((self._outage_since_ms, event.at_ms))
        self._outage_since_ms = None
        return list(self.requests())

    def _in_outage(self, at_ms: int) -> bool:
        if self._outage_since_ms is not None and at_ms >= self._outage_since_ms:
            return True
        return any(began_ms <= at_ms <= ended_ms for began_ms, ended_ms in self._outages)

    # --- appeals and bans ------------------------------------------------------------------

    def _appeal_asked(self, event: AppealAsked) -> list[Command]:
        if self.appeal_refusal(event) is not None:
            return []
        pair = (event.node_id, event.manifest_digest)
        tracks = self._pairs[pair]
        record = replace(tracks.active, appeal_requests=1)
        self._pairs[pair] = replace(tracks, active=record)
        return [appeal_request(event.node_id, event.manifest_digest, record), *self._stored(pair)]

    def _appeal_measured(self, event: AppealMeasured) -> list[Command]:
        pair = (event.node_id, event.manifest_digest)
        tracks = self._pairs.get(pair)
        if tracks is None or self._in_outage(event.at_ms):
            return []
        record = tracks.active
        if record.verdict_id != event.verdict_id or not record.appeal_requests or event.verifier in record.accused_by:
            return []
        record = replace(remember(record, event.audit_id, event.at_ms), appeal_requests=0)
        if event.hard is None and event.log_evidence < WATCH_LOG:
            step = Step(acquit(record), reason="the appeal was won: another verifier finds nothing; probation again")
            tracks = Tracks(tracks.active)
        else:
            record = convict(record, (event.verifier,), event.at_ms)
            record = replace(record, appeal_allowed_from_ms=event.at_ms + APPEAL_PAUSE_MS)
            step = Step(record, reason="the appeal was lost: another verifier finds the same")
        commands = self._changed(pair, tracks, step, event.audit_id, event.at_ms, tell=True)
        return commands + self._stored(pair) + self._bans(pair, tracks.active, event.at_ms)

    def _release_asked(self, event: ReleaseAsked) -> list[Command]:
        """As after an appeal that was won; what was being measured about it comes to nothing."""
        if self.release_refusal(event) is not None:
            return []
        pair = (event.node_id, event.manifest_digest)
        tracks = Tracks(self._pairs[pair].active)
        step = Step(acquit(tracks.active), reason=f"released by an administrator: {event.reason}")
        return self._changed(pair, tracks, step, "release", event.at_ms) + self._stored(pair)

    def _ban_asked(self, event: BanAsked) -> list[Command]:
        """Ban the node as a whole, and what is quarantined too, so that no appeal is left."""
        mine = {pair: tracks for pair, tracks in self._pairs.items() if pair[0] == event.node_id}
        if any(tracks.active.state is VerdictState.BANNED for tracks in mine.values()):
            return []
        banned = {pair: tracks for pair, tracks in mine.items() if tracks.active.state is VerdictState.QUARANTINED}
        whole = (event.node_id, NODE_WIDE)
        banned[whole] = mine.get(whole) or Tracks(Record(owner_id=event.owner_id))
        reason = f"banned by an administrator: {event.reason}"
        return [one for pair, tracks in banned.items() for one in self._ban(pair, tracks, reason, event.at_ms)]

    def _bans(self, pair: Pair, before: Record, now_ms: int) -> list[Command]:
        """Ban what is quarantined of an owner, where a quarantine that was confirmed just now repeats others."""
        owner_id, confirmed_at_ms = before.owner_id, self._pairs[pair].active.confirmed_at_ms
        if confirmed_at_ms is None or confirmed_at_ms == before.confirmed_at_ms:
            return []
        mine = [(pair, tracks) for pair, tracks in self._pairs.items() if tracks.active.owner_id == owner_id]
        times = sorted(
            at_ms
            for _, tracks in mine
            if (at_ms := tracks.active.confirmed_at_ms) is not None and at_ms > now_ms - BAN_WINDOW_MS
        )
        if count_occasions(times) < BAN_OCCASIONS:
            return []
        reason = f"nodes of this owner were quarantined, two verifiers each, on {BAN_OCCASIONS} occasions"
        commands: list[Command] = []
        for pair, tracks in mine:
            if tracks.active.state is VerdictState.QUARANTINED:
                commands += [*self._ban(pair, tracks, reason, now_ms), BanNode(pair[0], reason)]
        return commands

    def _ban(self, pair: Pair, tracks: Tracks, reason: str, now_ms: int) -> list[Command]:
        step = Step(replace(tracks.active, state=VerdictState.BANNED, appeal_requests=0), reason=reason)
        return self._changed(pair, tracks, step, "ban", now_ms) + self._stored(pair)

    # --- modes -----------------------------------------------------------------------------

    def _mode_changed(self, event: ModeChanged) -> list[Command]:
        if (event.rule in self._shadow_rules) == (event.mode is Mode.SHADOW):
            return []
        commands: list[Command] = [StoreMode(event.rule, event.mode)]
        if event.mode is Mode.SHADOW:
            self._shadow_rules.add(event.rule)
        else:
            self._shadow_rules.remove(event.rule)
        for pair, tracks in list(self._pairs.items()):
            # What waits to be confirmed by a rule that does not count any more is dropped.
            left = tuple(one for one in tracks.active.disputes if event.rule not in _rules_of_dispute(one))
            changed = Tracks(replace(tracks.active, disputes=left))
            if changed != tracks:
                self._pairs[pair] = changed
                commands += self._stored(pair)
        return commands

    # --- what follows ----------------------------------------------------------------------

    def _changed(
        self, pair: Pair, tracks: Tracks, step: Step, cause: str, at_ms: int, *, tell: bool = False
    ) -> list[Command]:
        """Take over a step of what counts; `tell` makes a verdict of it even where the state stays."""
        node_id, digest = pair
        before, record = tracks.active, step.record
        commands: list[Command] = []
        if record.state is not before.state or tell:
            verdict = _verdict(pair, before, step, cause, at_ms, shadow=False)
            record = replace(record, verdict_id=verdict.verdict_id, verdict_at_ms=at_ms)
            commands += [StoreVerdict(verdict), NotifyNode(verdict)]
            if use_of(record.state, digest) is not use_of(before.state, digest):
                commands.append(SetNodeStanding(node_id, digest, use_of(record.state, digest)))
        if step.request is not None:
            commands.append(confirm_request(node_id, digest, step.request))
        self._pairs[pair] = replace(tracks, active=record)
        return commands

    def _stored(self, pair: Pair) -> list[Command]:
        tracks = self._pairs[pair]
        return [StoreRecord(node_id=pair[0], manifest_digest=pair[1], active=tracks.active, shadow=tracks.shadow)]


def _verdict(pair: Pair, before: Record, step: Step, cause: str, at_ms: int, *, shadow: bool) -> Verdict:
    state = step.record.state
    told = "\0".join((*pair, cause, state.word, str(at_ms), str(shadow)))
    # An appeal that was won has wiped the record; what it was about is in the one before.
    shown = step.record if step.record.evidence or state is VerdictState.OK else before
    return Verdict(
        verdict_id=f"verdict-{hashlib.sha256(told.encode()).hexdigest()[:16]}",
        node_id=pair[0],
        owner_id=before.owner_id,
        manifest_digest=pair[1],
        state=state,
        previous=before.state,
        reason=step.reason,
        audit_ids=shown.evidence,
        log_evidence=shown.log_m,
        shadow=shadow,
        at_ms=at_ms,
    )


def _rules_of_dispute(dispute: Dispute) -> tuple[str, ...]:
    return (dispute.kind, f"{dispute.kind}.{dispute.hard}")
