"""The torch engine as a process, with the real model: batching changes no greedy answer, nor does a resumption."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from inference.engine import EngineError, GenerateRequest
from inference.launch import launch_torch
from inference.task import FinishReason, Sampling, TaskKind
from inference.testing import EngineProcess, started

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-torch" / "bin" / "python"
MODEL = ROOT / "var" / "models" / "smollm2-135m-instruct"
END_OF_TURN = 2
SLOTS = 4
# Loading takes 8 s on an idle core, importing torch on a busy machine several times that.
READY_WITHIN_S = 100
QUESTIONS = [
    "What is the capital of France?",
    "Write a story about a fox.",
    "List five fruits and say for each of them where it grows and in which month it is picked.",
    "What is 2+2?",
    "Why is the sky blue?",
    "Tell me a joke about cats.",
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


@contextlib.asynccontextmanager
async def torch_engine(folder: Path, model: Path, kind: TaskKind = TaskKind.GENERATE) -> AsyncIterator[EngineProcess]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run `make setup`")
    launch = launch_torch(PYTHON, folder / "engine.sock", model, slots=SLOTS, context_tokens=1024, threads=2)
    async with started(launch, folder / "engine.sock", ready_within_s=READY_WITHIN_S, kind=kind) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    async with torch_engine(tmp_path_factory.mktemp("torch"), MODEL) as process:
        yield process


async def answer(
    process: EngineProcess, name: str, prompt: list[int], max_tokens: int, sampling: Sampling
) -> list[int]:
    request = GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=sampling, max_tokens=max_tokens, stop_token_ids=[]
    )
    token_ids: list[int] = []
    async for chunk in process.engine.generate(request):
        token_ids += chunk.token_ids
    return token_ids


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(temperature=0.9, top_p=0.9, top_k=40, seed=12)],
    ids=["greedy", "sampled"],
)
async def test_an_answer_is_the_same_alone_in_a_batch_and_resumed(
    engine: EngineProcess, prompts: list[list[int]], sampling: Sampling
) -> None:
    # More sequences than slots, of unlike lengths, so that some wait, join and leave while others run.
    # Mutation seen to fail: a sequence that moved to a freed row left its newest id's keys behind.
    lengths = [6, 20, 9, 24, 13, 17]
    jobs = zip(prompts, lengths, strict=True)
    batch = await asyncio.gather(*[answer(engine, f"b{index}", *job, sampling) for index, job in enumerate(jobs)])
    assert [len(token_ids) for token_ids in batch] == lengths
    resumed = await asyncio.gather(
        *[
            answer(engine, f"r{index}", prompt + whole[:5], len(whole) - 5, sampling)
            for index, (prompt, whole) in enumerate(zip(prompts, batch, strict=True))
        ]
    )
    assert resumed == [whole[5:] for whole in batch]
    for prompt, whole in list(zip(prompts, batch, strict=True))[1:4]:
        assert await answer(engine, "alone", prompt, len(whole), sampling) == whole


async def test_the_end_id_is_delivered_and_ends_the_answer(engine: EngineProcess, prompts: list[list[int]]) -> None:
    request = GenerateRequest(
        request_id="end",
        prompt_ids=prompts[0],
        sampling=Sampling(temperature=0.0, logprobs=2),
        max_tokens=40,
        stop_token_ids=[END_OF_TURN],
    )
    chunks = [chunk async for chunk in engine.engine.generate(request)]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert (token_ids[-1], chunks[-1].finish_reason) == (END_OF_TURN, FinishReason.STOP)
    positions = [position for chunk in chunks for position in chunk.logprobs]
    assert [[item.rank for item in position.top] for position in positions] == [[1, 2]] * len(token_ids)
    assert Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(token_ids) == "The capital of France is Paris."


async def test_scores_are_the_logprobs_that_the_answer_came_with(
    engine: EngineProcess, prompts: list[list[int]]
) -> None:
    request = GenerateRequest(
        request_id="score",
        prompt_ids=prompts[1],
        sampling=Sampling(seed=4, logprobs=3),
        max_tokens=12,
        stop_token_ids=[],
    )
    chunks = [chunk async for chunk in engine.engine.generate(request)]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    told = [position for chunk in chunks for position in chunk.logprobs]
    scored = (await engine.engine.score(prompts[1] + token_ids, 3))[-len(token_ids) :]
    for one, other in zip(told, scored, strict=True):
        assert (one.chosen.token_id, one.chosen.rank) == (other.chosen.token_id, other.chosen.rank)
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)
        assert [item.token_id for item in one.top] == [item.token_id for item in other.top]


async def test_a_score_longer_than_a_turn_has_every_position(engine: EngineProcess) -> None:
    token_ids = [(index * 37) % 5000 for index in range(300)]
    positions = await engine.engine.score(token_ids, 0)
    assert [position.chosen.token_id for position in positions] == token_ids[1:]


async def test_aborts_and_readers_that_leave_free_their_rows(engine: EngineProcess, prompts: list[list[int]]) -> None:
    for attempt in range(2 * SLOTS):
        chunks = engine.engine.generate(
            GenerateRequest(
                request_id=f"leave{attempt}",
                prompt_ids=prompts[0],
                sampling=Sampling(),
                max_tokens=900,
                stop_token_ids=[],
            )
        )
        await anext(chunks)
        if attempt % 2:
            await chunks.aclose()
        else:
            await engine.engine.abort(f"leave{attempt}")
            with pytest.raises(EngineError, match="abort"):
                [chunk async for chunk in chunks]
    await engine.engine.check_health(READY_WITHIN_S)


async def test_a_decoder_does_not_embed(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match="does not embed"):
        await engine.engine.embed([1, 2])


BUILD_ENCODER = """
import sys, transformers
config = transformers.BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                 intermediate_size=64, max_position_embeddings=64)
transformers.BertModel(config).save_pretrained(sys.argv[1])
"""


@pytest.mark.slow
async def test_an_encoder_embeds_at_unit_length_and_does_not_generate(tmp_path: Path) -> None:
    building = await asyncio.create_subprocess_exec(PYTHON, "-c", BUILD_ENCODER, str(tmp_path))
    assert await building.wait() == 0
    async with torch_engine(tmp_path, tmp_path, TaskKind.EMBED) as process:
        vector = await process.engine.embed([5, 6, 7])
        assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-4)
        assert await process.engine.embed([5, 7, 6]) != vector
        with pytest.raises(EngineError, match="embeds"):
            await answer(process, "g", [5], 3, Sampling())
        with pytest.raises(EngineError, match="vocabulary"):
            await process.engine.embed([100])
