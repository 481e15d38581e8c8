"""Benchmark `relay`: what does it cost to pass a token on?

CLIENTS readers stream through our coordinator and gateway from one agent with a
fake engine, and, in the same run, through vllm-router (Rust) and LiteLLM from a
mock of OpenAI's API; engine and mock bring a token every 5 ms to each stream.
The processor time of the process in the middle is divided by the tokens that
`usage` counted. The time to the first token is compared with the same load
sent straight to the engine, or to the mock.

Then prompts of 100,000 tokens arrive one after the other, and the coordinator's
own histogram tells how late its event loop woke.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from bench_load import CHAT_TOKEN, ENGINE_TOKEN, Job, run_in_process
from bench_numbers import percentile
from child_process import ChildProcess, deadline
from dev_network import DevNetwork
from network_settings import ROOT, EngineOptions

CLIENTS = 32
INTERVAL_MS = 5.0
TTFT_MS = 20.0
TOKENS = 400
ROUNDS = 4
# Clients begin spread over the length of one answer, as readers do. Where all begin within
# 160 ms, the time to the first token is mostly that of 31 other prompts; that is told, too.
SPREAD_STAGGER_S = (TTFT_MS + TOKENS * INTERVAL_MS) / 1000 / CLIENTS
BURST_STAGGER_S = 0.005
LONG_PROMPT_TOKENS = 100_000
# The gateway samples its loop ten times a second: enough samples for a 99th percentile.
LAG_WINDOW_S = 15.0
# LiteLLM imports for twenty seconds on a busy machine.
ROUTER_START_S = 120.0
ENVIRONMENT = ROOT / ".venv-bench" / "bin"
LAG_BUCKET = re.compile(r'^slackwater_gateway_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Measured:
    """One load through, or straight to, something."""

    tokens: int
    tokens_per_s: float
    cpu_us_per_token: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    gap_ms_p50: float
    gap_ms_p99: float


async def measure(job: Job, pid: int = 0, *, may_break: bool = False) -> Measured:
    """Carry out a load; `pid` is the process (children included) whose processor time is counted.

    Raises:
        RuntimeError: a stream broke, where that is not for us to mend: then those that held are counted.
    """
    before_s, started_s = cpu_s(pid), time.monotonic()
    streams = await run_in_process(job)
    wall_s, used_s = time.monotonic() - started_s, cpu_s(pid) - before_s
    broken = [stream for stream in streams if not stream.complete or stream.status != 200]
    if broken and may_break:
        say(f"{len(broken)} of {len(streams)} streams broke and are left out")
        streams = [stream for stream in streams if stream not in broken]
    elif broken:
        raise RuntimeError(f"{len(broken)} of {len(streams)} streams broke, the first with: {broken[0].error or '?'}")
    # An engine's own stream has no usage; there every event is a token.
    tokens = sum(stream.usage_tokens or stream.events for stream in streams)
    ttfts = sorted(stream.ttft_ms for stream in streams)
    gaps = sorted(gap for stream in streams for gap in stream.gaps_ms)
    return Measured(
        tokens=tokens,
        tokens_per_s=round(tokens / wall_s, 1),
        cpu_us_per_token=round(used_s / tokens * 1e6, 1),
        ttft_ms_p50=percentile(ttfts, 0.50),
        ttft_ms_p99=percentile(ttfts, 0.99),
        gap_ms_p50=percentile(gaps, 0.50),
        gap_ms_p99=percentile(gaps, 0.99),
    )


def cpu_s(pid: int) -> float:
    """Return user and system time of a process and of its children; 0 for no process."""
    if not pid:
        return 0.0
    process = psutil.Process(pid)
    times = [member.cpu_times() for member in [process, *process.children(recursive=True)]]
    return sum(taken.user + taken.system for taken in times)


def chat_job(model: str, port: int, key: str, rounds: int, stagger_s: float = SPREAD_STAGGER_S) -> Job:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "How high is the tide?"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Job(
        path="/v1/chat/completions",
        bodies=[body],
        clients=CLIENTS,
        rounds=rounds,
        token_pattern=CHAT_TOKEN,
        port=port,
        headers={"Authorization": f"Bearer {key}"},
        stagger_s=stagger_s,
    )


def engine_job(socket_path: Path, rounds: int, stagger_s: float = SPREAD_STAGGER_S) -> Job:
    """Return the same load, straight to an engine's socket."""
    bodies = [
        {
            "request_id": f"bench-{number}",
            "token_ids": list(range(100, 140)),
            "sampling_params": {"max_tokens": TOKENS, "temperature": 0.0},
            "stream": True,
        }
        for number in range(CLIENTS)
    ]
    return Job(
        path="/inference/v1/generate",
        bodies=bodies,
        clients=CLIENTS,
        rounds=rounds,
        token_pattern=ENGINE_TOKEN,
        host="localhost",
        socket_path=str(socket_path),
        stagger_s=stagger_s,
    )


