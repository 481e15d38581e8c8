"""Calibration over a real engine process and a real NVML child; the card is simulated and follows its power limit."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.cards.hardware import HardwareMonitor
from agent.cards.testing import (
    NO_PERMISSION,
    NOT_SUPPORTED,
    card,
    fake_child,
    model_at,
    read_limits,
    write_scenario,
)
from agent.clock import monotonic_s
from agent.config import EngineSettings
from agent.engines.processes import find_marked, kill_marked
from agent.power.calibrate import (
    CALIBRATION_FILE,
    calibrate,
    calibrate_engine,
    calibrate_machine,
    load_calibrations,
)
from agent.power.limits import POWER_FILE, PowerLimitFile, restore_leftovers
from agent.power.standard_load import CalibrationRefused, StandardLoad
from agent.testing import ScriptedEngine
from inference.engine import Engine, EngineUnreachable, GenerateRequest, TokenChunk
from inference.manifest import Manifest
from inference.task import FinishReason, ManifestDigest, PositionLogprobs, TaskKind

# Each calibration measures for seconds at every cap: forty in all.
pytestmark = pytest.mark.slow

UUID = card(0)["uuid"]
# The shortest measurement in which a window of energy closes.
LOAD = StandardLoad(streams=4, warmup_s=0.2, seconds=2.0)
# Tokens per second and watts by limit: at 371 W a third less energy for 2 % of the speed, at 292 W too slow.
MODEL = [[150, 40, 140], [292, 300, 260], [371, 392, 270], [450, 400, 420]]

MANIFEST = Manifest(
    digest=ManifestDigest("sha256:" + "0" * 64),
    name="tiny",
    revision="1",
    architecture="TinyForCausalLM",
    licence="MIT",
    dtype="float32",
    context_tokens=1024,
    vocabulary_size=64,
    stop_token_ids=(0,),
    files=(),
    origin="",
    kind=TaskKind.GENERATE,
)


class CardEngine:
    """An engine that is as fast as the simulated card is under its present limit. Keeps to the engine port."""

    def __init__(self, limits: Path, model: Sequence[Sequence[float]], streams: int) -> None:
        self._limits = limits
        self._model = model
        self._streams = streams

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        due_at = monotonic_s()
        for left in range(request.max_tokens - 1, -1, -1):
            limit_w = read_limits(self._limits).get(UUID, 450_000) / 1000
            # Against a schedule, so that a busy machine makes no slower card.
            due_at += self._streams / model_at(self._model, limit_w)[0]
            await asyncio.sleep(max(0.0, due_at - monotonic_s()))
            yield TokenChunk((1,), finish_reason=None if left else FinishReason.LENGTH)

    async def score(self, token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
        raise EngineUnreachable("this engine does not score")

    async def embed(self, token_ids: Sequence[int]) -> list[float]:
        raise EngineUnreachable("this engine does not embed")

    async def abort(self, request_id: str) -> None:
        """Sequences end when their iterator is closed."""

    async def check_health(self, timeout_s: float) -> None:
        """Always well."""

    async def aclose(self) -> None:
        """Holds nothing."""


class Bench:
    """A machine with one simulated card."""

    def __init__(self, directory: Path) -> None:
        self.state_dir = directory / "state"
        self.state_dir.mkdir()
        self.limits = directory / "limits.json"
        self.scenario = directory / "scenario.json"
        self.marker = f"test-{directory.parent.name}-{directory.name}"
        self.told: list[str] = []
        self.hardware = HardwareMonitor(fake_child(self.scenario), sysfs=directory / "sysfs", marker=f"{self.marker}/")
        model = directory / "model"
        model.mkdir()
        vocabulary = {f"t{number}": number for number in range(64)}
        (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        self.settings = EngineSettings(
            engine_id="main",
            kind="fake",
            model_directory=model,
            fake_tokens_per_second=50.0,
            gpu_uuids=(UUID,),
        )
        self.plug(model=MODEL)

    def plug(self, **changes: Any) -> None:
        write_scenario(self.scenario, [card(0, **changes)], limits=str(self.limits))

    @property
    def limit_w(self) -> float:
        return read_limits(self.limits).get(UUID, 450_000) / 1000

    async def calibrate(self, engine: Engine | None = None) -> Any:
        engine = engine or CardEngine(self.limits, MODEL, LOAD.streams)
        return await calibrate(
            self.settings, MANIFEST, engine, self.hardware, self.state_dir, LOAD, tell=self.told.append
        )


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    await bench.hardware.aclose()
    kill_marked(f"{bench.marker}/", confirm_s=5.0)


async def test_the_cap_with_the_least_energy_per_token_at_almost_full_speed_is_recommended(bench: Bench) -> None:
    """Mutation tried: measuring without the caps in force leaves three equal rows and no recommendation."""
    result = await bench.calibrate()
    assert [one.cap_w for one in result.measurements] == [450.0, 371.0, 292.0]
    for one, (_, rate, watts) in zip(result.measurements, reversed(MODEL[1:]), strict=True):
        assert one.watts == pytest.approx(watts, rel=0.05)
        assert one.tokens_per_second == pytest.approx(rate, rel=0.05)
        assert one.method == "counter"
    assert result.choice.cap_w == 371.0
    assert bench.limit_w == 450.0
    assert PowerLimitFile(bench.state_dir).load() == {}
    assert load_calibrations(bench.state_dir) == {UUID: result}
    assert stat.S_IMODE(os.stat(bench.state_dir / CALIBRATION_FILE).st_mode) == 0o600
    assert [line.split()[1] for line in bench.told] == ["292", "371", "450"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"errors": {"nvmlDeviceSetPowerManagementLimit": NO_PERMISSION}}, "denied.*run this as root"),
        ({"errors": {"nvmlDeviceSetPowerManagementLimit": NOT_SUPPORTED}}, "unsupported"),
        ({"limit_stuck": True}, "does not apply it"),
        ({"errors": {"nvmlDeviceGetPowerManagementLimitConstraints": NOT_SUPPORTED}}, "does not tell"),
        ({"limits_mw": [440_000, 450_000]}, "changes nothing"),
        ({"compute": [[os.getpid(), 1]]}, "in use by others: .*close them first"),
        ({"uuid": "GPU-another"}, "does not answer"),
        (
            {
                "errors": {
                    "nvmlDeviceGetTotalEnergyConsumption": NOT_SUPPORTED,
                    "nvmlDeviceGetPowerUsage": NOT_SUPPORTED,
                }
            },
            "neither its energy nor its power",
        ),
    ],
)
async def test_what_cannot_be_calibrated_is_refused_in_plain_words_and_left_as_it_was(
    bench: Bench, changes: dict[str, Any], why: str
) -> None:
    bench.plug(**changes)
    with pytest.raises(CalibrationRefused, match=why):
        await bench.calibrate()
    assert bench.limit_w == 450.0
    assert PowerLimitFile(bench.state_dir).load() == {}


async def test_an_engine_that_fails_under_load_ends_the_calibration_and_the_limit_comes_back(bench: Bench) -> None:
    class Dying(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            yield TokenChunk((1,))
            raise EngineUnreachable("the engine is gone")

    with pytest.raises(CalibrationRefused, match=r"failed at 292 W: the engine is gone"):
        await bench.calibrate(Dying())
    assert bench.limit_w == 450.0


async def test_heat_makes_a_measurement_useless_and_power_stands_in_for_an_absent_counter(bench: Bench) -> None:
    bench.plug(model=MODEL, reasons=0x40, errors={"nvmlDeviceGetTotalEnergyConsumption": NOT_SUPPORTED})
    result = await bench.calibrate()
    assert {one.note for one in result.measurements} == {"the card slowed down because of heat"}
    assert result.choice.cap_w is None
    assert {one.method for one in result.measurements} == {"integrated_power"}
    assert result.measurements[0].watts == pytest.approx(420, rel=0.05)


async def test_an_engine_is_started_measured_and_ended(bench: Bench) -> None:
    """The fake engine's speed does not depend on the card, so the lowest cap is the cheapest."""
    result = await calibrate_engine(
        bench.settings, MANIFEST, bench.hardware, bench.state_dir, bench.marker, LOAD, tell=bench.told.append
    )
    assert result.choice.cap_w == 292.0
    assert result.measurements[0].tokens_per_second == pytest.approx(200, rel=0.1)
    assert find_marked(f"{bench.marker}/") == set()
    assert bench.limit_w == 450.0


