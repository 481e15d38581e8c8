"""The fake engine as a process: its answers, its pace, its faults, and what it refuses."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from inference.engine import EngineError, EngineUnreachable, GenerateRequest
from inference.engine_protocol import GENERATE_PATH
from inference.fake_model import FakeVocabulary, expected_ids
from inference.fake_server import CRASH_STATUS, EXCESS_IDS, MAX_WAITING_PER_SLOT, VERSION
from inference.fake_steps import StepTimes
from inference.launch import launch_fake
from inference.task import FinishReason, Sampling
from inference.testing import EngineProcess, started

PYTHON = Path(__file__).parents[2] / ".venv" / "bin" / "python"
SLOTS = 4
CONTEXT = 2048
END_ID = 300
PROMPT = [5, 6, 7]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    added = [{"id": END_ID, "content": "<end>", "special": True}]
    path.write_text(json.dumps({"model": {"vocab": {f"t{i}": i for i in range(END_ID)}}, "added_tokens": added}))
    return path


@pytest.fixture(scope="module")
def vocabulary(tokenizer_file: Path) -> FakeVocabulary:
    return FakeVocabulary.load(tokenizer_file)


@contextlib.asynccontextmanager
async def fake_engine(
    folder: Path, tokenizer_file: Path, rate: float = 500, step_times: str = ""
) -> AsyncIterator[EngineProcess]:
    socket_path = folder / "engine.sock"
    launch = launch_fake(
        PYTHON,
        socket_path,
        tokenizer_file,
        tokens_per_second=rate,
        ttft_ms=5,
        context_tokens=CONTEXT,
        slots=SLOTS,
        step_times=step_times,
    )
    async with started(launch, socket_path, ready_within_s=30) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fake(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> AsyncIterator[EngineProcess]:
    async with fake_engine(tmp_path_factory.mktemp("fake"), tokenizer_file) as process:
        yield process


def request(name: str = "r", max_tokens: int = 30, prompt: list[int] | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=prompt or PROMPT,
        sampling=Sampling(**sampling),
        max_tokens=max_tokens,
        stop_token_ids=[END_ID],
    )


async def answer(process: EngineProcess, wanted: GenerateRequest) -> tuple[list[int], FinishReason | None]:
    token_ids: list[int] = []
    reason = None
    async for chunk in process.engine.generate(wanted):
        token_ids += chunk.token_ids
        reason = chunk.finish_reason
    return token_ids, reason


async def post(process: EngineProcess, path: str, data: bytes | io.BytesIO) -> tuple[int, str]:
    connector = aiohttp.UnixConnector(path=str(process.socket_path))
    async with (
        aiohttp.ClientSession("http://engine", connector=connector) as session,
        session.post(path, data=data) as response,
    ):
        return response.status, await response.text()


@contextlib.asynccontextmanager
async def fault(process: EngineProcess, **fields: Any) -> AsyncIterator[None]:
    status, reason = await post(process, "/fault", json.dumps([fields]).encode())
    assert status == 200, reason
    try:
        yield
    finally:
        await post(process, "/fault", b"[]")


async def test_answers_are_the_models_whatever_else_runs(fake: EngineProcess, vocabulary: FakeVocabulary) -> None:
    answers = await asyncio.gather(*[answer(fake, request(f"a{seed}", seed=seed)) for seed in range(10)])
    for seed, (token_ids, reason) in enumerate(answers):
        assert token_ids == list(expected_ids(PROMPT, Sampling(seed=seed), 30, vocabulary))
        assert reason is FinishReason.LENGTH


async def test_an_answer_resumed_on_the_engine_continues_the_same(
    fake: EngineProcess, vocabulary: FakeVocabulary
) -> None:
    whole = list(expected_ids(PROMPT, Sampling(seed=2), 30, vocabulary))
    resumed, _ = await answer(fake, request("b", 18, prompt=PROMPT + whole[:12], seed=2))
    assert resumed == whole[12:]


async def test_the_pace_is_the_one_that_was_set(fake: EngineProcess) -> None:
    started_s = asyncio.get_running_loop().time()
    await answer(fake, request("c", 250))
    elapsed_s = asyncio.get_running_loop().time() - started_s
    # 250 ids at 500 a second; nothing may come early, and a busy machine may be late.
    assert 0.49 <= elapsed_s < 2.0


async def test_logprobs_scores_vectors_and_version_are_deterministic(fake: EngineProcess) -> None:
    chunks = [chunk async for chunk in fake.engine.generate(request("d", 3, logprobs=2))]
    positions = [position for chunk in chunks for position in chunk.logprobs]
    assert [[item.rank for item in position.top] for position in positions] == [[1, 2]] * 3
    scores = await fake.engine.score([1, 2, 3], 1)
    assert [position.chosen.token_id for position in scores] == [2, 3]
    assert await fake.engine.score([1, 2, 3], 1) == scores
    assert await fake.engine.embed([1, 2]) == await fake.engine.embed([1, 2])
    assert await fake.engine.version() == VERSION


async def test_an_abort_frees_the_slot_and_is_no_success(fake: EngineProcess) -> None:
    chunks = fake.engine.generate(request("e", 1500))
    await anext(chunks)
    await fake.engine.abort("e")
    with pytest.raises(EngineError, match="abort"):
        [chunk async for chunk in chunks]
    await fake.engine.abort("unknown")


async def test_a_closed_iterator_frees_the_slot(fake: EngineProcess) -> None:
    for attempt in range(SLOTS * (MAX_WAITING_PER_SLOT + 2)):
        async with contextlib.aclosing(fake.engine.generate(request(f"f{attempt}", 1500))) as chunks:
            await anext(chunks)
    await fake.engine.check_health(2)


async def test_more_sequences_than_may_wait_are_refused(fake: EngineProcess) -> None:
    # Mutation seen to fail: the handler did not drop the job of a reader that had gone.
    async with fault(fake, kind="stall"):
        limit = SLOTS * (1 + MAX_WAITING_PER_SLOT)
        readers = [asyncio.create_task(answer(fake, request(f"g{index}"))) for index in range(limit + 1)]
        (refused,), _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
        reason = str(refused.exception())
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert "503" in reason
    assert (await answer(fake, request("g")))[1] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "delivered", "reason"),
    [
        ({"kind": "truncate", "after_tokens": 7}, 7, FinishReason.LENGTH),
        ({"kind": "lie_finish", "after_tokens": 7}, 8, FinishReason.STOP),
        ({"kind": "lie_count", "after_tokens": 7}, 30 + EXCESS_IDS, FinishReason.LENGTH),
        ({"kind": "stop", "after_tokens": 7}, 8, FinishReason.STOP),
        ({"kind": "slow", "factor": 3}, 30, FinishReason.LENGTH),
        ({"kind": "long_prefill", "seconds": 0.2}, 30, FinishReason.LENGTH),
    ],
)
async def test_faults_that_end_an_answer(
    fake: EngineProcess, fields: dict[str, Any], delivered: int, reason: FinishReason
) -> None:
    async with fault(fake, **fields):
        token_ids, got = await answer(fake, request("h"))
    assert (len(token_ids), got) == (delivered, reason)


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"kind": "error", "after_tokens": 7}, EngineError), ({"kind": "cut", "after_tokens": 7}, EngineUnreachable)],
)
async def test_faults_that_break_an_answer_off(
    fake: EngineProcess, fields: dict[str, Any], error: type[EngineError], vocabulary: FakeVocabulary
) -> None:
    token_ids: list[int] = []
    async with fault(fake, **fields):
        chunks = fake.engine.generate(request("i"))
        with pytest.raises(error):
            while True:
                token_ids += (await anext(chunks)).token_ids
    assert token_ids == list(expected_ids(PROMPT, Sampling(), 7, vocabulary))


async def test_wrong_ids_begin_where_they_were_told_to(fake: EngineProcess, vocabulary: FakeVocabulary) -> None:
    right = list(expected_ids(PROMPT, Sampling(), 30, vocabulary))
    async with fault(fake, kind="wrong_ids", after_tokens=7):
        token_ids, _ = await answer(fake, request("j"))
    assert token_ids[:7] == right[:7]
    assert token_ids[7:] != right[7:]


async def test_a_fault_can_hit_one_stream_and_leave_the_others(fake: EngineProcess) -> None:
    async with fault(fake, kind="stall", after_tokens=3, request_id="victim", streams=1):
        victim = asyncio.create_task(answer(fake, request("victim")))
        others = await asyncio.gather(*[answer(fake, request(f"k{index}")) for index in range(3)])
        assert [len(token_ids) for token_ids, _ in others] == [30, 30, 30]
        assert not victim.done()
    # Healed, it goes on where it stood.
    assert len((await victim)[0]) == 30


async def test_a_crash_is_an_engine_that_does_not_answer(tmp_path: Path, tokenizer_file: Path) -> None:
    async with fake_engine(tmp_path, tokenizer_file) as process:
        status, _ = await post(process, "/fault", b'[{"kind": "crash", "after_tokens": 3}]')
        assert status == 200
        with pytest.raises(EngineUnreachable):
            await answer(process, request("l"))
        assert await process.process.wait() == CRASH_STATUS
        with pytest.raises(EngineUnreachable):
            await process.engine.check_health(1)


GOOD = {"request_id": "m", "token_ids": [1], "stream": True, "sampling_params": {"max_tokens": 3}}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "request body"),
        (b"{", "request body"),
        (b"\xff\xfe", "request body"),
        (b"[" * 20_000, "request body"),
        (b'{"request_id": "m", "token_ids": ' + b"[" * 20_000, "request body"),
        (GOOD | {"token_ids": []}, "token_ids"),
        (GOOD | {"token_ids": [1.5]}, "token_ids"),
        (GOOD | {"token_ids": [-1]}, "token_ids"),
        (GOOD | {"token_ids": ["1"]}, "token_ids"),
        (GOOD | {"token_ids": [END_ID + 1]}, "vocabulary"),
        (GOOD | {"token_ids": [1] * CONTEXT}, "context"),
        (GOOD | {"request_id": ""}, "request_id"),
        (GOOD | {"stream": False}, "stream"),
        (GOOD | {"lora": "x"}, "lora"),
        (GOOD | {"sampling_params": {}}, "max_tokens"),
        (GOOD | {"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        (GOOD | {"sampling_params": {"max_tokens": 3, "n": 2}}, "n"),
        (GOOD | {"sampling_params": {"max_tokens": 3, "temperature": -1}}, "temperature"),
        (GOOD | {"sampling_params": {"max_tokens": 3, "temperature": float("nan")}}, "request body"),
        (GOOD | {"sampling_params": {"max_tokens": 3, "top_p": 0}}, "top_p"),
        (GOOD | {"sampling_params": {"max_tokens": 3, "seed": 2**64}}, "seed"),
        (GOOD | {"sampling_params": {"max_tokens": 3, "stop_token_ids": [1] * 17}}, "stop_token_ids"),
        (GOOD | {"sampling_params": {"max_tokens": 3, "prompt_logprobs": 1}}, "stream"),
    ],
)
async def test_malformed_requests_are_refused_with_the_reason_and_others_go_on(
    fake: EngineProcess, data: bytes | dict[str, Any], reason: str
) -> None:
    running = asyncio.create_task(answer(fake, request("n", 60)))
    status, text = await post(fake, GENERATE_PATH, data if isinstance(data, bytes) else json.dumps(data).encode())
    assert status == 400
    assert reason in json.loads(text)["error"]["message"]
    assert len((await running)[0]) == 60


async def test_a_body_over_the_limit_is_refused(fake: EngineProcess) -> None:
    status, _ = await post(fake, GENERATE_PATH, io.BytesIO(b" " * (9 * 1024 * 1024)))
    assert status == 413


async def test_the_socket_is_for_this_user_only(fake: EngineProcess) -> None:
    assert fake.socket_path.stat().st_mode & 0o077 == 0


async def test_steps_take_what_those_of_a_real_engine_would(
    tmp_path: Path, tokenizer_file: Path, vocabulary: FakeVocabulary
) -> None:
    """Mutations seen to fail here: prompts take no time; a request waits for nothing outside of steps."""
    times = StepTimes(
        step_base_ms=20.0,
        step_sequence_ms=0.0,
        step_kv_token_ms=0.0,
        prefill_token_ms=1.0,
        request_ms=100.0,
        step_tokens_max=512,
    )
    prompt = [1 + number % 200 for number in range(300)]
    async with fake_engine(tmp_path, tokenizer_file, step_times=msgspec.json.encode(times).decode()) as process:
        loop = asyncio.get_running_loop()
        began_s, at_s, token_ids = loop.time(), [], []
        async for chunk in process.engine.generate(request(prompt=prompt, max_tokens=11)):
            at_s += [loop.time() - began_s] * len(chunk.token_ids)
            token_ids += chunk.token_ids
        assert token_ids == list(expected_ids(prompt, Sampling(), 11, vocabulary))
        assert at_s[0] >= 0.42
        # Ten steps after the first; a busy machine is late, and never early.
        assert at_s[-1] - at_s[0] >= 0.19
        # One that is given up while its prompt is computed leaves its slot to others.
        leaving = [process.engine.generate(request(f"leaves-{number}", prompt=prompt)) for number in range(2 * SLOTS)]
        tasks = [asyncio.ensure_future(anext(chunks)) for chunks in leaving]
        await asyncio.sleep(0.15)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await answer(process, request("after", max_tokens=3)))[1] is FinishReason.LENGTH
