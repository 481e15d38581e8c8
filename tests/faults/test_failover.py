"""What a client sees when a node is killed, frozen or drained in mid-answer, over real processes.

The fake engine's ids depend on all ids before, so an answer that equals the
undisturbed one has lost, doubled or changed nothing.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from dev_network import DevNetwork
from network_settings import MODELS
from slackwater import Answer, AsyncClient, AttemptBroken, Completion, Delta
from slackwater.errors import CoordinatorRestarted, MigrationImpossible

from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "fake-smollm2"
PROMPT = (100, 200, 300)
TOKENS = 200
SEED = 7
GREEDY = Sampling(temperature=0.0, seed=SEED)


@pytest.fixture(scope="module")
def vocabulary() -> FakeVocabulary:
    return FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")


@dataclass
class Reading:
    """One answer as it came: ids, and when each piece of them arrived."""

    ids: list[int] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    broken: list[AttemptBroken] = field(default_factory=list)
    node_id: str = ""

    @property
    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in zip(self.arrived_at, self.arrived_at[1:], strict=False))


async def read(answer: Answer, reading: Reading) -> None:
    async with answer:
        async for event in answer:
            if isinstance(event, Delta):
                assert event.first_index == len(reading.ids) or not event.token_ids
                reading.ids.extend(event.token_ids)
                reading.arrived_at.append(time.monotonic())
            elif isinstance(event, AttemptBroken):
                reading.broken.append(event)
            reading.node_id = answer.started.node_id if answer.started else ""


@asynccontextmanager
async def eight_answers(network: DevNetwork) -> AsyncIterator[list[Reading]]:
    """Begin eight answers, yield when each has brought ids, and wait for their ends."""
    readings = [Reading() for _ in range(8)]
    async with network.client() as client, asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number, reading in enumerate(readings):
            answer = client.complete([*PROMPT, number], model=MODEL, max_tokens=TOKENS, temperature=0.0, seed=SEED)
            group.create_task(read(answer, reading))
        while any(len(reading.ids) < 20 for reading in readings):
            await asyncio.sleep(0.01)
        yield readings


def check_whole(readings: list[Reading], vocabulary: FakeVocabulary) -> None:
    for number, reading in enumerate(readings):
        assert reading.ids == list(expected_ids([*PROMPT, number], GREEDY, TOKENS, vocabulary)), (
            f"answer {number} differs from the undisturbed one"
        )


def busiest(network: DevNetwork, readings: list[Reading]) -> int:
    nodes = [reading.node_id for reading in readings]
    return network.index_of(max(set(nodes), key=nodes.count))


async def test_answers_go_on_whole_when_their_agent_is_killed(network: DevNetwork, vocabulary: FakeVocabulary) -> None:
    """Mutation seen to fail here: resume with the prompt alone, without the received ids."""
    async with eight_answers(network) as readings:
        victim = busiest(network, readings)
        await network.kill_agent(victim)
    check_whole(readings, vocabulary)
    struck = [reading for reading in readings if reading.broken]
    assert struck
    assert {broken.reason for reading in struck for broken in reading.broken} == {"stream_lost"}
    # The target of the benchmark is 1 s at p99 on an idle machine; here other tests may run beside.
    assert max(reading.longest_gap_s for reading in struck) < 5
    await network.restart_agent(victim)


async def test_answers_leave_a_frozen_agent_and_ignore_its_late_words(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    async with eight_answers(network) as readings:
        victim = busiest(network, readings)
        network.signal_agent(victim, signal.SIGSTOP)
        while not any(reading.broken for reading in readings):
            await asyncio.sleep(0.05)
        network.signal_agent(victim, signal.SIGCONT)
    check_whole(readings, vocabulary)
    assert {broken.reason for reading in readings for broken in reading.broken} == {"node_silent"}
    assert max(reading.longest_gap_s for reading in readings) < 6


async def test_answers_leave_a_crashed_engine_and_the_agent_brings_a_new_one_up(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    async with eight_answers(network) as readings:
        victim = busiest(network, readings)
        engine_pid = network.ready.agents[victim].engine_pid
        os.kill(engine_pid, signal.SIGKILL)
    check_whole(readings, vocabulary)
    reasons = {broken.reason for reading in readings for broken in reading.broken}
    assert reasons <= {"engine_crashed", "engine_error"}
    assert reasons

    async def restarted() -> bool:
        async with network.admin() as admin:
            nodes = {node.node_id: node for node in await admin.nodes()}
        (engine,) = nodes[network.ready.agents[victim].node_id].engines
        return engine.status == "ready" and engine.pid != engine_pid

    await eventually(restarted, 30)


async def test_a_drained_agent_hands_its_answers_over(network: DevNetwork, vocabulary: FakeVocabulary) -> None:
    async with network.admin() as admin:
        async with eight_answers(network) as readings:
            node_id = network.ready.agents[busiest(network, readings)].node_id
            await admin.drain(node_id)
        check_whole(readings, vocabulary)
        assert {broken.reason for reading in readings for broken in reading.broken} == {"drained"}
        assert max(reading.longest_gap_s for reading in readings) < 2
        await admin.resume(node_id)


async def test_a_coordinator_stopped_for_ten_seconds_ends_no_attempt(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    async with eight_answers(network) as readings:
        network.signal_coordinator(signal.SIGSTOP)
        await asyncio.sleep(10)
        network.signal_coordinator(signal.SIGCONT)
    check_whole(readings, vocabulary)
    assert not any(reading.broken for reading in readings)


async def test_a_penalised_answer_fails_loudly_when_its_agent_dies(network: DevNetwork) -> None:
    async with network.client() as client:
        answer = client.complete(list(PROMPT), model=MODEL, max_tokens=TOKENS, presence_penalty=1.0)
        reading = Reading()
        reader = await begun(answer, reading)
        victim = network.index_of(reading.node_id)
        await network.kill_agent(victim)
        with pytest.raises(MigrationImpossible):
            await reader
    await network.restart_agent(victim)


async def test_a_cancelled_answer_stops_at_the_engine(network: DevNetwork) -> None:
    async with network.client() as client, network.admin() as admin:
        async with client.complete(list(PROMPT), model=MODEL, max_tokens=5000) as answer:
            async for event in answer:
                if isinstance(event, Delta):
                    break

        async def idle() -> bool:
            online = [node for node in await admin.nodes() if node.status == "online"]
            return all(engine.running == 0 for node in online for engine in node.engines)

        await eventually(idle, 5)
        assert (await client.get_task(answer.task_id or "")).status == "cancelled"


async def test_after_a_crash_of_the_coordinator_all_that_lasts_is_there_and_clients_were_told(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    async with network.admin() as admin, network.client() as client:
        owners, keys = await admin.owners(), await admin.api_keys()
        done = await client.complete(list(PROMPT), model=MODEL, max_tokens=5, temperature=0.0, seed=SEED)
        await asyncio.sleep(0.5)  # The accounting is written five times a second.
        answer = client.complete(list(PROMPT), model=MODEL, max_tokens=TOKENS, temperature=0.0, seed=SEED)
        reading = Reading()
        reader = await begun(answer, reading)
        await network.kill_coordinator()
        await network.restart_coordinator()
        with pytest.raises(CoordinatorRestarted):
            await reader
        assert await admin.owners() == owners
        assert await admin.api_keys() == keys
        record = await client.get_task(done.task_id)
        assert (record.status, record.usage.completion_tokens) == ("finished", 5)
        assert [attempt.signed for attempt in record.attempts] == [True]

        async def back() -> bool:
            return all(node.status == "online" for node in await admin.nodes())

        await eventually(back, 30)
        again: Completion = await client.complete(list(PROMPT), model=MODEL, max_tokens=50, temperature=0.0, seed=SEED)
        assert list(again.token_ids) == list(expected_ids(PROMPT, GREEDY, 50, vocabulary))


async def test_a_lost_client_connection_is_taken_up_again_without_loss(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    """A second client attaches where the first one left without a word."""
    client: AsyncClient = network.client()
    answer = client.complete(list(PROMPT), model=MODEL, max_tokens=TOKENS, temperature=0.0, seed=SEED)
    ids: list[int] = []
    async for event in answer:
        if isinstance(event, Delta):
            ids.extend(event.token_ids)
        if len(ids) >= 20:
            break
    await client.close()
    async with network.client() as second:
        reading = Reading(ids=list(ids))
        await read(second.attach(answer.task_id or "", from_index=len(ids)), reading)
    assert reading.ids == list(expected_ids(PROMPT, GREEDY, TOKENS, vocabulary))


async def begun(answer: Answer, reading: Reading) -> "asyncio.Task[None]":
    """Read an answer in the background; return when some of it has come."""
    reader = asyncio.create_task(read(answer, reading))
    async with asyncio.timeout(30):
        while len(reading.ids) < 10:
            assert not reader.done(), "the answer ended too soon"
            await asyncio.sleep(0.01)
    return reader


async def eventually(holds: Callable[[], Coroutine[Any, Any, bool]], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():
            await asyncio.sleep(0.1)
