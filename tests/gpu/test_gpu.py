"""What can only be seen on an NVIDIA card: NVML's real readings, vLLM behind the agent, and the card given back.

Run by `make test-gpu` on a machine with a card. Nothing here has a substitute
that would let it pass elsewhere. No power limit is changed here.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dev_network import DevNetwork
from network_settings import EngineOptions
from slackwater import AsyncClient

from agent.cards.details import CardDetails
from agent.cards.hardware import HardwareMonitor
from agent.cards.use import CardReading
from agent.daemon import marker_of
from agent.engines.processes import find_marked
from agent.owner.pause import Pause, write_pause
from protos.slackwater.common.v1 import capability_pb2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

OK = capability_pb2.READING_STATUS_OK
STREAMS = 8
ANSWER_TOKENS = 1000
# From the owner's return until the engine is gone and the card is free.
GIVE_BACK_S_MAX = 2.0
# The driver's own bookkeeping and whoever else draws on the card; a context alone takes more.
MEMORY_SLACK_BYTES = 128 * 2**20
# vLLM takes minutes to come up on a card with a cold cache.
ENGINE_S_MAX = 900.0
# Several windows of the agent's energy meter.
LOAD_S = 40.0
# A task that is shorter than this ends with a part that no counter measured (`agent.energy.meter`).
COUNTED_TASK_S = 25.0


@dataclass
class Rig:
    """One agent with vLLM on the first card, and the card as it was before."""

    network: DevNetwork
    hardware: HardwareMonitor
    marker: str
    uuid: str
    used_before_bytes: int

    @property
    def home(self) -> Path:
        return self.network.agent_config(0).with_suffix("")

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.home / "status.json").read_bytes())
        return told

    async def reading(self) -> tuple[CardReading, CardDetails]:
        """Ask NVML, beside the agent."""
        reading = await self.hardware.poll_now(self.uuid)
        assert reading is not None, self.hardware.gpu_note
        assert reading.details is not None, self.hardware.gpu_note
        return reading, reading.details

    def press(self, pause: Pause) -> float:
        """Do what `slackwater-agent pause` does, without the start of a Python in between; return the moment."""
        write_pause(pause, self.home)
        return time.monotonic()

    async def engine_is_ready(self) -> None:
        async with asyncio.timeout(ENGINE_S_MAX):
            while self.status()["engines"][0]["status"] != "ready":
                await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[Rig]:
    before = HardwareMonitor()
    await before.start()
    cards = {reading.uuid: reading for reading in before.readings}
    await before.aclose()
    engine = EngineOptions(kind="vllm", slots=STREAMS)
    async with DevNetwork(agents=1, engine=engine) as network:
        async with network.client() as client:
            (uuid,) = (await client.nodes())[0].engines[0].gpu_uuids
        # With its marker, so that the processes of the agent's engine are told from those of others.
        marker = f"{marker_of(network.agent_config(0).with_suffix(''))}/"
        hardware = HardwareMonitor(marker=marker)
        await hardware.start()
        try:
            details = cards[uuid].details
            assert details is not None
            assert details.memory_used_bytes is not None
            yield Rig(network, hardware, marker, uuid, details.memory_used_bytes)
        finally:
            await hardware.aclose()


@asynccontextmanager
async def load(rig: Rig) -> AsyncIterator[AsyncClient]:
    """Keep all sequences of the engine but one busy; yield once each has brought something."""
    began: set[int] = set()

    async def ask(client: AsyncClient, number: int) -> None:
        while True:
            prompt = [100 + number, 200, 300]
            model = rig.network.ready.model
            async with client.complete(prompt, model=model, max_tokens=ANSWER_TOKENS, seed=number) as answer:
                async for _ in answer:
                    began.add(number)

    async with rig.network.client() as client:
        readers = [asyncio.create_task(ask(client, number)) for number in range(STREAMS - 1)]
        try:
            async with asyncio.timeout(60):
                while len(began) < len(readers):
                    await asyncio.sleep(0.01)
            yield client
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def test_every_card_tells_what_it_is_and_what_it_draws() -> None:
    monitor = HardwareMonitor()
    await monitor.start()
    try:
        cards = await monitor.snapshot()
    finally:
        await monitor.aclose()
    assert cards, monitor.gpu_note
    for card in cards:
        assert card.uuid.value.startswith("GPU-")
        assert card.name.status == OK
        assert card.memory_total_bytes.value > card.memory_free_bytes.value >= 0
        assert card.power_draw_w.value > 0
        # Every reading has a status, whatever the card lacks.
        for field in card.DESCRIPTOR.fields:
            if field.message_type is not None:
                assert getattr(card, field.name).status != capability_pb2.READING_STATUS_UNSPECIFIED, field.name


async def test_vllm_answers_behind_the_agent_and_the_statement_holds(rig: Rig) -> None:
    """Also shows whether CUDA works inside the fence: the fleet table says what was proven."""
    async with rig.network.client() as client:
        (node,) = await client.nodes()
        (engine,) = node.engines
        assert engine.kind == "vllm"
        assert engine.gpu_uuids
        answer = client.chat(
            "What is the capital of France?", model=rig.network.ready.model, max_tokens=32, temperature=0.0
        )
        completion = await answer
        assert "Paris" in completion.text
        assert answer.verify().token_ids == completion.token_ids


async def test_the_energy_counter_only_grows_and_tasks_know_their_joules(rig: Rig) -> None:
    reading, _ = await rig.reading()
    if reading.gpu.energy_mj.status != OK:
        pytest.skip("this card has no energy counter (older than Volta)")
    counter_mj = [reading.gpu.energy_mj.value]
    async with load(rig) as client:
        began_at = time.monotonic()
        while time.monotonic() - began_at < LOAD_S:
            await asyncio.sleep(0.5)
            reading, _ = await rig.reading()
            assert reading.gpu.energy_mj.status == OK
            counter_mj.append(reading.gpu.energy_mj.value)
        drawn_w = (counter_mj[-1] - counter_mj[0]) / 1000 / (time.monotonic() - began_at)
        asked_at = time.monotonic()
        done = await client.complete([1, 2, 3], model=rig.network.ready.model, max_tokens=ANSWER_TOKENS, seed=1)
        took_s = time.monotonic() - asked_at
        (card,) = (card for card in rig.status()["energy"]["cards"] if card["card"] == rig.uuid)
        (attempt,) = (await client.get_task(done.task_id)).attempts
    assert counter_mj == sorted(counter_mj)
    assert 0 < drawn_w < 1.5 * reading.gpu.power_limit_w.value
    assert (card["method"], card["joules_per_token"] > 0) == ("counter", True)
    assert rig.status()["energy"]["work_mj"]["counter"] > 0
    assert attempt.energy_j is not None
    assert attempt.energy_j > 0
    assert attempt.energy_method in (("counter",) if took_s >= COUNTED_TASK_S else ("counter", "integrated_power"))


async def nothing_is_left(rig: Rig) -> bool:
    """Whether NVML shows no process of the engine and as much free memory as before it, and the kernel none either."""
    reading, details = await rig.reading()
    used_bytes = details.memory_used_bytes
    assert used_bytes is not None, "this card does not tell how much of its memory is in use"
    memory_is_back = used_bytes <= rig.used_before_bytes + MEMORY_SLACK_BYTES
    return memory_is_back and not reading.our_pids and not await asyncio.to_thread(find_marked, rig.marker)


async def test_a_paused_card_has_its_memory_back_and_no_process_of_ours(rig: Rig) -> None:
    """By NVML's own word, asked beside the agent, and by the kernel's."""
    await rig.engine_is_ready()
    async with load(rig):
        _, details = await rig.reading()
        assert (details.memory_used_bytes or 0) > rig.used_before_bytes + 2**30, "the engine is not on this card"
        pressed_at = rig.press(Pause(paused=True, asked_at_ms=1))
        async with asyncio.timeout(60):
            while not await nothing_is_left(rig):
                await asyncio.sleep(0.02)
        assert time.monotonic() - pressed_at < GIVE_BACK_S_MAX
    async with asyncio.timeout(60):
        while (told := rig.status()["cards"][0])["state"] != "given_back":
            await asyncio.sleep(0.05)
    assert told["cause"] == "paused"
    assert told["giveback_ms"] < GIVE_BACK_S_MAX * 1000
    rig.press(Pause(asked_at_ms=2))
    await rig.engine_is_ready()
    _, details = await rig.reading()
    if details.processes is None:
        pytest.skip(f"memory is back; NVML does not list processes here: {details.processes_note}")
