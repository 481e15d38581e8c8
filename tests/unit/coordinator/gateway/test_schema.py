"""The two request bodies, field by field. Every refusal names its parameter."""

import json
from collections.abc import Callable

import pytest

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway import limits
from coordinator.gateway.body import parse
from coordinator.gateway.schema import Call, chat_call, completion_call, quote_request
from inference.task import PrivacyClass, ServiceClass
from inference.text import Message

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def _refusal(check: Callable[[object], Call], document: object) -> SlackwaterError:
    with pytest.raises(SlackwaterError) as caught:
        check(document)
    error = caught.value
    assert error.presentation.http_status == 400
    return error


def test_a_minimal_chat_leaves_every_choice_to_the_coordinator() -> None:
    call = chat_call(CHAT)
    assert call.task.model == "m"
    assert call.task.input == (Message("user", "hi"),)
    assert call.task.max_tokens is None  # a small default would truncate answers silently
    assert call.task.sampling.temperature is None
    assert call.task.sampling.logprobs is None
    assert call.task.stop == ()
    assert call.task.service_class is ServiceClass.INTERACTIVE
    assert call.task.detach_grace_s == 0
    assert not call.stream
    assert not call.task.streaming


def test_a_full_chat_reaches_the_task_unchanged() -> None:
    call = chat_call(
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
                {"role": "user", "content": "d"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "temperature": 0,
            "top_p": 0.5,
            "top_k": -1,
            "seed": 2**63 - 1,
            "presence_penalty": -2,
            "frequency_penalty": 2.0,
            "repetition_penalty": 1.1,
            "logprobs": True,
            "top_logprobs": 20,
            "stop": ["x", "y"],
            "max_tokens": 5,
            "max_completion_tokens": 9,
            "service_class": "batch",
            "deadline_ms": 1500,
            "max_ttft_ms": 700,
            "max_price_micro": 2**40,
            "privacy": "own_nodes",
        }
    )
    roles = [message.role for message in call.task.input if isinstance(message, Message)]
    assert roles == ["system", "user", "assistant", "user"]
    assert call.task.input[1] == Message("user", "a\nb")
    assert call.stream
    assert call.task.streaming
    assert call.include_usage
    sampling = call.task.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 0, 2**63 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2.0, 2.0, 1.1)
    assert sampling.logprobs == 20
    assert call.task.stop == ("x", "y")
    # Mutation: with `max_tokens or max_completion_tokens` the older name won, and this failed.
    assert call.task.max_tokens == 9
    assert call.task.service_class is ServiceClass.BATCH
    assert (call.task.deadline_s, call.task.max_ttft_ms, call.task.max_price_micro) == (1.5, 700, 2**40)
    assert call.task.privacy_class is PrivacyClass.OWN_NODES


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hi", "hi"), (["hi"], "hi"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([0, 2**32 - 1], (0, 2**32 - 1))],
)
def test_each_of_the_four_prompt_forms_is_understood(prompt: object, expected: object) -> None:
    call = completion_call({"model": "m", "prompt": prompt})
    assert call.task.input == expected
    assert call.task.max_tokens == 16


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"modalities": ["text"]},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False},
        {"service_tier": "auto", "reasoning_effort": "none", "verbosity": "medium"},
        {"temperature": None, "stop": None, "n": None, "stream": None, "tools": None, "stream_options": None},
        {"stop": []},
        {"logprobs": False, "top_logprobs": 0},
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(extra: dict[str, object]) -> None:
    assert chat_call({**CHAT, **extra}) == chat_call(CHAT)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),  # True == 1 in Python; mutation: comparing without types let it through
        ({"n": 1.0}, "n"),
        ({"n": 0}, "n"),
        ({"n": "1"}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_what_is_not_built_is_refused_by_name(extra: dict[str, object], param: str) -> None:
    error = _refusal(chat_call, {**CHAT, **extra})
    assert (error.reason, error.param) == (Reason.UNSUPPORTED, param)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 1}, "model"),
        ({"model": ""}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "a\x00b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**4000}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1e3}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": 1}, "stop"),
        ({"stop": "é" * 129}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"service_class": "fast"}, "service_class"),
        ({"service_class": 1}, "service_class"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 2**32}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
        ({"max_ttft_ms": 0}, "max_ttft_ms"),
        ({"max_ttft_ms": 3_600_001}, "max_ttft_ms"),
        ({"max_ttft_ms": "1"}, "max_ttft_ms"),
        ({"max_price_micro": 0}, "max_price_micro"),
        ({"max_price_micro": 2**53}, "max_price_micro"),
        ({"max_price_micro": True}, "max_price_micro"),
        ({"privacy": ["public"]}, "privacy"),
        ({"user": 5}, "user"),
        ({"metadata": "x"}, "metadata"),
        ({"colour": "blue"}, "colour"),
        ({"echo": False}, "echo"),  # the other endpoint's
    ],
)
def test_a_wrong_value_is_refused_by_name(extra: dict[str, object], param: str) -> None:
    error = _refusal(chat_call, {**CHAT, **extra})
    assert (error.reason, error.param) == (Reason.INVALID_ARGUMENT, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("extra", "param", "reason"),
    [
        ({"prompt": None}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": ""}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": []}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": [[]]}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": [""]}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": 5}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": {"a": 1}}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": [1, "a"]}, "prompt[1]", Reason.INVALID_ARGUMENT),
        ({"prompt": [1, -1]}, "prompt[1]", Reason.INVALID_ARGUMENT),
        ({"prompt": [True]}, "prompt[0]", Reason.INVALID_ARGUMENT),
        ({"prompt": [2**32]}, "prompt[0]", Reason.INVALID_ARGUMENT),
        ({"prompt": [1.0]}, "prompt[0]", Reason.INVALID_ARGUMENT),
        ({"prompt": "a\x00"}, "prompt", Reason.INVALID_ARGUMENT),
        ({"prompt": ["a", "b"]}, "prompt", Reason.UNSUPPORTED),
        ({"prompt": [[1], [2]]}, "prompt", Reason.UNSUPPORTED),
        ({"echo": True}, "echo", Reason.UNSUPPORTED),
        ({"best_of": 2}, "best_of", Reason.UNSUPPORTED),
        ({"suffix": "x"}, "suffix", Reason.UNSUPPORTED),
        ({"logprobs": 6}, "logprobs", Reason.INVALID_ARGUMENT),
        ({"logprobs": True}, "logprobs", Reason.INVALID_ARGUMENT),
        ({"messages": []}, "messages", Reason.INVALID_ARGUMENT),
    ],
)
def test_a_wrong_completion_is_refused_by_name(extra: dict[str, object], param: str, reason: Reason) -> None:
    error = _refusal(completion_call, {**COMPLETION, **extra})
    assert (error.reason, error.param) == (reason, param)