@asynccontextmanager
async def calibrating(bench: Bench) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A calibration in a process of its own, once it has set its first cap."""
    program = f"""
import asyncio
from pathlib import Path
from agent.power.calibrate import calibrate, until_signal
from agent.config import EngineSettings
from agent.cards.hardware import HardwareMonitor
from agent.power.standard_load import StandardLoad
from agent.cards.testing import fake_child
from inference.manifest import Manifest
from inference.task import TaskKind

class Idle:
    async def generate(self, request):
        await asyncio.sleep(600)
        yield

manifest = Manifest(digest="sha256:0", name="tiny", revision="1", architecture="T", licence="MIT", dtype="float32",
    context_tokens=64, vocabulary_size=64, stop_token_ids=(), files=(), origin="", kind=TaskKind.GENERATE)
settings = EngineSettings(engine_id="main", kind="fake", model_directory=Path("/none"), gpu_uuids=({UUID!r},))
hardware = HardwareMonitor(fake_child(Path({str(bench.scenario)!r})), sysfs=Path("/none"))
load = StandardLoad(streams=1, warmup_s=600.0, seconds=600.0)
work = calibrate(settings, manifest, Idle(), hardware, Path({str(bench.state_dir)!r}), load, tell=print)
asyncio.run(until_signal(work))
"""
    process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", program])
    try:
        async with asyncio.timeout(30.0):
            while bench.limit_w == 450.0:
                await asyncio.sleep(0.05)
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def test_a_calibration_killed_in_the_middle_is_undone_by_the_next_start(bench: Bench) -> None:
    """Mutation tried: a cap set before the owner's limit is on the disk cannot be undone after this kill."""
    async with calibrating(bench) as process:
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    assert bench.limit_w == 292.0
    assert stat.S_IMODE(os.stat(bench.state_dir / POWER_FILE).st_mode) == 0o600
    assert await restore_leftovers(bench.state_dir, bench.hardware) == [f"{UUID}: power limit of 450 W put back"]
    assert bench.limit_w == 450.0
    assert await restore_leftovers(bench.state_dir, bench.hardware) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_calibration_that_is_broken_off_puts_the_limit_back_itself(bench: Bench, number: int) -> None:
    """Mutation tried: without `until_signal`, SIGTERM leaves the cap on the card."""
    async with calibrating(bench) as process:
        process.send_signal(number)
        await asyncio.to_thread(process.wait)
    assert bench.limit_w == 450.0
    assert PowerLimitFile(bench.state_dir).load() == {}


async def test_a_limit_that_the_owner_set_after_the_crash_is_left_and_said(bench: Bench) -> None:
    async with calibrating(bench) as process:
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    bench.limits.write_text(json.dumps({UUID: 222_000}))
    (line,) = await restore_leftovers(bench.state_dir, bench.hardware)
    assert "somebody else set the power limit to 222 W" in line
    assert bench.limit_w == 222.0
    assert PowerLimitFile(bench.state_dir).load() == {}


async def test_a_card_that_is_gone_keeps_its_owners_limit_on_the_disk(bench: Bench) -> None:
    async with calibrating(bench) as process:
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    bench.plug(uuid="GPU-another")
    (line,) = await restore_leftovers(bench.state_dir, bench.hardware)
    assert "when the card answers" in line
    assert UUID in PowerLimitFile(bench.state_dir).load()


def test_a_machine_whose_engines_have_no_card_has_nothing_to_calibrate(tmp_path: Path) -> None:
    settings = EngineSettings(engine_id="main", kind="fake", model_directory=tmp_path)
    with pytest.raises(CalibrationRefused, match="no engine of this machine runs on a card"):
        calibrate_machine([settings], [], tmp_path, "marker", seconds=1.0, tell=print)
