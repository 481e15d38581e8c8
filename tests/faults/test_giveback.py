"""The owner's will over real processes: what the machine gets back and how fast, and what clients notice."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from dev_network import DevNetwork
from lending_network import (
    GIVE_BACK_S_MAX,
    GREEDY,
    MODEL,
    PATIENCE_S,
    PROMPT,
    SEED,
    answers,
    card_is,
    check_whole,
    engine_is,
    gone,
    logged,
    node_of,
    press,
    runs,
    status,
)
from network_settings import MODELS, EngineOptions

from agent.cards.testing import GIB, GPU_IS_LOST, card, write_scenario
from agent.clock import wall_ms
from agent.owner.pause import Pause
from inference.fake_model import FakeVocabulary, expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Stands in for `agent.cards.nvml_child`: reads the machine for each listing, so that a test changes it at any time.
LIVE_CHILD = """
import json, sys
from pathlib import Path
from agent.cards.nvml_child import run
from agent.cards.testing import FakeNvml

class Live(FakeNvml):
    def nvmlDeviceGetCount(self):
        self.cards = json.loads(Path(sys.argv[1]).read_text())["cards"]
        return super().nvmlDeviceGetCount()

fake = Live()
run(fake, int(sys.argv[2]), fake.kernel)
"""
# Runs `slackwater-agent` on a machine whose cards are in a file.
AGENT_WITH_CARDS = """
import sys
from agent.cards import hardware
hardware.DEFAULT_CHILD = (sys.executable, {child!r}, {scenario!r})
from agent.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def vocabulary() -> FakeVocabulary:
    return FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network() -> AsyncIterator[DevNetwork]:
    """Two machines without a card; the second unloads its engine soon."""

    def configure(index: int, text: str) -> str:
        return text + "unload_after_s = 3\n" if index == 1 else text

    async with DevNetwork(agents=2, engine=EngineOptions(), configure=configure) as network:
        yield network


# ---- pause and resume


