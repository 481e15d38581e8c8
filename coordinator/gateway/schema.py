"""OpenAI's two completion requests, checked by hand and turned into a `TaskRequest`.

docs/openai_api.md is the readable form of the tables below. A field is in one
of four groups: it has an effect, it has none and is accepted, it is known but
not built (accepted only with the value that asks for nothing), or it is
unknown and refused.
"""

from dataclasses import dataclass

from coordinator.gateway import limits
from coordinator.gateway.fields import Fields, checked_integer, checked_list, checked_text, invalid, unsupported
from coordinator.tasks_port import (
    DEADLINE_MS_MAX,
    PRICE_LIMIT_MICRO_MAX,
    TTFT_MS_MAX,
    QuoteRequest,
    SamplingRequest,
    TaskRequest,
)
from inference.task import PrivacyClass, ServiceClass
from inference.text import Message

_ACCEPTED_AND_IGNORED: dict[str, type] = {"user": str}
_ACCEPTED_AND_IGNORED_IN_CHAT: dict[str, type] = {
    "metadata": dict,
    "store": bool,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "parallel_tool_calls": bool,  # says how to call tools, and there are none
}

# Field -> the values that ask for nothing.
_NOT_BUILT: dict[str, tuple[object, ...]] = {"n": (1,), "logit_bias": ({},)}
_NOT_BUILT_IN_CHAT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
}
_NOT_BUILT_IN_COMPLETIONS: dict[str, tuple[object, ...]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
# OpenAI's own client hands these back in an assistant's message, as null or empty.
_NOT_BUILT_IN_MESSAGES: dict[str, tuple[object, ...]] = {
    "name": (),
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
}

# OpenAI's newer name of the system role.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NO_TOOL_ROLES = ("tool", "function")
# vLLM's separator, so that one template sees the same text behind either server.
_PART_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, as the gateway carries it out."""

    task: TaskRequest
    stream: bool
    include_usage: bool


def chat_call(document: object) -> Call:
    """Check a body of POST /v1/chat/completions.

    Raises:
        SlackwaterError: INVALID_ARGUMENT or UNSUPPORTED, with the parameter's name.
    """
    fields = Fields(document)
    model = fields.required_text("model")
    return _chat_call(fields, model, _messages(fields))


def quote_request(document: object) -> QuoteRequest:
    """Check a body of POST /v1/quote: a chat's, in which `prompt_tokens` may stand in for the messages.

    Raises:
        SlackwaterError: INVALID_ARGUMENT or UNSUPPORTED, with the parameter's name.
    """
    fields = Fields(document)
    model = fields.required_text("model")
    prompt_tokens = fields.integer("prompt_tokens", 1, limits.MAX_TOKENS)
    if prompt_tokens is None:
        return QuoteRequest(task=_chat_call(fields, model, _messages(fields)).task)
    if fields.take("messages") is not None:
        raise invalid("prompt_tokens", "give it or 'messages', not both")
    return QuoteRequest(task=_chat_call(fields, model, ()).task, prompt_tokens=prompt_tokens)


def _chat_call(fields: Fields, model: str, messages: tuple[Message, ...]) -> Call:
    # The newer name wins; the older is still checked.
    max_tokens = fields.integer("max_tokens", 1, limits.MAX_TOKENS)
    max_completion_tokens = fields.integer("max_completion_tokens", 1, limits.MAX_TOKENS)
    fields.ignore(_ACCEPTED_AND_IGNORED_IN_CHAT)
    fields.refuse_unless_neutral(_NOT_BUILT_IN_CHAT)
    return _call(
        fields,
        model=model,
        input=messages,
        max_tokens=max_tokens if max_completion_tokens is None else max_completion_tokens,
        logprobs=_chat_logprobs(fields),
    )


def completion_call(document: object) -> Call:
    """Check a body of POST /v1/completions.

    Raises:
        SlackwaterError: INVALID_ARGUMENT or UNSUPPORTED, with the parameter's name.
    """
    fields = Fields(document)
    model = fields.required_text("model")
    max_tokens = fields.integer("max_tokens", 1, limits.MAX_TOKENS)
    fields.refuse_unless_neutral(_NOT_BUILT_IN_COMPLETIONS)
    return _call(
        fields,
        model=model,
        input=_prompt(fields.take("prompt")),
        max_tokens=limits.DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        logprobs=fields.integer("logprobs", 0, limits.MAX_COMPLETION_LOGPROBS),
    )


def _call(
    fields: Fields,
    *,
    model: str,
    input: tuple[Message, ...] | str | tuple[int, ...],
    max_tokens: int | None,
    logprobs: int | None,
) -> Call:
    """Read what both endpoints share, and refuse what is left."""
    fields.ignore(_ACCEPTED_AND_IGNORED)
    fields.refuse_unless_neutral(_NOT_BUILT)
    stream = fields.boolean("stream")
    deadline_ms = fields.integer("deadline_ms", 1, DEADLINE_MS_MAX)
    task = TaskRequest(
        model=model,
        input=input,
        sampling=SamplingRequest(
            temperature=fields.number("temperature", 0, 2),
            top_p=fields.number("top_p", 0, 1, low_included=False),
            top_k=_top_k(fields),
            seed=fields.integer("seed", 0, limits.MAX_SEED),
            presence_penalty=fields.number("presence_penalty", -2, 2),
            frequency_penalty=fields.number("frequency_penalty", -2, 2),
            repetition_penalty=fields.number("repetition_penalty", 0, 2, low_included=False),
            logprobs=logprobs,
        ),
        max_tokens=max_tokens,
        stop=_stop(fields.take("stop")),
        service_class=fields.choice("service_class", ServiceClass, ServiceClass.INTERACTIVE),
        privacy_class=fields.choice("privacy", PrivacyClass, PrivacyClass.PUBLIC),
        deadline_s=None if deadline_ms is None else deadline_ms / 1000,
        max_ttft_ms=fields.integer("max_ttft_ms", 1, TTFT_MS_MAX),
        max_price_micro=fields.integer("max_price_micro", 1, PRICE_LIMIT_MICRO_MAX),
        streaming=stream,
        # An HTTP client cannot come back to its stream, so the work ends with the connection.
        detach_grace_s=0.0,
    )
    include_usage = _include_usage(fields, stream)
    fields.refuse_rest()
    return Call(task=task, stream=stream, include_usage=include_usage)


def _messages(fields: Fields) -> tuple[Message, ...]:
    value = fields.take("messages")
    if value is None:
        raise invalid("messages", "is required")
    items = checked_list(value, "messages", limits.MAX_MESSAGES)
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(items))


def _message(value: object, param: str) -> Message:
    fields = Fields(value, param)
    role = fields.required_text("role")
    if role in _NO_TOOL_ROLES:
        raise unsupported(fields.param("role"), "tool and function messages are not supported")
    if role not in _ROLES:
        raise invalid(fields.param("role"), f"must be one of {', '.join(_ROLES)}")
    content = _content(fields.take("content"), fields.param("content"))
    fields.refuse_unless_neutral(_NOT_BUILT_IN_MESSAGES)
    fields.refuse_rest()
    return Message(role=_ROLES[role], content=content)


def _content(value: object, param: str) -> str:
    if value is None:
        raise invalid(param, "is required")
    if isinstance(value, str):
        return checked_text(value, param)
    if not isinstance(value, list):
        raise invalid(param, "expected a string or an array of text parts")
    parts = checked_list(value, param, limits.MAX_PARTS)
    return _PART_SEPARATOR.join(_part(part, f"{param}[{index}]") for index, part in enumerate(parts))


def _part(value: object, param: str) -> str:
    fields = Fields(value, param)
    kind = fields.required_text("type")
    if kind != "text":
        raise unsupported(fields.param("type"), "only text parts are supported")
    text = checked_text(fields.take("text"), fields.param("text"))
    fields.refuse_rest()
    return text


def _prompt(value: object) -> str | tuple[int, ...]:
    """Return the one prompt out of OpenAI's four forms: text, [text], ids, [ids]."""
    if value is None:
        raise invalid("prompt", "is required")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) != 1:
            raise unsupported("prompt", "one prompt per request; send the others in requests of their own")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise invalid("prompt", "must not be empty")
        return checked_text(value, "prompt")
    if not isinstance(value, list):
        raise invalid("prompt", "expected a string, an array of token ids, or an array with one of either")
    if not value:
        raise invalid("prompt", "must not be empty")
    return tuple(checked_integer(item, f"prompt[{index}]", 0, limits.MAX_TOKEN_ID) for index, item in enumerate(value))


