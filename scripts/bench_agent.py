"""Benchmark `agent`: what an idle agent costs its owner, and how soon after its start the fleet may use it.

Processor time and memory are those of the agent's own processes, the child that reads the cards included; the engine
is not counted. The cold start ends when the coordinator knows the engine as ready, which with the fake engine leaves
out only what a real one takes to load its model.
"""

import asyncio
import sys
import time
from typing import Any

import psutil
from dev_network import DevNetwork
from network_settings import EngineOptions

IDLE_S = 60.0
QUICK_IDLE_S = 10.0
# After the start: imports, the first listing of cards, the measurement of the engine's speed.
SETTLE_S = 5.0
STARTS = 5
QUICK_STARTS = 1
# The coordinator answers ten such questions a second, and the restart asks as well.
POLL_S = 0.1


def agent_processes(network: DevNetwork) -> list[psutil.Process]:
    """Return the processes of the agent, without those of its engine."""
    agent = psutil.Process(network.ready.agents[0].pid)
    engine = {network.ready.agents[0].engine_pid}
    children = agent.children(recursive=True)
    engine |= {child.pid for child in children if "SLACKWATER_ENGINE_MARKER" in child.environ()}
    return [agent, *(child for child in children if child.pid not in engine)]


def processor_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure_idle(network: DevNetwork, idle_s: float) -> tuple[float, float]:
    """Return the share of one core in percent, and the resident memory in MB."""
    await asyncio.sleep(SETTLE_S)
    processes = agent_processes(network)
    before_s, began_s = processor_s(processes), time.monotonic()
    await asyncio.sleep(idle_s)
    share = (processor_s(processes) - before_s) / (time.monotonic() - began_s)
    return round(share * 100, 2), round(sum(process.memory_info().rss for process in processes) / 1e6, 1)


async def measure_start(network: DevNetwork) -> float:
    """Return the milliseconds from the start of the agent until the fleet knows its engine as ready."""
    await network.stop_agent(0)
    engine_pid = network.ready.agents[0].engine_pid
    began_s = time.monotonic()
    starting = asyncio.create_task(network.restart_agent(0))
    async with network.admin() as admin:
        while True:
            [node] = await admin.nodes()
            if any(engine.status == "ready" and engine.pid != engine_pid for engine in node.engines):
                break
            await asyncio.sleep(POLL_S)
    took_ms = (time.monotonic() - began_s) * 1000
    await starting
    return took_ms


async def run(*, quick: bool) -> dict[str, Any]:
    async with DevNetwork(agents=1, engine=EngineOptions(), say=say) as network:
        idle_percent, rss_mb = await measure_idle(network, QUICK_IDLE_S if quick else IDLE_S)
        say(f"idle: {idle_percent} % of a core, {rss_mb} MB")
        starts = [await measure_start(network) for _ in range(QUICK_STARTS if quick else STARTS)]
        say(f"cold starts: {', '.join(f'{start:.0f}' for start in starts)} ms")
    return {
        "idle_cpu_percent": idle_percent,
        "rss_mb": rss_mb,
        "cold_start_ms": round(max(starts)),
        "starts": len(starts),
    }


def say(message: str) -> None:
    print(f"[agent] {message}", file=sys.stderr, flush=True)
