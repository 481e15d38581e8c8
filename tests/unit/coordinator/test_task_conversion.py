"""TaskService's two conversions: what a caller sends becomes a request, events become what it reads."""

import pytest

from coordinator.api.task_service import (
    DETACH_GRACE_S,
    MESSAGES_MAX,
    event_to_wire,
    quote_request_from_wire,
    quote_to_wire,
    request_from_wire,
)
from coordinator.errors import Reason, SlackwaterError
from coordinator.tasks_port import (
    Accepted,
    AnswerEvent,
    AttemptBroken,
    AttemptStarted,
    Delta,
    Failed,
    Finished,
    QuoteRequest,
    SamplingRequest,
    TaskRequest,
)
from coordinator.testing import FAKE_DIGEST, fake_quote
from inference.task import (
    FinishReason,
    NodeId,
    PositionLogprobs,
    PrivacyClass,
    ServiceClass,
    TaskId,
    TaskKind,
    TokenLogprob,
)
from inference.text import Message
from protos.slackwater.common.v1 import completion_pb2, error_pb2
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.task.v1 import task_service_pb2 as wire


def submitted(**changes: object) -> TaskRequest:
    fields: dict[str, object] = {"model": "model", "text": "hello", **changes}
    return request_from_wire(wire.SubmitTaskRequest(**fields))  # type: ignore[arg-type]


def chat(*messages: tuple[str, str]) -> wire.Chat:
    return wire.Chat(messages=[wire.ChatMessage(role=role, content=content) for role, content in messages])


# --- requests ----------------------------------------------------------------------------------


def test_what_is_left_out_takes_its_default() -> None:
    assert submitted() == TaskRequest(model="model", input="hello", detach_grace_s=DETACH_GRACE_S)


def test_whatever_is_said_arrives() -> None:
    request = submitted(
        kind=completion_pb2.TASK_KIND_SCORE,
        sampling=wire.SamplingRequest(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=2**63 - 1,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            logprobs=5,
        ),
        max_tokens=7,
        stop=["a", "b"],
        service_class=completion_pb2.SERVICE_CLASS_BATCH,
        privacy_class=completion_pb2.PRIVACY_CLASS_TRUSTED_OWNERS,
        deadline_ms=1500,
        max_ttft_ms=700,
        max_price_micro=2**40,
    )
    assert request == TaskRequest(
        model="model",
        input="hello",
        kind=TaskKind.SCORE,
        sampling=SamplingRequest(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=2**63 - 1,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            logprobs=5,
        ),
        max_tokens=7,
        stop=("a", "b"),
        service_class=ServiceClass.BATCH,
        privacy_class=PrivacyClass.TRUSTED_OWNERS,
        deadline_s=1.5,
        max_ttft_ms=700,
        max_price_micro=2**40,
        detach_grace_s=DETACH_GRACE_S,
    )


def test_zero_is_a_number_and_silence_is_none() -> None:
    """Greedy, seed 0, no alternatives: all of them are said. Mutation seen to fail here: `value or None`."""
    zeros = wire.SamplingRequest(
        temperature=0,
        top_p=0,
        top_k=0,
        seed=0,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=0,
        logprobs=0,
    )
    said = submitted(sampling=zeros).sampling
    assert said == SamplingRequest(
        temperature=0.0,
        top_p=0.0,
        top_k=0,
        seed=0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=0.0,
        logprobs=0,
    )
    assert submitted(sampling=wire.SamplingRequest()).sampling == SamplingRequest()


def test_each_form_of_input_arrives() -> None:
    assert submitted(text="").input == ""
    assert request_from_wire(wire.SubmitTaskRequest(token_ids=wire.TokenIds(ids=[1, 2]))).input == (1, 2)
    request = request_from_wire(wire.SubmitTaskRequest(chat=chat(("system", "be brief"), ("user", "hi"))))
    assert request.input == (Message("system", "be brief"), Message("user", "hi"))


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (wire.SubmitTaskRequest(model="model"), "input"),
        (wire.SubmitTaskRequest(chat=chat()), "messages"),
        (wire.SubmitTaskRequest(chat=chat(*[("user", "x")] * (MESSAGES_MAX + 1))), "messages"),
        (wire.SubmitTaskRequest(chat=chat(("user", "x"), ("tool", "x"))), "messages[1].role"),
        (wire.SubmitTaskRequest(chat=chat(("", "x"))), "messages[0].role"),
        (wire.SubmitTaskRequest(text="x", kind=9), "kind"),  # type: ignore[arg-type]  # of a later version
        (wire.SubmitTaskRequest(text="x", service_class=9), "service_class"),  # type: ignore[arg-type]
        (wire.SubmitTaskRequest(text="x", privacy_class=9), "privacy_class"),  # type: ignore[arg-type]
    ],
)
def test_what_the_wire_allows_and_a_request_does_not_is_refused_and_named(
    request_: wire.SubmitTaskRequest, param: str
) -> None:
    """Mutation seen to fail here: an unknown privacy class taken for the default, which is the widest."""
    with pytest.raises(SlackwaterError) as caught:
        request_from_wire(request_)
    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, param)


# --- quotes ------------------------------------------------------------------------------------


