"""What is read from graphics cards, and what becomes of a reading that fails."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agent.cards import testing as fake
from agent.cards.details import SLEEPING, CardDetails, GpuProcess, LimitOutcome, LimitRequest
from agent.cards.nvml import Nvml
from agent.cards.nvml_child import CARD, DETAILS, END, HEADER, LIMIT, NOTE, TOUCHING, serve
from agent.cards.nvml_processes import Kernel
from agent.cards.nvml_query import Unavailable, query
from agent.cards.pci_devices import read_power_states
from agent.cards.testing import GIB, FakeNvml, card, cards
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
    return Nvml(module, module.kernel).read_card(index, asleep)[0]


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
    gpus = [nvml.read_card(index)[0] for index in range(nvml.count())]
    assert [statuses(gpu) for gpu in gpus] == [{READING_STATUS_OK}, {READING_STATUS_LOST}, {READING_STATUS_OK}]


def test_memory_falls_back_to_the_first_version_of_its_structure() -> None:
    for code in (fake.FUNCTION_NOT_FOUND, fake.NOT_SUPPORTED, 25):
        gpu = read(FakeNvml([card(0, errors={"nvmlDeviceGetMemoryInfo_v2": code})]))
        assert gpu.memory_total_bytes.value == 24 * GIB


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "NVIDIA Thor", "memory_total": 0, "memory_free": 0},
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


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"memory_total": 0, "memory_free": 0}, READING_STATUS_UNSUPPORTED),
        ({"memory_total": 2**64 - 1, "memory_free": 0}, READING_STATUS_ERROR),
        ({"memory_total": 255 * 1024**2, "memory_free": 0}, READING_STATUS_ERROR),
        ({"memory_free": 25 * GIB}, READING_STATUS_ERROR),
        ({"memory_used": 2**63}, READING_STATUS_ERROR),
    ],
)
def test_memory_that_cannot_be_is_unknown_and_no_number(changes: dict[str, Any], status: int) -> None:
    """Mutation tried: without the check of `free`, a card with 24 GiB offers 25."""
    gpu = read(FakeNvml([card(0, **changes)]))
    assert gpu.memory_total_bytes.status == gpu.memory_free_bytes.status == status
    assert not gpu.memory_total_bytes.value
    assert not gpu.memory_free_bytes.value
    assert not gpu.unified_memory


def test_an_energy_counter_that_stays_at_zero_is_none() -> None:
    """Mutation tried: `_number` for `_positive` reports an energy of 0 for ever (mlco2/codecarbon#1316)."""
    assert read(FakeNvml([card(0, energy_mj=0)])).energy_mj.status == READING_STATUS_UNSUPPORTED


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
    lines = b"".join(json.dumps(request).encode() + b"\n" for request in requests)
    serve(module, io.BytesIO(lines), answers, module.kernel)
    answers.seek(0)
    frames = []
    while header := answers.read(HEADER.size):
        tag, size = HEADER.unpack(header)
        frames.append((tag, answers.read(size)))
    return frames


def test_the_child_names_each_card_before_it_touches_it() -> None:
    frames = ask(FakeNvml(cards(3)), {"skipped": [1], "asleep": [], "marker": ""})
    assert [tag for tag, _ in frames] == [TOUCHING, CARD, DETAILS, TOUCHING, CARD, DETAILS, END]
    assert [payload for tag, payload in frames if tag == TOUCHING] == [b"0", b"2"]
    assert frames[-1] == (END, b"3")


def test_the_child_answers_with_a_note_where_there_is_no_list() -> None:
    request: dict[str, Any] = {"skipped": [], "asleep": [], "marker": ""}
    for module in (FakeNvml(init_error=fake.LIBRARY_NOT_FOUND), FakeNvml(count_error=fake.UNKNOWN)):
        frames = ask(module, request, request)
        assert [tag for tag, _ in frames] == [NOTE, NOTE]


def test_a_card_that_cannot_be_opened_has_no_details() -> None:
    frames = ask(FakeNvml([card(0, errors={"*": fake.GPU_IS_LOST})]), {"skipped": [], "asleep": [], "marker": ""})
    assert [tag for tag, _ in frames] == [TOUCHING, CARD, END]


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


# ---- what the owner's machine alone needs to know


def details(module: FakeNvml, marker: str = "", kernel: Kernel | None = None) -> CardDetails:
    read_details = Nvml(module, kernel or module.kernel).read_card(0, marker=marker)[1]
    assert read_details is not None
    return read_details


def kernel_with(*pids: int, ours: tuple[int, ...] = (), same_namespace: bool = True) -> Kernel:
    """A machine on which these processes run and no other."""
    return Kernel(
        same_namespace=lambda: same_namespace,
        exists=lambda pid: pid in pids,
        name=lambda pid: f"program-{pid}",
        is_ours=lambda pid, marker: marker == "mark/" and pid in ours,
    )


def test_the_processes_of_a_card_are_listed_once_with_their_kind_and_whose_they_are() -> None:
    module = FakeNvml([card(0, compute=[[10, GIB], [11, None]], graphics=[[11, None], [12, 2**64 - 1]])])
    processes = details(module, "mark/", kernel_with(10, 11, 12, ours=(10,))).processes
    assert processes == (
        GpuProcess(10, "program-10", "compute", GIB, True),
        GpuProcess(11, "program-11", "both", None, False),
        GpuProcess(12, "program-12", "graphics", None, False),
    )


def test_a_process_that_the_kernel_does_not_know_any_more_is_left_out() -> None:
    module = FakeNvml([card(0, compute=[[10, GIB], [11, GIB]])])
    processes = details(module, kernel=kernel_with(11)).processes
    assert processes is not None
    assert [process.pid for process in processes] == [11]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([[10, 30 * GIB]], "more memory than the card has"),
        ([[998, 1], [999, 1]], "no process of the list exists"),
        ([[0, 1], [10, 1]], "no process has the number 0"),
        ([[10 + number, 1] for number in range(513)], "more contexts than fit"),
    ],
)
def test_a_list_that_cannot_be_right_is_no_list(rows: list[list[int]], why: str) -> None:
    """A structure of the wrong version (NVIDIA/go-nvml#75). Mutation tried: `_implausible` that returns False."""
    told = details(FakeNvml([card(0, compute=rows)]), kernel=kernel_with(10))
    assert told.processes is None, why
    assert not told.processes_absent
    assert "cannot be right" in told.processes_note


