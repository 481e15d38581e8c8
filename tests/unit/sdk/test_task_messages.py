"""Requests as they go onto the wire, and what cannot be written there."""

import math
from typing import Any

import pytest
from slackwater._protos.slackwater.common.v1 import completion_pb2
from slackwater._protos.slackwater.task.v1 import task_service_pb2
from slackwater._task_messages import (
    chat_request,
    completion_request,
    event_from_proto,
    quote_from_proto,
    quote_request,
    task_from_proto,
)
from slackwater.errors import InvalidArgument, MalformedAnswer
from slackwater.events import Decision, Message, TaskOptions, Waiting


def test_a_chat_is_written_with_everything_that_was_said_and_nothing_else() -> None:
    request = chat_request(
        "m",
        [Message("system", "Be brief."), {"role": "user", "content": "Hi 🌊"}],
        {"max_tokens": 5, "temperature": 0.0, "stop": ["\n"], "service_class": "batch", "privacy_class": "own_nodes"},
    )
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("system", "Be brief."), ("user", "Hi 🌊")]
    assert (request.model, request.max_tokens, list(request.stop)) == ("m", 5, ["\n"])
    assert request.service_class == completion_pb2.SERVICE_CLASS_BATCH
    assert request.privacy_class == completion_pb2.PRIVACY_CLASS_OWN_NODES
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("seed")


def test_limits_are_written_as_they_were_said() -> None:
    request = chat_request("m", "Hi", {"deadline_ms": 9, "max_ttft_ms": 700, "max_price_micro": 2**40})
    assert (request.deadline_ms, request.max_ttft_ms, request.max_price_micro) == (9, 700, 2**40)


def test_a_quote_is_asked_for_what_would_be_submitted() -> None:
    options: TaskOptions = {"max_tokens": 5, "max_ttft_ms": 700}
    assert quote_request("m", "Hi", None, None, options).task == chat_request("m", "Hi", options)
    assert quote_request("m", None, [1, 2], None, options).task == completion_request("m", [1, 2], options)
    by_length = quote_request("m", None, None, 9, options)
    assert (by_length.prompt_tokens, by_length.task.WhichOneof("input"), by_length.task.max_tokens) == (9, None, 5)


@pytest.mark.parametrize(
    ("messages", "prompt", "prompt_tokens", "param"),
    [
        (None, None, None, "messages"),
        ("Hi", "Hi", None, "messages"),
        (None, "", 3, "messages"),
        (None, None, 0, "prompt_tokens"),
        (None, None, -1, "prompt_tokens"),
        (None, None, 2**32, "prompt_tokens"),
    ],
)
def test_a_quote_needs_one_prompt(
    messages: str | None, prompt: str | None, prompt_tokens: int | None, param: str
) -> None:
    """Mutation seen to fail here: an empty text taken for none."""
    with pytest.raises(InvalidArgument) as caught:
        quote_request("m", messages, prompt, prompt_tokens, {})
    assert caught.value.param == param


def test_what_a_quote_does_not_say_is_none() -> None:
    """Mutation seen to fail here: absent numbers read as 0."""
    wire_quote = task_service_pb2.QuoteResponse(
        model="m",
        classes=[
            task_service_pb2.ClassQuote(service_class=completion_pb2.SERVICE_CLASS_BATCH),
            task_service_pb2.ClassQuote(
                service_class=completion_pb2.SERVICE_CLASS_STANDARD, target_met=True, wait_ms=0.0, joules=1.5
            ),
        ],
    )
    batch, standard = quote_from_proto(wire_quote).classes
    assert (batch.service_class, batch.target_met, batch.wait_ms, batch.co2_g) == ("batch", False, None, None)
    assert (standard.service_class, standard.wait_ms, standard.joules, standard.token_ms) == (
        "standard",
        0.0,
        1.5,
        None,
    )


def test_a_text_is_one_turn_of_the_user_and_a_stop_string_is_one_stop() -> None:
    request = chat_request("m", "Hi", {"stop": "END"})
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "Hi")]
    assert list(request.stop) == ["END"]


