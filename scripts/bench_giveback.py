"""Benchmark `giveback`: from the owner's pause until the machine is theirs again, and what readers lose by it.

The clock starts when the pause is written and stops when no process of the engine is left and the agent has confirmed
that the card is free. With the fake engine each trial strikes an agent that holds STREAMS streams, which go on
elsewhere; every id is held against an undisturbed answer. With vLLM (on the processor) it is a real engine with a real
model that has to go, with its processes and its memory.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench_numbers import percentile
from bench_streams import Streams
from dev_network import ENGINE_START_S, DevNetwork
from network_settings import EngineOptions
from slackwater import AsyncClient, Delta

from agent.engines.processes import find_marked
from agent.owner.pause import Pause, write_pause

STREAMS = 20
STREAM_TOKENS = 250
# Twice STREAMS readers, and everything else on the same machine, must keep up.
TOKENS_PER_SECOND = 40.0
SEED = 11
VLLM_STREAMS = 4
# More than a trial takes; the model's context has 8,192.
VLLM_TOKENS = 2000
# A give-back that takes longer has failed, and the trial with it.
GIVE_BACK_S_MAX = 30.0
POLL_S = 0.002


@dataclass(frozen=True)
class Size:
    trials: int
    vllm_trials: int


FULL = Size(trials=100, vllm_trials=20)
# A start of vLLM takes a minute.
QUICK = Size(trials=5, vllm_trials=1)


@dataclass(frozen=True)
class Freed:
    """One give-back: how long it took, how many processes ended, and the memory they had."""

    took_ms: float
    processes: int
    rss_mb: float


class Machine:
    """One agent's machine, seen by its owner."""

    def __init__(self, network: DevNetwork, index: int) -> None:
        self._home = Path(network.ready.state_dir) / f"agent-{index + 1}"
        self._asked = 0

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self._home / "status.json").read_bytes())
        return told

    async def pause(self) -> Freed:
        """Press pause and wait until the machine is free."""
        pids = self._engine_pids()
        rss = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        began_s = time.monotonic()
        self._press(paused=True)
        async with asyncio.timeout(GIVE_BACK_S_MAX):
            while any(_runs(pid) for pid in pids) or self.status()["cards"][0]["state"] != "given_back":
                await asyncio.sleep(POLL_S)
        took_ms = (time.monotonic() - began_s) * 1000
        left = self._engine_pids()
        if left:
            raise RuntimeError(f"processes {sorted(left)} of the engine came after the give-back")
        return Freed(took_ms, len(pids), rss / 2**20)

    async def resume(self, timeout_s: float) -> None:
        """Press resume and wait until the engine is ready."""
        self._press(paused=False)
        try:
            async with asyncio.timeout(timeout_s):
                while self.status()["engines"][0]["status"] != "ready":
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise RuntimeError(f"the engine does not come up again: {self.status()}") from error

    def _press(self, *, paused: bool) -> None:
        self._asked += 1
        write_pause(Pause(paused=paused, asked_at_ms=self._asked), self._home)

    def _engine_pids(self) -> set[int]:
        """Return all processes of the engine, children that left its group included."""
        pid = self.status()["engines"][0]["pid"]
        if not pid:
            return set()
        marker = psutil.Process(pid).environ()["SLACKWATER_ENGINE_MARKER"]
        return find_marked(f"{marker}\0")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def measure_fake(trials: int) -> dict[str, Any]:
    # One agent must be able to take what the other gives back.
    engine = EngineOptions(slots=2 * STREAMS, fake_tokens_per_second=TOKENS_PER_SECOND)
    took_ms: list[float] = []
    handed_back = 0
    async with DevNetwork(agents=2, engine=engine, say=say) as network, network.client() as client:
        machines = [Machine(network, index) for index in range(2)]
        streams = Streams(network, client, readers=2 * STREAMS, tokens=STREAM_TOKENS, seed=SEED)
        async with asyncio.TaskGroup() as group:
            streams.start(group)
            for number in range(1, trials + 1):
                await asyncio.sleep(streams.random.uniform(0.1, 0.5))
                index, affected = await streams.choose(STREAMS)
                while len(affected) < STREAMS:
                    await asyncio.sleep(0.01)
                    index, affected = await streams.choose(STREAMS)
                handed_back += len(affected)
                took_ms.append((await machines[index].pause()).took_ms)
                await streams.wait_for_seams(affected, index)
                await machines[index].resume(ENGINE_START_S["fake"])
                if number % 10 == 0 or number == trials:
                    say(f"{number} trials, p50 {percentile(sorted(took_ms), 0.5)} ms, {streams.tally.lost} ids lost")
            streams.stopping = True
    tally, gaps = streams.tally, sorted(streams.tally.gaps_ms)
    return {
        "trials": trials,
        "streams_handed_back": handed_back,
        "streams_finished": tally.finished,
        "lost": tally.lost,
        "doubled": tally.doubled,
        "altered": tally.altered,
        "hung": tally.hung,
        "failed": tally.failed,
        "giveback_ms_p50": percentile(sorted(took_ms), 0.50),
        "giveback_ms_p99": percentile(sorted(took_ms), 0.99),
        "giveback_ms_max": round(max(took_ms), 1),
        "gap_ms_p99": percentile(gaps, 0.99),
    }


async def measure_vllm(trials: int) -> dict[str, Any]:
    freed: list[Freed] = []
    async with DevNetwork(agents=1, engine=EngineOptions(kind="vllm", slots=VLLM_STREAMS), say=say) as network:
        machine = Machine(network, 0)
        for number in range(1, trials + 1):
            async with busy_engine(network):
                available = psutil.virtual_memory().available
                freed.append(await machine.pause())
                regained_mb = (psutil.virtual_memory().available - available) / 2**20
            last = freed[-1]
            say(
                f"vLLM, trial {number}: {last.processes} processes gone after {last.took_ms:.0f} ms, "
                f"RSS {last.rss_mb:.0f} MiB, {regained_mb:.0f} MiB more available"
            )
            if number < trials:
                await machine.resume(ENGINE_START_S["vllm"])
    return {
        "vllm_trials": trials,
        "vllm_giveback_ms_max": round(max(one.took_ms for one in freed), 1),
        "vllm_processes": max(one.processes for one in freed),
        "vllm_rss_mb": round(max(one.rss_mb for one in freed)),
    }


@asynccontextmanager
async def busy_engine(network: DevNetwork) -> AsyncIterator[None]:
    """Keep streams running for as long as the block runs; drop them at its end."""
    began: set[int] = set()

    async def read(client: AsyncClient, number: int) -> None:
        prompt = [100 + number, 200, 300]
        async with client.complete(prompt, model=network.ready.model, max_tokens=VLLM_TOKENS) as answer:
            async for event in answer:
                if isinstance(event, Delta) and event.token_ids:
                    began.add(number)

    async with network.client() as client:
        readers = [asyncio.create_task(read(client, number)) for number in range(VLLM_STREAMS)]
        try:
            while len(began) < VLLM_STREAMS:
                await asyncio.sleep(0.01)
            yield
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def run(*, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else FULL
    return {**await measure_fake(size.trials), **await measure_vllm(size.vllm_trials)}


def say(message: str) -> None:
    print(f"[giveback] {message}", file=sys.stderr, flush=True)
