"""The power limit of a real card: set within its range, measured under, and put back.

These tests change the limit for a while. Where that is not permitted, they are
left out and say so.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from dev_network import DevNetwork
from network_settings import EngineOptions, NetworkError

from agent.cards.hardware import HardwareMonitor
from agent.power.calibration import plan_caps
from agent.power.cap import LimitSeen, Stage
from agent.power.limits import PowerKeeper, PowerLimitFile, limit_seen
from agent.power.settings import PowerSettings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

SLOTS = 8
CAP_S_MAX = 15.0
# Drivers round a limit to what the card's regulator can do.
TOLERANCE_W = 1.0
CALIBRATION_S = 5


@pytest_asyncio.fixture
async def hardware() -> AsyncIterator[HardwareMonitor]:
    monitor = HardwareMonitor()
    await monitor.start()
    yield monitor
    await monitor.aclose()


async def limits_of(hardware: HardwareMonitor, uuid: str) -> LimitSeen:
    reading = await hardware.poll_now(uuid)
    assert reading is not None, hardware.gpu_note
    return limit_seen(reading)


async def settable_card(hardware: HardwareMonitor) -> tuple[str, LimitSeen, tuple[float, ...]]:
    """Return the first card, its limits and the caps worth a try; skips where nothing may be set."""
    assert hardware.readings, hardware.gpu_note
    uuid = hardware.readings[0].uuid
    before = await limits_of(hardware, uuid)
    try:
        caps = plan_caps(before)
    except ValueError as error:
        pytest.skip(f"this card's limit cannot be lowered: {error}")
    assert before.limit_w is not None
    # The limit that it has: changes nothing, and tells whether it may be set.
    outcome = await hardware.set_power_limit(uuid, before.limit_w)
    if outcome.result in ("denied", "unsupported"):
        pytest.skip(f"no power limit may be set here ({outcome.result}): {outcome.detail}; it takes root")
    assert outcome.result == "ok", outcome.detail
    return uuid, before, caps


async def test_a_cap_is_set_within_the_range_and_the_owners_limit_comes_back(
    hardware: HardwareMonitor, tmp_path: Path
) -> None:
    uuid, before, caps = await settable_card(hardware)
    assert before.min_w is not None
    assert before.max_w is not None
    changed = asyncio.Event()
    keeper = PowerKeeper(PowerSettings(cap=caps[1]), tmp_path, hardware.set_power_limit, on_change=changed.set)
    work = asyncio.create_task(keeper.run())
    try:
        await hardware.snapshot()
        keeper.see(hardware.readings)
        keeper.want(uuid)
        async with asyncio.timeout(CAP_S_MAX):
            while keeper.status(uuid).stage is not Stage.CAPPED:
                await changed.wait()
                changed.clear()
        capped = await limits_of(hardware, uuid)
        assert capped.limit_w == pytest.approx(caps[1], abs=TOLERANCE_W)
        assert before.min_w <= caps[1] <= before.max_w
        assert PowerLimitFile(tmp_path).load()[uuid].original_w == before.limit_w
        # Below the range the driver refuses, and nothing changes.
        outcome = await hardware.set_power_limit(uuid, before.min_w - 10 * TOLERANCE_W)
        assert outcome.result == "out_of_range"
    finally:
        await keeper.restore_all()
        work.cancel()
    assert (await limits_of(hardware, uuid)).limit_w == pytest.approx(before.limit_w, abs=TOLERANCE_W)
    assert PowerLimitFile(tmp_path).load() == {}


async def test_a_short_calibration_measures_three_caps_and_puts_the_limit_back(hardware: HardwareMonitor) -> None:
    uuid, before, caps = await settable_card(hardware)
    engine = EngineOptions(kind="vllm", slots=SLOTS)
    # The first card, as the engine of a single agent.
    async with DevNetwork(
        agents=1,
        engine=engine,
    ) as network:
        await network.stop_agent(0)
        try:
            said = await network.agent_command(0, "calibrate-power", "--seconds", str(CALIBRATION_S))
        except NetworkError as error:
            if "in use by others" not in str(error):
                raise
            pytest.skip(f"a calibration needs the card for itself: {error}")
    lines = said.splitlines()
    head = next(number for number, line in enumerate(lines) if f"({uuid})" in line)
    rows = [line.split() for line in lines[head + 2 : head + 5]]
    assert [row[0] for row in rows] == [f"{cap_w:.0f}" for cap_w in caps]
    assert {row[5] for row in rows} <= {"counter", "integrated_power"}
    assert any(line.startswith("recommended: ") for line in lines)
    assert (await limits_of(hardware, uuid)).limit_w == pytest.approx(before.limit_w, abs=TOLERANCE_W)
