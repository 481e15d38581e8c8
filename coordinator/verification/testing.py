"""Audits as tests tell them, and verdicts that are followed. For tests only."""

from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.scheduler.standing import Standings
from coordinator.verification.commands import (
    Command,
    RequestAudit,
    SetNodeStanding,
    StoreMode,
    StoreRecord,
    StoreVerdict,
    Verdict,
)
from coordinator.verification.events import (
    SCORED,
    AppealAsked,
    AppealMeasured,
    AuditKind,
    AuditMeasured,
    Event,
    Mode,
    Use,
    VerdictState,
)
from coordinator.verification.record import PROBATION_AUDITS
from coordinator.verification.service import VerificationHooks
from coordinator.verification.verdicts import Pair, Tracks, Verdicts
from inference.task import ManifestDigest, NodeId, OwnerId

NODE = NodeId("node-1")
OWNER = OwnerId("owner-1")
DIGEST = ManifestDigest("sha256:" + "0" * 64)
# What a good audit of the real measure says: a little for the node.
GOOD_LOG = -0.5


def audit(number: int, log_evidence: float = GOOD_LOG, **changes: Any) -> AuditMeasured:
    """Return a re-scored audit of `NODE`; its id and time follow from its number."""
    made = AuditMeasured(
        node_id=NODE,
        owner_id=OWNER,
        manifest_digest=DIGEST,
        audit_id=f"audit-{number}",
        kind=AuditKind.RESCORE,
        tokens=100,
        log_evidence=log_evidence,
        hard=None,
        at_ms=1_000 * (number + 1),
    )
    return replace(made, **changes)


def proof(node_id: NodeId = NODE, digest: ManifestDigest = DIGEST) -> list[AuditMeasured]:
    """Return what it takes to be believed as a verifier: good answers, and a good score."""
    answers = [
        audit(number, node_id=node_id, manifest_digest=digest, audit_id=f"{node_id}-{number}")
        for number in range(PROBATION_AUDITS)
    ]
    scored = replace(answers[0], kind=AuditKind.SCORE, mode=SCORED, audit_id=f"{node_id}-scored")
    return [*answers, scored]


@dataclass(slots=True)
class Court:
    """Verdicts, everything that they ever wanted, and what a scheduler made of it that audits `DIGEST`."""

    verdicts: Verdicts = field(default_factory=Verdicts)
    commands: list[Command] = field(default_factory=list)
    standings: Standings = field(default_factory=Standings)

    def tell(self, *events: Event) -> list[Command]:
        """Return the commands of these events alone."""
        made = [command for event in events for command in self.verdicts.handle(event)]
        self.commands += made
        for command in made:
            if isinstance(command, SetNodeStanding):
                self.standings.set(command.node_id, command.manifest_digest, command.use)
        return made

    def use(self, digest: ManifestDigest = DIGEST) -> Use:
        """Return what the scheduler uses `NODE` for."""
        self.standings.audit([DIGEST])
        return self.standings.use(NODE, digest)

    def state(self, node_id: NodeId = NODE, digest: ManifestDigest = DIGEST) -> VerdictState:
        record = self.verdicts.record(node_id, digest)
        return VerdictState.PROBATION if record is None else record.state

    def told(self, *, shadow: bool = False) -> list[Verdict]:
        """Return the verdicts so far, those that count or those of rules in shadow."""
        stored = [one.verdict for one in self.commands if isinstance(one, StoreVerdict)]
        return [verdict for verdict in stored if verdict.shadow is shadow]

    def asked(self) -> list[RequestAudit]:
        return [one for one in self.commands if isinstance(one, RequestAudit)]

    def uses(self) -> list[Use]:
        return [one.use for one in self.commands if isinstance(one, SetNodeStanding)]

    def restarted(self) -> "Court":
        """Return what a new process makes of what was stored."""
        pairs: dict[Pair, Tracks] = {}
        modes: dict[str, Mode] = {}
        for command in self.commands:
            if isinstance(command, StoreRecord):
                pairs[command.node_id, command.manifest_digest] = Tracks(command.active, command.shadow)
            elif isinstance(command, StoreMode):
                modes[command.rule] = command.mode
        return Court(Verdicts(pairs, [rule for rule, mode in modes.items() if mode is Mode.SHADOW]))

    def quarantine(self, number: int = 900, **changes: Any) -> Verdict:
        """Have two verifiers find a hard failure; return the quarantine."""
        first = audit(number, hard="rank", verifier="peer-1", **changes)
        second = audit(number + 1, hard="rank", verifier="peer-2", confirms=first.audit_id, **changes)
        self.tell(first, second)
        return self.told()[-1]

    def appeal(self, verdict: Verdict, at_ms: int, log_evidence: float, verifier: str = "peer-3") -> list[Command]:
        """Ask for an appeal and have it measured."""
        about: dict[str, Any] = {"node_id": verdict.node_id, "manifest_digest": verdict.manifest_digest}
        return self.tell(
            AppealAsked(**about, verdict_id=verdict.verdict_id, at_ms=at_ms),
            AppealMeasured(
                **about,
                verdict_id=verdict.verdict_id,
                audit_id=f"appeal-{at_ms}",
                verifier=verifier,
                log_evidence=log_evidence,
                hard=None,
                at_ms=at_ms + 1,
            ),
        )


def quiet_hooks() -> VerificationHooks:
    """Hooks of a coordinator that has neither a scheduler nor verifiers."""

    async def ban(node_id: NodeId, reason: str) -> None:
        raise AssertionError(f"{node_id} would be banned: {reason}")

    return VerificationHooks(
        on_standing=lambda node_id, digest, use: None,
        on_audited=lambda node_id, good_until_ms: None,
        on_request=lambda request: None,
        on_notify=lambda verdict: None,
        on_ban=ban,
    )
