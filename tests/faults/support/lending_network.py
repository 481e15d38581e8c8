"""A network whose machines are given back to their owners: what is asked of it, and what its clients notice.

The fake engine's ids depend on all ids before, so an answer that equals the
undisturbed one has lost, doubled or changed nothing.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from dev_network import DevNetwork
from slackwater import Answer, AttemptBroken, Delta, Node
from slackwater.fleet import Engine

from agent.owner.pause import Pause, write_pause
from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling

MODEL = "fake-smollm2"
PROMPT = (100, 200, 300)
TOKENS = 200
SEED = 7
GREEDY = Sampling(temperature=0.0, seed=SEED)
# From the owner's return until the engine is gone and the card is free.
GIVE_BACK_S_MAX = 2.0
PATIENCE_S = 30.0


@dataclass
class Reading:
    """One answer as it came."""

    number: int
    ids: list[int] = field(default_factory=list)
    broken: list[AttemptBroken] = field(default_factory=list)
    node_id: str = ""

    @property
    def reasons(self) -> set[str]:
        return {broken.reason for broken in self.broken}


async def read(answer: Answer, reading: Reading) -> None:
    async with answer:
        async for event in answer:
            if isinstance(event, Delta):
                reading.ids.extend(event.token_ids)
            elif isinstance(event, AttemptBroken):
                reading.broken.append(event)
            if not reading.broken and answer.started:
                reading.node_id = answer.started.node_id


@asynccontextmanager
async def answers(network: DevNetwork, count: int) -> AsyncIterator[list[Reading]]:
    """Begin answers, yield when each has brought ids, and wait for their ends."""
    readings = [Reading(number) for number in range(count)]
    async with network.client() as client, asyncio.timeout(60), asyncio.TaskGroup() as group:
        for reading in readings:
            prompt = [*PROMPT, reading.number]
            answer = client.complete(prompt, model=MODEL, max_tokens=TOKENS, temperature=0.0, seed=SEED)
            group.create_task(read(answer, reading))
        while any(len(reading.ids) < 20 for reading in readings):
            await asyncio.sleep(0.01)
        yield readings


def check_whole(readings: list[Reading], vocabulary: FakeVocabulary) -> None:
    for reading in readings:
        expected = list(expected_ids([*PROMPT, reading.number], GREEDY, TOKENS, vocabulary))
        assert reading.ids == expected, f"answer {reading.number} differs from the undisturbed one"


async def status(network: DevNetwork, index: int) -> dict[str, Any]:
    """Return what the agent tells of itself, as `status --json` prints it; no cards before it tells anything."""
    path = Path(network.ready.state_dir) / f"agent-{index + 1}" / "status.json"
    try:
        told: dict[str, Any] = json.loads(await asyncio.to_thread(path.read_bytes))
    except FileNotFoundError:
        return {"cards": []}
    return told


async def node_of(network: DevNetwork, index: int) -> Node:
    async with network.admin() as admin:
        nodes = {node.node_id: node for node in await admin.nodes()}
    return nodes[network.ready.agents[index].node_id]


async def engine_is(network: DevNetwork, index: int, wanted: str, engine_id: str = "main") -> Engine:
    """Wait until the fleet knows an engine to stand like that."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for engine in (await node_of(network, index)).engines:
                if engine.engine_id == engine_id and engine.status == wanted:
                    return engine
            await asyncio.sleep(0.05)


async def card_is(network: DevNetwork, index: int, wanted: str, number: int = 0) -> dict[str, Any]:
    """Wait until the agent itself says that a card stands like that."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            cards = (await status(network, index))["cards"]
            if len(cards) > number and cards[number]["state"] == wanted:
                one: dict[str, Any] = cards[number]
                return one
            await asyncio.sleep(0.02)


async def gone(pid: int, since: float) -> float:
    """Wait until a process holds nothing any more; return the seconds since a moment."""
    async with asyncio.timeout(PATIENCE_S):
        while runs(pid):
            await asyncio.sleep(0.005)
    return time.monotonic() - since


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def press(network: DevNetwork, index: int, pause: Pause) -> float:
    """Do what `slackwater-agent pause` does, without the start of a Python in between; return the moment."""
    write_pause(pause, Path(network.ready.state_dir) / f"agent-{index + 1}")
    return time.monotonic()


async def logged(network: DevNetwork, index: int, event: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while event not in network.agent_log(index):
            await asyncio.sleep(0.05)