@pytest.mark.parametrize("code", [fake.FUNCTION_NOT_FOUND, 25])
def test_an_older_driver_is_asked_for_the_older_list(code: int) -> None:
    errors = {"nvmlDeviceGetComputeRunningProcesses_v3": code, "nvmlDeviceGetGraphicsRunningProcesses_v3": code}
    processes = details(FakeNvml([card(0, compute=[[10, 1]], errors=errors)]), kernel=kernel_with(10)).processes
    assert processes is not None
    assert [process.pid for process in processes] == [10]


@pytest.mark.parametrize(
    ("code", "absent"), [(fake.NOT_SUPPORTED, True), (fake.UNKNOWN, False), (fake.FUNCTION_NOT_FOUND, True)]
)
def test_a_list_that_the_driver_does_not_have_is_not_an_empty_list(code: int, absent: bool) -> None:
    """WSL. Mutation tried: an empty tuple for None says that nobody uses the card."""
    names = [f"nvmlDeviceGetGraphicsRunningProcesses{version}" for version in ("_v2", "_v3")]
    told = details(FakeNvml([card(0, errors=dict.fromkeys(names, code))]))
    assert told.processes is None
    assert told.processes_absent is absent
    assert told.processes_note


def test_in_a_container_the_list_is_unknown_and_not_empty() -> None:
    told = details(FakeNvml([card(0, compute=[[10, 1]])]), kernel=kernel_with(10, same_namespace=False))
    assert told.processes is None
    assert told.processes_absent