def test_a_quote_is_asked_for_a_task_or_for_the_length_of_a_prompt() -> None:
    given = quote_request_from_wire(wire.QuoteRequest(task=wire.SubmitTaskRequest(model="m", text="hello")))
    assert given == QuoteRequest(task=TaskRequest(model="m", input="hello", detach_grace_s=DETACH_GRACE_S))
    task = wire.SubmitTaskRequest(model="m", max_ttft_ms=5)
    length = quote_request_from_wire(wire.QuoteRequest(task=task, prompt_tokens=9))
    assert (length.prompt_tokens, length.task.input, length.task.max_ttft_ms) == (9, (), 5)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (wire.QuoteRequest(), "input"),
        (wire.QuoteRequest(task=wire.SubmitTaskRequest(text=""), prompt_tokens=1), "prompt_tokens"),
        (wire.QuoteRequest(task=wire.SubmitTaskRequest(privacy_class=9), prompt_tokens=1), "privacy_class"),  # type: ignore[arg-type]
    ],
)
def test_a_quote_that_cannot_be_asked_for_is_refused_and_named(request_: wire.QuoteRequest, param: str) -> None:
    """Mutation seen to fail here: a length that comes with an input is let pass."""
    with pytest.raises(SlackwaterError) as caught:
        quote_request_from_wire(request_)
    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, param)


def test_a_quote_arrives_with_all_that_it_says_and_without_what_it_does_not() -> None:
    """Mutation seen to fail here: 0 in place of what is not known."""
    quote = quote_to_wire(fake_quote("m"))
    assert (quote.model, quote.prompt_tokens, quote.max_tokens, quote.likely_tokens) == ("m", 7, 100, 50)
    assert (quote.max_price_micro, quote.likely_price_micro, quote.grid_grams_per_kwh) == (101_750, 51_750, 400)
    interactive, standard, batch = quote.classes
    assert interactive == wire.ClassQuote(
        service_class=completion_pb2.SERVICE_CLASS_INTERACTIVE,
        target_met=True,
        wait_ms=0.0,
        first_token_ms=250.5,
        token_ms=12.5,
        joules=36.0,
        energy_method="counter",
        co2_g=0.004,
    )
    assert {field.name for field, _ in standard.ListFields()} == {"service_class", "wait_ms", "first_token_ms"}
    assert batch == wire.ClassQuote(service_class=completion_pb2.SERVICE_CLASS_BATCH)


# --- events ------------------------------------------------------------------------------------

POSITION = PositionLogprobs(TokenLogprob(5, -0.5, 1), (TokenLogprob(5, -0.5, 1), TokenLogprob(6, -1.5, 2)))
POSITION_ON_WIRE = completion_pb2.PositionLogprobs(
    chosen=completion_pb2.TokenLogprob(token_id=5, logprob=-0.5, rank=1),
    top=[
        completion_pb2.TokenLogprob(token_id=5, logprob=-0.5, rank=1),
        completion_pb2.TokenLogprob(token_id=6, logprob=-1.5, rank=2),
    ],
)


def test_every_event_arrives_with_all_that_it_says() -> None:
    header, statement = SignedEnvelope(payload=b"header"), SignedEnvelope(payload=b"statement")
    cases: list[tuple[AnswerEvent, wire.TaskEvent]] = [
        (
            Accepted(
                task_id=TaskId("task"),
                model="model",
                manifest_digest=FAKE_DIGEST,
                prompt_tokens=7,
                resumable=True,
                seed=2**63 - 1,
                coordinator_public_keys=(b"key",),
            ),
            wire.TaskEvent(
                accepted=wire.TaskAccepted(
                    task_id="task",
                    model="model",
                    manifest_digest=FAKE_DIGEST,
                    prompt_tokens=7,
                    resumable=True,
                    seed=2**63 - 1,
                    coordinator_public_keys=[b"key"],
                )
            ),
        ),
        (
            AttemptStarted(attempt=2, node_id=NodeId("a"), first_index=3),
            wire.TaskEvent(attempt_started=wire.AttemptStarted(attempt=2, node_id="a", first_index=3)),
        ),
        (
            AttemptBroken(attempt=2, node_id=NodeId("a"), reason="stalled", delivered_tokens=4),
            wire.TaskEvent(
                attempt_broken=wire.AttemptBroken(attempt=2, node_id="a", reason="stalled", delivered_tokens=4)
            ),
        ),
        (
            Delta(first_index=3, token_ids=(5, 6), text="ab", logprobs=(POSITION, POSITION)),
            wire.TaskEvent(
                delta=wire.Delta(
                    first_index=3, token_ids=[5, 6], text="ab", logprobs=[POSITION_ON_WIRE, POSITION_ON_WIRE]
                )
            ),
        ),
        (
            Finished(
                finish_reason=FinishReason.LENGTH,
                prompt_tokens=7,
                completion_tokens=5,
                header=header,
                statement=statement,
                node_public_key=b"node",
                embedding=b"1234",
                scores=(POSITION,),
            ),
            wire.TaskEvent(
                finished=wire.TaskFinished(
                    finish_reason=completion_pb2.FINISH_REASON_LENGTH,
                    usage=completion_pb2.Usage(prompt_tokens=7, completion_tokens=5),
                    header=header,
                    statement=statement,
                    node_public_key=b"node",
                    embedding=b"1234",
                    scores=[POSITION_ON_WIRE],
                )
            ),
        ),
        (
            Failed(SlackwaterError(Reason.NO_CAPACITY, "none", retry_after_s=1.5)),
            wire.TaskEvent(
                failed=error_pb2.ErrorDetail(
                    reason=error_pb2.ERROR_REASON_NO_CAPACITY,
                    message="none",
                    retry_after_ms=1500,
                    actor=error_pb2.ERROR_ACTOR_RETRY,
                )
            ),
        ),
    ]
    for event, expected in cases:
        assert event_to_wire(event) == expected


def test_an_answer_ended_by_a_stop_string_carries_no_statement() -> None:
    stopped = Finished(
        finish_reason=FinishReason.STOP,
        prompt_tokens=7,
        completion_tokens=5,
        header=SignedEnvelope(payload=b"header"),
        statement=None,
        node_public_key=b"node",
    )
    finished = event_to_wire(stopped).finished
    assert finished.HasField("header")
    assert not finished.HasField("statement")
