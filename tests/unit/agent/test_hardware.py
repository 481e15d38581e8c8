"""What is read from graphics cards, and what becomes of a reading that fails."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import testing_hardware as fake
from agent.hardware import read_power_states
from agent.nvml import Nvml, Unavailable, query
from agent.nvml_child import CARD, END, HEADER, NOTE, TOUCHING, serve
from agent.testing_hardware import GIB, FakeNvml, card, cards
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_DENIED,
    READING_STATUS_ERROR,
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_TIMEOUT,
    READING_STATUS_UNSUPPORTED,
)


def read(module: FakeNvml, index: int = 0, asleep: frozenset[str] = frozenset()) -> capability_pb2.Gpu:
    return Nvml(module).read_card(index, asleep)


def statuses(gpu: capability_pb2.Gpu) -> set[int]:
    return {getattr(gpu, field.name).status for field in gpu.DESCRIPTOR.fields if field.message_type is not None}


def test_a_healthy_card_has_every_reading_in_its_unit() -> None:
    gpu = read(FakeNvml(cards(1)))
    assert statuses(gpu) == {READING_STATUS_OK}
    assert gpu.name.value == "NVIDIA GeForce RTX 4090"
    assert gpu.compute_capability.value == "8.9"
    assert (gpu.memory_total_bytes.value, gpu.memory_free_bytes.value) == (24 * GIB, 20 * GIB)
    assert (gpu.power_draw_w.value, gpu.power_limit_w.value) == (61.5, 450.0)
    assert (gpu.power_limit_min_w.value, gpu.power_limit_max_w.value) == (150.0, 600.0)
    assert (gpu.pcie_generation.value, gpu.pcie_generation_max.value, gpu.pcie_width.value) == (1, 4, 16)
    assert not gpu.unified_memory


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (fake.NOT_SUPPORTED, READING_STATUS_UNSUPPORTED),
        (fake.FUNCTION_NOT_FOUND, READING_STATUS_UNSUPPORTED),
        (fake.NO_PERMISSION, READING_STATUS_DENIED),
        (fake.TIMEOUT, READING_STATUS_TIMEOUT),
        (fake.GPU_IS_LOST, READING_STATUS_LOST),
        (fake.UNKNOWN, READING_STATUS_ERROR),
    ],
)
def test_each_error_code_becomes_a_status_of_its_reading_alone(code: int, status: int) -> None:
    gpu = read(FakeNvml([card(0, errors={"nvmlDeviceGetTotalEnergyConsumption": code})]))
    assert gpu.energy_mj == capability_pb2.NumberReading(status=status)  # type: ignore[arg-type]
    assert gpu.power_draw_w.status == READING_STATUS_OK


@pytest.mark.parametrize("error", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), fake.NVMLLibraryMismatchError()])
def test_an_exception_that_is_no_nvml_error_is_an_error_reading(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert query(fail).status == READING_STATUS_ERROR


def test_a_wsl_card_has_neither_utilisation_nor_a_readable_name() -> None:
    gpu = read(FakeNvml([card(0, name_hex="fffe41", errors={"nvmlDeviceGetUtilizationRates": fake.NOT_SUPPORTED})]))
    assert gpu.name.status == READING_STATUS_ERROR
    assert gpu.utilization_percent.status == READING_STATUS_UNSUPPORTED
    assert gpu.uuid.status == READING_STATUS_OK


def test_names_in_bytes_as_older_bindings_give_them_are_decoded() -> None:
    module = FakeNvml([card(0) | {"uuid": b"GPU-1", "name": b"Tesla \xff"}], driver=b"470.1")
    gpu = read(module)
    assert (gpu.uuid.value, gpu.name.value, gpu.driver_version.value) == ("GPU-1", "Tesla �", "470.1")


def test_a_value_that_is_not_available_is_unsupported_and_not_zero() -> None:
    """WDDM and some laptops. Mutation tried: `float(value or 0)` in `_number` reports 0 W."""
    assert read(FakeNvml([card(0, power_mw=None)])).power_draw_w.status == READING_STATUS_UNSUPPORTED


def test_one_lost_card_hides_no_other() -> None:
    module = FakeNvml([card(0), card(1, errors={"*": fake.GPU_IS_LOST}), card(2)])
    nvml = Nvml(module)
    gpus = [nvml.read_card(index) for index in range(nvml.count())]
    assert [statuses(gpu) for gpu in gpus] == [{READING_STATUS_OK}, {READING_STATUS_LOST}, {READING_STATUS_OK}]


def test_memory_falls_back_to_the_first_version_of_its_structure() -> None:
    for code in (fake.FUNCTION_NOT_FOUND, fake.NOT_SUPPORTED, 25):
        gpu = read(FakeNvml([card(0, errors={"nvmlDeviceGetMemoryInfo_v2": code})]))
        assert gpu.memory_total_bytes.value == 24 * GIB


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_total": 0, "memory_free": 0},
        {
            "name": "NVIDIA GB10",
            "errors": {
                "nvmlDeviceGetMemoryInfo": fake.NOT_SUPPORTED,
                "nvmlDeviceGetMemoryInfo_v2": fake.NOT_SUPPORTED,
            },
        },
    ],
)
def test_a_part_with_unified_memory_reports_the_hosts(changes: dict[str, Any]) -> None:
    gpu = read(FakeNvml([card(0, **changes)]))
    assert gpu.unified_memory
    assert gpu.memory_total_bytes.value > 0


def test_memory_that_a_discrete_card_does_not_tell_is_not_taken_for_the_hosts() -> None:
    errors = {"nvmlDeviceGetMemoryInfo": fake.NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo_v2": fake.NOT_SUPPORTED}
    gpu = read(FakeNvml([card(0, errors=errors)]))
    assert not gpu.unified_memory
    assert gpu.memory_total_bytes.status == READING_STATUS_UNSUPPORTED


@pytest.mark.parametrize("missing", ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"])
def test_a_temperature_is_found_under_its_old_and_its_new_name(missing: str) -> None:
    assert read(FakeNvml(cards(1), missing=[missing])).temperature_c.value == 41


def test_a_function_that_the_library_lacks_is_an_unsupported_reading() -> None:
    gpu = read(FakeNvml(cards(1), missing=["nvmlDeviceGetTotalEnergyConsumption"]))
    assert gpu.energy_mj.status == READING_STATUS_UNSUPPORTED


def test_a_sleeping_card_is_asked_nothing_that_wakes_it() -> None:
    module = FakeNvml(cards(1))
    gpu = read(module, asleep=frozenset({"0000:01:00.0"}))
    assert statuses(gpu) == {READING_STATUS_UNSUPPORTED}
    assert module.calls == ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo"]


@pytest.mark.parametrize(
    ("code", "words", "lasting"),
    [
        (fake.LIBRARY_NOT_FOUND, "no NVIDIA driver", True),
        (fake.DRIVER_NOT_LOADED, "no NVIDIA driver", True),
        (fake.LIBRARY_MISMATCH, "needs a reboot", True),
        (-1, "needs a reboot", True),
        (fake.NO_PERMISSION, "no permission", True),
        (fake.NOT_READY, "not ready yet", False),
        (fake.UNKNOWN, "recreate the container", False),
        (fake.GPU_IS_LOST, "fallen off the bus", False),
        (21, "code 21", False),
    ],
)
def test_a_library_that_does_not_start_says_why_and_whether_asking_soon_helps(
    code: int, words: str, lasting: bool
) -> None:
    with pytest.raises(Unavailable, match=words) as caught:
        Nvml(FakeNvml(init_error=code))
    assert caught.value.lasting is lasting


def test_the_impostor_package_is_refused_by_name() -> None:
    with pytest.raises(Unavailable, match="uninstall the package pynvml"):
        Nvml(SimpleNamespace(nvmlInit=lambda: None))


def ask(module: FakeNvml, *requests: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    answers = io.BytesIO()
    serve(module, io.BytesIO(b"".join(json.dumps(request).encode() + b"\n" for request in requests)), answers)
    answers.seek(0)
    frames = []
    while header := answers.read(HEADER.size):
        tag, size = HEADER.unpack(header)
        frames.append((tag, answers.read(size)))
    return frames


def test_the_child_names_each_card_before_it_touches_it() -> None:
    frames = ask(FakeNvml(cards(3)), {"skipped": [1], "asleep": []})
    assert [tag for tag, _ in frames] == [TOUCHING, CARD, TOUCHING, CARD, END]
    assert [payload for tag, payload in frames if tag == TOUCHING] == [b"0", b"2"]
    assert frames[-1] == (END, b"3")


def test_the_child_answers_with_a_note_where_there_is_no_list() -> None:
    request: dict[str, Any] = {"skipped": [], "asleep": []}
    for module in (FakeNvml(init_error=fake.LIBRARY_NOT_FOUND), FakeNvml(count_error=fake.UNKNOWN)):
        frames = ask(module, request, request)
        assert [tag for tag, _ in frames] == [NOTE, NOTE]


def write_device(root: Path, address: str, **files: str) -> None:
    device = root / address
    (device / "power").mkdir(parents=True)
    for name, value in files.items():
        (device / name.replace("power_", "power/", 1)).write_text(value + "\n")


def test_power_states_are_read_of_nvidias_display_devices_only(tmp_path: Path) -> None:
    nvidia = {"vendor": "0x10de", "class": "0x030000"}
    write_device(tmp_path, "0000:01:00.0", **nvidia, power_runtime_status="suspended", power_control="auto")
    write_device(
        tmp_path,
        "0000:02:00.0",
        **nvidia,
        power_runtime_status="active",
        power_control="auto",
        power_runtime_suspended_time="81234",
    )
    write_device(tmp_path, "0000:03:00.0", **nvidia, power_runtime_status="active", power_control="on")
    # The card's own sound device, and another maker's card.
    write_device(tmp_path, "0000:01:00.1", **{"vendor": "0x10de", "class": "0x040300"})
    write_device(tmp_path, "0000:05:00.0", **{"vendor": "0x1002", "class": "0x030000"})
    asleep, sleepers, awake = read_power_states(tmp_path)
    assert asleep == {"0000:01:00.0"}
    assert sleepers == {"0000:02:00.0"}
    assert awake == {"0000:02:00.0", "0000:03:00.0"}


def test_a_machine_without_a_pci_bus_has_no_power_states(tmp_path: Path) -> None:
    assert read_power_states(tmp_path / "absent") == (frozenset(), frozenset(), frozenset())
