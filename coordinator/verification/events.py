"""The vocabulary of verification: what is told to `Verdicts`. Data alone.

A verdict is about a pair: one node and one manifest. What concerns a node as a
whole (a capability challenge) is told under `NODE_WIDE`.

Evidence is a natural logarithm. `AuditMeasured.log_evidence` is the log of an
e-value: under an honest node the expectation of its exponential is at most 1,
whatever was measured before. So evidence of several audits is added up, and a
threshold of log(c) is crossed by an honest node once in c audits at most.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from inference.task import ManifestDigest, NodeId, OwnerId

# A pair of a node with no manifest: the node itself.
NODE_WIDE = ManifestDigest("")
# The verifier that is the coordinator's own process; others are node ids.
COORDINATOR = "coordinator"
# Kinds of decoding whose evidence is added up apart.
GREEDY = "greedy"
SAMPLED = "sampled"
# And what a node says of ids that somebody else has chosen.
SCORED = "scored"
# Named numbers and short words of one audit, such as a mean margin; a text has no room in them.
DETAIL_ENTRIES_MAX = 32
DETAIL_CHARACTERS_MAX = 80

Detail = Mapping[str, int | float | str]


class AuditKind(Enum):
    CANARY = "canary"
    SCORE = "score"
    RESCORE = "rescore"
    PEER = "peer"
    STRUCTURE = "structure"
    CHALLENGE = "challenge"


# These ask whether the named model spoke. A node that computes nothing passes the others, so only these earn trust.
OUTPUT_KINDS = frozenset({AuditKind.CANARY, AuditKind.RESCORE, AuditKind.PEER})
# Integer arithmetic and counting: repeated by anybody, they give the same.
EXACT_KINDS = frozenset({AuditKind.STRUCTURE, AuditKind.CHALLENGE})


class VerdictState(IntEnum):
    """From best to worst: a greater one is more severe."""

    OK = 0
    PROBATION = 1
    WATCH = 2
    QUARANTINED = 3
    BANNED = 4

    @property
    def word(self) -> str:
        return self.name.lower()


class Use(IntEnum):
    """What the scheduler may use a node for; a greater one is narrower."""

    EVERYTHING = 0
    PUBLIC_ONLY = 1
    CANARIES_ONLY = 2
    NOTHING = 3


class Mode(Enum):
    ACTIVE = "active"
    # The rule's verdicts are recorded and change nothing.
    SHADOW = "shadow"


class Purpose(Enum):
    """Why another verifier is asked."""

    CONFIRM = "confirm"
    APPEAL = "appeal"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditMeasured:
    """One audit came to a result.

    Args:
        tokens: audited ids, at least 1 for kinds that look at an output.
        log_evidence: log of the e-value; positive speaks against the node. 0 where only `hard` can tell.
        hard: name of a hard rule that was broken, None for none.
        verifier: `COORDINATOR` or the node id of whoever measured.
        confirms: id of the audit that this one repeats for a dispute; it is a vote then, and no new evidence.
        mode: what kind of decoding the evidence is about; each kind is added up by itself, as a wrong temperature shows
            in what is drawn alone. Empty where there is but one.
        log_capitals: what each gambler made of it (`inference.evidence.log_capitals`), each the log of an e-value, of
            which `log_evidence` is what they made together. Empty where there is but one, and it is `log_evidence`.
        detail: what was measured, for the owner's eyes: numbers and names, never ids of a prompt or a text.
    """

    node_id: NodeId
    owner_id: OwnerId
    manifest_digest: ManifestDigest
    audit_id: str
    kind: AuditKind
    tokens: int
    log_evidence: float
    hard: str | None
    at_ms: int
    verifier: str = COORDINATOR
    confirms: str | None = None
    mode: str = ""
    log_capitals: tuple[float, ...] = ()
    detail: Detail = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(math.isnan(number) or number == math.inf for number in (self.log_evidence, *self.log_capitals)):
            raise ValueError(f"audit {self.audit_id} has evidence {self.log_evidence}: it was not measured")
        check_detail(self.detail)

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that this audit applies: its kind, and the hard rule of that kind that was broken."""
        return rules_of(self.kind, self.hard)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditNotMeasured:
    """An audit came to no result: the verifier was gone, or had no engine for it. Never the node's fault."""

    node_id: NodeId
    manifest_digest: ManifestDigest
    audit_id: str
    kind: AuditKind
    reason: str
    at_ms: int
    # As in `AuditMeasured`; or the verdict, where an appeal could not be measured.
    confirms: str | None = None


@dataclass(frozen=True, slots=True)
class OutageBegan:
    """Something of ours fails (the coordinator, a database, a verifier): from then on nothing counts."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class OutageEnded:
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppealAsked:
    node_id: NodeId
    manifest_digest: ManifestDigest
    verdict_id: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppealMeasured:
    """Another verifier has repeated what a verdict stands on; `log_evidence` is the sum over it."""

    node_id: NodeId
    manifest_digest: ManifestDigest
    verdict_id: str
    audit_id: str
    verifier: str
    log_evidence: float
    hard: str | None
    at_ms: int

    def __post_init__(self) -> None:
        if math.isnan(self.log_evidence):
            raise ValueError(f"the appeal against {self.verdict_id} has no evidence: it was not measured")


@dataclass(frozen=True, slots=True)
class ModeChanged:
    """A rule counts, or only looks on. Args: `rule` is a kind ("canary") or a hard rule of one ("canary.rank")."""

    rule: str
    mode: Mode
    at_ms: int


@dataclass(frozen=True, slots=True)
class BanAsked:
    """An administrator has shut a node out for good; told again, it changes nothing."""

    node_id: NodeId
    owner_id: OwnerId
    reason: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """An administrator takes a quarantine back, or what put a node under watch; `verdict_id` is the one in force."""

    node_id: NodeId
    manifest_digest: ManifestDigest
    verdict_id: str
    reason: str
    at_ms: int


Event = (
    AuditMeasured
    | AuditNotMeasured
    | OutageBegan
    | OutageEnded
    | AppealAsked
    | AppealMeasured
    | ModeChanged
    | BanAsked
    | ReleaseAsked
)


def rules_of(kind: AuditKind, hard: str | None) -> tuple[str, ...]:
    """Return the names of the rules that an audit applies."""
    return (kind.value,) if hard is None else (kind.value, f"{kind.value}.{hard}")


def check_detail(detail: Detail) -> None:
    """Raise ValueError where what an audit measured has room for a text."""
    if len(detail) > DETAIL_ENTRIES_MAX:
        raise ValueError(f"the detail of an audit has {len(detail)} entries, more than {DETAIL_ENTRIES_MAX}")
    for name, value in detail.items():
        if len(name) > DETAIL_CHARACTERS_MAX or (isinstance(value, str) and len(value) > DETAIL_CHARACTERS_MAX):
            raise ValueError(f"{name[:DETAIL_CHARACTERS_MAX]!r} of an audit's detail is no short word or number")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name!r} of an audit's detail is {value}")
