"""The NVML child as a real process that crashes, hangs and comes back with another machine."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.cards import testing as fake
from agent.cards.details import CardDetails
from agent.cards.hardware import (
    BACKOFF_S,
    LASTING_RETRY_S,
    QUARANTINE_S,
    RESTART_BUDGET,
    RESTART_WINDOW_S,
    HardwareMonitor,
    Pace,
)
from agent.cards.testing import card, cards, fake_child, write_scenario
from agent.energy.card import card_sample
from agent.engines.processes import MARKER_VARIABLE
from agent.owner.events import CardUseObserved, TemperatureObserved, Unknown
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_ERROR,
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_TIMEOUT,
    READING_STATUS_UNSUPPORTED,
    Gpu,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """A machine whose cards are in a file, and its monitor."""

    def __init__(self, directory: Path, deadline_s: float = 20.0, **arguments: Any) -> None:
        self.clock = Clock()
        self.sysfs = directory / "sysfs"
        self.dev = directory / "dev"
        self.dev.mkdir()
        self.scenario = directory / "scenario.json"
        self.monitor = HardwareMonitor(
            fake_child(self.scenario),
            sysfs=self.sysfs,
            dev=self.dev,
            deadline_s=deadline_s,
            clock=self.clock,
            **{"awake_clock": self.clock, **arguments},
        )

    async def read(self, after_s: float = 0.0) -> list[Gpu]:
        self.clock.now += after_s
        return await self.monitor.snapshot()


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    await machine.monitor.aclose()


def powers(gpus: list[Gpu]) -> dict[str, int]:
    """Return the status of each card's power draw by the number in its uuid."""
    return {gpu.uuid.value[4:12].lstrip("0") or "0": gpu.power_draw_w.status for gpu in gpus}


async def test_a_machine_with_two_cards_lists_both_and_asks_one_child(machine: Machine) -> None:
    write_scenario(machine.scenario, cards(2))
    assert powers(await machine.read()) == {"0": READING_STATUS_OK, "1": READING_STATUS_OK}
    assert machine.monitor.gpu_note == ""
    # The child is still the one that read the first file.
    machine.scenario.unlink()
    assert len(await machine.read()) == 2
    assert machine.monitor.cards == await machine.read()


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ({"init_error": fake.LIBRARY_NOT_FOUND}, "no NVIDIA driver"),
        ({"init_error": fake.LIBRARY_MISMATCH}, "needs a reboot"),
        ({"init_error": -1}, "needs a reboot"),
        ({"init_error": fake.UNKNOWN}, "recreate the container"),
        ({}, "lists no card"),
    ],
)
async def test_a_machine_without_a_list_says_why(machine: Machine, arguments: dict[str, int], note: str) -> None:
    write_scenario(machine.scenario, [], **arguments)
    assert await machine.read() == []
    assert note in machine.monitor.gpu_note


async def test_cards_in_dev_that_nvml_does_not_list_are_said(machine: Machine) -> None:
    (machine.dev / "nvidia0").touch()
    write_scenario(machine.scenario, [])
    assert await machine.read() == []
    assert "/dev has one" in machine.monitor.gpu_note


async def test_a_driver_that_needs_a_reboot_is_asked_again_after_minutes_only(machine: Machine) -> None:
    write_scenario(machine.scenario, cards(1), init_error=fake.LIBRARY_MISMATCH)
    assert await machine.read() == []
    write_scenario(machine.scenario, cards(1))
    assert await machine.read(after_s=LASTING_RETRY_S - 1.0) == []
    assert len(await machine.read(after_s=1.0)) == 1
    assert machine.monitor.gpu_note == ""


async def test_a_driver_lost_under_a_running_agent_leaves_the_cards_known_as_lost(machine: Machine) -> None:
    write_scenario(machine.scenario, cards(1))
    await machine.read()
    await machine.monitor.aclose()
    write_scenario(machine.scenario, cards(1), init_error=fake.DRIVER_NOT_LOADED)
    (gpu,) = await machine.read()
    assert gpu.power_draw_w.status == READING_STATUS_LOST
    assert gpu.uuid.status == gpu.name.status == READING_STATUS_OK


