"""The NVML child as a real process that crashes, hangs and comes back with another machine."""

import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent import testing_hardware as fake
from agent.hardware import (
    BACKOFF_S,
    LASTING_RETRY_S,
    QUARANTINE_S,
    RESTART_BUDGET,
    RESTART_WINDOW_S,
    HardwareMonitor,
)
from agent.testing_hardware import card, cards, fake_child, write_scenario
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

    def __init__(self, directory: Path, deadline_s: float = 20.0) -> None:
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
            awake_clock=self.clock,
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