def test_a_completion_takes_its_own_neutral_values() -> None:
    extra = {"echo": False, "best_of": 1, "suffix": "", "n": 1, "logprobs": None, "user": "u"}
    assert completion_call({**COMPLETION, **extra}) == completion_call(COMPLETION)


@pytest.mark.parametrize("document", [None, 1, "x", [], [CHAT], True])
def test_a_body_that_is_no_object_is_refused(document: object) -> None:
    assert _refusal(chat_call, document).param is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "line 1 column 1"),
        (b'{"model": }', "line 1 column 11"),
        (b'{"model": "m",\n "messages": [', "line 2 column 15"),
        (b"{} {}", "Extra data"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
        (b"[" * 20_000, "nested too deeply"),
        (b'{"a":' * 20_000, "nested too deeply"),
        (b"[" * 20_000 + b"]" * 20_000, "nested too deeply"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'\xef\xbb\xbf{"model": "m"}', "BOM"),
        ('{"model": "m"}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": "\x00"}', "Invalid control character"),
    ],
    ids=range(14),
)
def test_a_body_that_is_no_json_is_refused_with_the_place(body: bytes, words: str) -> None:
    with pytest.raises(SlackwaterError, match="not valid JSON") as caught:
        parse(body, chat_call)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert words in caught.value.message


def test_of_a_key_that_comes_twice_the_last_one_counts() -> None:
    body = b'{"model": "a", "model": "b", "messages": [{"role": "user", "content": "x"}]}'
    assert parse(body, chat_call).task.model == "b"


def test_an_escaped_half_of_a_pair_is_refused_and_a_whole_one_is_a_character() -> None:
    half = rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]}'
    with pytest.raises(SlackwaterError, match="surrogate"):
        parse(half, chat_call)
    whole = rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    assert parse(whole, chat_call).task.input == (Message("user", "\N{GRINNING FACE}"),)


def test_a_refusal_never_repeats_the_value() -> None:
    secret = "the secret plan"
    for extra in ({"temperature": secret}, {"service_class": secret}, {"stop": [{secret: 1}]}, {"n": secret}):
        error = _refusal(chat_call, {**CHAT, **extra})
        assert secret not in error.message


def test_an_unknown_name_is_shortened_and_made_printable() -> None:
    error = _refusal(chat_call, {**CHAT, "é\n" * 5000: 1})
    assert error.param is not None
    assert error.param.isascii()
    assert len(error.param) < 500
    json.dumps(error.message).encode("ascii")


def test_completions_take_the_same_limits_as_chats() -> None:
    task = completion_call({**COMPLETION, "deadline_ms": 1, "max_ttft_ms": 3_600_000, "max_price_micro": 1}).task
    assert (task.deadline_s, task.max_ttft_ms, task.max_price_micro) == (0.001, 3_600_000, 1)


def test_a_quote_is_asked_for_with_a_chats_body_or_the_length_of_its_prompt() -> None:
    limits_ = {"max_tokens": 5, "max_ttft_ms": 700, "privacy": "trusted_owners"}
    by_messages = quote_request({**CHAT, **limits_})
    assert (by_messages.task, by_messages.prompt_tokens) == (chat_call({**CHAT, **limits_}).task, None)
    by_length = quote_request({"model": "m", "prompt_tokens": 9, **limits_})
    assert (by_length.prompt_tokens, by_length.task.input, by_length.task.max_ttft_ms) == (9, (), 700)


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"model": "m"}, "messages"),
        ({**CHAT, "prompt_tokens": 9}, "prompt_tokens"),
        ({"model": "m", "prompt_tokens": 0}, "prompt_tokens"),
        ({"model": "m", "prompt_tokens": 2**31}, "prompt_tokens"),
        ({"model": "m", "prompt_tokens": 9, "prompt": "hi"}, "prompt"),
        ({"prompt_tokens": 9}, "model"),
    ],
)
def test_a_quote_that_cannot_be_asked_for_names_its_parameter(document: object, param: str) -> None:
    """Mutation seen to fail here: a length beside messages is let pass."""
    with pytest.raises(SlackwaterError) as caught:
        quote_request(document)
    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, param)
