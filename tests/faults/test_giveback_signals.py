"""The signs that give a machine back to its owner, over real processes; the answers go on elsewhere, whole.

Every sign comes the way it comes on an owner's machine: the kernel's files, the
system bus, a desktop that the companion looks at, a terminal, the clock.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dev_network import DevNetwork
from lending_network import (
    GIVE_BACK_S_MAX,
    MODEL,
    PATIENCE_S,
    answers,
    card_is,
    check_whole,
    engine_is,
    gone,
)
from network_settings import MODELS, EngineOptions

from agent.clock import wall_ms
from agent.signals.bus import PROPERTIES
from agent.signals.local_time import LocalZone, local_moment
from agent.signals.logind import MANAGER, MANAGER_INTERFACE
from agent.signals.logind import SERVICE as LOGIND
from agent.signals.metered import PATH as NETWORK_PATH
from agent.signals.metered import SERVICE as NETWORK_MANAGER
from agent.signals.source import LENDING_PERIOD_S, RESTING_PERIOD_S
from agent.signals.testing_bus import CallError, FakeBus, FakeService
from agent.signals.testing_display import FakeX
from inference.fake_model import FakeVocabulary

pytestmark = pytest.mark.asyncio(loop_scope="module")

DISPLAY = 4711
# Runs `slackwater-agent` on a laptop whose power supplies and system bus are the test's.
AGENT_ON_A_LAPTOP = """
import functools, os
from pathlib import Path
from agent.signals import watch
os.environ["DBUS_SYSTEM_BUS_ADDRESS"] = {bus!r}
watch.BatterySource = functools.partial(watch.BatterySource, Path({supplies!r}))
from agent.__main__ import main
main()
"""
# Runs the companion of a session whose X server is the test's.
COMPANION = """
import functools, sys
from pathlib import Path
from agent import session_companion
session_companion.X11Source = functools.partial(session_companion.X11Source, sockets=Path({displays!r}))
sys.exit(session_companion.main(["--socket", {socket!r}]))
"""
LENDING = 'mode = "always"\ncool_down_s = 1'
# Lends soon again, so that one test can follow another.
SOON = "start_idle_s = 10\ncontinue_idle_s = 10\ncool_down_s = 1"


@dataclass
class Laptop:
    """The first machine of a network, and what it shows of its owner; the second lends whatever happens."""

    network: DevNetwork
    bus: FakeBus
    directory: Path

    def plug(self, *, charger: bool) -> None:
        """Plug the charger in, or pull it out."""
        (self.directory / "supplies" / "AC" / "online").write_text(f"{charger:d}\n")
        (self.directory / "supplies" / "BAT0" / "status").write_text("Charging\n" if charger else "Discharging\n")

    def meter(self, value: int) -> None:
        """Have NetworkManager judge the network anew, as NMMetered says it."""
        properties = self.bus.services[NETWORK_MANAGER].properties[NETWORK_PATH, NETWORK_MANAGER]
        properties["Metered"] = ("u", value)
        self.bus.emit(
            NETWORK_MANAGER, NETWORK_PATH, PROPERTIES, "PropertiesChanged", "sa{sv}as", NETWORK_MANAGER, {}, []
        )

    def inhibit(self, *locks: tuple[str, str, str, str, int, int]) -> None:
        """Have programs hold (what, who, why, mode, uid, pid) at logind from now on; it is asked every few seconds."""
        logind = self.bus.services[LOGIND]
        logind.methods[MANAGER, MANAGER_INTERFACE, "ListInhibitors"] = lambda body: ("a(ssssuu)", (list(locks),))


def network_manager() -> FakeService:
    return FakeService(properties={(NETWORK_PATH, NETWORK_MANAGER): {"Metered": ("u", 4)}})


def logind() -> FakeService:
    """A logind that knows no desktop, and lets nobody delay the sleep."""

    def refuse(body: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        raise CallError("org.freedesktop.DBus.Error.AccessDenied")

    return FakeService(
        methods={
            (MANAGER, MANAGER_INTERFACE, "Inhibit"): refuse,
            (MANAGER, MANAGER_INTERFACE, "ListSessions"): lambda body: ("a(susso)", ([],)),
            (MANAGER, MANAGER_INTERFACE, "ListInhibitors"): lambda body: ("a(ssssuu)", ([],)),
        }
    )


@pytest.fixture(scope="module")
def vocabulary() -> FakeVocabulary:
    return FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def laptop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    directory = tmp_path_factory.mktemp("laptop")
    supplies, program, prices = directory / "supplies", directory / "slackwater_agent.py", directory / "prices.csv"
    for name, attributes in {"AC": {"type": "Mains"}, "BAT0": {"type": "Battery", "present": "1"}}.items():
        (supplies / name).mkdir(parents=True)
        for attribute, value in attributes.items():
            (supplies / name / attribute).write_text(f"{value}\n")
    write_price(prices, 0.20)

    def configure(index: int, text: str) -> str:
        if index:
            # It reads the same bus and the same supplies.
            return text.replace('mode = "always"', 'mode = "always"\nlend_on_battery = true')
        text = text.replace('mode = "always"', f"{LENDING}\nprice_ceiling_per_kwh = 0.30\nlend_on_metered = false")
        return f'{text}\n[signals]\ncompanion_socket = "{directory}/signals.sock"\nprice_file = "{prices}"\n'

    async with FakeBus(directory / "bus", {NETWORK_MANAGER: network_manager(), LOGIND: logind()}) as bus:
        program.write_text(AGENT_ON_A_LAPTOP.format(bus=bus.address, supplies=str(supplies)))
        network = DevNetwork(agents=2, engine=EngineOptions(), configure=configure, agent_program=(str(program),))
        laptop = Laptop(network, bus, directory)
        laptop.plug(charger=True)
        async with network:
            yield laptop


def write_price(path: Path, price_per_kwh: float) -> None:
    """Write a price that holds from an hour ago on, in place of what was there."""
    start = local_moment(wall_ms(), LocalZone().zone()) - timedelta(minutes=30)
    fresh = path.with_suffix(".new")
    fresh.write_text(f"start,price_per_kwh\n{start.isoformat()},{price_per_kwh}\n")
    fresh.replace(path)


async def given_back(
    laptop: Laptop, vocabulary: FakeVocabulary, show: Callable[[], None], *, seen_within_s: float
) -> dict[str, Any]:
    """Show a sign of the owner in the middle of answers; return what the agent then tells of the machine.

    Checks that the machine is free in time, and that no answer has lost anything.
    """
    engine = await engine_is(laptop.network, 0, "ready")
    async with answers(laptop.network, 4) as readings:
        shown_at = time.monotonic()
        show()
        assert await gone(engine.pid, shown_at) < seen_within_s + GIVE_BACK_S_MAX
        told = await card_is(laptop.network, 0, "given_back")
    check_whole(readings, vocabulary)
    return told


@asynccontextmanager
async def automatic(laptop: Laptop) -> AsyncIterator[None]:
    """Have the first machine lend only while nobody is there."""
    config = laptop.network.agent_config(0)
    before = config.read_text()
    assert LENDING in before
    config.write_text(before.replace(LENDING, f'mode = "auto"\n{SOON}'))
    await lent_because(laptop, "lent: no input")
    yield
    # Two changes within a second may be none.
    config.write_text(before)
    await lent_because(laptop, 'lent: mode is "always"')


async def lent_because(laptop: Laptop, reason: str) -> None:
    """Wait until the first machine is lent for a reason."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await card_is(laptop.network, 0, "lent"))["reason"].startswith(reason):
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_charger_that_is_pulled_out(laptop: Laptop, vocabulary: FakeVocabulary) -> None:
    told = await given_back(laptop, vocabulary, lambda: laptop.plug(charger=False), seen_within_s=RESTING_PERIOD_S)
    assert told["cause"] == "battery", told
    assert (await engine_is(laptop.network, 0, "given_back")).note == "the machine runs on its battery"
    laptop.plug(charger=True)
    await engine_is(laptop.network, 0, "ready")


