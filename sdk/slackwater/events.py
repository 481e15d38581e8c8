"""What becomes of a task, as its client sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

FinishReason = Literal["stop", "length"]
ServiceClass = Literal["interactive", "standard", "batch"]
PrivacyClass = Literal["public", "trusted_owners", "own_nodes"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; the role is "system", "user" or "assistant"."""

    role: str
    content: str


class TaskOptions(TypedDict, total=False):
    """What a caller may ask for beside the prompt; what is left out, or None, takes the model's neutral default.

    With a penalty, an answer cannot move to another node once its first id has
    arrived.
    """

    # At least 1; left out for what the context leaves.
    max_tokens: int | None
    # 0 is greedy.
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    # Alternatives to report at each position, 0 to 20; left out for no logprobs at all.
    logprobs: int | None
    # At most four texts that end the answer, and are no part of it.
    stop: str | Sequence[str]
    # "interactive" unless said otherwise.
    service_class: ServiceClass
    # "public" unless said otherwise: any node may read the prompt.
    privacy_class: PrivacyClass
    # Milliseconds after which the task fails.
    deadline_ms: int | None
    # Milliseconds to the first token, at most an hour; left out for what the service class promises.
    max_ttft_ms: int | None
    # Micro-credits that the whole task may cost at list price; it is refused where it could cost more.
    max_price_micro: int | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    # 1 is the most likely; 0 where the engine does not say.
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the first prompt and ids delivered, however many nodes it took."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Signature:
    key_id: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class SignedEnvelope:
    """Signed bytes exactly as they travelled (DSSE); `verify_finished` opens them."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The coordinator took the task; with `task_id` anyone who holds the key can attach."""

    task_id: str
    model: str
    manifest_digest: str
    prompt_tokens: int
    # Whether the loss of a node after the first id can be survived.
    resumable: bool
    # The seed in force: the caller's, or the coordinator's.
    seed: int
    # Raw Ed25519 keys that the coordinator said may sign the task's header.
    coordinator_public_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    attempt: int
    node_id: str
    # Index, in the whole answer, of the first id that this attempt produces.
    first_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBroken:
    """A node was lost. The coordinator's own record; no node signed it."""

    attempt: int
    node_id: str
    # For example "stream_lost", "node_silent", "engine_crashed".
    reason: str
    delivered_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Ids as they came, and the text that they complete.

    The two need not match piece by piece: half a character, or text that may
    turn out to be a stop string, is held back by the coordinator.
    """

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    # Either empty or one per id.
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of an answer that came to its end."""

    finish_reason: FinishReason
    usage: Usage
    # Task header of the finishing attempt, signed by the coordinator.
    header: SignedEnvelope | None
    # Result of the finishing attempt, signed by its node; None where a stop string ended it before the node did.
    statement: SignedEnvelope | None
    # Raw Ed25519 key of that node, as the coordinator knows it.
    node_public_key: bytes


Event = Accepted | AttemptStarted | AttemptBroken | Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    task_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    # Attempts that were lost on the way; empty for an undisturbed answer.
    broken_attempts: tuple[AttemptBroken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    attempt: int
    node_id: str
    first_index: int
    delivered_tokens: int
    # "running", "finished", or why it broke.
    outcome: str
    # Whether the coordinator holds a signed statement of the node.
    signed: bool
    # Joules of the node's cards, as its statement attributes them to this attempt; None without a statement, or where
    # the node does not know.
    energy_j: float | None
    # How the node knows: "counter", "integrated_power", "estimate", "none", "unknown"; "" without a statement.
    energy_method: str
    # None where an older coordinator kept none.
    decision: "Decision | None" = None
    # Milliseconds from the order to its first token, on the coordinator's clock; None before it came.
    first_token_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why an attempt went to its node, and what was expected of it then. Milliseconds from the order."""

    # "meets_target", "warm", "best_effort", "late" or "only_node".
    why: str
    engine_id: str
    # What the node's owner asked for all that was left of the task, in micro-credits.
    cost_micro: int
    first_token_ms: float
    # Of each token after the first.
    token_ms: float
    # The first token was expected no later than so many times its prediction, 19 times in 20.
    tail: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a task is in the queue."""

    # "no_node", "loading", "no_free_slot", "avoiding", "reserve", "target" or
    # "turn".
    reason: str
    # Since it came to the queue, for the last time.
    waited_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskError:
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How a task stands."""

    task_id: str
    # "queued", "running", "finished", "failed", "cancelled".
    status: str
    usage: Usage
    attempts: tuple[AttemptRecord, ...]
    error: TaskError | None
    # While it is in the queue.
    waiting: Waiting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    revision: str
    manifest_digest: str
    licence: str
    # "generate", "score" or "embed".
    kind: str
    context_tokens: int
    # Engines that could take a task now.
    engines_ready: int
    created_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassQuote:
    """What a service class would make of a task. Milliseconds from now; None where no node can serve it."""

    service_class: ServiceClass
    # Whether the target of the class, or max_ttft_ms, would be kept, and the deadline, where there is one.
    target_met: bool
    # In the queue.
    wait_ms: float | None
    # The wait included.
    first_token_ms: float | None
    # Of each token after the first; None too where an engine would have to be loaded first.
    token_ms: float | None
    # Of the cards, for an answer of likely_tokens; None where nothing was measured.
    joules: float | None
    # How the measured node knows: "counter", "integrated_power", "estimate", or "mixed"; "" without joules.
    energy_method: str
    # Grams of CO2 equivalent of those joules, at grid_grams_per_kwh.
    co2_g: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What would become of a task, and what it would cost at list price, in micro-credits."""

    model: str
    prompt_tokens: int
    # The longest answer that was asked for, or what the context leaves.
    max_tokens: int
    # As long as answers of the model were lately, at most max_tokens.
    likely_tokens: int
    max_price_micro: int
    likely_price_micro: int
    # As the operator says of the fleet's electricity.
    grid_grams_per_kwh: int
    # Of "interactive", "standard" and "batch", in this order.
    classes: tuple[ClassQuote, ...]
