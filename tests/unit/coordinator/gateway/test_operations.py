"""Models, probes and metrics."""

import asyncio

from prometheus_client import CollectorRegistry, generate_latest

from coordinator.gateway.metrics import FrameGaps
from coordinator.gateway.testing import serve_gateway
from coordinator.testing import FAKE_DIGEST, FAKE_MODEL, FakeTasks, fake_model

CHAT = "/v1/chat/completions"
BODY: dict[str, object] = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_models_are_listed_and_found_even_with_a_slash() -> None:
    tasks = FakeTasks()
    tasks.model_infos.append(fake_model("lab/model"))
    async with serve_gateway(tasks) as gateway:
        listed = await gateway.send("GET", "/v1/models")
        found = await gateway.send("GET", "/v1/models/lab/model")
        missing = await gateway.send("GET", "/v1/models/lab")
    assert listed.json()["object"] == "list"
    assert [model["id"] for model in listed.json()["data"]] == [FAKE_MODEL, "lab/model"]  # type: ignore[attr-defined]
    assert found.json() == {
        "id": "lab/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "slackwater",
        "kind": "generate",
        "revision": "1",
        "manifest_digest": FAKE_DIGEST,
        "licence": "Apache-2.0",
        "context_tokens": 2048,
        "engines_ready": 1,
    }
    assert missing.status == 404
    assert missing.json()["error"]["code"] == "model_not_found"  # type: ignore[index]


async def test_alive_is_not_ready() -> None:
    tasks = FakeTasks()
    async with serve_gateway(tasks) as gateway:
        assert (await gateway.send("GET", "/readyz", headers={"Authorization": ""})).status == 200
        tasks.is_ready = False
        ready = await gateway.send("GET", "/readyz")
        alive = await gateway.send("GET", "/healthz", headers={"Authorization": ""})
    assert (ready.status, alive.status) == (503, 200)
    assert ready.json()["error"]["code"] == "no_capacity"  # type: ignore[index]


async def test_metrics_count_what_happened() -> None:
    async with serve_gateway(FakeTasks()) as gateway:
        await gateway.post(CHAT, {**BODY, "stream": True})
        await gateway.post(CHAT, {})
        await gateway.until(lambda: gateway.sample("slackwater_gateway_event_loop_lag_seconds_count") > 0)
        text = (await gateway.send("GET", "/metrics", headers={"Authorization": ""})).body.decode()
    for line in (
        'slackwater_gateway_requests_total{endpoint="chat",status="200"} 1.0',
        'slackwater_gateway_requests_total{endpoint="chat",status="400"} 1.0',
        'slackwater_gateway_requests_in_flight{endpoint="chat"} 0.0',
        'slackwater_gateway_errors_total{code="invalid_value"} 1.0',
        'slackwater_gateway_tokens_total{kind="prompt"} 7.0',
        'slackwater_gateway_tokens_total{kind="completion"} 13.0',
        'slackwater_gateway_time_to_first_token_seconds_count{endpoint="chat"} 1.0',
        "slackwater_gateway_inter_token_seconds_count 3.0",
    ):
        assert line in text.splitlines()


def test_frame_gaps_are_a_histogram_like_any_other() -> None:
    registry = CollectorRegistry()
    gaps = FrameGaps("gap_seconds", "Gaps.", (0.1, 1.0), registry)
    for gap_s in (0.05, 0.1, 0.5, 7.0):
        gaps.observe(gap_s)
    lines = generate_latest(registry).decode().splitlines()
    assert 'gap_seconds_bucket{le="0.1"} 2.0' in lines
    assert 'gap_seconds_bucket{le="1.0"} 3.0' in lines
    assert 'gap_seconds_bucket{le="+Inf"} 4.0' in lines
    assert "gap_seconds_count 4.0" in lines
    assert "gap_seconds_sum 7.65" in lines


async def test_keep_alive_serves_many_requests_on_one_connection() -> None:
    async with serve_gateway(FakeTasks()) as gateway, asyncio.timeout(10):
        for stream in (True, False) * 5:
            assert (await gateway.post(CHAT, {**BODY, "stream": stream})).status == 200