@pytest.mark.parametrize(("fault", "status"), [("crash", READING_STATUS_ERROR), ("hang", READING_STATUS_TIMEOUT)])
async def test_a_card_that_takes_nvml_down_is_left_out_and_the_others_stay(
    tmp_path: Path, fault: str, status: int
) -> None:
    """Mutation tried: an empty `skipped` in the request has the child die of the same card every time."""
    machine = Machine(tmp_path, deadline_s=1.5)
    write_scenario(machine.scenario, cards(3))
    await machine.read()
    await machine.monitor.aclose()
    bad = [card(0), card(1, **{fault: "nvmlDeviceGetPowerUsage"}), card(2)]
    write_scenario(machine.scenario, bad)
    # The card before was read; the one behind is not known at present.
    assert powers(await machine.read()) == {"0": READING_STATUS_OK, "1": status, "2": status}
    healthy = {"0": READING_STATUS_OK, "1": status, "2": READING_STATUS_OK}
    assert powers(await machine.read(after_s=BACKOFF_S)) == healthy
    assert powers(await machine.read(after_s=1.0)) == healthy
    # In time it gets another chance.
    await machine.monitor.aclose()
    write_scenario(machine.scenario, cards(3))
    assert set(powers(await machine.read(after_s=QUARANTINE_S)).values()) == {READING_STATUS_OK}
    await machine.monitor.aclose()


async def test_a_child_that_always_dies_is_left_alone_when_its_budget_is_spent(machine: Machine) -> None:
    machine.scenario.write_text("not JSON")
    for _ in range(RESTART_BUDGET):
        assert await machine.read(after_s=60.0) == []
        assert "NVML child ended" in machine.monitor.gpu_note
    write_scenario(machine.scenario, cards(1))
    assert await machine.read(after_s=RESTART_WINDOW_S - 1.0) == []
    assert len(await machine.read(after_s=1.0)) == 1


async def test_cards_are_joined_by_uuid_when_their_order_changes(machine: Machine) -> None:
    """Mutation tried: keeping what is known by index gives card 2 the lost card's readings."""
    write_scenario(machine.scenario, cards(3))
    await machine.read()
    await machine.monitor.aclose()
    # Card 0 fell off the bus, and the driver numbers the others anew.
    write_scenario(machine.scenario, [card(2), card(1)])
    assert powers(await machine.read()) == {
        "0": READING_STATUS_LOST,
        "1": READING_STATUS_OK,
        "2": READING_STATUS_OK,
    }


async def test_a_lost_card_that_does_not_tell_its_uuid_keeps_the_one_it_had(machine: Machine) -> None:
    write_scenario(machine.scenario, cards(2))
    await machine.read()
    await machine.monitor.aclose()
    write_scenario(machine.scenario, [card(0, errors={"*": fake.GPU_IS_LOST}), card(1)])
    gpus = await machine.read()
    assert powers(gpus) == {"0": READING_STATUS_LOST, "1": READING_STATUS_OK}
    assert len(gpus) == 2


def put_to_sleep(sysfs: Path, number: int, status: str) -> None:
    power = sysfs / f"0000:{number + 1:02x}:00.0" / "power"
    power.mkdir(parents=True, exist_ok=True)
    (power.parent / "vendor").write_text("0x10de\n")
    (power.parent / "class").write_text("0x030000\n")
    (power / "runtime_status").write_text(status)
    (power / "control").write_text("auto")
    (power / "runtime_suspended_time").write_text("5000")


