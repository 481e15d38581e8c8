"""OpenAI's own Python client against a whole network: coordinator, gateway, agents and engines as processes.

The fake engine's answers are known beforehand, so texts are compared whole.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
import pytest_asyncio
from dev_network import DevNetwork
from network_settings import MODELS, EngineOptions

from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling
from inference.text import Message, Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "fake-smollm2"
SEED = 7
QUESTION = "What is the tide?"
TOKENS = 40
# From the moment a client leaves until its engine has stopped, reports included.
ABORT_S = 3.0
PATIENCE_S = 30.0

_GREEDY: Any = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "seed": SEED}


def user(text: str = QUESTION) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


class Oracle:
    """Knows what the fake engine answers."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.load(MODELS / MODEL)
        self._vocabulary = FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")

    def chat_ids(self, text: str = QUESTION) -> Sequence[int]:
        return self.tokenizer.encode_chat([Message("user", text)])

    def answer(self, prompt: Sequence[int], tokens: int = TOKENS, temperature: float = 0.0, seed: int = SEED) -> str:
        sampling = Sampling(temperature=temperature, seed=seed)
        detokenizer = self.tokenizer.detokenizer()
        ids = expected_ids(prompt, sampling, tokens, self._vocabulary)
        return detokenizer.feed(ids) + detokenizer.finish()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network() -> AsyncIterator[DevNetwork]:
    engine = EngineOptions(kind="fake", slots=8, fake_tokens_per_second=100.0, fake_ttft_ms=10.0)
    async with DevNetwork(agents=2, engine=engine) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(network: DevNetwork) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = network.ready.gateway_url + "/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=network.ready.api_key, timeout=PATIENCE_S) as made:
        yield made


async def running_sequences(network: DevNetwork) -> int:
    async with network.admin() as admin:
        return sum(engine.running for node in await admin.nodes() for engine in node.engines)


async def until_running(network: DevNetwork, count: int, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        # The list of nodes is what an operator sees, and announces nothing.
        while await running_sequences(network) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# ---- answers


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_chat(client: openai.AsyncOpenAI, oracle: Oracle) -> None:
    answer = await client.chat.completions.create(messages=user(), **_GREEDY)
    assert answer.choices[0].message.content == oracle.answer(oracle.chat_ids())
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    prompt_tokens = len(oracle.chat_ids())
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, TOKENS)
    assert answer.usage.total_tokens == prompt_tokens + TOKENS


