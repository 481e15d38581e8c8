"""OpenAI's own Python client against the gateway: what its users see, and when it retries."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway.testing import RunningGateway, serve_gateway
from coordinator.testing import FAKE_API_KEY, FAKE_MODEL, FakeTasks, delta, fake_model, finished, text_steps, wait_step


@pytest.fixture
def tasks() -> FakeTasks:
    return FakeTasks()


@pytest.fixture
async def gateway(tasks: FakeTasks) -> AsyncIterator[RunningGateway]:
    async with serve_gateway(tasks) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.base_url + "/v1", api_key=FAKE_API_KEY, max_retries=2) as made:
        yield made


def _user(text: str = "hi") -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=FAKE_MODEL, messages=_user(), max_completion_tokens=50)
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 13, 20)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id == "task-1"


async def test_chat_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=FAKE_MODEL, messages=_user(), stream=True, stream_options={"include_usage": True}
    )
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world."
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_the_clients_own_stream_helper_assembles_the_answer(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=FAKE_MODEL, messages=_user()) as stream:
        async for _ in stream:
            await asyncio.sleep(0)
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world."


async def test_an_answer_goes_back_in_as_history(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    """The client's own dump of a message carries nulls for all that we have not built."""
    answer = await client.chat.completions.create(model=FAKE_MODEL, messages=_user())
    history: list[object] = [*_user(), answer.choices[0].message.model_dump(), *_user("and then?")]
    await client.chat.completions.create(model=FAKE_MODEL, messages=history)  # type: ignore[arg-type]
    assert [getattr(message, "role", None) for message in tasks.submitted[1][1].input] == ["user", "assistant", "user"]


async def test_chat_logprobs(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    tasks.script(text_steps(["ab"], logprobs=2))
    answer = await client.chat.completions.create(model=FAKE_MODEL, messages=_user(), logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "b"]
    assert len(logprobs.content[0].top_logprobs) == 2


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [1, 2, 3], [[1, 2, 3]]])
async def test_completions(client: openai.AsyncOpenAI, prompt: str) -> None:
    whole = await client.completions.create(model=FAKE_MODEL, prompt=prompt)
    stream = await client.completions.create(model=FAKE_MODEL, prompt=prompt, stream=True, logprobs=1)
    assert whole.choices[0].text == "Hello, world."
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world."
    offsets = [offset for chunk in chunks if (lp := chunk.choices[0].logprobs) for offset in lp.text_offset or []]
    assert offsets == list(range(13))


async def test_models(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    tasks.model_infos.append(fake_model("lab/model"))
    assert [model.id async for model in client.models.list()] == [FAKE_MODEL, "lab/model"]
    # The client escapes the slash.
    assert (await client.models.retrieve("lab/model")).owned_by == "slackwater"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nothing")


async def test_every_refusal_is_the_exception_that_users_catch(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=FAKE_MODEL, messages=_user(), n=2)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("n", "unsupported", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=FAKE_MODEL, messages=_user(), temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-17", messages=_user())
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as stranger:
        await client.with_options(api_key="wrong").chat.completions.create(model=FAKE_MODEL, messages=_user())
    assert stranger.value.code == "invalid_api_key"
    assert stranger.value.request_id
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=FAKE_MODEL, input="x")
    # Not one of them was tried again: only the unknown model reached the tasks.
    assert len(tasks.submitted) == 1


async def test_a_passing_failure_is_retried_after_the_time_we_say(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    for reason in (Reason.NO_CAPACITY, Reason.QUEUE_FULL):
        tasks.script(SlackwaterError(reason, "no engine is free", retry_after_s=0.01))
    answer = await client.chat.completions.create(model=FAKE_MODEL, messages=_user())
    assert answer.choices[0].message.content == "Hello, world."
    assert len(tasks.submitted) == 3


async def test_a_failure_that_will_not_pass_is_not_retried(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    """Mutation: without `x-should-retry: false` the client sent this 500 three times."""
    tasks.script(SlackwaterError(Reason.INTERNAL, "a fault"))
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model=FAKE_MODEL, messages=_user())
    assert len(tasks.submitted) == 1


async def test_a_stream_that_breaks_raises_and_does_not_just_end(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    tasks.script([(delta(0, "ab"),), SlackwaterError(Reason.MIGRATION_IMPOSSIBLE, "the node left")])
    stream = await client.chat.completions.create(model=FAKE_MODEL, messages=_user(), stream=True)
    seen: list[str] = []
    with pytest.raises(openai.APIError, match="the node left"):
        await _read_into(seen, stream)
    assert "".join(seen) == "ab"


async def _read_into(seen: list[str], stream: openai.AsyncStream[ChatCompletionChunk]) -> None:
    async for chunk in stream:
        seen.append(chunk.choices[0].delta.content or "")


async def test_closing_the_stream_aborts_the_task(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    wait = wait_step()
    tasks.script([(delta(0, "ab"),), wait, (finished(2),)])
    stream = await client.chat.completions.create(model=FAKE_MODEL, messages=_user(), stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(10):
        await tasks.answers[0].closed.wait()
    assert tasks.answers[0].times_closed == 1


async def test_the_clients_timeout_aborts_the_task(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    tasks.script([wait_step()])
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.2, max_retries=0).chat.completions.create(
            model=FAKE_MODEL, messages=_user()
        )
    async with asyncio.timeout(10):
        await tasks.answers[0].closed.wait()


async def test_the_synchronous_client_streams_too(gateway: RunningGateway) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=gateway.base_url + "/v1", api_key=FAKE_API_KEY) as client:
            stream = client.chat.completions.create(model=FAKE_MODEL, messages=_user(), stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == "Hello, world."


async def test_extensions_go_in_the_extra_body(client: openai.AsyncOpenAI, tasks: FakeTasks) -> None:
    extra = {"top_k": 5, "repetition_penalty": 1.2, "service_class": "standard", "privacy": "trusted_owners"}
    await client.chat.completions.create(model=FAKE_MODEL, messages=_user(), extra_body=extra, user="u", seed=3)
    request = tasks.submitted[0][1]
    assert (request.sampling.top_k, request.sampling.repetition_penalty, request.sampling.seed) == (5, 1.2, 3)
    assert (request.service_class.value, request.privacy_class.value) == ("standard", "trusted_owners")