async def test_a_network_that_turns_out_to_be_metered(laptop: Laptop, vocabulary: FakeVocabulary) -> None:
    """NetworkManager guesses so, of a phone's hotspot, and says it at once."""
    told = await given_back(laptop, vocabulary, lambda: laptop.meter(3), seen_within_s=0.0)
    assert (told["cause"], told["reason"]) == ("metered", "the network is metered")
    laptop.meter(4)
    await engine_is(laptop.network, 0, "ready")


@pytest.mark.slow
async def test_an_hour_that_is_too_dear(laptop: Laptop, vocabulary: FakeVocabulary) -> None:
    prices = laptop.directory / "prices.csv"
    told = await given_back(laptop, vocabulary, lambda: write_price(prices, 0.41), seen_within_s=RESTING_PERIOD_S)
    assert told["reason"] == "electricity costs 0.41 per kWh, above the ceiling of 0.3"
    assert (await engine_is(laptop.network, 0, "given_back")).note == "electricity is too dear now"
    write_price(prices, 0.20)
    await engine_is(laptop.network, 0, "ready")


async def test_an_hour_that_is_over(laptop: Laptop, vocabulary: FakeVocabulary) -> None:
    now = local_moment(wall_ms(), LocalZone().zone())
    window = "-".join((now + timedelta(hours=hours)).strftime("%H:%M") for hours in (2, 3))
    config = laptop.network.agent_config(0)
    before = config.read_text()
    over = before.replace(LENDING, f'{LENDING}\nhours = ["{window}"]')
    # A second until the change of the file is seen.
    told = await given_back(laptop, vocabulary, lambda: write(config, over), seen_within_s=1.0)
    assert told["cause"] == "hours", told
    write(config, before)
    await engine_is(laptop.network, 0, "ready")


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.slow
async def test_a_film_in_full_screen(laptop: Laptop, vocabulary: FakeVocabulary) -> None:
    """The owner's session tells of it, through the companion that runs in it; nobody touches a key."""
    displays = laptop.directory / "displays"
    displays.mkdir()

    def play() -> None:
        screen.fullscreen = True

    async with (
        FakeX(displays / f"X{DISPLAY}", idle_ms=3_600_000) as screen,
        companion(laptop.directory / "signals.sock", displays),
        automatic(laptop),
    ):
        # The companion looks once a second.
        told = await given_back(laptop, vocabulary, play, seen_within_s=LENDING_PERIOD_S)
        assert told["cause"] == "busy", told
        assert "full screen" in told["reason"]
        # The fleet need not know what its owner does.
        assert (await engine_is(laptop.network, 0, "given_back")).note == "its owner is there"
        screen.fullscreen = False
        await engine_is(laptop.network, 0, "ready")