def _stop(value: object) -> tuple[str, ...]:
    if value is None or value == []:
        return ()
    if isinstance(value, str):
        return (_stop_string(value, "stop"),)
    if not isinstance(value, list):
        raise invalid("stop", "expected a string or an array of strings")
    items = checked_list(value, "stop", limits.MAX_STOP_STRINGS)
    return tuple(_stop_string(item, f"stop[{index}]") for index, item in enumerate(items))


def _stop_string(value: object, param: str) -> str:
    text = checked_text(value, param)
    if not text:
        raise invalid(param, "must not be empty")
    if len(text.encode()) > limits.MAX_STOP_BYTES:
        raise invalid(param, f"is longer than {limits.MAX_STOP_BYTES} bytes")
    return text


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, limits.MAX_CHAT_TOP_LOGPROBS)
    if not wanted:
        if top:
            raise invalid("top_logprobs", "needs 'logprobs' to be true")
        return None
    return top or 0


def _top_k(fields: Fields) -> int | None:
    top_k = fields.integer("top_k", -1, limits.MAX_TOP_K)
    # vLLM's clients write -1 for off.
    return 0 if top_k == -1 else top_k


def _include_usage(fields: Fields, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise invalid("stream_options", "is only allowed when 'stream' is true")
    options = Fields(value, "stream_options")
    include_usage = options.boolean("include_usage")
    # Padding against traffic analysis; none is sent.
    options.refuse_unless_neutral({"include_obfuscation": (False,)})
    options.refuse_rest()
    return include_usage