async def test_a_sleeping_laptop_card_is_not_woken_and_no_handle_keeps_it_awake(machine: Machine) -> None:
    write_scenario(machine.scenario, cards(1))
    put_to_sleep(machine.sysfs, 0, "active")
    assert powers(await machine.read()) == {"0": READING_STATUS_OK}
    # A card that sleeps at times is read rarely, by a child that ends, or it never would.
    assert not machine.monitor._link.up
    machine.scenario.unlink()
    assert powers(await machine.read(after_s=30.0)) == {"0": READING_STATUS_OK}
    put_to_sleep(machine.sysfs, 0, "suspended")
    # A child would find no file, so none was started.
    assert powers(await machine.read(after_s=60.0)) == {"0": READING_STATUS_UNSUPPORTED}
    assert "asleep" in machine.monitor.gpu_note


async def test_an_interpreter_that_is_missing_is_a_note_and_no_exception(tmp_path: Path) -> None:
    monitor = HardwareMonitor((str(tmp_path / "absent"),), sysfs=tmp_path)
    assert await monitor.snapshot() == []
    assert "cannot start the NVML child" in monitor.gpu_note


async def test_a_child_killed_between_two_readings_is_replaced(machine: Machine) -> None:
    write_scenario(machine.scenario, cards(1))
    await machine.read()
    child = machine.monitor._link._child
    assert child is not None
    child.send_signal(signal.SIGKILL)
    assert powers(await machine.read()) == {"0": READING_STATUS_ERROR}
    assert powers(await machine.read(after_s=BACKOFF_S)) == {"0": READING_STATUS_OK}


@pytest.mark.parametrize(
    "answer",
    [
        b"Z" + bytes(4),
        b"G" + b"\xff" * 4,
        b"G\0\0\0\2\xff\xff",
        b"N\0\0\0\1{",
        b"N\0\0\0\2[]",
        b"B\0\0\0\1x",
        b"G\0",
        b"",
    ],
)
async def test_a_child_that_talks_nonsense_is_ended(tmp_path: Path, answer: bytes) -> None:
    program = f"import sys; sys.stdin.readline(); sys.stdout.buffer.write({answer!r}); sys.stdout.flush()"
    monitor = HardwareMonitor((sys.executable, "-c", program), sysfs=tmp_path)
    assert await monitor.snapshot() == []
    assert monitor.gpu_note
    assert not monitor._link.up


# ---- who uses a card, and its power limit


async def test_processes_are_named_and_ours_are_told_from_the_owners(tmp_path: Path) -> None:
    """Both are real processes, and the child that looks at them is real. Mutation tried: an empty marker in the
    request makes our engine the owner's program."""
    program = (sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()")
    running = []
    for marker in ("slackwater-test/main", ""):
        environment = {**os.environ, MARKER_VARIABLE: marker}
        running.append(await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, env=environment))
    try:
        for process in running:
            assert process.stdout is not None
            await process.stdout.readline()
        engine, game = running
        machine = Machine(tmp_path, marker="slackwater-test/")
        rows = [[engine.pid, 12 * fake.GIB], [game.pid, fake.GIB]]
        write_scenario(machine.scenario, [card(0, compute=rows, memory_free=10 * fake.GIB)])
        await machine.read()
        use, heat = machine.monitor.observe()
        assert isinstance(use, CardUseObserved)
        assert isinstance(use.processes, tuple)
        assert [(one.pid, one.kind, one.memory_bytes) for one in use.processes] == [(game.pid, "compute", fake.GIB)]
        assert use.processes[0].name.startswith("python")
        assert use.foreign_memory_bytes == 2 * fake.GIB
        assert machine.monitor.readings[0].our_pids == (engine.pid,)
        assert heat == TemperatureObserved(use.card, 41.0, 95.0, throttled=False)
        polled = await machine.monitor.poll_now(use.card)
        assert polled is not None
        assert polled.our_pids == (engine.pid,)
        await machine.monitor.aclose()
    finally:
        for process in running:
            process.kill()
            await process.wait()