async def test_a_streamed_chat(client: openai.AsyncOpenAI, oracle: Oracle) -> None:
    stream = await client.chat.completions.create(
        messages=user(), stream=True, stream_options={"include_usage": True}, **_GREEDY
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == oracle.answer(oracle.chat_ids())
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len(chunks) > 5, "it came in pieces"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_of_a_text_and_of_ids(client: openai.AsyncOpenAI, oracle: Oracle, stream: bool) -> None:
    for prompt in ("Once upon a time", [100, 200, 300]):
        ids = list(oracle.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        given: Any = prompt
        if stream:
            pieces = await client.completions.create(prompt=given, stream=True, **_GREEDY)
            text = "".join([piece.choices[0].text async for piece in pieces if piece.choices])
        else:
            text = (await client.completions.create(prompt=given, **_GREEDY)).choices[0].text
        assert text == oracle.answer(ids)


async def test_a_seed_fixes_the_answer_and_another_changes_it(client: openai.AsyncOpenAI, oracle: Oracle) -> None:
    async def ask(seed: int | None) -> str:
        options: Any = {**_GREEDY, "temperature": 1, "seed": seed}
        return (await client.chat.completions.create(messages=user(), **options)).choices[0].message.content or ""

    assert await ask(1) == await ask(1) == oracle.answer(oracle.chat_ids(), temperature=1.0, seed=1)
    assert await ask(2) == oracle.answer(oracle.chat_ids(), temperature=1.0, seed=2) != await ask(1)
    assert await ask(None) != await ask(None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_before_it(
    network: DevNetwork, client: openai.AsyncOpenAI, oracle: Oracle, stream: bool
) -> None:
    """The stop string begins and ends in the middle of tokens, and the engine is told to stop."""
    whole = oracle.answer(oracle.chat_ids(), tokens=2_000)
    middle = len(oracle.answer(oracle.chat_ids(), tokens=30))
    stop = whole[middle - 6 : middle + 6]
    assert whole.index(stop) == middle - 6
    options: Any = {**_GREEDY, "max_tokens": 2_000, "stop": ["never in there", stop]}
    if stream:
        text, reasons = "", []
        async for chunk in await client.chat.completions.create(messages=user(), stream=True, **options):
            text += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
        reason = reasons[-1]
    else:
        answer = await client.chat.completions.create(messages=user(), **options)
        text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens < 60
    assert (text, reason) == (whole[: middle - 6], "stop")
    await until_running(network, 0, ABORT_S)


async def test_log_probabilities_of_a_chat(client: openai.AsyncOpenAI, oracle: Oracle) -> None:
    answer = await client.chat.completions.create(messages=user(), logprobs=True, top_logprobs=2, **_GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == TOKENS
    raw = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert raw.decode("utf-8", "replace").startswith((answer.choices[0].message.content or "")[:20])
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in logprobs.content)


async def test_log_probabilities_of_a_streamed_completion(client: openai.AsyncOpenAI) -> None:
    pieces = await client.completions.create(prompt="Once", stream=True, logprobs=2, **_GREEDY)
    tokens: list[str] = []
    offsets: list[int] = []
    async for piece in pieces:
        if piece.choices and piece.choices[0].logprobs is not None:
            tokens += piece.choices[0].logprobs.tokens or []
            offsets += piece.choices[0].logprobs.text_offset or []
    assert len(tokens) == TOKENS
    assert offsets == sorted(offsets)


async def test_many_streams_at_once_stay_apart(client: openai.AsyncOpenAI, oracle: Oracle) -> None:
    async def ask(number: int) -> str:
        stream = await client.chat.completions.create(messages=user(f"Question {number}"), stream=True, **_GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers = await asyncio.gather(*(ask(number) for number in range(12)))
    assert answers == [oracle.answer(oracle.chat_ids(f"Question {number}")) for number in range(12)]


async def test_the_synchronous_client(network: DevNetwork, oracle: Oracle) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=network.ready.gateway_url + "/v1", api_key=network.ready.api_key) as client:
            stream = client.chat.completions.create(messages=user(), stream=True, **_GREEDY)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == oracle.answer(oracle.chat_ids())


# ---- refusals


async def test_refusals_are_the_exceptions_that_users_catch(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=user(), temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt=[5] * 131_072)
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-17", messages=user())
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=MODEL, input="x")


# ---- leaving


async def test_closing_a_stream_frees_the_engine(network: DevNetwork, client: openai.AsyncOpenAI) -> None:
    await until_running(network, 0, ABORT_S)
    streams = []
    for _ in range(3):
        options: Any = {**_GREEDY, "max_tokens": 100_000}
        stream = await client.chat.completions.create(messages=user(), stream=True, **options)
        await anext(aiter(stream))
        streams.append(stream)
    await until_running(network, 3, PATIENCE_S)
    for stream in streams:
        await stream.close()
    await until_running(network, 0, ABORT_S)


async def test_the_clients_timeout_frees_the_engine(network: DevNetwork, client: openai.AsyncOpenAI) -> None:
    """Nothing of an answer that does not stream has been sent when its client leaves.

    Mutation seen to fail: `handler_cancellation` off in the gateway's runner.
    """
    impatient = client.with_options(timeout=1.0, max_retries=0)
    began_at = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        await impatient.chat.completions.create(messages=user(), **{**_GREEDY, "max_tokens": 100_000})
    assert time.monotonic() - began_at < 5
    await until_running(network, 0, ABORT_S)
