"""Let vLLM's CPU build answer the calibration prompts, for scripts/record_verification.py to re-score.

    .venv/bin/python scripts/answer_with_vllm.py var/models/smollm2-135m-instruct answers.json

Another engine with other kernels in bf16: an honest variant. --prompts names
another file of prompts. Takes some five minutes on two cores.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import typer
from tokenizers import Tokenizer
from verification_prompts import END_OF_TURN, MAX_TOKENS, PROMPTS_FILE, StoredAnswer, read_prompts, seed_of

from inference.engine import Engine, GenerateRequest
from inference.launch import launch_vllm_cpu
from inference.task import FinishReason, Sampling, TaskKind
from inference.testing import started

ROOT: Final = Path(__file__).resolve().parent.parent
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
ANSWERS: Final = 96
# What runs at once; the rest waits in the engine.
SLOTS: Final = 48
READY_WITHIN_S: Final = 400.0


async def answer(engine: Engine, prompt_ids: tuple[int, ...], index: int) -> StoredAnswer:
    seed = seed_of("honest-vllm", index, prompt_ids)
    request = GenerateRequest(
        request_id=f"answer-{index}",
        prompt_ids=prompt_ids,
        sampling=Sampling(seed=seed),
        max_tokens=MAX_TOKENS,
        stop_token_ids=[END_OF_TURN],
    )
    stored = StoredAnswer(prompt_ids=list(prompt_ids), output_ids=[], seed=seed, stopped=False)
    async for chunk in engine.generate(request):
        stored.output_ids += chunk.token_ids
        stored.stopped = chunk.finish_reason is FinishReason.STOP
    return stored


async def answer_all(model: Path, file: Path) -> list[StoredAnswer]:
    prompts = read_prompts(Tokenizer.from_file(str(model / "tokenizer.json")), file)
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch:
        folder = Path(scratch)
        launch = launch_vllm_cpu(
            PYTHON,
            folder / "engine.sock",
            model,
            cache_directory=folder,
            kind=TaskKind.GENERATE,
            context_tokens=1024,
            slots=SLOTS,
            dtype="bfloat16",
            kv_cache_gib=1,
        )
        async with started(launch, folder / "engine.sock", ready_within_s=READY_WITHIN_S) as process:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(answer(process.engine, prompts[index % len(prompts)], index))
                    for index in range(ANSWERS)
                ]
            return [task.result() for task in running]


def main(model: Path, out: Path, prompts: Path = PROMPTS_FILE) -> None:
    """Write the answers."""
    answers = asyncio.run(answer_all(model, prompts))
    out.write_bytes(msgspec.json.encode(answers))
    print(f"{sum(len(item.output_ids) for item in answers)} ids in {len(answers)} answers: {out}")


if __name__ == "__main__":
    typer.run(main)
