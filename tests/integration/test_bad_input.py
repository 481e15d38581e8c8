"""Every kind of bad input over the real gateway of a real network: a 4xx that names the parameter, and nobody dies.

After each test a normal request is answered, the processes are the same ones
as before, and both nodes are online.
"""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from dev_network import DevNetwork
from network_settings import MODELS, EngineOptions

from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "fake-smollm2"
CONTEXT_TOKENS = 131_072
VOCABULARY_SIZE = 49_152
PROMPT = [100, 200, 300]
SEED = 7
# A test that waits longer for anything has failed.
PATIENCE_S = 60.0

_MESSAGES: Any = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    content_type: str
    body: bytes

    def refusal(self) -> dict[str, str | None]:
        """Return the error; anything but OpenAI's envelope with a 4xx fails the test."""
        assert 400 <= self.status < 500, (self.status, self.body[:500])
        assert self.content_type.startswith("application/json")
        document = json.loads(self.body)
        assert set(document) == {"error"}
        error: dict[str, str | None] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert len(self.body) < 2_000, "a refusal repeats nothing of the request"
        return error


class Caller:
    """Sends what it is given, with the network's key."""

    def __init__(self, network: DevNetwork, session: aiohttp.ClientSession) -> None:
        self.url = network.ready.gateway_url
        self._key = network.ready.api_key
        self._session = session

    async def post(self, path: str, body: object, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json", **headers}
        async with (
            asyncio.timeout(PATIENCE_S),
            self._session.post(self.url + path, data=io.BytesIO(data), headers=sent) as response,
        ):
            return Reply(response.status, response.content_type, await response.read())

    async def chat(self, **fields: object) -> Reply:
        return await self.post(CHAT, {"model": MODEL, "messages": _MESSAGES, "max_tokens": 4, **fields})

    async def complete(self, **fields: object) -> Reply:
        return await self.post(COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network() -> AsyncIterator[DevNetwork]:
    engine = EngineOptions(kind="fake", slots=8, fake_tokens_per_second=100.0, fake_ttft_ms=10.0)
    async with DevNetwork(agents=2, engine=engine) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(network: DevNetwork) -> AsyncIterator[Caller]:
    async with aiohttp.ClientSession() as session:
        yield Caller(network, session)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nobody_dies(network: DevNetwork, caller: Caller) -> AsyncIterator[None]:
    yield
    answered = await caller.complete(prompt=PROMPT, temperature=0)
    assert answered.status == 200, answered.body
    assert json.loads(answered.body)["usage"]["completion_tokens"] == 4
    ready = network.ready
    assert psutil.pid_exists(ready.coordinator_pid)
    async with network.admin() as admin:
        nodes = {node.node_id: node for node in await admin.nodes()}
    for agent in ready.agents:
        node = nodes[agent.node_id]
        assert psutil.pid_exists(agent.pid)
        assert (node.status, [engine.pid for engine in node.engines]) == ("online", [agent.engine_pid])
        assert [engine.restarts for engine in node.engines] == [0]


# ---- bodies that are no request


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b'{"model": "fake-smollm2",}', id="a comma too many"),
        pytest.param(b"[]", id="an array"),
        pytest.param(b"null", id="null"),
        pytest.param(b'"text"', id="a string"),
        pytest.param(b"\x00\x01\x02", id="bytes"),
        pytest.param(b'{"model": "\xff\xfe"}', id="no UTF-8"),
        pytest.param(b'{"model": "\xed\xa0\x80"}', id="half a surrogate pair in UTF-8"),
        pytest.param(b'{"temperature": NaN}', id="NaN"),
        pytest.param(b'{"temperature": -Infinity}', id="minus infinity"),
        pytest.param(b'{"max_tokens": ' + b"9" * 5_000 + b"}", id="a number of 5,000 digits"),
        pytest.param(b"[" * 20_000, id="20,000 arrays"),
        pytest.param(b'{"a":' * 20_000 + b"1" + b"}" * 20_000, id="20,000 objects"),
        pytest.param(b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", id="20,000 arrays as messages"),
        pytest.param(b"[" * 2_000_000, id="two million arrays"),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(caller: Caller, path: str, body: bytes) -> None:
    error = (await caller.post(path, body)).refusal()
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert "the request body" in str(error["message"])


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "in chunks"])
async def test_40_megabytes_are_refused(caller: Caller, network: DevNetwork, chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 1_000_000

    headers = {"Authorization": f"Bearer {network.ready.api_key}", "Content-Type": "application/json"}
    before = psutil.Process(network.ready.coordinator_pid).memory_info().rss
    # A connection of its own, which the gateway gives up.
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
        data = chunks() if chunked else io.BytesIO(b" " * 40_000_000)
        async with session.post(caller.url + CHAT, data=data, headers=headers) as response:
            reply = Reply(response.status, response.content_type, await response.read())
    assert reply.status == 413
    assert reply.refusal()["code"] == "payload_too_large"
    assert psutil.Process(network.ready.coordinator_pid).memory_info().rss - before < 40_000_000


# ---- fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a\x00b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [*_MESSAGES, {"role": "user", "content": "\udfff tail"}]}, "messages[1].content"),
        ({"messages": _MESSAGES * 3_000}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"model": "a\x00"}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"model": "gpt-17"}, "model"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": CONTEXT_TOKENS}, "max_tokens"),
        ({"max_completion_tokens": CONTEXT_TOKENS}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": "x" * 300}, "stop"),
        ({"stop": ["a\x00"]}, "stop[0]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"service_class": "royal"}, "service_class"),
        ({"privacy": "own_nodes"}, "privacy"),
        ({"colour": "red"}, "colour"),
        ({"\ud800": 1}, "\\ud800"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
async def test_a_wrong_field_of_a_chat_is_named(caller: Caller, fields: dict[str, object], param: str) -> None:
    for stream in ({}, {"stream": True}) if "stream" not in fields and "stream_options" not in fields else ({},):
        assert (await caller.chat(**fields, **stream)).refusal()["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "hi"}}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1, 2**32]}, "prompt[1]"),
        ({"prompt": [1, VOCABULARY_SIZE]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": "a\x00"}, "prompt"),
        ({"prompt": "\udc00"}, "prompt"),
        ({"prompt": [5] * (CONTEXT_TOKENS + 1)}, "prompt"),
        ({"prompt": [5] * CONTEXT_TOKENS}, "prompt"),
        ({"prompt": [5] * (CONTEXT_TOKENS - 3)}, "max_tokens"),
        ({"prompt": "word " * CONTEXT_TOKENS}, "prompt"),
        ({"prompt": "a" * 4_000_000}, "prompt"),
        ({"prompt": "\U0001f6f6" * 500_000}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"n": 3}, "n"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
async def test_a_wrong_field_of_a_completion_is_named(caller: Caller, fields: dict[str, object], param: str) -> None:
    assert (await caller.complete(**fields)).refusal()["param"] == param


async def test_a_chat_over_the_context_is_told_so(caller: Caller) -> None:
    """Mutation seen to fail: the prompt is not held against the context in `_max_tokens`."""
    error = (await caller.chat(messages=[{"role": "user", "content": "word " * CONTEXT_TOKENS}])).refusal()
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "131072" in str(error["message"])


async def test_an_unknown_model_is_not_found(caller: Caller) -> None:
    reply = await caller.chat(model="gpt-17")
    assert (reply.status, reply.refusal()["code"]) == (404, "model_not_found")


# ---- keys and paths


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Basic abc", "Bearer sk-slackwater-" + "A" * 43, "Bearer " + "k" * 8_000],
)
async def test_without_a_key_in_force_nothing_is_served(caller: Caller, authorization: str) -> None:
    for path in (CHAT, COMPLETIONS):
        reply = await caller.post(path, {"model": MODEL, "messages": _MESSAGES}, Authorization=authorization)
        assert (reply.status, reply.refusal()["code"]) == (401, "invalid_api_key")


async def test_an_administrators_key_is_no_tenants(caller: Caller, network: DevNetwork) -> None:
    reply = await caller.post(CHAT, {"model": MODEL}, Authorization=f"Bearer {network.ready.admin_key}")
    assert reply.status in (401, 403)
    assert reply.refusal()["type"] in ("authentication_error", "permission_error")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/%00", "/v1/" + "x" * 7_000])
async def test_a_path_that_does_not_exist_is_refused_in_the_envelope(caller: Caller, path: str) -> None:
    assert (await caller.post(path, {})).refusal()["code"] == "unknown_url"


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), id="TLS"),
        pytest.param(b"\x00" * 1_000, id="zeros"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="HTTP/9.9"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", id="a negative length"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", id="a header of 100 kB"),
    ],
)
async def test_what_is_no_http_is_refused_or_hung_up_on(caller: Caller, raw: bytes) -> None:
    host, port = caller.url.removeprefix("http://").split(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        answer = await reader.read(64)
        writer.close()
    # Without a request there is nobody whose envelope could be asked for: HTTP's own refusal does.
    assert not answer or answer.startswith((b"HTTP/1.0 4", b"HTTP/1.1 4")), answer


# ---- all together


async def test_long_prompts_without_a_space_keep_nobody_waiting(caller: Caller) -> None:
    """A million letters take the tokenizer half a second, and there are twenty of them.

    Mutation seen to fail: they are tokenized in the threads that also look up API keys.
    """
    slow = [asyncio.create_task(caller.complete(prompt="a" * 1_000_000)) for _ in range(20)]
    waited_s = []
    while not all(request.done() for request in slow):
        began_at = time.monotonic()
        assert (await caller.complete(prompt=PROMPT, temperature=0)).status == 200
        waited_s.append(time.monotonic() - began_at)
        # As long as a key is remembered: each of these looks its own up again.
        await asyncio.sleep(0.5)
    assert max(waited_s) < 1.5
    for request in slow:
        assert request.result().refusal()["code"] == "context_length_exceeded"


async def test_a_storm_of_bad_requests_disturbs_no_answer(caller: Caller, network: DevNetwork) -> None:
    """500 refusals of every size while an answer streams, whole and without a long pause."""
    vocabulary = FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")
    expected = expected_ids(PROMPT, Sampling(temperature=0.0, seed=SEED), 300, vocabulary)
    bad = [b"[" * 20_000, b"{}", b"\xff", b'{"model": "x", "messages": []}', b'"' + b"x" * 1_000_000]
    async with network.client() as client, asyncio.TaskGroup() as group:
        answer = client.complete(PROMPT, model=MODEL, max_tokens=300, temperature=0.0, seed=SEED)
        reading = group.create_task(answer.completion())
        slots = asyncio.Semaphore(50)

        async def send(number: int) -> None:
            async with slots:
                (await caller.post(CHAT, bad[number % len(bad)])).refusal()

        for number in range(500):
            group.create_task(send(number))
    completion = await reading
    assert list(completion.token_ids) == list(expected)
    assert completion.broken_attempts == ()
