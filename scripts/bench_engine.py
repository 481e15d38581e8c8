"""Benchmark `engine`: the torch fallback beside vLLM on the same machine, model and load.

STREAMS streams at once through the whole product (gateway, coordinator, agent),
one engine after the other, in the same run; tokens are counted from `usage`.
"""

import statistics
import sys
import time
from typing import Any

from bench_load import CHAT_TOKEN, Job, run_in_process
from dev_network import DevNetwork
from network_settings import EngineOptions

STREAMS = 8
TOKENS = 128
RUNS = 3
QUESTIONS = (
    "Write a long story about a lighthouse.",
    "Explain how a bicycle works, in detail.",
    "Describe a day in the life of a fisherman.",
    "Tell me about the history of bread.",
    "Write a letter to a friend about the sea.",
    "Explain why the sky is blue, at length.",
    "Describe a walk through an old town.",
    "Write about a storm and a small boat.",
)


async def measure(kind: str, runs: int) -> float:
    """Return the median tokens per second over the runs."""
    async with DevNetwork(agents=1, engine=EngineOptions(kind=kind, slots=STREAMS), say=say) as network:
        ready = network.ready
        job = Job(
            path="/v1/chat/completions",
            bodies=[request(ready.model, question) for question in QUESTIONS],
            clients=STREAMS,
            rounds=1,
            token_pattern=CHAT_TOKEN,
            port=int(ready.gateway_url.rpartition(":")[2]),
            headers={"Authorization": f"Bearer {ready.api_key}"},
            stagger_s=0.0,
        )
        rates = []
        # The first load warms caches and compiled code and is not counted.
        for number in range(runs + 1):
            started_s = time.monotonic()
            streams = await run_in_process(job)
            if not all(stream.complete and stream.usage_tokens for stream in streams):
                raise RuntimeError(f"a stream broke: {[stream.error for stream in streams if not stream.complete]}")
            rate = sum(stream.usage_tokens for stream in streams) / (time.monotonic() - started_s)
            say(f"{kind}, {'warming up' if number == 0 else f'run {number}'}: {rate:.1f} tokens/s at {STREAMS} streams")
            rates += [rate] if number else []
        return round(statistics.median(rates), 1)


def request(model: str, question: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def run(*, quick: bool) -> dict[str, Any]:
    runs = 1 if quick else RUNS
    torch = await measure("torch", runs)
    vllm = await measure("vllm", runs)
    return {
        "runs": runs,
        "streams": STREAMS,
        "torch_tokens_per_s": torch,
        "vllm_tokens_per_s": vllm,
        "ratio": round(torch / vllm, 2),
    }


def say(message: str) -> None:
    print(f"[engine] {message}", file=sys.stderr, flush=True)