async def test_a_pause_frees_the_machine_and_the_answers_go_on_elsewhere(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    """Mutations seen to fail here: order the kill before the tasks are handed back; give the engine its grace."""
    engine = await engine_is(network, 0, "ready")
    async with answers(network, 8) as readings:
        pressed_at = press(network, 0, Pause(paused=True, asked_at_ms=1))
        assert await gone(engine.pid, pressed_at) < GIVE_BACK_S_MAX
        told = await card_is(network, 0, "given_back")
        assert told["reason"] == "paused by the owner; until resumed by hand"
        assert told["giveback_ms"] < GIVE_BACK_S_MAX * 1000
    check_whole(readings, vocabulary)
    struck = [reading for reading in readings if reading.broken]
    assert struck
    assert {reason for reading in struck for reason in reading.reasons} == {"owner_returned"}
    assert (await engine_is(network, 0, "given_back")).note == "paused by its owner"
    press(network, 0, Pause(asked_at_ms=2))
    assert (await engine_is(network, 0, "ready")).pid != engine.pid


async def test_the_commands_say_what_happened(network: DevNetwork) -> None:
    await engine_is(network, 0, "ready")
    said = await network.agent_command(0, "pause", "for", "2h")
    assert said.startswith("paused until ")
    assert "the card is free after 0." in said
    assert "connected, paused by you for 119 min more" in await network.agent_command(0, "status")
    assert (await network.agent_command(0, "resume")).splitlines() == ["resumed", '  cpu: lent: mode is "always"']
    said = await network.agent_command(0, "drain")
    assert said == "draining: no new work is taken, 0 answers still run\n"
    async with asyncio.timeout(PATIENCE_S):
        while (await node_of(network, 0)).status != "draining":
            await asyncio.sleep(0.05)
    await network.agent_command(0, "resume")
    await engine_is(network, 0, "ready")


async def test_a_pause_without_a_running_agent_holds_at_its_next_start(network: DevNetwork) -> None:
    """And one that ends by itself needs nobody: it is over when its time has come."""
    await network.stop_agent(0)
    assert await network.agent_command(0, "pause") == (
        "paused until you resume; no agent runs here, it will hold at the next start\n"
    )
    starting = asyncio.create_task(network.restart_agent(0))
    assert (await card_is(network, 0, "given_back"))["cause"] == "paused"
    await engine_is(network, 0, "given_back")
    press(network, 0, Pause(paused=True, until_ms=wall_ms() + 1500, asked_at_ms=3))
    await starting
    await card_is(network, 0, "lent")


async def test_an_engine_that_is_deaf_to_signals_is_gone_as_fast(network: DevNetwork) -> None:
    engine = await engine_is(network, 0, "ready")
    # SIGTERM does not reach a stopped process; SIGKILL does.
    os.kill(engine.pid, signal.SIGSTOP)
    pressed_at = press(network, 0, Pause(paused=True, asked_at_ms=4))
    assert await gone(engine.pid, pressed_at) < GIVE_BACK_S_MAX
    press(network, 0, Pause(asked_at_ms=5))
    await engine_is(network, 0, "ready")


async def test_an_engine_that_still_starts_is_gone_as_fast(network: DevNetwork) -> None:
    press(network, 0, Pause(paused=True, asked_at_ms=6))
    await card_is(network, 0, "given_back")
    press(network, 0, Pause(asked_at_ms=7))
    async with asyncio.timeout(PATIENCE_S):
        while not (pid := (await status(network, 0))["engines"][0]["pid"]):
            await asyncio.sleep(0.01)
    pressed_at = press(network, 0, Pause(paused=True, asked_at_ms=8))
    assert await gone(pid, pressed_at) < GIVE_BACK_S_MAX
    press(network, 0, Pause(asked_at_ms=9))
    await engine_is(network, 0, "ready")


# ---- engines that nobody uses


async def test_an_unused_engine_is_unloaded_and_comes_back_for_the_next_answer(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    unloaded = await engine_is(network, 1, "unloaded")
    assert (unloaded.pid, unloaded.note) == (0, "unused for 3 s")
    press(network, 0, Pause(paused=True, asked_at_ms=10))
    await engine_is(network, 0, "given_back")
    asked_at = time.monotonic()
    async with network.client() as client:
        done = await client.complete(list(PROMPT), model=MODEL, max_tokens=20, temperature=0.0, seed=SEED)
    # A start of the fake engine takes a second; what is added to it is a report and an answer to it.
    assert time.monotonic() - asked_at < 10
    assert list(done.token_ids) == list(expected_ids(PROMPT, GREEDY, 20, vocabulary))
    press(network, 0, Pause(asked_at_ms=11))
    await engine_is(network, 0, "ready")


# ---- the configuration file


async def test_a_change_of_the_file_acts_at_once_and_an_invalid_one_changes_nothing(network: DevNetwork) -> None:
    config = network.agent_config(0)
    before = config.read_text()
    engine = await engine_is(network, 0, "ready")
    config.write_text(before.replace('mode = "always"', 'mode = "sometimes"'))
    await logged(network, 0, "the changed configuration is not valid; the old one stays in force")
    assert runs(engine.pid)
    saved_at = time.monotonic()
    config.write_text(before.replace('mode = "always"', 'mode = "never"'))
    # A second until it is seen.
    assert await gone(engine.pid, saved_at) < 1.0 + GIVE_BACK_S_MAX
    assert (await card_is(network, 0, "given_back"))["reason"] == 'mode is "never"'
    config.write_text(before)
    await engine_is(network, 0, "ready")
    config.write_text(before.replace("[owner]", f'[consent]\nmodels_denied = ["{MODEL}"]\n\n[owner]'))
    assert "consent.models_denied" in (await engine_is(network, 0, "given_back")).note
    config.write_text(before)
    await engine_is(network, 0, "ready")


# ---- cards


@dataclass
class Rig:
    """Two machines that see the same three cards: the first has an engine on each of two, the second on the third."""

    network: DevNetwork
    scenario: Path

    def occupy(self, number: int, *pids: int) -> None:
        """Let processes of others compute on a card from now on."""
        self.change(number, compute=[[pid, GIB] for pid in pids])

    def change(self, number: int, **readings: Any) -> None:
        """Let a card read otherwise from now on, and the others be well."""
        cards = [card(0), card(1), card(2)]
        cards[number] |= readings
        fresh = self.scenario.with_suffix(".new")
        write_scenario(fresh, cards)
        fresh.replace(self.scenario)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("rig")
    child, scenario, program = (directory / name for name in ("live_child.py", "cards.json", "slackwater_agent.py"))
    child.write_text(LIVE_CHILD)
    write_scenario(scenario, [card(0), card(1), card(2)])
    program.write_text(AGENT_WITH_CARDS.format(child=str(child), scenario=str(scenario)))

    def configure(index: int, text: str) -> str:
        text = text.replace('mode = "always"\n', 'mode = "always"\ncool_down_s = 1\n')
        if index == 0:
            top, engine = text.split("[[engines]]\n")
            left = f"{engine}gpu_uuids = [{json.dumps(card(0)['uuid'])}]\n"
            right = f"{engine}gpu_uuids = [{json.dumps(card(1)['uuid'])}]\n".replace('"main"', '"right"')
            return f"{top}[[engines]]\n{left}\n[[engines]]\n{right}"
        return f"{text}gpu_uuids = [{json.dumps(card(2)['uuid'])}]\n"

    options = EngineOptions(slots=4)
    async with DevNetwork(agents=2, engine=options, configure=configure, agent_program=(str(program),)) as network:
        await engine_is(network, 0, "ready", "right")
        yield Rig(network, scenario)


@asynccontextmanager
async def game(directory: Path, on_start: Callable[[int], None]) -> AsyncIterator[int]:
    """Run a program of the owner's."""
    program = directory / "game"
    shutil.copy(shutil.which("sleep") or "", program)
    process = await asyncio.create_subprocess_exec(str(program), "600")
    try:
        on_start(process.pid)
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def test_a_program_of_the_owner_gets_its_card_while_the_other_card_works_on(
    rig: Rig, vocabulary: FakeVocabulary, tmp_path: Path
) -> None:
    """Mutation seen to fail here: withdraw every card of the machine."""
    network = rig.network
    left, right = await engine_is(network, 0, "ready"), await engine_is(network, 0, "ready", "right")
    async with answers(network, 12) as readings, game(tmp_path, lambda pid: rig.occupy(0, pid)) as pid:
        # One reading a second while a card is lent.
        assert await gone(left.pid, time.monotonic()) < GIVE_BACK_S_MAX
        told = await card_is(network, 0, "given_back")
        assert told["reason"].startswith(f"game (pid {pid}) on the card")
        assert runs(right.pid)
        note = (await engine_is(network, 0, "given_back")).note
        assert note == "its owner uses the card", "the fleet need not know which program it is"
        rig.occupy(0)
    check_whole(readings, vocabulary)
    struck = [reading for reading in readings if reading.broken]
    reasons = {reason for reading in struck for reason in reading.reasons}
    # An order may have been on its way to the engine that the owner has just taken away.
    assert "owner_returned" in reasons
    assert reasons <= {"owner_returned", "refused_busy", "refused_engine_not_ready"}
    # Four slots on that card, and as many on each of the others.
    assert 0 < len(struck) <= 4
    assert (await status(network, 0))["cards"][1]["state"] == "lent"
    assert (await engine_is(network, 0, "ready")).pid != left.pid


async def test_a_card_is_free_only_when_the_driver_says_so(rig: Rig) -> None:
    """The driver still lists a process of ours for a while after the kernel has let go of it."""
    network = rig.network
    engine = await engine_is(network, 0, "ready")
    marker = next(one for one in psutil.Process(engine.pid).environ().items() if one[0] == "SLACKWATER_ENGINE_MARKER")
    # Another engine of ours, as far as marker and driver tell; no member of the one that is killed.
    leftover = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(600)", env={marker[0]: marker[1].rsplit("/", 1)[0] + "/left"}
    )
    try:
        rig.occupy(0, leftover.pid)
        press(network, 0, Pause(paused=True, asked_at_ms=1))
        await gone(engine.pid, time.monotonic())
        await asyncio.sleep(1.0)
        assert (await status(network, 0))["cards"][0]["state"] == "giving_back"
        leftover.kill()
        await leftover.wait()
        freed = await card_is(network, 0, "given_back")
        assert freed["giveback_ms"] > 1000
    finally:
        if leftover.returncode is None:
            leftover.kill()
            await leftover.wait()
        rig.occupy(0)
        press(network, 0, Pause(asked_at_ms=2))
    await engine_is(network, 0, "ready")


async def test_a_card_that_stays_occupied_by_ours_is_in_quarantine(rig: Rig) -> None:
    """As after a kill that does not work: a process stuck in the driver. Said in status, in the fleet, and logged."""
    network = rig.network
    engine = await engine_is(network, 0, "ready", "right")
    marker = psutil.Process(engine.pid).environ()["SLACKWATER_ENGINE_MARKER"]
    stuck = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import time; time.sleep(600)",
        env={"SLACKWATER_ENGINE_MARKER": marker.rsplit("/", 1)[0] + "/stuck"},
    )
    try:
        rig.occupy(1, stuck.pid)
        press(network, 0, Pause(paused=True, asked_at_ms=3))
        told = await card_is(network, 0, "quarantined", number=1)
        assert f"processes {stuck.pid} are still on the card" in told["reason"]
        assert (await engine_is(network, 0, "given_back", "right")).note == "in quarantine: a give-back failed"
        press(network, 0, Pause(asked_at_ms=4))
        # The other card works on.
        await engine_is(network, 0, "ready")
        assert (await status(network, 0))["cards"][1]["state"] == "quarantined"
    finally:
        stuck.kill()
        await stuck.wait()


