"""POST /v1/quote: what goes in, what comes out, and who may ask. And when whoever is turned away may come back."""

import math

import pytest

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway.testing import serve_gateway
from coordinator.tasks_port import Failed, QuoteRequest, TaskRequest
from coordinator.testing import FAKE_MODEL, FAKE_TENANT, FakeTasks
from inference.text import Message

BODY = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hi"}], "max_ttft_ms": 700}


async def test_a_quote_says_what_each_class_would_make_of_the_task_and_null_for_what_is_not_known() -> None:
    """Mutation seen to fail here: what is not known left out."""
    tasks = FakeTasks()
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post("/v1/quote", BODY)
    assert reply.status == 200
    document = reply.json()
    interactive, standard, batch = document.pop("classes")  # type: ignore[misc]
    assert document == {
        "object": "quote",
        "model": FAKE_MODEL,
        "prompt_tokens": 7,
        "max_tokens": 100,
        "likely_tokens": 50,
        "max_price_micro": 101_750,
        "likely_price_micro": 51_750,
        "grid_grams_per_kwh": 400,
    }
    assert interactive == {
        "service_class": "interactive",
        "target_met": True,
        "wait_ms": 0.0,
        "first_token_ms": 250.5,
        "token_ms": 12.5,
        "joules": 36.0,
        "energy_method": "counter",
        "co2_g": 0.004,
    }
    assert (standard["service_class"], standard["wait_ms"], standard["token_ms"]) == ("standard", 60_000.0, None)
    assert batch == dict.fromkeys(interactive, None) | {"service_class": "batch", "target_met": False}
    task = TaskRequest(model=FAKE_MODEL, input=(Message("user", "hi"),), max_ttft_ms=700, streaming=False)
    assert tasks.quoted == [(FAKE_TENANT, QuoteRequest(task=task))]


async def test_a_quote_needs_a_key_and_a_body_that_holds() -> None:
    """Mutation seen to fail here: no look at the key."""
    tasks = FakeTasks()
    async with serve_gateway(tasks) as gateway:
        stranger = await gateway.send("POST", "/v1/quote", b"{}", {"Authorization": ""})
        wrong = await gateway.post("/v1/quote", {**BODY, "max_ttft_ms": 0})
        other_method = await gateway.send("GET", "/v1/quote")
    assert (stranger.status, wrong.status, other_method.status) == (401, 400, 405)
    assert wrong.json()["error"]["param"] == "max_ttft_ms"  # type: ignore[index]
    assert tasks.quoted == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("retry_after_s", [1.0, 41.3, 7_200.01])
async def test_a_full_queue_says_when_to_come_back_in_whole_seconds_rounded_up(
    stream: bool, retry_after_s: float
) -> None:
    """Mutations seen to fail here: rounded to the nearest; held to two minutes."""
    error = SlackwaterError(Reason.QUEUE_FULL, "the queue is full", retry_after_s=retry_after_s)
    assert error.to_proto().retry_after_ms == round(retry_after_s * 1000)
    tasks = FakeTasks()
    tasks.script([(Failed(error),)])
    async with serve_gateway(tasks) as gateway:
        reply = await gateway.post("/v1/chat/completions", {**BODY, "stream": stream})
    assert reply.status == 429
    assert reply.headers["retry-after"] == str(math.ceil(retry_after_s))
    assert int(reply.headers["retry-after-ms"]) == math.ceil(retry_after_s * 1000)
