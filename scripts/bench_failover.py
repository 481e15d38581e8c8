"""Benchmark `failover`: agents die in mid-stream; what does the reader of an answer notice?

A fleet of fake engines (each next id is a hash of all ids before it) streams to
STREAMS readers. Again and again the agent with the most streams gets SIGKILL;
the gap is the time at the client between the last id before the seam and the
first one after it. Every stream is compared with the answer that an undisturbed
engine gives: an id lost, doubled or altered anywhere changes all that follows.

Then agents are frozen (SIGSTOP) instead, and one with a very long prefill must
not be taken for a dead one.
"""

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench_numbers import percentile
from bench_streams import Reader, Streams, Tally
from dev_network import DevNetwork
from network_settings import EngineOptions
from slackwater import AsyncClient

AGENTS = 6
# The next kill waits until so many agents are up: killed ones come back beside it.
AGENTS_UP_MIN = 3
STREAMS = 12
# A kill waits until so many streams are in mid-answer.
MIN_STREAMS = 8
STREAM_TOKENS = 1500
TOKENS_PER_SECOND = 100.0
TTFT_MS = 20.0
SEED = 11
# Long enough that streams are under way, and that no two kills fall on the same moment of their lives.
PAUSE_S = (0.2, 0.6)
# Silence of a prefill with live heartbeats: five times what a frozen agent gets.
LONG_PREFILL_S = 12.0


@dataclass(frozen=True)
class Size:
    """How much is done: the full benchmark, or a quick look that every part works."""

    kills: int
    freezes: int


FULL = Size(kills=200, freezes=10)
QUICK = Size(kills=5, freezes=1)


class Benchmark:
    def __init__(self, network: DevNetwork, client: AsyncClient, size: Size) -> None:
        self._network = network
        self._size = size
        self._streams = Streams(network, client, readers=STREAMS, tokens=STREAM_TOKENS, seed=SEED)
        self._down: set[int] = set()
        self._came_up = asyncio.Event()

    @property
    def tally(self) -> Tally:
        return self._streams.tally

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            self._streams.start(group)
            for number in range(1, self._size.kills + 1):
                await self._kill_one(group)
                if number % 10 == 0 or number == self._size.kills:
                    self._progress(number)
            # Of the kills alone: a freeze is found by silence, and has a figure of its own.
            gaps = sorted(self.tally.gaps_ms)
            await self._wait_until_up(AGENTS)
            frozen_ms = [await self._freeze_one() for _ in range(self._size.freezes)]
            self._streams.stopping = True
        return {
            "streams": STREAMS,
            "streams_finished": self.tally.finished,
            "kills": self._size.kills,
            "seams": len(gaps),
            "lost": self.tally.lost,
            "doubled": self.tally.doubled,
            "altered": self.tally.altered,
            "hung": self.tally.hung,
            "failed": self.tally.failed,
            "gap_ms_p50": percentile(gaps, 0.50),
            "gap_ms_p99": percentile(gaps, 0.99),
            "gap_ms_max": gaps[-1] if gaps else 0.0,
            "freezes": self._size.freezes,
            "frozen_resume_ms_max": max(frozen_ms),
        }

    def _progress(self, kills: int) -> None:
        tally, gaps = self.tally, sorted(self.tally.gaps_ms)
        say(
            f"{kills} kills, {len(gaps)} seams, gap p50 {percentile(gaps, 0.5)} and p99 {percentile(gaps, 0.99)} ms, "
            f"lost {tally.lost}, doubled {tally.doubled}, hung {tally.hung}, failed {len(tally.failed)}"
        )

    async def _kill_one(self, group: asyncio.TaskGroup) -> None:
        await self._wait_until_up(AGENTS_UP_MIN)
        index, affected = await self._choose()
        self._down.add(index)
        await self._network.kill_agent(index)
        group.create_task(self._restart(index))
        await self._streams.wait_for_seams(affected, index)

    async def _restart(self, index: int) -> None:
        await self._network.restart_agent(index)
        self._down.discard(index)
        self._came_up.set()

    async def _wait_until_up(self, agents: int) -> None:
        while AGENTS - len(self._down) < agents:
            self._came_up.clear()
            await self._came_up.wait()

    async def _freeze_one(self) -> float:
        """Return how long the slowest stream of a frozen agent stood still, in milliseconds."""
        index, affected = await self._choose()
        frozen_s = time.monotonic()
        self._network.signal_agent(index, signal.SIGSTOP)
        await self._streams.wait_for_seams(affected, index)
        slowest_ms = max((reader.last_s - frozen_s) * 1000 for reader in affected)
        # What it still says of its old attempts when it wakes must reach nobody.
        self._network.signal_agent(index, signal.SIGCONT)
        await asyncio.sleep(PAUSE_S[1])
        await self._network.stop_agent(index)
        await self._network.restart_agent(index)
        say(f"frozen agent: its streams went on after {slowest_ms:.0f} ms")
        return slowest_ms

    async def _choose(self) -> tuple[int, list[Reader]]:
        """Return the agent with the most streams in mid-answer, and their readers."""
        await asyncio.sleep(self._streams.random.uniform(*PAUSE_S))
        return await self._streams.choose(MIN_STREAMS)


async def check_long_prefill() -> int:
    """Return how many attempts were given up on while an engine prefilled for LONG_PREFILL_S."""
    say(f"a prefill of {LONG_PREFILL_S:.0f} s with live heartbeats")
    # Tasks only: the engine's own first token is due when it starts.
    fault = json.dumps({"kind": "long_prefill", "seconds": LONG_PREFILL_S, "request_id": "task-"})
    engine = EngineOptions(fake_faults=(fault,))
    async with DevNetwork(agents=2, engine=engine, say=say) as network, network.client() as client:
        completion = await client.complete([1, 2, 3], model=network.ready.model, temperature=0, max_tokens=5)
        return len(completion.broken_attempts)


async def run(*, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else FULL
    engine = EngineOptions(slots=STREAMS, fake_tokens_per_second=TOKENS_PER_SECOND, fake_ttft_ms=TTFT_MS)
    async with DevNetwork(agents=AGENTS, engine=engine, say=say) as network, network.client() as client:
        result = await Benchmark(network, client, size).run()
    result["long_prefill_broken_attempts"] = await check_long_prefill()
    return result


def say(message: str) -> None:
    print(f"[failover] {message}", file=sys.stderr, flush=True)