def test_used_memory_is_the_lower_of_two_looks_so_that_a_growing_engine_looks_like_nobody_else() -> None:
    class Growing(FakeNvml):
        """Its engine takes 10 GiB while the processes are listed."""

        def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any) -> Any:
            self.cards[0]["memory_free"] -= 10 * GIB
            return super().nvmlDeviceGetGraphicsRunningProcesses_v3(handle)

    assert details(Growing(cards(1))).memory_used_bytes == 4 * GIB


def test_limits_and_reasons_are_read_under_their_old_and_new_names() -> None:
    for missing in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        told = details(FakeNvml([card(0, reasons=0x40)], missing=[missing]))
        assert told.clock_event_reasons == 0x40
    assert (told.slowdown_c, told.shutdown_c) == (95, 98)
    assert (told.power_limit_set_w, told.power_limit_default_w) == (450.0, 450.0)


def test_what_a_card_does_not_tell_of_itself_is_none_each_by_itself() -> None:
    errors = dict.fromkeys(
        (
            "nvmlDeviceGetTemperatureThreshold",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetPowerManagementLimit",
            "nvmlDeviceGetPowerManagementDefaultLimit",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetMemoryInfo_v2",
        ),
        fake.NOT_SUPPORTED,
    )
    told = details(FakeNvml([card(0, errors=errors)]))
    assert told == CardDetails(processes=())


def set_limit(module: FakeNvml, limit_w: int, expected_w: int | None = None, number: int = 0) -> LimitOutcome:
    expected_mw = None if expected_w is None else expected_w * 1000
    request = LimitRequest(uuid=card(number)["uuid"], limit_mw=limit_w * 1000, expected_mw=expected_mw)
    ((tag, payload),) = ask(module, {"set_power_limit": msgspec.to_builtins(request)})
    assert tag == LIMIT
    return msgspec.json.decode(payload, type=LimitOutcome)


def test_a_limit_is_set_and_read_back() -> None:
    module = FakeNvml(cards(1))
    assert set_limit(module, 300) == LimitOutcome(result="ok", limit_w=300.0)
    assert module.cards[0]["limit_mw"] == 300_000


def test_a_limit_that_somebody_else_changed_is_left_as_it_is() -> None:
    """Mutation tried: without the comparison, a restore overwrites what the owner has just set."""
    module = FakeNvml([card(0, limit_mw=222_000)])
    outcome = set_limit(module, 450, expected_w=300)
    assert (outcome.result, outcome.limit_w) == ("changed", 222.0)
    assert module.cards[0]["limit_mw"] == 222_000


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"errors": {"nvmlDeviceSetPowerManagementLimit": fake.NO_PERMISSION}}, "denied"),
        ({"errors": {"nvmlDeviceSetPowerManagementLimit": fake.NOT_SUPPORTED}}, "unsupported"),
        ({"errors": {"nvmlDeviceSetPowerManagementLimit": fake.UNKNOWN}}, "error"),
        ({"errors": {"nvmlDeviceGetPowerManagementLimit": fake.NOT_SUPPORTED}}, "unsupported"),
        ({"errors": {"*": fake.GPU_IS_LOST}}, "lost"),
        ({"errors": {"nvmlDeviceSetPowerManagementLimit": fake.TIMEOUT}}, "timeout"),
        ({"limits_mw": [350_000, 450_000]}, "out_of_range"),
        ({"limit_stuck": True}, "unsupported"),
        ({"uuid": "GPU-another"}, "lost"),
    ],
)
def test_a_limit_that_cannot_be_set_says_why_and_changes_nothing(changes: dict[str, Any], result: str) -> None:
    module = FakeNvml([card(0, **changes)])
    outcome = set_limit(module, 300)
    assert outcome.result == result
    assert outcome.detail
    assert module.cards[0]["limit_mw"] == 450_000


def test_a_card_that_fell_asleep_keeps_its_uuid_and_is_asked_for_nothing_else() -> None:
    module = FakeNvml(cards(1))
    nvml = Nvml(module, module.kernel)
    nvml.read_card(0)
    module.calls.clear()
    gpu, told = nvml.read_card(0, frozenset({"0000:01:00.0"}))
    assert gpu.uuid.value == card(0)["uuid"]
    assert told == SLEEPING
    assert module.calls == ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo"]
