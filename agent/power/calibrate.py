"""Measures a card under three power caps while its own engine works, for `slackwater-agent calibrate-power`.

The owner's limit is on the disk before the first cap is on the card
(`agent.power.limits`), so it comes back when a measurement fails, is broken off
or is killed; after a kill, with the next start of whatever uses the directory.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from agent.cards.hardware import HardwareMonitor, Pace
from agent.cards.use import THERMAL_REASONS, CardReading, CardWatch
from agent.clock import monotonic_s, wall_ms
from agent.config import EngineSettings
from agent.energy.card import CardEnergy, EnergyMethod, Window, card_sample, weaker
from agent.engines.settling import settle_engine
from agent.engines.supervisor import EngineSupervisor, sweep_leftovers
from agent.host import read_host
from agent.identity import write_private
from agent.models import load_model
from agent.owner.events import CardUseObserved, Unknown
from agent.power.calibration import Calibration, Measurement, choose_cap, plan_caps
from agent.power.cap import Stage
from agent.power.limits import PowerKeeper, limit_seen, restore_leftovers
from agent.power.settings import PowerSettings
from agent.power.standard_load import CalibrationRefused, EngineLost, StandardLoad, Work, working
from inference.engine import Engine
from inference.manifest import Manifest
from inference.task import TaskKind
from protos.slackwater.common.v1.capability_pb2 import ENGINE_STATUS_FAILED, READING_STATUS_OK

CALIBRATION_FILE = "calibration.json"
# A little above the shortest window over which an energy counter is worth anything (`agent.energy.card`).
SAMPLE_S = 2.5
# Setting a limit takes milliseconds; a child that hangs is given five seconds.
CAP_S_MAX = 10.0
# A model is read at disk speed and vLLM compiles at its first start; as the supervisor waits.
ENGINE_S_MAX = 900.0

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")


def calibrate_machine(
    engines: Sequence[EngineSettings],
    release_keys: Sequence[bytes],
    state_dir: Path,
    marker: str,
    *,
    seconds: float,
    tell: Callable[[str], None],
) -> list[Calibration]:
    """Calibrate the card of each engine that has one, and return the results. For the command line: runs the loop.

    The caller holds the lock of the state directory, so no agent runs. SIGINT and SIGTERM put the owner's limit back.

    Args:
        seconds: of each of the three measurements.

    Raises:
        CalibrationRefused: there is no such engine, one cannot be calibrated, or a signal broke it off.
        ModelRefused: a model's files are not what its manifest says.
    """
    with_cards = [settings for settings in engines if settings.gpu_uuids]
    if not with_cards:
        raise CalibrationRefused("no engine of this machine runs on a card: there is no power limit to set")

    async def calibrate_all() -> list[Calibration]:
        hardware = HardwareMonitor(marker=f"{marker}/")
        try:
            results = []
            for settings in with_cards:
                manifest = await asyncio.to_thread(load_model, settings, release_keys)
                load = StandardLoad(streams=settings.slots, seconds=seconds)
                results.append(await calibrate_engine(settings, manifest, hardware, state_dir, marker, load, tell=tell))
            return results
        finally:
            await hardware.aclose()

    sweep_leftovers(marker, state_dir)
    return asyncio.run(until_signal(calibrate_all()))


async def until_signal(work: Coroutine[None, None, T]) -> T:
    """Do the work; SIGINT and SIGTERM cancel it, also where a shell in the background has SIGINT ignored.

    Raises:
        CalibrationRefused: a signal came. What the work has to undo is undone.
    """
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in _ENDING_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError as error:
        raise CalibrationRefused("broken off before it was finished") from error
    finally:
        for number in _ENDING_SIGNALS:
            loop.remove_signal_handler(number)


async def calibrate_engine(
    settings: EngineSettings,
    manifest: Manifest,
    hardware: HardwareMonitor,
    state_dir: Path,
    marker: str,
    load: StandardLoad,
    *,
    tell: Callable[[str], None],
) -> Calibration:
    """Start one engine, calibrate its card, and end the engine. The caller holds the lock of the state directory.

    Args:
        marker: as given to `sweep_leftovers`; `hardware` has the same with a slash behind, to know our own processes.

    Raises:
        CalibrationRefused: the card cannot be capped, the engine does not run, or nothing sensible can be measured.
    """
    await hardware.snapshot()
    settings = await asyncio.to_thread(
        lambda: settle_engine(settings, manifest, state_dir, hardware.readings, read_host(hardware.gpu_note))
    )
    card = check_calibratable(settings, manifest)
    # Before minutes go by with loading a model in vain.
    await restore_leftovers(state_dir, hardware)
    plan_for(await _read(hardware, card))
    changed = asyncio.Event()
    supervisor = EngineSupervisor(
        settings, manifest, state_dir, marker, lambda _: changed.set(), cards=lambda: hardware.readings
    )
    running = asyncio.create_task(supervisor.run())
    try:
        tell(f"engine {settings.engine_id} starts with {manifest.name}")
        engine = await _wait_for_engine(supervisor, changed)
        return await calibrate(settings, manifest, engine, hardware, state_dir, load, tell=tell)
    finally:
        await supervisor.stop()
        await running


async def _wait_for_engine(supervisor: EngineSupervisor, changed: asyncio.Event) -> Engine:
    try:
        async with asyncio.timeout(ENGINE_S_MAX):
            while supervisor.engine is None:
                if supervisor.report.status == ENGINE_STATUS_FAILED:
                    raise EngineLost(f"engine {supervisor.report.engine_id} does not run: {supervisor.report.note}")
                changed.clear()
                await changed.wait()
            return supervisor.engine
    except TimeoutError as error:
        name = supervisor.report.engine_id
        raise EngineLost(f"engine {name} was not ready within {ENGINE_S_MAX:.0f} s") from error


async def calibrate(
    settings: EngineSettings,
    manifest: Manifest,
    engine: Engine,
    hardware: HardwareMonitor,
    state_dir: Path,
    load: StandardLoad,
    *,
    tell: Callable[[str], None],
) -> Calibration:
    """Measure the card of one running engine, write the result into the state directory, and return it.

    The caller holds the lock of the state directory, and nothing else uses the engine.

    Args:
        tell: takes a line of progress.

    Raises:
        CalibrationRefused: the card cannot be capped, or nothing sensible can be measured.
    """
    await restore_leftovers(state_dir, hardware)
    hardware.set_pace(Pace.WORKING)
    card = check_calibratable(settings, manifest)
    reading = await _read(hardware, card)
    others = foreign_programs(reading)
    if others:
        raise CalibrationRefused(f"{card} is in use by others: {others}; close them first")
    if READING_STATUS_OK not in (reading.gpu.energy_mj.status, reading.gpu.power_draw_w.status):
        raise CalibrationRefused(f"{card} tells neither its energy nor its power, so there is nothing to compare")
    caps = plan_for(reading)
    measurements = []
    async with working(engine, manifest, load) as work:
        # The lowest first: whoever is not allowed to cap learns it before a minute has passed.
        for cap_w in reversed(caps):
            tell(f"{card}: {cap_w:.0f} W, {load.streams} streams, {load.warmup_s + load.seconds:.0f} s")
            async with _capped(hardware, state_dir, card, cap_w):
                measurements.append(await _measure(work, hardware, card, cap_w, load))
    result = Calibration(
        card=card,
        card_name=reading.gpu.name.value,
        engine_id=settings.engine_id,
        model=manifest.name,
        streams=load.streams,
        measured_at_ms=wall_ms(),
        measurements=tuple(reversed(measurements)),
        choice=choose_cap(measurements),
    )
    await asyncio.to_thread(_store, result, state_dir)
    return result


def check_calibratable(settings: EngineSettings, manifest: Manifest) -> str:
    """Return the card to calibrate.

    Raises:
        CalibrationRefused: this engine has none, or several, or makes no tokens.
    """
    if manifest.kind is TaskKind.EMBED:
        raise CalibrationRefused(f"engine {settings.engine_id} makes vectors; calibrate an engine that makes tokens")
    if len(settings.gpu_uuids) != 1:
        count = len(settings.gpu_uuids) or "no"
        raise CalibrationRefused(f"engine {settings.engine_id} runs on {count} cards; calibrate an engine on one")
    return settings.gpu_uuids[0]


def plan_for(reading: CardReading) -> tuple[float, ...]:
    """Return the caps to measure, highest first.

    Raises:
        CalibrationRefused: the card's limit cannot be lowered.
    """
    try:
        return plan_caps(limit_seen(reading))
    except ValueError as error:
        raise CalibrationRefused(f"{reading.uuid}: {error}; set fewer slots instead") from error


def load_calibrations(state_dir: Path) -> dict[str, Calibration]:
    """Return the newest result of each card, by uuid. Blocks on the disk; a damaged file counts as none."""
    try:
        return msgspec.json.decode((state_dir / CALIBRATION_FILE).read_bytes(), type=dict[str, Calibration])
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


def _store(result: Calibration, state_dir: Path) -> None:
    results = {**load_calibrations(state_dir), result.card: result}
    write_private(state_dir / CALIBRATION_FILE, msgspec.json.encode(results))


async def _read(hardware: HardwareMonitor, card: str) -> CardReading:
    reading = await hardware.poll_now(card)
    if reading is None:
        raise CalibrationRefused(f"{card} does not answer: {hardware.gpu_note or 'see the log'}")
    return reading


def foreign_programs(reading: CardReading) -> str:
    """Return the names of the programs of others on a card; empty where there is none, or nobody can tell."""
    for event in CardWatch().observe(reading, 0.0):
        if isinstance(event, CardUseObserved) and not isinstance(event.processes, Unknown):
            return ", ".join(f"{one.name} ({one.pid})" for one in event.processes)
    return ""


@asynccontextmanager
async def _capped(hardware: HardwareMonitor, state_dir: Path, card: str, cap_w: float) -> AsyncIterator[None]:
    """Hold a card at a cap. The owner's limit is back when this ends, however it ends."""
    changed = asyncio.Event()
    keeper = PowerKeeper(PowerSettings(cap=cap_w), state_dir, hardware.set_power_limit, on_change=changed.set)
    reading = await _read(hardware, card)
    seen = limit_seen(reading)
    if seen.limit_w is not None and cap_w >= seen.limit_w:
        # The limit that is there: measured as the owner left it.
        yield
        return
    work = asyncio.create_task(keeper.run())
    try:
        keeper.see([reading])
        keeper.want(card)
        await _wait_for_cap(keeper, card, cap_w, changed)
        yield
    finally:
        await keeper.restore_all()
        work.cancel()


