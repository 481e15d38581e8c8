"""Submitting and following tasks, as the two edges (gRPC and HTTP) see it.

An edge converts its wire format to a `TaskRequest`, calls `submit`, and turns
the events of the `Answer` back into its wire format. Everything in between
(rendering, scheduling, failover, assembling) lies behind this port, so that a
gateway can run in the coordinator's process or in one of its own.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from coordinator.errors import SlackwaterError
from coordinator.stated_energy import StatedEnergy
from inference.task import (
    FinishReason,
    ManifestDigest,
    NodeId,
    PositionLogprobs,
    PrivacyClass,
    ServiceClass,
    TaskId,
    TaskKind,
    TenantId,
)
from inference.text import Message, Tokenizer
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope

# Nobody waits longer than an hour for a first token; who can, asks for the class batch.
TTFT_MS_MAX: Final = 3_600_000
# 49 days: the most that TaskService's field holds.
DEADLINE_MS_MAX: Final = 2**32 - 1
# Whoever reads JSON numbers as floats has them exactly up to here.
PRICE_LIMIT_MICRO_MAX: Final = 2**53 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """What the caller said of sampling; None stands for not said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """One sequence, in the caller's terms. Numbers are checked by `submit`, which names the parameter at fault."""

    model: str
    # A chat, a text, or ids.
    input: tuple[Message, ...] | str | tuple[int, ...]
    kind: TaskKind = TaskKind.GENERATE
    sampling: SamplingRequest = SamplingRequest()
    max_tokens: int | None = None  # None: what the context leaves
    stop: tuple[str, ...] = ()
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    privacy_class: PrivacyClass = PrivacyClass.PUBLIC
    deadline_s: float | None = None
    # Milliseconds to the first token; None for what the service class promises.
    max_ttft_ms: int | None = None
    # The most that the whole task may cost at list price, in micro-credits.
    max_price_micro: int | None = None
    streaming: bool = True
    # Seconds that the task outlives its last follower; 0 aborts at once.
    detach_grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuoteRequest:
    """What is to be quoted. Args: `prompt_tokens` stands in for an input; None where the task has one."""

    task: TaskRequest
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassQuote:
    """What a service class would make of a task. Milliseconds from now; None where no node can serve it.

    Args:
        target_met: also its deadline, where it has one.
        wait_ms: in the queue.
        first_token_ms: the wait included.
        token_ms: of each token after it; None too where the engine would have to be loaded first.
        joules: of the cards, for an answer of the likely length; None where nothing was measured.
        energy_method: how the measured node knows; "" without joules.
        co2_g: grams of CO2 equivalent of those joules.
    """

    service_class: ServiceClass
    target_met: bool
    wait_ms: float | None = None
    first_token_ms: float | None = None
    token_ms: float | None = None
    joules: float | None = None
    energy_method: str = ""
    co2_g: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuote:
    """What would become of a task. Prices are list prices, in micro-credits.

    Args:
        likely_tokens: of the answer, by those of the model lately; at most `max_tokens`.
        grid_grams_per_kwh: of CO2 equivalent, as the operator says of the fleet's electricity.
    """

    model: str
    prompt_tokens: int
    max_tokens: int
    likely_tokens: int
    max_price_micro: int
    likely_price_micro: int
    grid_grams_per_kwh: int
    classes: tuple[ClassQuote, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    task_id: TaskId
    model: str
    manifest_digest: ManifestDigest
    prompt_tokens: int
    resumable: bool
    seed: int
    # Raw Ed25519 keys that may sign the task's header.
    coordinator_public_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why an attempt went where it went, and what was expected of it then.

    Args:
        why: as `scheduler.records.Why`.
        cost_micro: what the node's owner asked for all that was left of the task.
        first_token_ms: from the order.
        token_ms: of each token after it.
        tail: the first token was expected no later than so many times its prediction, 19 times in 20.
    """

    why: str
    engine_id: str
    cost_micro: int
    first_token_ms: float
    token_ms: float
    tail: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    attempt: int
    node_id: NodeId
    first_index: int
    decision: Decision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBroken:
    """The coordinator's own record; no node signed it."""

    attempt: int
    node_id: NodeId
    reason: str
    delivered_tokens: int
    # From the order to its first token; None where none came.
    first_token_ms: float | None = None


class Delta(NamedTuple):
    """Ids as they came, and the text that they complete.

    The two need not match piece by piece: a character that is not whole yet,
    or text that may turn out to be a stop string, is held back. One is made
    for every token, where a frozen dataclass takes three times as long.
    """

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    header: SignedEnvelope | None
    statement: SignedEnvelope | None
    node_public_key: bytes
    embedding: bytes = b""
    scores: Sequence[PositionLogprobs] = ()
    # Of the last attempt, from its order to its first token; None where none came.
    first_token_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    error: SlackwaterError


AnswerEvent = Accepted | AttemptStarted | AttemptBroken | Delta | Finished | Failed


class Batches(Protocol):
    """Events as they happen. An asynchronous generator is one."""

    def __aiter__(self) -> AsyncIterator[tuple[AnswerEvent, ...]]: ...

    async def __anext__(self) -> tuple[AnswerEvent, ...]: ...

    async def aclose(self) -> None: ...


class Answer(Protocol):
    """A submitted task."""

    @property
    def accepted(self) -> Accepted: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def follow(self, from_index: int = 0) -> Batches:
        """Yield what has happened since the last time, as it happens.

        The first batch begins with `Accepted`; the last ends with `Finished`
        or `Failed`, after which the iterator ends. Closing the iterator early
        (`aclose`) detaches: after `detach_grace_s` without a follower the task
        is aborted, down to the engine. With `from_index` the ids before that
        token index are left out, with the text that they completed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    name: str
    revision: str
    manifest_digest: ManifestDigest
    licence: str
    kind: TaskKind
    context_tokens: int
    engines_ready: int
    created_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    attempt: int
    node_id: NodeId
    first_index: int
    delivered_tokens: int
    outcome: str
    signed: bool
    # As the node's statement says; None without one.
    energy: StatedEnergy | None = None
    # None where an older release wrote the record.
    decision: Decision | None = None
    # From the order, on the coordinator's clock; None before it came.
    first_token_ms: float | None = None


@dataclass(frozen=True, slots=True)
class WaitingSummary:
    """Why a task is in the queue: as `scheduler.records.WaitingFor`, and since when."""

    reason: str
    waited_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    task_id: TaskId
    status: str  # "queued", "running", "finished", "failed", "cancelled"
    prompt_tokens: int
    completion_tokens: int
    attempts: tuple[AttemptSummary, ...]
    error: SlackwaterError | None
    # While it is in the queue.
    waiting: WaitingSummary | None = None


class Tasks(Protocol):
    """Every method raises SlackwaterError, with the parameter at fault where there is one."""

    async def submit(self, tenant_id: TenantId, request: TaskRequest) -> Answer: ...

    def attach(self, tenant_id: TenantId, task_id: TaskId) -> Answer: ...

    def cancel(self, tenant_id: TenantId, task_id: TaskId) -> None: ...

    async def summarize(self, tenant_id: TenantId, task_id: TaskId) -> TaskSummary: ...

    async def quote(self, tenant_id: TenantId, request: QuoteRequest) -> TaskQuote:
        """Say what would become of a task; nothing is submitted, and nothing reserved."""
        ...

    def models(self) -> list[ModelInfo]: ...

    def ready(self) -> bool:
        """Whether at least one engine could take a task now."""
        ...
