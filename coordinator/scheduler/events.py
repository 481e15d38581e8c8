"""What the scheduler is told. Frozen facts, past tense, a closed union."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from coordinator.ledger.prices import Price
from coordinator.verification.events import Use
from inference.task import (
    EngineId,
    FinishReason,
    ManifestDigest,
    NodeId,
    OwnerId,
    PositionLogprobs,
    TaskId,
    TaskSpec,
)
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope

# One Connect stream of one agent; never used twice.
ConnectionId = NewType("ConnectionId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What a node says of one engine."""

    engine_id: EngineId
    manifest_digest: ManifestDigest
    sampler_profile: str
    ready: bool
    slots: int
    tokens_per_second: float
    # It holds no memory, and comes up when it is wanted.
    unloaded: bool = False
    starting: bool = False
    # What its owner asks; None for what the list price leaves.
    ask: Price | None = None
    # Of an engine that is open to the fleet: models that it has, was told to have, or refuses. None for any other.
    heard: frozenset[ManifestDigest] | None = None


class Frame(NamedTuple):
    """Ids of one attempt; `first_index` counts in the whole answer.

    One is made for every token, where a frozen dataclass takes three times as long.
    """

    task_id: TaskId
    attempt: int
    first_index: int
    token_ids: Sequence[int]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    """By its tenant, or because nobody follows it any more."""

    task_id: TaskId


@dataclass(frozen=True, slots=True)
class TaskStopped:
    """A stop string was completed by the id before `token_count`."""

    task_id: TaskId
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected:
    node_id: NodeId
    connection_id: ConnectionId
    owner_id: OwnerId
    trusted: bool
    draining: bool
    boot_started_at_ms: int
    # Of this start; 0 from an agent that does not count them.
    stream_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """The whole state of a node, replacing what was known."""

    node_id: NodeId
    connection_id: ConnectionId
    engines: tuple[EngineView, ...]
    accepting: bool
    running: frozenset[tuple[TaskId, int]]


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """Any message is a sign of life."""

    node_id: NodeId
    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    node_id: NodeId
    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class NodeBanned:
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class DrainChanged:
    node_id: NodeId
    draining: bool


@dataclass(frozen=True, slots=True)
class StandingChanged:
    """Verification has found what a node may be used for with a model, or, under NODE_WIDE, with any."""

    node_id: NodeId
    manifest_digest: ManifestDigest
    use: Use


@dataclass(frozen=True, slots=True)
class AuditedModelsChanged:
    """These models are audited, and no others."""

    manifests: frozenset[ManifestDigest]


@dataclass(frozen=True, slots=True)
class CapabilityShown:
    """Each card of a node has shown what it can do, or one of them has not, or not any more."""

    node_id: NodeId
    shown: bool


@dataclass(frozen=True, slots=True)
class RateMeasured:
    """The coordinator has measured a node with a model.

    Args:
        tokens_per_second: of one answer; None where it is too old.
        joules_per_token: of the same answer, positive, as the node says; None where it does not know.
    """

    node_id: NodeId
    manifest_digest: ManifestDigest
    tokens_per_second: float | None
    joules_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class StayExpected:
    """How often an engine of a node is expected to be lost in the coming hour."""

    node_id: NodeId
    losses_per_h: float


@dataclass(frozen=True, slots=True)
class LossesExpected:
    """Which share of the fleet's engines is expected to be lost while one is replaced."""

    lost_share: float


@dataclass(frozen=True, slots=True)
class ModelsWanted:
    """What engines of a node that are open to the fleet are to hold, from now on."""

    node_id: NodeId
    models: tuple[tuple[EngineId, ManifestDigest], ...]


@dataclass(frozen=True, slots=True)
class ModelsComing:
    """In how many seconds an engine is expected to have each of the models that none has ready and one can have."""

    waits_s: Mapping[ManifestDigest, float]


@dataclass(frozen=True, slots=True)
class FramesReceived:
    node_id: NodeId
    connection_id: ConnectionId
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFinished:
    """A node's signed statement whose signature and header hash already held."""

    node_id: NodeId
    connection_id: ConnectionId
    task_id: TaskId
    attempt: int
    token_ids: Sequence[int]
    finish_reason: FinishReason
    statement: SignedEnvelope | None
    embedding: bytes = b""
    scores: Sequence[PositionLogprobs] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """The node gave up, refused, or said something that cannot be true; `reason` is lower_snake_case."""

    node_id: NodeId
    connection_id: ConnectionId
    task_id: TaskId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorStopping:
    """Every task ends now; the message is for its client."""

    message: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed. Deadlines are looked at here and nowhere else."""


Event = (
    TaskSubmitted
    | TaskCancelled
    | TaskStopped
    | NodeConnected
    | NodeReported
    | NodeHeard
    | NodeDisconnected
    | NodeBanned
    | DrainChanged
    | StandingChanged
    | AuditedModelsChanged
    | CapabilityShown
    | RateMeasured
    | StayExpected
    | LossesExpected
    | ModelsWanted
    | ModelsComing
    | FramesReceived
    | AttemptFinished
    | AttemptFailed
    | CoordinatorStopping
    | Ticked
)