@asynccontextmanager
async def companion(socket: Path, displays: Path) -> AsyncIterator[None]:
    """Run the companion of a session on a display."""
    bare = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "VIRTUAL_ENV")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMPANION.format(socket=str(socket), displays=str(displays)),
        env=bare | {"DISPLAY": f":{DISPLAY}"},
        cwd=Path(__file__).parents[2],
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.slow
async def test_a_program_that_keeps_the_machine_awake(laptop: Laptop, vocabulary: FakeVocabulary) -> None:
    async with automatic(laptop):
        call = ("idle", "Video Call", "in a call", "block", 1000, os.getpid())
        # Locks are listed every few seconds.
        told = await given_back(laptop, vocabulary, lambda: laptop.inhibit(call), seen_within_s=RESTING_PERIOD_S)
        assert told["cause"] == "busy", told
        assert "Video Call: in a call" in told["reason"]
        laptop.inhibit()
        await engine_is(laptop.network, 0, "ready")


@pytest.mark.slow
async def test_a_terminal_that_somebody_opens(laptop: Laptop, vocabulary: FakeVocabulary) -> None:
    """Whoever logs in over SSH, or opens a window with a shell, gets a new terminal: a real one here."""
    opened: list[int] = []
    async with automatic(laptop):
        try:
            # One look a second while a card is lent.
            told = await given_back(
                laptop, vocabulary, lambda: opened.extend(os.openpty()), seen_within_s=LENDING_PERIOD_S
            )
        finally:
            for descriptor in opened:
                os.close(descriptor)
        assert told["cause"] == "input", told
        assert "tty" in told["reason"]
        # And lends again by itself, once nobody has been there for as long as the owner says.
        await engine_is(laptop.network, 0, "ready")