async def _wait_for_cap(keeper: PowerKeeper, card: str, cap_w: float, changed: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(CAP_S_MAX):
            while keeper.status(card).stage is not Stage.CAPPED:
                note = keeper.status(card).note.partition(";")[0]
                if note:
                    raise CalibrationRefused(f"{card}: {note}; run this as root, or set fewer slots instead")
                changed.clear()
                await changed.wait()
    except TimeoutError as error:
        raise CalibrationRefused(f"{card}: the cap of {cap_w:.0f} W was not in force within {CAP_S_MAX:g} s") from error


async def _measure(work: Work, hardware: HardwareMonitor, card: str, cap_w: float, load: StandardLoad) -> Measurement:
    await asyncio.sleep(load.warmup_s)
    reading = await _read(hardware, card)
    began_at = now = monotonic_s()
    tokens_before = work.tokens
    energy = CardEnergy(None, began_at)
    energy.running_changed(load.streams, began_at)
    _sample(energy, reading, began_at)
    millijoules, method, note = 0, EnergyMethod.COUNTER, ""
    while now - began_at < load.seconds:
        await asyncio.sleep(SAMPLE_S)
        reading = await _read(hardware, card)
        now = monotonic_s()
        work.check(cap_w)
        window = _sample(energy, reading, now)
        if window is not None:
            millijoules += window.work_mj
            method = weaker(method, window.method)
        note = note or _disturbance(reading)
    if method in (EnergyMethod.ESTIMATE, EnergyMethod.NONE):
        note = note or "the card did not tell its energy all the time"
    return Measurement(
        cap_w=cap_w,
        tokens=work.tokens - tokens_before,
        seconds=now - began_at,
        joules=millijoules / 1000,
        method=method.value,
        note=note,
    )


def _sample(energy: CardEnergy, reading: CardReading, now: float) -> Window | None:
    sample = card_sample(reading.gpu)
    return None if sample is None else energy.sampled(sample, now)


def _disturbance(reading: CardReading) -> str:
    """Return what makes a measurement useless; empty where nothing does."""
    if reading.details is not None and (reading.details.clock_event_reasons or 0) & THERMAL_REASONS:
        return "the card slowed down because of heat"
    others = foreign_programs(reading)
    return f"{others} used the card too" if others else ""