@dataclass(frozen=True)
class Pair:
    """The load through a relay, and straight to what is behind it."""

    relayed: Measured
    direct: Measured

    @property
    def added_ttft_ms_p50(self) -> float:
        return round(self.relayed.ttft_ms_p50 - self.direct.ttft_ms_p50, 1)

    @property
    def added_ttft_ms_p99(self) -> float:
        return round(self.relayed.ttft_ms_p99 - self.direct.ttft_ms_p99, 1)


async def measure_slackwater(rounds: int, runs: int, lag_window_s: float) -> tuple[list[Pair], Pair, float]:
    """Return one pair per run, one of a burst, and the 99th percentile of the loop's lag under long prompts, in ms."""
    engine = EngineOptions(slots=CLIENTS, fake_tokens_per_second=1000 / INTERVAL_MS, fake_ttft_ms=TTFT_MS)
    async with DevNetwork(agents=1, engine=engine, say=say) as network:
        ready = network.ready
        socket_path = await asyncio.to_thread(engine_socket, Path(ready.state_dir))
        job = chat_job(ready.model, int(ready.gateway_url.rpartition(":")[2]), ready.api_key, rounds)
        await measure(chat_job(ready.model, job.port, ready.api_key, 1))
        pairs = []
        for number in range(1, runs + 1):
            direct = await measure(engine_job(socket_path, rounds))
            relayed = await measure(job, ready.coordinator_pid)
            pairs.append(Pair(relayed, direct))
            say(f"slackwater, run {number}: {describe(pairs[-1])}")
        direct = await measure(engine_job(socket_path, rounds, BURST_STAGGER_S))
        crowded = chat_job(ready.model, job.port, ready.api_key, rounds, BURST_STAGGER_S)
        burst = Pair(await measure(crowded, ready.coordinator_pid), direct)
        say(f"slackwater, all at once: {describe(burst)}")
        lag_ms = await measure_lag(ready.gateway_url, ready.api_key, ready.model, lag_window_s)
        return pairs, burst, lag_ms


def engine_socket(state_dir: Path) -> Path:
    """Return the Unix socket of the network's only engine."""
    [path] = (state_dir / "run").glob("slackwater-*/engine.sock")
    return path


async def measure_lag(gateway_url: str, key: str, model: str, window_s: float) -> float:
    """Send prompts of LONG_PROMPT_TOKENS tokens for a while; return the 99th percentile of the lag, in milliseconds."""
    say(f"prompts of {LONG_PROMPT_TOKENS} tokens for {window_s:.0f} s")
    body = {"model": model, "prompt": " tide" * LONG_PROMPT_TOKENS, "max_tokens": 1, "temperature": 0}
    payload = json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(gateway_url, headers=headers) as session:
        before = await lag_counts(session)
        until_s, prompts = time.monotonic() + window_s, 0
        while time.monotonic() < until_s:
            async with session.post("/v1/completions", data=payload) as response:
                answer = await response.json()
                if response.status != 200 or answer["usage"]["prompt_tokens"] < LONG_PROMPT_TOKENS:
                    raise RuntimeError(f"a long prompt was answered with {response.status}: {answer}")
            prompts += 1
        after = await lag_counts(session)
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    total = counts[float("inf")]
    bound_s = next(bound for bound in sorted(counts) if counts[bound] >= 0.99 * total)
    say(f"{prompts} long prompts; 99 % of {total:.0f} samples of the loop were at most {bound_s * 1000:g} ms late")
    return bound_s * 1000


async def lag_counts(session: aiohttp.ClientSession) -> dict[float, float]:
    async with session.get("/metrics") as response:
        text = await response.text()
    return {float(bound): float(count) for bound, count in LAG_BUCKET.findall(text)}


async def measure_router(name: str, directory: Path, rounds: int, runs: int) -> list[Pair]:
    """Measure another router in front of the mock."""
    upstream_port, router_port, spare_port = free_ports(3)
    mock: list[str | Path] = [sys.executable, ROOT / "scripts" / "bench_upstream.py", "--port", str(upstream_port)]
    mock += ["--interval-ms", str(INTERVAL_MS), "--ttft-ms", str(TTFT_MS)]
    key = f"sk-{secrets.token_hex(24)}"
    command, environment = router_command(name, directory, upstream_port, router_port, spare_port, key)
    async with running(ChildProcess("mock upstream", mock, directory / "mock.log", os.environ), upstream_port):
        child = ChildProcess(name, command, directory / f"{name}.log", environment)
        async with running(child, router_port, key=key):
            await measure(chat_job("mock", router_port, key, 1))
            pairs = []
            for number in range(1, runs + 1):
                direct = await measure(chat_job("mock", upstream_port, key, rounds))
                job = chat_job("mock", router_port, key, rounds)
                relayed = await measure(job, child.pid, may_break=True)
                pairs.append(Pair(relayed, direct))
                say(f"{name}, run {number}: {describe(pairs[-1])}")
            return pairs


