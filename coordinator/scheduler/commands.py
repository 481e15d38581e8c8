"""What the scheduler wants done. Frozen orders, verb first, a closed union."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from coordinator.ledger.prices import Price
from coordinator.scheduler.events import ConnectionId
from coordinator.scheduler.records import Choice
from inference.task import EngineId, FinishReason, ManifestDigest, NodeId, PositionLogprobs, TaskId, TaskSpec
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope


class TaskFailure(Enum):
    """Why a task ended without an answer; the names are those of coordinator.errors.Reason."""

    NO_CAPACITY = "no_capacity"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    MIGRATION_IMPOSSIBLE = "migration_impossible"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    TASK_CANCELLED = "task_cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    COORDINATOR_STOPPING = "coordinator_stopping"


class CloseReason(Enum):
    # By a newer start of the agent.
    SUPERSEDED = "superseded"
    # By a newer stream of the same start.
    REPLACED = "replaced"
    BANNED = "banned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Sign this attempt and send it with its ids."""

    node_id: NodeId
    connection_id: ConnectionId
    engine_id: EngineId
    # How the engine draws by its last report; what it reports later is about later attempts.
    sampler_profile: str
    spec: TaskSpec
    attempt: int
    lease_epoch: int
    prompt_ids: "array[int]"
    max_tokens: int
    first_index: int
    # What its owner asks; None for what the list price leaves.
    ask: Price | None
    # Why this engine, and what is expected of it.
    choice: Choice


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    connection_id: ConnectionId
    task_id: TaskId
    attempt: int


class Deliver(NamedTuple):
    """Hand ids to whoever follows the task, in order, each once. A tuple for the reason that `events.Frame` is one."""

    task_id: TaskId
    first_index: int
    token_ids: Sequence[int]
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget the ids handed over so far, which nobody has read: the task begins again."""

    task_id: TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordAttempt:
    """Keep what one attempt did. `outcome` is "finished", "stopped", or why it broke."""

    task_id: TaskId
    attempt: int
    node_id: NodeId
    lease_epoch: int
    first_index: int
    delivered_tokens: int
    outcome: str
    statement: SignedEnvelope | None
    duration_s: float
    ask: Price | None
    # Why its engine was chosen and what was expected of it, and how long its first token took; None where none came.
    choice: Choice
    first_token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTask:
    task_id: TaskId
    finish_reason: FinishReason
    completion_tokens: int
    # All ids that nodes gave; the first `completion_tokens` of them are the answer.
    output_ids: Sequence[int]
    # The attempt that finished, and its node; None where the node's goodbye was lost.
    attempt: int | None
    node_id: NodeId | None
    statement: SignedEnvelope | None
    embedding: bytes = b""
    scores: Sequence[PositionLogprobs] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailTask:
    task_id: TaskId
    failure: TaskFailure
    message: str
    completion_tokens: int
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SendDesired:
    """Tell a node what should be running on it."""

    connection_id: ConnectionId
    drain: bool
    attempts: tuple[tuple[TaskId, int], ...]
    engines_wanted: tuple[EngineId, ...] = ()
    models_wanted: tuple[tuple[EngineId, ManifestDigest], ...] = ()


@dataclass(frozen=True, slots=True)
class CloseConnection:
    connection_id: ConnectionId
    reason: CloseReason


Command = (
    Assign | CancelAttempt | Deliver | Discard | RecordAttempt | CompleteTask | FailTask | SendDesired | CloseConnection
)
