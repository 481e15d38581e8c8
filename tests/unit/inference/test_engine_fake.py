"""The in-memory engine keeps to the port, and fails where it is told to."""

import asyncio
import contextlib

import pytest

from inference.engine import Engine, EngineError, EngineUnreachable, GenerateRequest
from inference.fake_model import expected_ids
from inference.task import FinishReason, Sampling
from inference.testing import SMALL_VOCABULARY, FakeEngine


def request(max_tokens: int = 10, stop_token_ids: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_ids=[3, 4],
        sampling=Sampling(logprobs=2),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
    )


EXPECTED = list(expected_ids([3, 4], Sampling(), 10, SMALL_VOCABULARY))


async def test_it_answers_with_the_fake_models_ids() -> None:
    engine: Engine = FakeEngine(chunk_tokens=4)
    chunks = [chunk async for chunk in engine.generate(request())]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == EXPECTED
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason.LENGTH]
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)


async def test_it_ends_on_a_stop_id() -> None:
    chunks = [chunk async for chunk in FakeEngine().generate(request(stop_token_ids=(EXPECTED[2],)))]
    assert (len(chunks), chunks[-1].finish_reason) == (3, FinishReason.STOP)


async def test_it_fails_after_the_ids_it_was_told() -> None:
    engine = FakeEngine(chunk_tokens=4)
    engine.fail(after_tokens=3)
    got: list[int] = []
    with contextlib.suppress(EngineUnreachable):
        async for chunk in engine.generate(request()):
            got += chunk.token_ids
    assert got == EXPECTED[:3]
    with pytest.raises(EngineUnreachable):
        await engine.check_health(1)


async def test_it_stalls_until_it_recovers() -> None:
    engine = FakeEngine()
    engine.stall(after_tokens=2)
    chunks = engine.generate(request())
    assert [(await anext(chunks)).token_ids for _ in range(2)] == [(EXPECTED[0],), (EXPECTED[1],)]
    third = asyncio.ensure_future(anext(chunks))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not third.done()
    engine.recover()
    assert (await third).token_ids == (EXPECTED[2],)


async def test_closing_the_iterator_aborts_and_an_abort_breaks_the_answer_off() -> None:
    engine = FakeEngine()
    chunks = engine.generate(request())
    await anext(chunks)
    assert engine.running == {"r"}
    await chunks.aclose()
    assert (engine.running, engine.aborted) == (set(), ["r"])
    chunks = engine.generate(request())
    await anext(chunks)
    await engine.abort("r")
    with pytest.raises(EngineError, match="abort"):
        await anext(chunks)