async def test_where_the_driver_lists_no_processes_the_card_is_read_all_the_same(machine: Machine) -> None:
    """WSL: neither utilisation nor processes."""
    names = [
        f"nvmlDeviceGet{kind}RunningProcesses{version}"
        for kind in ("Compute", "Graphics")
        for version in ("_v3", "_v2")
    ]
    errors = dict.fromkeys([*names, "nvmlDeviceGetUtilizationRates"], fake.NOT_SUPPORTED)
    write_scenario(machine.scenario, [card(0, name_hex="fffe41", errors=errors)])
    (gpu,) = await machine.read()
    assert gpu.power_draw_w.status == READING_STATUS_OK
    use, _ = machine.monitor.observe()
    assert isinstance(use, CardUseObserved)
    assert use.processes is Unknown.ABSENT
    assert use.free_memory_bytes == 20 * fake.GIB


async def test_memory_that_cannot_be_and_energy_that_is_not_counted_leave_the_other_readings(machine: Machine) -> None:
    """A card without memory of its own, one that names 16 exabytes, one without a counter, one whose counter stands."""
    errors = {"nvmlDeviceGetTotalEnergyConsumption": fake.NOT_SUPPORTED}
    absurd = [card(0, memory_total=0, memory_free=0), card(1, memory_total=2**64 - 1, memory_free=0)]
    write_scenario(machine.scenario, [*absurd, card(2, errors=errors), card(3, energy_mj=0)])
    gpus = await machine.read()
    statuses = [gpu.memory_total_bytes.status for gpu in gpus]
    assert statuses == [READING_STATUS_UNSUPPORTED, READING_STATUS_ERROR, READING_STATUS_OK, READING_STATUS_OK]
    assert [gpu.memory_total_bytes.value for gpu in gpus[:2]] == [0, 0]
    samples = [card_sample(gpu) for gpu in gpus]
    assert [sample.energy_mj for sample in samples if sample] == [123_456_789, 123_456_789, None, None]
    assert {gpu.power_draw_w.status for gpu in gpus} == {READING_STATUS_OK}


async def test_a_lost_card_tells_nothing_about_its_owner_and_is_not_free(machine: Machine) -> None:
    write_scenario(machine.scenario, cards(1))
    await machine.read()
    await machine.monitor.aclose()
    write_scenario(machine.scenario, [card(0, errors={"*": fake.GPU_IS_LOST})])
    await machine.read()
    use, heat = machine.monitor.observe()
    assert use == CardUseObserved(card(0)["uuid"], Unknown.BROKEN, None, None)
    assert heat == TemperatureObserved(card(0)["uuid"], Unknown.BROKEN, None, throttled=False)
    assert await machine.monitor.poll_now(card(0)["uuid"]) is None


async def test_a_power_limit_is_set_through_the_child_and_outlives_it(machine: Machine) -> None:
    limits = machine.scenario.with_name("limits.json")
    write_scenario(machine.scenario, cards(2), limits=str(limits))
    await machine.read()
    uuid = card(1)["uuid"]
    outcome = await machine.monitor.set_power_limit(uuid, 300.0, expected_w=450.0)
    assert (outcome.result, outcome.limit_w) == ("ok", 300.0)
    await machine.monitor.aclose()
    assert [gpu.power_limit_w.value for gpu in await machine.read()] == [450.0, 300.0]
    assert (await machine.monitor.set_power_limit(uuid, 450.0, expected_w=222.0)).result == "changed"
    assert fake.read_limits(limits) == {uuid: 300_000}


@pytest.mark.parametrize(("fault", "result"), [("crash", "error"), ("hang", "timeout")])
async def test_a_setter_that_takes_nvml_down_is_an_outcome_and_the_cards_stay(
    tmp_path: Path, fault: str, result: str
) -> None:
    machine = Machine(tmp_path, deadline_s=1.5)
    write_scenario(machine.scenario, [card(0, **{fault: "nvmlDeviceSetPowerManagementLimit"})])
    await machine.read()
    outcome = await machine.monitor.set_power_limit(card(0)["uuid"], 300.0)
    assert outcome.result == result
    assert outcome.detail
    assert powers(await machine.read(after_s=BACKOFF_S)) == {"0": READING_STATUS_OK}
    await machine.monitor.aclose()


