"""Service classes, quotes and the reasons of decisions, through gRPC and HTTP, over real processes and a real store."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from dev_network import DevNetwork
from network_settings import EngineOptions
from slackwater import AsyncClient, Quote, errors

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "fake-smollm2"
TOKENS_PER_SECOND = 60.0
ENGINE = EngineOptions(kind="fake", slots=2, fake_tokens_per_second=TOKENS_PER_SECOND)
PROMPT = [100, 200, 300]
PATIENCE_S = 30.0
# A few group commits of what the recorder keeps.
RECORDED_S = 1.0
CLASSES = ("interactive", "standard", "batch")
# What 3 and 8 tokens bring a node that asks for nothing: the list price less the fee of 20 %.
PROMPT_AND_ANSWER_ASK_MICRO = 7_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network() -> AsyncIterator[DevNetwork]:
    async with DevNetwork(agents=1, engine=ENGINE, say=lambda _: None) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(network: DevNetwork) -> AsyncIterator[AsyncClient]:
    ready = network.ready
    async with AsyncClient(ready.grpc_address, api_key=ready.api_key, ca_file=Path(ready.ca_file)) as connected:
        yield connected


async def post(network: DevNetwork, path: str, body: dict[str, object]) -> tuple[int, dict[str, Any]]:
    """Send a body to the gateway; return the status and the document."""
    headers = {"Authorization": f"Bearer {network.ready.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(network.ready.gateway_url + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


def without_times(quote: Quote) -> dict[str, Any]:
    """What of a quote does not change from one moment to the next."""
    document = asdict(quote)
    for one in document["classes"]:
        for name in ("first_token_ms", "token_ms"):
            assert one.pop(name) > 0
    return document


async def test_a_quote_is_the_same_over_grpc_and_http_and_its_price_is_the_lists(
    network: DevNetwork, client: AsyncClient
) -> None:
    quote = await client.quote(model=MODEL, prompt_tokens=3, max_tokens=8)
    # 250,000 micro-credits for a thousand tokens of prompt, a million for a thousand of answer.
    assert (quote.max_price_micro, quote.prompt_tokens, quote.max_tokens) == (8_750, 3, 8)
    assert tuple(one.service_class for one in quote.classes) == CLASSES
    assert all(one.target_met and one.wait_ms == 0.0 for one in quote.classes)
    status, document = await post(network, "/v1/quote", {"model": MODEL, "prompt_tokens": 3, "max_tokens": 8})
    assert (status, document.pop("object")) == (200, "quote")
    for one in document["classes"]:
        assert one.pop("first_token_ms") > 0
        assert one.pop("token_ms") > 0
        one["energy_method"] = one["energy_method"] or ""
    said = without_times(quote)
    said["classes"] = list(said["classes"])
    assert document == said


async def test_a_limit_that_the_fleet_cannot_keep_is_not_met(client: AsyncClient) -> None:
    """Mutation seen to fail here: max_ttft_ms left out of the spec."""
    hasty = await client.quote(model=MODEL, prompt_tokens=3, max_tokens=8, max_ttft_ms=1)
    assert not any(one.target_met for one in hasty.classes)


async def test_each_class_is_served_and_why_is_told_from_memory_and_from_the_store(
    network: DevNetwork, client: AsyncClient
) -> None:
    task_ids = {}
    for name in CLASSES:
        completion = await client.complete(
            PROMPT,
            model=MODEL,
            max_tokens=8,
            service_class=name,  # type: ignore[arg-type]  # a plain str here
            max_ttft_ms=20_000,
            max_price_micro=8_750,
        ).completion()
        task_ids[name] = completion.task_id
    for task_id in task_ids.values():
        (attempt,) = (await client.get_task(task_id)).attempts
        assert attempt.decision is not None
        assert attempt.decision.why == "meets_target"
        assert attempt.decision.cost_micro == PROMPT_AND_ANSWER_ASK_MICRO
        assert attempt.first_token_ms is not None
        assert 0 < attempt.first_token_ms < 20_000
        assert 500 / TOKENS_PER_SECOND < attempt.decision.token_ms < 4_000 / TOKENS_PER_SECOND
        row = await kept(network, task_id)
        assert row == (
            attempt.decision.engine_id,
            attempt.decision.why,
            attempt.decision.cost_micro,
            attempt.decision.first_token_ms,
            attempt.decision.token_ms,
            attempt.decision.tail,
            attempt.first_token_ms,
        )


async def kept(network: DevNetwork, task_id: str) -> tuple[object, ...]:
    """Return the decision in the store, once it is written."""
    columns = "engine_id, why, cost_micro, expected_first_token_ms, expected_token_ms, tail, first_token_ms"

    def look() -> tuple[object, ...] | None:
        with sqlite3.connect(f"file:{database(network)}?mode=ro", uri=True) as connection:
            found: tuple[object, ...] | None = connection.execute(
                f"select {columns} from attempts where task_id = ?", (task_id,)
            ).fetchone()
            return found

    async with asyncio.timeout(PATIENCE_S):
        while (row := await asyncio.to_thread(look)) is None:
            await asyncio.sleep(RECORDED_S / 10)
    return row


def database(network: DevNetwork) -> Path:
    (path,) = Path(network.ready.state_dir).rglob("coordinator.db")
    return path


async def test_a_task_that_waits_says_so_and_one_that_may_cost_too_much_is_refused(
    network: DevNetwork, client: AsyncClient
) -> None:
    running = [client.complete(PROMPT, model=MODEL, max_tokens=400) for _ in range(ENGINE.slots or 0)]
    for answer in running:
        while answer.started is None:
            await anext(answer)
    waiting = client.complete(PROMPT, model=MODEL, max_tokens=4, service_class="standard")
    await anext(waiting)
    assert waiting.task_id is not None
    await asyncio.sleep(0.2)
    task = await client.get_task(waiting.task_id)
    assert (task.status, task.attempts) == ("queued", ())
    assert task.waiting is not None
    assert task.waiting.reason == "no_free_slot"
    assert 100 < task.waiting.waited_ms < 10_000
    for answer in running:
        await answer.cancel()
    assert (await waiting.completion()).usage.completion_tokens == 4
    assert (await client.get_task(waiting.task_id)).waiting is None

    with pytest.raises(errors.PriceExceeded) as refused:
        await client.complete(PROMPT, model=MODEL, max_tokens=8, max_price_micro=8_749).text()
    assert (refused.value.param, "8750" in refused.value.message) == ("max_price_micro", True)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "max_price_micro": 8_749}
    status, document = await post(network, "/v1/completions", body)
    assert (status, document["error"]["code"], document["error"]["param"]) == (400, "price_exceeded", "max_price_micro")
    limits = {"service_class": "batch", "deadline_ms": 30_000, "max_ttft_ms": 20_000, "max_price_micro": 8_750}
    status, document = await post(network, "/v1/completions", {**body, **limits})
    assert (status, document["usage"]["completion_tokens"]) == (200, 8), json.dumps(document)
