"""What verification keeps in the database: audits, verdicts, standings of nodes, modes of rules, and measured rates.

Numbers, names and ids; never a prompt, a text or a token id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inference.task import ManifestDigest, NodeId, OwnerId

# Of one node in one answer, the newest: more than a node can get in a year.
VERDICTS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """What one audit measured, or why it could not."""

    audit_id: str
    node_id: NodeId
    manifest_digest: ManifestDigest
    kind: str
    verifier: str  # empty where it was not measured
    counted: bool
    tokens: int
    log_evidence: float
    hard: str | None
    not_measured: str | None  # why
    confirms: str | None
    detail: str  # JSON object of numbers and short words
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    verdict_id: str
    node_id: NodeId
    owner_id: OwnerId
    manifest_digest: ManifestDigest
    state: str
    previous: str
    reason: str
    audit_ids: str  # JSON list
    log_evidence: float
    shadow: bool
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRow:
    """All that decides about a pair; `state` repeats what `body` says, for whoever looks into the database."""

    node_id: NodeId
    manifest_digest: ManifestDigest
    state: str
    body: str  # JSON, coordinator.verification.stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRow:
    rule: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """What a node did with a model when it was measured last, so many answers at once.

    Args:
        engine_build: as the node named it.
        tokens_per_second: of all answers together, from the order to the last id, on the coordinator's clock.
        first_token_ms: from the order to the first id of the slowest of them.
        joules_per_token: the node's word; 0 where the method is "none".
        energy_method: as `StatedEnergy.method`.
    """

    node_id: NodeId
    manifest_digest: ManifestDigest
    streams: int
    engine_build: str
    tokens_per_second: float
    first_token_ms: int
    joules_per_token: float
    energy_method: str
    measured_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationBatch:
    """What is written in one transaction. Audits and verdicts never change; standings and modes are replaced."""

    audits: Sequence[AuditRow] = field(default=())
    verdicts: Sequence[VerdictRow] = field(default=())
    standings: Sequence[StandingRow] = field(default=())
    modes: Sequence[ModeRow] = field(default=())


class VerificationStore(Protocol):
    def record_verification(self, batch: VerificationBatch) -> None:
        """Write a batch; writing it again changes nothing."""
        ...

    def standings(self) -> list[StandingRow]: ...

    def verification_modes(self) -> list[ModeRow]: ...

    def verdicts_of(self, node_id: NodeId) -> list[VerdictRow]:
        """Return the newest `VERDICTS_MAX` verdicts on a node, newest first."""
        ...

    def find_verdict(self, verdict_id: str) -> VerdictRow | None: ...

    def challenge_findings(self, since_ms: int) -> list[AuditRow]:
        """Return the capability challenges that were passed from then on, and what took a figure away, by time.

        The latter are not measured, and their ids are "challenge.CHALLENGE.NODE.CARD".
        """
        ...

    def put_rate(self, rate: RateRow) -> None:
        """Write what was measured, in place of what was measured before."""
        ...

    def rates(self) -> list[RateRow]: ...

    def audits_of(self, audit_ids: Sequence[str]) -> list[AuditRow]:
        """Return the audits of these ids that there are, by time."""
        ...