async def test_without_a_driver_a_limit_is_an_error_with_the_reason(machine: Machine) -> None:
    write_scenario(machine.scenario, [], init_error=fake.LIBRARY_MISMATCH)
    outcome = await machine.monitor.set_power_limit(card(0)["uuid"], 300.0)
    assert outcome.result == "error"
    assert "needs a reboot" in outcome.detail


# ---- what changes under a running agent


async def test_a_machine_that_slept_has_its_driver_opened_anew_and_the_daemon_told(tmp_path: Path) -> None:
    """Mutation tried: without `_stale`, the child goes on with handles from before the sleep."""
    slept: list[float] = []
    awake = Clock()
    machine = Machine(tmp_path, on_resumed=slept.append, awake_clock=awake)
    write_scenario(machine.scenario, [card(0, crash="nvmlDeviceGetPowerUsage"), card(1)])
    await machine.read()
    assert slept == []
    write_scenario(machine.scenario, cards(2))
    # The quarantine of before goes with it.
    awake.now += 1.0
    assert powers(await machine.read(after_s=60.0)) == {"0": READING_STATUS_OK, "1": READING_STATUS_OK}
    assert slept == [59.0]
    write_scenario(machine.scenario, cards(3))
    awake.now += 5.0
    assert len(await machine.read(after_s=5.0)) == 2
    assert slept == [59.0]
    assert len(await machine.read(after_s=60.0)) == 3
    assert slept == [59.0, 60.0]
    await machine.monitor.aclose()


async def test_a_card_that_comes_later_is_found_though_the_open_library_does_not_know_it(machine: Machine) -> None:
    """An external card, or one bound to the driver later. Mutation tried: without the comparison of devices."""
    put_to_sleep(machine.sysfs, 0, "active")
    machine.monitor.set_pace(Pace.WORKING)
    write_scenario(machine.scenario, cards(1))
    assert powers(await machine.read()) == {"0": READING_STATUS_OK}
    write_scenario(machine.scenario, cards(2))
    assert powers(await machine.read()) == {"0": READING_STATUS_OK}
    put_to_sleep(machine.sysfs, 1, "active")
    assert powers(await machine.read()) == {"0": READING_STATUS_OK, "1": READING_STATUS_OK}


async def test_a_card_in_use_is_read_at_every_call_though_it_sleeps_at_times(machine: Machine) -> None:
    """Mutation tried: without `_busy`, a give-back on a laptop is confirmed by readings of a minute ago."""
    put_to_sleep(machine.sysfs, 0, "active")
    write_scenario(machine.scenario, [card(0, compute=[[os.getpid(), 1]])])
    await machine.read()
    write_scenario(machine.scenario, [card(0)])
    await machine.read()
    assert machine.monitor.readings[0].details != CardDetails(processes=())
    stale, _ = machine.monitor.observe()
    machine.monitor.set_pace(Pace.CONFIRMING)
    await machine.read()
    fresh, _ = machine.monitor.observe()
    assert isinstance(stale, CardUseObserved)
    assert isinstance(fresh, CardUseObserved)
    assert stale.processes != ()
    assert fresh.processes == ()


async def test_nobody_uses_a_sleeping_card(machine: Machine) -> None:
    put_to_sleep(machine.sysfs, 0, "active")
    write_scenario(machine.scenario, cards(1))
    await machine.read()
    put_to_sleep(machine.sysfs, 0, "suspended")
    await machine.read(after_s=60.0)
    assert machine.monitor.observe()[0] == CardUseObserved(card(0)["uuid"], (), None, None)


async def test_a_faster_pace_ends_the_wait_that_goes_on(tmp_path: Path) -> None:
    monitor = HardwareMonitor(fake_child(tmp_path / "scenario.json"), sysfs=tmp_path)
    write_scenario(tmp_path / "scenario.json", cards(1))
    await monitor.snapshot()
    waiting = asyncio.create_task(monitor.wait())
    await asyncio.sleep(0)
    monitor.set_pace(Pace.CONFIRMING)
    async with asyncio.timeout(5.0):
        await waiting
        await monitor.wait()
    await monitor.aclose()
