"""Whole answers over a real connection: the shapes, the order, the headers."""

import asyncio

import pytest

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway.limits import GatewayLimits
from coordinator.gateway.testing import FAKE_NOW_S, serve_gateway
from coordinator.tasks_port import AttemptBroken, AttemptStarted, Delta, Failed
from coordinator.testing import (
    FAKE_API_KEY,
    FAKE_DIGEST,
    FAKE_MODEL,
    FAKE_TENANT,
    FakeTasks,
    Step,
    delta,
    finished,
    text_steps,
    wait_step,
)
from inference.task import FinishReason, NodeId, PositionLogprobs, TokenLogprob

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CHAT_BODY: dict[str, object] = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION_BODY: dict[str, object] = {"model": FAKE_MODEL, "prompt": "hi"}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 13,
    "total_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


async def test_a_chat_answer_that_does_not_stream() -> None:
    tasks = FakeTasks()
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post(CHAT, CHAT_BODY)
    assert reply.status == 200
    assert reply.json() == {
        "id": "chatcmpl-task-1",
        "object": "chat.completion",
        "created": int(FAKE_NOW_S),
        "model": FAKE_MODEL,
        "system_fingerprint": "fp_" + FAKE_DIGEST[7:23],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
    assert tasks.submitted[0][0] == FAKE_TENANT
    assert tasks.answers[0].times_closed == 1


async def test_a_streamed_chat_keeps_the_order_that_clients_rely_on() -> None:
    """Role, text, finish, usage with no choices, [DONE]; the same id in all of them.

    Mutation: with `choices` filled in the usage chunk (as some servers do) this failed.
    """
    async with serve_gateway(FakeTasks()) as gateway:
        body = {**CHAT_BODY, "stream": True, "stream_options": {"include_usage": True}}
        reply = await gateway.post(CHAT, body)
    events = reply.events()
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    heads = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    assert heads == {("chatcmpl-task-1", "chat.completion.chunk", int(FAKE_NOW_S), FAKE_MODEL)}
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        *(
            [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
            for text in ("Hello", ",", " world", ".")
        ),
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    assert [event["usage"] for event in events] == [None] * 6 + [USAGE]


async def test_without_include_usage_no_chunk_has_the_key() -> None:
    async with serve_gateway(FakeTasks()) as gateway:
        reply = await gateway.post(CHAT, {**CHAT_BODY, "stream": True})
    assert all("usage" not in event for event in reply.events())
    assert reply.events()[-1]["choices"] != []


async def test_a_completion_streams_and_does_not() -> None:
    async with serve_gateway(FakeTasks()) as gateway:
        whole = await gateway.post(COMPLETIONS, COMPLETION_BODY)
        body = {**COMPLETION_BODY, "stream": True, "stream_options": {"include_usage": True}}
        streamed = await gateway.post(COMPLETIONS, body)
    document = whole.json()
    assert (document["id"], document["object"]) == ("cmpl-task-1", "text_completion")
    choice = {"index": 0, "text": "Hello, world.", "logprobs": None, "finish_reason": "stop"}
    assert document["choices"] == [choice]
    assert document["usage"] == USAGE
    events = streamed.events()
    assert [event["choices"] for event in events] == [
        *(
            [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
            for text in ("Hello", ",", " world", ".")
        ),
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    assert events[-1]["usage"] == USAGE


async def test_all_that_came_together_is_one_event() -> None:
    tasks = FakeTasks()
    tasks.script([(delta(0, "a"), delta(1, ""), delta(1, "bc")), (delta(3, "d"), finished(4))])
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post(COMPLETIONS, {**COMPLETION_BODY, "stream": True})
    assert [event["choices"][0]["text"] for event in reply.events()] == ["abc", "d", ""]  # type: ignore[index]


async def test_ids_that_complete_no_text_send_nothing() -> None:
    tasks = FakeTasks()
    part = Delta(first_index=0, token_ids=(0xC3,), text="")
    rest = Delta(first_index=1, token_ids=(0xA9,), text="é")
    tasks.script([(part,), (rest,), (finished(2),)])
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post(COMPLETIONS, {**COMPLETION_BODY, "stream": True})
    assert [event["choices"][0]["text"] for event in reply.events()] == ["é", ""]  # type: ignore[index]


async def test_text_of_any_kind_survives_the_hand_made_events() -> None:
    text = 'quote " backslash \\ newline \n mark \x7f \u2028 "\\u0000" \N{GRINNING FACE} é'
    for path, body in ((CHAT, CHAT_BODY), (COMPLETIONS, COMPLETION_BODY)):
        tasks = FakeTasks(default=lambda _: text_steps([text]))
        async with serve_gateway(tasks) as gateway:
            events = (await gateway.post(path, {**body, "stream": True})).events()
            choices = [event["choices"][0] for event in events]  # type: ignore[index]
        assert (
            "".join(choice.get("text", "") or choice.get("delta", {}).get("content", "") for choice in choices) == text
        )


async def test_an_answer_without_a_token_has_its_role_and_its_finish() -> None:
    tasks = FakeTasks()
    tasks.script([(finished(0, reason=FinishReason.LENGTH),)])
    async with serve_gateway(tasks) as gateway:
        events = (await gateway.post(CHAT, {**CHAT_BODY, "stream": True})).events()
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}  # type: ignore[index]
    assert events[1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]


async def test_a_failover_leaves_no_trace_in_the_stream() -> None:
    tasks = FakeTasks()
    broken = AttemptBroken(attempt=1, node_id=NodeId("n1"), reason="stream_lost", delivered_tokens=2)
    started = AttemptStarted(attempt=2, node_id=NodeId("n2"), first_index=2)
    tasks.script([(delta(0, "ab"),), (broken,), (started,), (delta(2, "cd"),), (finished(4),)])
    async with serve_gateway(tasks) as gateway:
        events = (await gateway.post(COMPLETIONS, {**COMPLETION_BODY, "stream": True})).events()
    assert [event["choices"][0]["text"] for event in events] == ["ab", "cd", ""]  # type: ignore[index]


async def test_chat_logprobs_name_every_token_in_both_modes() -> None:
    body = {**CHAT_BODY, "logprobs": True, "top_logprobs": 2}
    steps = text_steps(["a", "é"], logprobs=2)
    tasks = FakeTasks(default=lambda _: steps)
    async with serve_gateway(tasks) as gateway:
        whole = await gateway.post(CHAT, body)
        streamed = await gateway.post(CHAT, {**body, "stream": True})
    assert tasks.submitted[0][1].sampling.logprobs == 2
    content = whole.json()["choices"][0]["logprobs"]["content"]  # type: ignore[index]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    # Half a character: `bytes` is exact where `token` cannot be.
    assert [(entry["token"], entry["bytes"]) for entry in content[1:]] == [("\ufffd", [0xC3]), ("\ufffd", [0xA9])]
    chunks = [event["choices"][0] for event in streamed.events()]  # type: ignore[index]
    assert [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]] == content


async def test_completion_logprobs_are_four_parallel_lists_with_running_offsets() -> None:
    body = {**COMPLETION_BODY, "logprobs": 1}
    tasks = FakeTasks(default=lambda _: text_steps(["ab", "c"], logprobs=1))
    async with serve_gateway(tasks) as gateway:
        whole = (await gateway.post(COMPLETIONS, body)).json()["choices"][0]["logprobs"]  # type: ignore[index]
        streamed = (await gateway.post(COMPLETIONS, {**body, "stream": True})).events()
    assert whole == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert streamed[1]["choices"][0]["logprobs"]["text_offset"] == [2]  # type: ignore[index]


async def test_an_infinitely_unlikely_token_is_still_json() -> None:
    tasks = FakeTasks()
    positions = (PositionLogprobs(TokenLogprob(97, float("-inf"), 0)),)
    tasks.script([(Delta(first_index=0, token_ids=(97,), text="a", logprobs=positions), finished(1))])
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post(CHAT, {**CHAT_BODY, "logprobs": True})
    assert reply.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_submission_has_its_status_and_envelope(stream: bool) -> None:
    tasks = FakeTasks()
    tasks.script(SlackwaterError(Reason.CONTEXT_EXCEEDED, "too long by 5 tokens", param="messages"))
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post(CHAT, {**CHAT_BODY, "stream": stream})
        assert gateway.sample("slackwater_gateway_errors_total", code="context_length_exceeded") == 1
    assert reply.status == 400
    assert reply.json() == {
        "error": {
            "message": "too long by 5 tokens",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_event", [False, True])
async def test_a_failure_before_the_first_byte_has_a_status_of_its_own(stream: bool, as_event: bool) -> None:
    error = SlackwaterError(Reason.QUEUE_TIMEOUT, "waited 30 s", retry_after_s=1.2)
    tasks = FakeTasks()
    tasks.script([(Failed(error),) if as_event else error])
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post(CHAT, {**CHAT_BODY, "stream": stream})
    assert reply.status == 503
    assert reply.json()["error"]["code"] == "queue_timeout"  # type: ignore[index]
    assert reply.headers["x-should-retry"] == "true"
    assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("2", "1200")
    assert tasks.answers[0].times_closed == 1


def _broken_streams() -> list[tuple[str, list[Step], str]]:
    lost = SlackwaterError(Reason.ATTEMPTS_EXHAUSTED, "three nodes failed")
    return [
        ("a failure as an event", [(delta(0, "ab"),), (Failed(lost),)], "attempts_exhausted"),
        ("text and failure together", [(delta(0, "ab"), Failed(lost))], "attempts_exhausted"),
        ("a failure as an exception", [(delta(0, "ab"),), lost], "attempts_exhausted"),
        ("a fault of ours", [(delta(0, "ab"),), ZeroDivisionError("private")], "internal_error"),
        ("an end without a finish", [(delta(0, "ab"),)], "internal_error"),
        ("a token twice", [(delta(0, "ab"),), (delta(1, "bc"),), (finished(3),)], "internal_error"),
        ("a token lost", [(delta(0, "ab"),), (delta(3, "de"),), (finished(5),)], "internal_error"),
    ]


@pytest.mark.parametrize(("name", "steps", "code"), _broken_streams(), ids=[name for name, _, _ in _broken_streams()])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(
    name: str, steps: list[Step], code: str
) -> None:
    """Never a silent end: OpenAI's client takes one for success.

    Mutation: without the check of `first_index` in Progress the doubled and the lost token passed as success.
    """
    tasks = FakeTasks(default=lambda _: steps)
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post(COMPLETIONS, {**COMPLETION_BODY, "stream": True})
        assert gateway.sample("slackwater_gateway_errors_total", code=code) == 1
        whole = await gateway.post(COMPLETIONS, COMPLETION_BODY)
    assert reply.status == 200
    events = reply.body.decode().split("\n\n")
    assert '"text":"ab"' in events[0]
    assert events[-1] == ""
    assert events[-2].startswith('data: {"error": {"message":')
    assert f'"code": "{code}"' in events[-2]
    assert "[DONE]" not in reply.body.decode()
    assert "private" not in reply.body.decode()
    assert whole.status in (500, 503)
    assert set(whole.json()["error"]) == {"message", "type", "param", "code"}  # type: ignore[call-overload]
    assert [answer.times_closed for answer in tasks.answers] == [1, 1]


async def test_the_connection_serves_the_next_request_after_a_broken_stream() -> None:
    tasks = FakeTasks()
    tasks.script([(delta(0, "ab"),), SlackwaterError(Reason.ATTEMPTS_EXHAUSTED, "lost")])
    async with serve_gateway(tasks) as gateway:
        await gateway.post(CHAT, {**CHAT_BODY, "stream": True})
        assert (await gateway.post(CHAT, CHAT_BODY)).status == 200
        assert gateway.sample("slackwater_gateway_requests_in_flight", endpoint="chat") == 0


async def test_a_sane_request_id_is_echoed_and_any_other_replaced_by_the_tasks() -> None:
    async with serve_gateway(FakeTasks()) as gateway:
        echoed = await gateway.post(CHAT, CHAT_BODY, {"x-request-id": "trace-1:a.b_c"})
        replaced = await gateway.post(CHAT, {**CHAT_BODY, "stream": True}, {"x-request-id": "a b" * 99})
        failed = await gateway.send("GET", "/nowhere")
    assert echoed.headers["x-request-id"] == "trace-1:a.b_c"
    assert echoed.headers["x-slackwater-task-id"] == "task-1"
    assert replaced.headers["x-request-id"] == "task-2"
    assert failed.headers["x-request-id"].startswith("req-")
    assert "x-slackwater-task-id" not in failed.headers


async def test_a_silent_stream_beats_and_then_says_what_failed() -> None:
    """A queue longer than the heartbeat: comments keep proxies calm, and the failure becomes an event."""
    wait = wait_step()
    tasks = FakeTasks()
    tasks.script([wait, SlackwaterError(Reason.QUEUE_TIMEOUT, "waited too long")])
    async with (
        serve_gateway(tasks, GatewayLimits(heartbeat_s=0.01)) as gateway,
        gateway.connection(CHAT, {**CHAT_BODY, "stream": True}) as (reader, _),
    ):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        for _ in range(2):
            assert await reader.readuntil(b"\n\n\r\n") == b"b\r\n: waiting\n\n\r\n"
        wait.until.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
    assert b'"code": "queue_timeout"' in rest


async def test_http_1_0_gets_its_stream_without_chunks() -> None:
    async with serve_gateway(FakeTasks()) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = b'{"model": "fake-model", "prompt": "x", "stream": true}'
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nAuthorization: Bearer {FAKE_API_KEY}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
    payload = answer.partition(b"\r\n\r\n")[2]
    assert payload.startswith(b"data: {")
    assert payload.endswith(b"data: [DONE]\n\n")


async def test_stopping_tells_every_open_request_and_refuses_new_ones() -> None:
    """Mutation: cancelling without `_unless_stopping` cut the stream off silently, and this failed."""
    first, second = wait_step(), wait_step()
    tasks = FakeTasks()
    tasks.script([(delta(0, "ab"),), first])
    tasks.script([second])
    async with (
        serve_gateway(tasks) as gateway,
        gateway.connection(COMPLETIONS, {**COMPLETION_BODY, "stream": True}) as (reader, _),
    ):
        await first.reached.wait()
        whole = asyncio.create_task(gateway.post(COMPLETIONS, COMPLETION_BODY))
        await second.reached.wait()
        cleanup = asyncio.create_task(gateway.runner.cleanup())
        streamed = await reader.read()
        reply = await whole
        await cleanup
    assert streamed.count(b"HTTP/1.1") == 1
    last_event = streamed.split(b"\n\n")[-2]
    assert b'data: {"error": {' in last_event
    assert b'"code": "coordinator_stopping"' in last_event
    assert streamed.endswith(b"0\r\n\r\n")
    assert reply.status == 503
    assert reply.headers["x-should-retry"] == "true"
    assert [answer.times_closed for answer in tasks.answers] == [1, 1]