def router_command(
    name: str, directory: Path, upstream_port: int, port: int, spare_port: int, key: str
) -> tuple[Sequence[str | Path], Mapping[str, str]]:
    upstream = f"http://127.0.0.1:{upstream_port}"
    if name == "vllm-router":
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream]
        arguments += ["--policy", "round_robin", "--prometheus-port", str(spare_port), "--log-level", "warning"]
        return [ENVIRONMENT / "vllm-router", *arguments], os.environ
    config = directory / "litellm.yaml"
    # JSON is YAML, and needs no library here.
    model = {"model": "openai/mock", "api_base": f"{upstream}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "mock", "litellm_params": model}],
        "general_settings": {"master_key": key},
    }
    config.write_text(json.dumps(settings))
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    return [ENVIRONMENT / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)], environment


@asynccontextmanager
async def running(child: ChildProcess, port: int, key: str = "") -> AsyncIterator[None]:
    """Run a server until the block ends; begin when it lists its models."""
    await child.start()
    try:
        async with deadline(ROUTER_START_S, f"{child.name} does not answer", child), aiohttp.ClientSession() as session:
            while not await answers(session, f"http://127.0.0.1:{port}/v1/models", key):
                child.check()
                await asyncio.sleep(0.2)
        yield
    finally:
        await child.stop()


async def answers(session: aiohttp.ClientSession, url: str, key: str) -> bool:
    try:
        async with session.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def free_ports(count: int) -> list[int]:
    """Return ports that are free now; held together, so that they differ."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


async def run(*, quick: bool) -> dict[str, Any]:
    rounds, runs = (1, 1) if quick else (ROUNDS, 3)
    if not (ENVIRONMENT / "litellm").exists():
        raise RuntimeError(".venv-bench is missing: run `make setup-bench`")
    ours, burst, lag_ms = await measure_slackwater(rounds, runs, 2.0 if quick else LAG_WINDOW_S)
    with tempfile.TemporaryDirectory(prefix="sw-bench-") as name:
        rust = await measure_router("vllm-router", Path(name), rounds, runs)
        python = await measure_router("litellm", Path(name), rounds, runs)
    cpu, rust_cpu, python_cpu = (
        median(pair.relayed.cpu_us_per_token for pair in pairs) for pairs in (ours, rust, python)
    )
    return {
        "runs": runs,
        "clients": CLIENTS,
        "interval_ms": INTERVAL_MS,
        "tokens": sum(pair.relayed.tokens for pair in ours),
        "cpu_us_per_token": cpu,
        "vllm_router_cpu_us_per_token": rust_cpu,
        "litellm_cpu_us_per_token": python_cpu,
        # Above 1: ours takes more.
        "vs_vllm_router": round(cpu / rust_cpu, 2),
        "vs_litellm": round(cpu / python_cpu, 3),
        **figures("", ours),
        **figures("vllm_router_", rust),
        **figures("litellm_", python),
        "burst_added_ttft_ms_p50": burst.added_ttft_ms_p50,
        "loop_lag_ms_p99": lag_ms,
    }


def figures(prefix: str, pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the medians over the runs."""
    return {
        f"{prefix}added_ttft_ms_p50": median(pair.added_ttft_ms_p50 for pair in pairs),
        f"{prefix}added_ttft_ms_p99": median(pair.added_ttft_ms_p99 for pair in pairs),
        f"{prefix}gap_ms_p99": median(pair.relayed.gap_ms_p99 for pair in pairs),
        f"{prefix}direct_gap_ms_p99": median(pair.direct.gap_ms_p99 for pair in pairs),
        f"{prefix}tokens_per_s": median(pair.relayed.tokens_per_s for pair in pairs),
    }


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 1)


def describe(pair: Pair) -> str:
    return (
        f"{pair.relayed.cpu_us_per_token:.0f} us a token, {pair.added_ttft_ms_p50:+.1f} ms to the first token, "
        f"gap p99 {pair.relayed.gap_ms_p99:.1f} ms (direct {pair.direct.gap_ms_p99:.1f}), "
        f"{pair.relayed.tokens_per_s:.0f} tokens/s (direct {pair.direct.tokens_per_s:.0f})"
    )


def say(message: str) -> None:
    print(f"[relay] {message}", file=sys.stderr, flush=True)
