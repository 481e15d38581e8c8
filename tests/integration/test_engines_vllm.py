"""The engine client against vLLM itself, with the real model: the contract that our own servers imitate."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from inference.engine import EngineError, GenerateRequest
from inference.launch import launch_vllm_cpu
from inference.task import FinishReason, Sampling, TaskKind
from inference.testing import EngineProcess, started

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / "var" / "models" / "smollm2-135m-instruct"
END_OF_TURN = 2
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"

# Loading takes about 60 s on two idle cores, and several times that on busy ones.
READY_WITHIN_S = 400
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def prompt_ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return list(tokenizer.encode(PROMPT, add_special_tokens=False).ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run `make setup-vllm`")
    folder = tmp_path_factory.mktemp("vllm")
    launch = launch_vllm_cpu(
        PYTHON,
        folder / "engine.sock",
        MODEL,
        cache_directory=folder,
        kind=TaskKind.GENERATE,
        context_tokens=1024,
        slots=8,
        dtype="bfloat16",
        kv_cache_gib=1,
    )
    async with started(launch, folder / "engine.sock", ready_within_s=READY_WITHIN_S) as process:
        yield process


def greedy(name: str, prompt_ids: list[int], max_tokens: int, logprobs: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=prompt_ids,
        sampling=Sampling(temperature=0.0, logprobs=logprobs),
        max_tokens=max_tokens,
        stop_token_ids=[END_OF_TURN],
    )


async def test_the_end_id_is_delivered_counted_and_ends_the_answer(vllm: EngineProcess, prompt_ids: list[int]) -> None:
    chunks = [chunk async for chunk in vllm.engine.generate(greedy("a", prompt_ids, 50))]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert token_ids[-1] == END_OF_TURN
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(token_ids)
    assert "Paris" in text


async def test_logprobs_come_one_per_id_with_alternatives_by_rank(vllm: EngineProcess, prompt_ids: list[int]) -> None:
    chunks = [chunk async for chunk in vllm.engine.generate(greedy("b", prompt_ids, 5, logprobs=3))]
    positions = [position for chunk in chunks for position in chunk.logprobs]
    assert len(positions) == 5
    for position in positions:
        assert position.chosen.rank == 1
        assert [item.rank for item in position.top] == [1, 2, 3]
        assert position.top[0] == position.chosen


async def test_a_drawn_id_outside_the_top_does_not_push_an_alternative_out(
    vllm: EngineProcess, prompt_ids: list[int]
) -> None:
    request = GenerateRequest(
        request_id="c",
        prompt_ids=prompt_ids,
        sampling=Sampling(temperature=2.0, seed=7, logprobs=2),
        max_tokens=20,
        stop_token_ids=[],
    )
    chunks = [chunk async for chunk in vllm.engine.generate(request)]
    positions = [position for chunk in chunks for position in chunk.logprobs]
    assert any(position.chosen.rank > 2 for position in positions)
    assert all([item.rank for item in position.top] == [1, 2] for position in positions)


async def test_scoring_gives_every_id_after_the_first(vllm: EngineProcess, prompt_ids: list[int]) -> None:
    positions = await vllm.engine.score(prompt_ids, 2)
    assert [position.chosen.token_id for position in positions] == prompt_ids[1:]
    assert all(position.chosen.logprob <= 0 and len(position.top) == 2 for position in positions)


async def test_an_abort_ends_the_answer_with_an_error(vllm: EngineProcess, prompt_ids: list[int]) -> None:
    request = GenerateRequest(
        request_id="d", prompt_ids=prompt_ids, sampling=Sampling(), max_tokens=900, stop_token_ids=[]
    )
    chunks = vllm.engine.generate(request)
    assert (await anext(chunks)).token_ids
    await vllm.engine.abort("d")
    with pytest.raises(EngineError, match="abort"):
        [chunk async for chunk in chunks]


async def test_a_closed_iterator_frees_the_engine(vllm: EngineProcess, prompt_ids: list[int]) -> None:
    for attempt in range(16):
        request = GenerateRequest(
            request_id=f"e{attempt}", prompt_ids=prompt_ids, sampling=Sampling(), max_tokens=900, stop_token_ids=[]
        )
        async with contextlib.aclosing(vllm.engine.generate(request)) as chunks:
            await anext(chunks)
    # 16 unfinished answers of 900 ids would keep the 8 slots busy for minutes.
    async with asyncio.timeout(60):
        await vllm.engine.check_health(60)


async def test_what_the_engine_refuses_is_an_error_with_its_reason(vllm: EngineProcess) -> None:
    with pytest.raises(EngineError, match="maximum model length"):
        await anext(vllm.engine.generate(greedy("f", [1] * 5000, 5)))


async def test_the_version_is_told(vllm: EngineProcess) -> None:
    assert await vllm.engine.version()


# Long enough that reading it takes many times as long as a step.
LONG_PROMPT_TOKENS = 900


async def first_token_s(vllm: EngineProcess, name: str, prompt_ids: list[int], salt: str | None) -> float:
    request = replace(greedy(name, prompt_ids, 1), cache_salt=salt)
    began_s = time.monotonic()
    [chunk async for chunk in vllm.engine.generate(request)]
    return time.monotonic() - began_s


async def test_what_was_read_under_one_salt_is_not_read_again_under_it_and_under_no_other(vllm: EngineProcess) -> None:
    """Mutations seen to fail here: one salt for all, no salt where none is asked for, no cache."""
    # Ids that no other test has sent.
    prompts = [[(7 * place + 13 * number) % 40_000 + 1_000 for place in range(LONG_PROMPT_TOKENS)] for number in (1, 2)]
    await first_token_s(vllm, "warm-up", [5] * LONG_PROMPT_TOKENS, None)
    first, unsalted = prompts
    cold_s = await first_token_s(vllm, "s1", first, "alice")
    warm_s = await first_token_s(vllm, "s2", first, "alice")
    other_s = await first_token_s(vllm, "s3", first, "bob")
    assert warm_s < 0.4 * cold_s
    assert other_s > 0.6 * cold_s
    times_s = [await first_token_s(vllm, f"s{number}", unsalted, None) for number in (4, 5)]
    assert times_s[1] > 0.6 * times_s[0]