@pytest.mark.slow
async def test_memory_that_others_take_gives_the_card_back(rig: Rig, vocabulary: FakeVocabulary) -> None:
    """A program that the driver does not list, as under WSL, is seen by what it takes."""
    network = rig.network
    engine = await engine_is(network, 0, "ready")
    async with answers(network, 8) as readings:
        taken_at = time.monotonic()
        rig.change(0, memory_free=12 * GIB)
        # One reading a second while a card is lent.
        assert await gone(engine.pid, taken_at) < 1.0 + GIVE_BACK_S_MAX
        await logged(network, 0, "others took 8192 MiB more of the card's memory")
    check_whole(readings, vocabulary)
    # What others have kept for a while is theirs, and leaves enough.
    assert (await engine_is(network, 0, "ready")).pid != engine.pid
    rig.change(0)


@pytest.mark.slow
async def test_a_card_that_falls_off_the_bus_is_given_back_and_the_other_works_on(
    rig: Rig, vocabulary: FakeVocabulary
) -> None:
    network = rig.network
    engine = await engine_is(network, 0, "ready")
    async with answers(network, 8) as readings:
        lost_at = time.monotonic()
        rig.change(0, errors={"*": GPU_IS_LOST})
        assert await gone(engine.pid, lost_at) < 1.0 + GIVE_BACK_S_MAX
    check_whole(readings, vocabulary)
    assert (await status(network, 0))["cards"][1]["state"] == "lent"
    rig.change(0)
    assert (await engine_is(network, 0, "ready")).pid != engine.pid


async def test_a_card_that_gets_too_hot_is_given_back_and_the_other_works_on(
    rig: Rig, vocabulary: FakeVocabulary
) -> None:
    """Last, since a card that was hot is left alone for minutes."""
    network = rig.network
    engine = await engine_is(network, 0, "ready")
    try:
        async with answers(network, 8) as readings:
            heated_at = time.monotonic()
            rig.change(0, temperature_c=97)
            # One reading a second while a card is lent.
            assert await gone(engine.pid, heated_at) < 1.0 + GIVE_BACK_S_MAX
            told = await card_is(network, 0, "given_back")
        assert told["cause"] == "heat"
        assert told["reason"].startswith("the card is at 97 C")
        assert (await engine_is(network, 0, "given_back")).note == "the card is too hot"
        check_whole(readings, vocabulary)
    finally:
        rig.change(0, temperature_c=41)