def test_a_completion_takes_text_or_ids() -> None:
    assert completion_request("m", "once", {}).text == "once"
    assert list(completion_request("m", [1, 2], {}).token_ids.ids) == [1, 2]
    assert completion_request("m", [], {}).WhichOneof("input") == "token_ids"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**32}, "max_tokens"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"max_ttft_ms": 0}, "max_ttft_ms"),
        ({"max_ttft_ms": 1.5}, "max_ttft_ms"),
        ({"max_price_micro": 0}, "max_price_micro"),
        ({"max_price_micro": 2**64}, "max_price_micro"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": [3]}, "stop"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"service_class": "vip"}, "service_class"),
        ({"privacy_class": "unspecified"}, "privacy_class"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
def test_what_cannot_be_written_down_is_refused_with_its_name(options: Any, param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat_request("m", "Hi", options)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user"}], "messages[0]"),
        ([Message("user", "a"), {"role": "user", "content": "b", "name": "c"}], "messages[1]"),
        ([Message("user", "\ud800")], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
    ],
)
def test_a_bad_message_is_refused_with_its_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat_request("m", messages, {})
    assert caught.value.param == param


def test_numbers_out_of_range_are_left_to_the_coordinator() -> None:
    assert math.isnan(chat_request("m", "Hi", {"temperature": math.nan}).sampling.temperature)


def test_an_event_of_a_newer_coordinator_is_malformed_not_silence() -> None:
    with pytest.raises(MalformedAnswer, match="update the SDK"):
        event_from_proto(task_service_pb2.TaskEvent())


def test_a_finish_for_no_reason_is_malformed() -> None:
    finished = task_service_pb2.TaskFinished()
    with pytest.raises(MalformedAnswer, match="unspecified"):
        event_from_proto(task_service_pb2.TaskEvent(finished=finished))


@pytest.mark.parametrize(
    ("stated", "energy_j", "method"),
    [
        ({}, None, ""),
        ({"energy_mj": 0, "energy_method": "none"}, None, "none"),
        ({"energy_mj": 0, "energy_method": "counter"}, 0.0, "counter"),
        ({"energy_mj": 1500, "energy_method": "estimate"}, 1.5, "estimate"),
    ],
)
def test_joules_that_nobody_knows_are_none_and_not_zero(
    stated: dict[str, Any], energy_j: float | None, method: str
) -> None:
    record = task_service_pb2.AttemptRecord(attempt=1, **stated)
    [attempt] = task_from_proto(task_service_pb2.GetTaskResponse(attempts=[record])).attempts
    # Mutation: reading the field without looking whether it is there makes unknown energy look free.
    assert (attempt.energy_j, attempt.energy_method) == (energy_j, method)


def test_a_record_without_a_decision_has_none_and_one_with_it_tells_all_of_it() -> None:
    """Mutation seen to fail here: the field read without a look whether it is there."""
    decision = task_service_pb2.Decision(
        why="late", engine_id="engine", cost_micro=7, first_token_ms=1.5, token_ms=2.5, tail=3.5
    )
    records = [
        task_service_pb2.AttemptRecord(attempt=1),
        task_service_pb2.AttemptRecord(attempt=2, decision=decision, first_token_ms=0.0),
    ]
    waiting = task_service_pb2.Waiting(reason="target", waited_ms=5)
    task = task_from_proto(task_service_pb2.GetTaskResponse(attempts=records, waiting=waiting))
    old, new = task.attempts
    assert (old.decision, old.first_token_ms) == (None, None)
    assert new.decision == Decision(
        why="late", engine_id="engine", cost_micro=7, first_token_ms=1.5, token_ms=2.5, tail=3.5
    )
    assert new.first_token_ms == 0.0
    assert task.waiting == Waiting(reason="target", waited_ms=5)
    assert task_from_proto(task_service_pb2.GetTaskResponse()).waiting is None
