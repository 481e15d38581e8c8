"""What may become a task: a request is rendered, tokenized, checked and frozen. Pure, but for the time it takes."""

import math
from array import array
from dataclasses import dataclass

from coordinator.errors import Reason, SlackwaterError
from coordinator.ledger.prices import Price
from coordinator.tasks_port import PRICE_LIMIT_MICRO_MAX, TTFT_MS_MAX, SamplingRequest, TaskRequest
from inference.manifest import Manifest
from inference.task import PrivacyClass, Sampling, TaskId, TaskKind, TaskSpec, TenantId, token_array
from inference.text import Message, TemplateError, Tokenizer

# Longer texts are tokenized in a thread: about a millisecond's worth.
INLINE_CHARACTERS_MAX = 4_000
STOP_STRINGS_MAX = 4
STOP_STRING_BYTES_MAX = 256
LOGPROBS_MAX = 20
SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A registered manifest with its text side loaded."""

    manifest: Manifest
    tokenizer: Tokenizer
    created_at_ms: int


def specify(
    task_id: TaskId,
    tenant_id: TenantId,
    request: TaskRequest,
    manifest: Manifest,
    prompt_ids: "array[int]",
    derived_seed: int,
) -> TaskSpec:
    """Freeze a checked request.

    Raises:
        SlackwaterError: a value is out of its range; `param` names it.
    """
    if request.kind is not manifest.kind and TaskKind.EMBED in (request.kind, manifest.kind):
        raise SlackwaterError(
            Reason.UNSUPPORTED, f"the model {request.model!r} does not {request.kind.value}", param="model"
        )
    if request.privacy_class is PrivacyClass.OWN_NODES:
        raise SlackwaterError(
            Reason.UNSUPPORTED, "own_nodes needs an API key that belongs to an owner of nodes", param="privacy"
        )
    if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, "the deadline must be positive", param="deadline_ms")
    _check_limit(request.max_ttft_ms, TTFT_MS_MAX, "max_ttft_ms", "milliseconds")
    _check_limit(request.max_price_micro, PRICE_LIMIT_MICRO_MAX, "max_price_micro", "micro-credits")
    _check_stop(request.stop)
    return TaskSpec(
        task_id=task_id,
        tenant_id=tenant_id,
        kind=request.kind,
        model=request.model,
        manifest_digest=manifest.digest,
        prompt_ids=prompt_ids,
        sampling=_sampling(request.sampling, derived_seed),
        max_tokens=_max_tokens(request, manifest, len(prompt_ids)),
        stop_token_ids=tuple(manifest.stop_token_ids),
        vocabulary_size=manifest.vocabulary_size,
        service_class=request.service_class,
        privacy_class=request.privacy_class,
        streaming=request.streaming,
        deadline_s=request.deadline_s,
        max_ttft_ms=request.max_ttft_ms,
    )


def check_price(spec: TaskSpec, price: Price, max_price_micro: int | None) -> None:
    """Refuse a task that could cost more than it may.

    Raises:
        SlackwaterError: PRICE_EXCEEDED.
    """
    most_micro = price.charge_micro(len(spec.prompt_ids), spec.max_tokens)
    if max_price_micro is not None and most_micro > max_price_micro:
        raise SlackwaterError(
            Reason.PRICE_EXCEEDED,
            f"the task may cost {most_micro} micro-credits ({len(spec.prompt_ids)} tokens of prompt and up to "
            f"{spec.max_tokens} of answer), its limit is {max_price_micro}; lower max_tokens, shorten the prompt, or "
            "raise max_price_micro",
            param="max_price_micro",
        )


def unwritten_prompt(tokens: int, manifest: Manifest) -> "array[int]":
    """Return a prompt of so many tokens, for a quote.

    Raises:
        SlackwaterError: INVALID_ARGUMENT, or CONTEXT_EXCEEDED, before any memory is taken for it.
    """
    if tokens < 1:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, "prompt_tokens must be at least 1", param="prompt_tokens")
    if tokens > manifest.context_tokens:
        raise _context_exceeded(manifest, tokens, 0, "prompt_tokens")
    return token_array([0]) * tokens


def input_size(given: tuple[Message, ...] | str | tuple[int, ...]) -> int:
    """Return characters, or ids. Of more parts than `INLINE_CHARACTERS_MAX` their count will do."""
    if isinstance(given, str) or len(given) > INLINE_CHARACTERS_MAX:
        return len(given)
    return sum(len(part.content) if isinstance(part, Message) else 1 for part in given)


def encode(model: ServedModel, request: TaskRequest) -> "array[int]":
    """Return the ids of a prompt.

    Raises:
        SlackwaterError: the text cannot be tokenized, the template refuses the chat, or an id is none.
    """
    given = request.input
    param = "prompt" if isinstance(given, str) else "messages"
    try:
        if isinstance(given, str):
            return model.tokenizer.encode(given)
        messages = [part for part in given if isinstance(part, Message)]
        if messages:
            return model.tokenizer.encode_chat(messages)
    except TemplateError as error:
        message = f"the chat template of {request.model!r} refused the messages: {error}"
        raise SlackwaterError(Reason.INVALID_ARGUMENT, message, param=param) from error
    except ValueError as error:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, str(error), param=param) from error
    return _checked_ids([part for part in given if isinstance(part, int)], model.manifest.vocabulary_size)


def _checked_ids(ids: list[int], vocabulary_size: int) -> "array[int]":
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocabulary_size:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"token id {token_id} is outside the vocabulary of {vocabulary_size} ids",
                param=f"prompt[{position}]",
            )
    return token_array(ids)


def _max_tokens(request: TaskRequest, manifest: Manifest, prompt_tokens: int) -> int:
    room = manifest.context_tokens - prompt_tokens
    chat = bool(request.input) and isinstance(request.input[0], Message)
    param = "messages" if chat else "prompt"
    if request.kind is not TaskKind.GENERATE:
        if room < 0:
            raise _context_exceeded(manifest, prompt_tokens, 0, param)
        return 0
    if request.max_tokens is not None and request.max_tokens < 1:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, "max_tokens must be at least 1", param="max_tokens")
    if room < 1:
        raise _context_exceeded(manifest, prompt_tokens, 1, param)
    if request.max_tokens is not None and request.max_tokens > room:
        raise _context_exceeded(manifest, prompt_tokens, request.max_tokens, "max_tokens")
    return request.max_tokens or room


def _context_exceeded(manifest: Manifest, prompt_tokens: int, asked: int, param: str) -> SlackwaterError:
    return SlackwaterError(
        Reason.CONTEXT_EXCEEDED,
        f"the model's context is {manifest.context_tokens} tokens; the prompt has {prompt_tokens} and "
        f"{asked} more were asked for; shorten the prompt or lower max_tokens",
        param=param,
    )


def _check_limit(value: int | None, most: int, param: str, unit: str) -> None:
    if value is not None and not 1 <= value <= most:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, f"{param} must lie in [1, {most}] {unit}", param=param)


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > STOP_STRINGS_MAX:
        raise SlackwaterError(
            Reason.INVALID_ARGUMENT, f"at most {STOP_STRINGS_MAX} stop strings are taken, not {len(stop)}", param="stop"
        )
    for position, text in enumerate(stop):
        if not text or len(text.encode(errors="replace")) > STOP_STRING_BYTES_MAX:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"a stop string has 1 to {STOP_STRING_BYTES_MAX} bytes",
                param=f"stop[{position}]",
            )


# Field, neutral value, smallest, largest, whether the smallest is allowed.
_SAMPLING_RANGES: tuple[tuple[str, float, float, float, bool], ...] = (
    ("temperature", 1.0, 0.0, 2.0, True),
    ("top_p", 1.0, 0.0, 1.0, False),
    ("top_k", 0, 0, 2**31 - 1, True),
    ("presence_penalty", 0.0, -2.0, 2.0, True),
    ("frequency_penalty", 0.0, -2.0, 2.0, True),
    ("repetition_penalty", 1.0, 0.0, 2.0, False),
)


def _sampling(request: SamplingRequest, derived_seed: int) -> Sampling:
    values: dict[str, float] = {}
    for name, neutral, low, high, low_allowed in _SAMPLING_RANGES:
        value = getattr(request, name)
        if value is None:
            value = neutral
        # NaN fails every comparison, and so is refused here too.
        if not (low <= value <= high) or (value == low and not low_allowed):
            bracket = "[" if low_allowed else "("
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT, f"{name} must lie in {bracket}{low:g}, {high:g}]", param=name
            )
        values[name] = value
    if request.seed is not None and not 0 <= request.seed <= SEED_MAX:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, f"seed must lie in [0, {SEED_MAX}]", param="seed")
    if request.logprobs is not None and not 0 <= request.logprobs <= LOGPROBS_MAX:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, f"logprobs must lie in [0, {LOGPROBS_MAX}]", param="logprobs")
    return Sampling(
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=int(values["top_k"]),
        seed=derived_seed if request.seed is None else request.seed,
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        logprobs=request.logprobs,
    )
