"""The whole path to a driver's library: the child as it is installed, NVIDIA's binding, ctypes, and a shared object."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.cards.hardware import BACKOFF_S, HardwareMonitor
from agent.engines.processes import MARKER_VARIABLE
from agent.owner.events import CardUseObserved, TemperatureObserved
from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_ERROR, READING_STATUS_OK

SOURCE = Path(__file__).with_name("fake_nvml.c")
GIB = 1024**3

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="builds a library with gcc")


def build(directory: Path, *flags: str) -> Path:
    """Build the library and return its directory."""
    directory.mkdir()
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "-o", directory / "libnvidia-ml.so.1", SOURCE], check=True)
    return directory


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("nvml")
    return {name: build(root / name, *flags) for name, flags in VARIANTS.items()}


VARIANTS = {"new": [], "v2": ["-DONLY_V2", "-DOLD_NAMES"], "v1": ["-DONLY_V1"]}


@dataclass
class Opener:
    """Makes monitors whose child finds a library; ends them."""

    libraries: dict[str, Path]
    monkeypatch: pytest.MonkeyPatch
    now: float = 1000.0
    monitors: list[HardwareMonitor] = field(default_factory=list)

    def open(self, variant: str = "new", **environment: str) -> HardwareMonitor:
        self.monkeypatch.setenv("LD_LIBRARY_PATH", str(self.libraries[variant]))
        for name, value in environment.items():
            self.monkeypatch.setenv(name, value)
        monitor = HardwareMonitor(
            sysfs=Path("/none"),
            dev=Path("/none"),
            deadline_s=20.0,
            marker="slackwater-test/",
            clock=lambda: self.now,
            awake_clock=lambda: self.now,
        )
        self.monitors.append(monitor)
        return monitor


@pytest.fixture
async def opener(libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opener]:
    opener = Opener(libraries, monkeypatch)
    yield opener
    for monitor in opener.monitors:
        await monitor.aclose()


async def test_every_reading_arrives_through_the_real_binding(opener: Opener) -> None:
    monitor = opener.open()
    gpu, other = await monitor.snapshot()
    assert monitor.gpu_note == ""
    assert (gpu.uuid.value, other.uuid.value) == ("GPU-0", "GPU-1")
    assert gpu.name.value == "NVIDIA GeForce RTX 4090"
    assert (gpu.driver_version.value, gpu.compute_capability.value) == ("580.65.06", "8.9")
    assert (gpu.memory_total_bytes.value, gpu.memory_free_bytes.value) == (24 * GIB, 20 * GIB)
    assert (gpu.power_draw_w.value, gpu.energy_mj.value, gpu.temperature_c.value) == (61.5, 123456789, 41)
    assert {getattr(gpu, field.name).status for field in gpu.DESCRIPTOR.fields if field.message_type is not None} == {
        READING_STATUS_OK
    }
    details = monitor.readings[0].details
    assert details is not None
    assert (details.slowdown_c, details.shutdown_c, details.clock_event_reasons) == (95, 98, 0x40)
    assert (details.power_limit_set_w, details.power_limit_default_w) == (450, 450)
    # As version 2 counts, without the driver's reserve.
    assert details.memory_used_bytes == 3 * GIB
    assert details.processes == ()
    assert monitor.observe()[1] == TemperatureObserved("GPU-0", 41.0, 95.0, throttled=True)


@pytest.mark.parametrize("variant", VARIANTS)
async def test_processes_are_listed_in_each_version_of_their_structure(opener: Opener, variant: str) -> None:
    """Mutation tried: reading version 1 with the structure of version 2 takes the second process for nonsense."""
    engine, game = [
        await asyncio.create_subprocess_exec("sleep", "600", env={**os.environ, MARKER_VARIABLE: marker})
        for marker in ("slackwater-test/main", "")
    ]
    try:
        monitor = opener.open(variant, NVML_PIDS=f"{engine.pid},{game.pid}")
        await monitor.snapshot()
        use, heat, other_use, _ = monitor.observe()
        assert isinstance(use, CardUseObserved)
        assert isinstance(use.processes, tuple)
        assert [(one.pid, one.name, one.memory_bytes) for one in use.processes] == [(game.pid, "sleep", GIB)]
        assert use.foreign_memory_bytes == 2 * GIB
        assert monitor.readings[0].our_pids == (engine.pid,)
        assert isinstance(other_use, CardUseObserved)
        assert other_use.processes == ()
        assert isinstance(heat, TemperatureObserved)
        assert heat.throttled, "under its old name too"
    finally:
        for process in (engine, game):
            process.kill()
            await process.wait()


async def test_a_power_limit_is_set_and_read_back(opener: Opener) -> None:
    monitor = opener.open()
    outcome = await monitor.set_power_limit("GPU-1", 300.0, expected_w=450.0)
    assert (outcome.result, outcome.limit_w) == ("ok", 300.0)
    assert [gpu.power_limit_w.value for gpu in await monitor.snapshot()] == [450.0, 300.0]
    assert (await monitor.set_power_limit("GPU-1", 450.0, expected_w=450.0)).result == "changed"
    assert (await monitor.set_power_limit("GPU-1", 700.0)).result == "out_of_range"
    assert (await monitor.set_power_limit("GPU-7", 300.0)).result == "lost"


@pytest.mark.parametrize(("code", "result"), [("4", "denied"), ("3", "unsupported"), ("999", "error")])
async def test_a_refused_limit_is_told_as_what_it_is(opener: Opener, code: str, result: str) -> None:
    assert (await opener.open(NVML_SET=code).set_power_limit("GPU-0", 300.0)).result == result


@pytest.mark.parametrize(
    ("code", "note"), [("18", "needs a reboot"), ("9", "no NVIDIA driver"), ("4", "no permission"), ("999", "recreate")]
)
async def test_a_library_that_does_not_open_says_why(opener: Opener, code: str, note: str) -> None:
    monitor = opener.open(NVML_INIT=code)
    assert await monitor.snapshot() == []
    assert note in monitor.gpu_note


async def test_without_a_library_there_is_no_driver(opener: Opener, tmp_path: Path) -> None:
    opener.libraries["none"] = tmp_path
    monitor = opener.open("none")
    assert await monitor.snapshot() == []
    assert monitor.gpu_note == "no NVIDIA driver"


async def test_a_name_that_is_no_utf8_hides_nothing_else(opener: Opener) -> None:
    monitor = opener.open()
    # An environment holds bytes; a str with a surrogate is how Python passes one on.
    opener.monkeypatch.setenv("NVML_NAME", "RTX \udcff\udcfe")
    gpu, _ = await monitor.snapshot()
    assert gpu.name.status == READING_STATUS_ERROR
    assert gpu.uuid.status == gpu.memory_total_bytes.status == READING_STATUS_OK


async def test_a_library_that_takes_its_process_down_leaves_the_agent_and_the_other_card(opener: Opener) -> None:
    """A lost card with a stale handle (XuehaiPan/nvitop#139)."""
    monitor = opener.open()
    await monitor.snapshot()
    await monitor.aclose()
    opener.monkeypatch.setenv("NVML_CRASH", "1")
    await monitor.snapshot()
    opener.now += BACKOFF_S
    gpu, lost = await monitor.snapshot()
    assert (gpu.uuid.value, gpu.power_draw_w.status) == ("GPU-0", READING_STATUS_OK)
    assert (lost.uuid.value, lost.power_draw_w.status) == ("GPU-1", READING_STATUS_ERROR)
