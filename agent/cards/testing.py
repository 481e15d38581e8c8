"""Graphics cards for tests: a stand-in for the module `pynvml`, driven by data, and a child that serves it.

A card with a "model" draws and works as its power limit allows, which is how a
calibration is tried without one. Limits that are set are kept in a file, as a
driver keeps them when the process that set them is gone.

python -m agent.cards.testing SCENARIO PARENT     as `agent.cards.nvml_child`, with the machine of SCENARIO (JSON)
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent.cards.nvml_child import run
from agent.cards.nvml_processes import KERNEL
from agent.clock import monotonic_s

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIBRARY_MISMATCH = 18
NOT_READY = 27
UNKNOWN = 999

GIB = 1024**3


class NVMLError(Exception):
    """As pynvml's: the code is in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class NVMLLibraryMismatchError(Exception):
    """As pynvml's: no NVMLError, and without a code."""


def card(number: int, **changes: Any) -> dict[str, Any]:
    """Return the data of a card of 2023 in good health; `changes` replace entries.

    `errors` maps a function's name to the code it fails with; "*" stands for every function. `crash` and `hang` name
    the function that ends or stops the process.
    """
    data: dict[str, Any] = {
        "uuid": f"GPU-{number:08d}-0000-0000-0000-000000000000",
        "name": "NVIDIA GeForce RTX 4090",
        "bus": number + 1,
        "memory_total": 24 * GIB,
        "memory_free": 20 * GIB,
        "capability": [8, 9],
        "power_mw": 61_500,
        "limit_mw": 450_000,
        "limits_mw": [150_000, 600_000],
        "limit_default_mw": 450_000,
        "energy_mj": 123_456_789,
        "temperature_c": 41,
        "thresholds_c": {"0": 98, "1": 95},
        "reasons": 1,
        # Rows of [pid, memory in bytes or None].
        "compute": [],
        "graphics": [],
        # Rows of [power limit in W, tokens per second, W drawn], by rising limit.
        "model": [],
        "clock_mhz": {"0": 2520, "2": 10501},
        "utilization": 3,
        "pcie_generation": 1,
        "pcie_generation_max": 4,
        "pcie_width": 16,
        "errors": {},
        "crash": "",
        "hang": "",
    }
    return data | changes


def cards(count: int) -> list[dict[str, Any]]:
    return [card(number) for number in range(count)]


class FakeNvml:
    """What `pynvml` looks like on a machine with these cards.

    Args:
        init_error: the code that nvmlInit fails with; -1 stands for the mismatch error that has none.
        missing: functions that this version of the library lacks.
        limits: file that keeps the power limits that were set, in mW by uuid.
        same_namespace: whether process ids are those of the driver.
    """

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    nvmlMemory_v2 = 33554472

    def __init__(
        self,
        cards: Sequence[Mapping[str, Any]] = (),
        *,
        init_error: int = 0,
        count_error: int = 0,
        driver: Any = "580.65.06",
        missing: Sequence[str] = (),
        limits: str = "",
        same_namespace: bool = True,
    ) -> None:
        self.cards = [dict(card) for card in cards]
        self.kernel = replace(KERNEL, same_namespace=lambda: same_namespace)
        self._limits = Path(limits) if limits else None
        self._drawn_until = monotonic_s()
        for uuid, limit_mw in self._limits_set().items():
            for card in self.cards:
                if card["uuid"] == uuid:
                    card["limit_mw"] = limit_mw
        self.calls: list[str] = []
        self._init_error = init_error
        self._count_error = count_error
        self._driver = driver
        self._missing = frozenset(missing)

    def _nvmlGetFunctionPointer(self, name: str) -> Any:
        """Only NVIDIA's own module has this; it is how impostors are told. Here no function is behind it."""
        raise NVMLError(FUNCTION_NOT_FOUND)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_missing"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        if self._init_error == -1:
            raise NVMLLibraryMismatchError("unversioned function called with a newer library")
        if self._init_error:
            raise NVMLError(self._init_error)

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._driver

    def nvmlDeviceGetCount(self) -> int:
        if self._count_error:
            raise NVMLError(self._count_error)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Mapping[str, Any]:
        self._ask(self.cards[index], "nvmlDeviceGetHandleByIndex", lambda data: None)
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        for data in self.cards:
            if data["uuid"] == uuid:
                self._ask(data, "nvmlDeviceGetHandleByUUID", lambda data: None)
                return data
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetUUID", lambda data: data["uuid"])

    def nvmlDeviceGetName(self, handle: Mapping[str, Any]) -> Any:
        def decode(data: Mapping[str, Any]) -> Any:
            # pynvml decodes before it returns, and raises where that fails.
            return bytes.fromhex(data["name_hex"]).decode() if "name_hex" in data else data["name"]

        return self._ask(handle, "nvmlDeviceGetName", decode)

    def nvmlDeviceGetPciInfo(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(
            handle, "nvmlDeviceGetPciInfo", lambda data: SimpleNamespace(domain=0, bus=data["bus"], device=0)
        )

    def nvmlDeviceGetCudaComputeCapability(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetCudaComputeCapability", lambda data: tuple(data["capability"]))

    def nvmlDeviceGetMemoryInfo(self, handle: Mapping[str, Any], version: int | None = None) -> Any:
        name = "nvmlDeviceGetMemoryInfo" if version is None else "nvmlDeviceGetMemoryInfo_v2"
        return self._ask(
            handle,
            name,
            lambda data: SimpleNamespace(
                total=data["memory_total"],
                free=data["memory_free"],
                used=data.get("memory_used", max(0, data["memory_total"] - data["memory_free"])),
            ),
        )

    def nvmlDeviceGetPowerUsage(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetPowerUsage", _power_mw)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetEnforcedPowerLimit", lambda data: data["limit_mw"])

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetPowerManagementLimitConstraints", lambda data: data["limits_mw"])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Mapping[str, Any]) -> Any:
        self._draw()
        return self._ask(handle, "nvmlDeviceGetTotalEnergyConsumption", lambda data: data["energy_mj"])

    def nvmlDeviceGetPowerManagementLimit(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetPowerManagementLimit", lambda data: data["limit_mw"])

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetPowerManagementDefaultLimit", lambda data: data["limit_default_mw"])

    def nvmlDeviceSetPowerManagementLimit(self, handle: dict[str, Any], limit_mw: int) -> None:
        self._ask(handle, "nvmlDeviceSetPowerManagementLimit", lambda data: None)
        least, most = handle["limits_mw"]
        if not least <= limit_mw <= most:
            raise NVMLError(INVALID_ARGUMENT)
        if handle.get("limit_stuck"):
            return
        self._draw()
        handle["limit_mw"] = limit_mw
        if self._limits is not None:
            # Whole, since others read it meanwhile.
            fresh = self._limits.with_suffix(".new")
            fresh.write_text(json.dumps({**self._limits_set(), handle["uuid"]: limit_mw}))
            fresh.replace(self._limits)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetComputeRunningProcesses_v3", lambda data: _processes(data["compute"]))

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetComputeRunningProcesses_v2", lambda data: _processes(data["compute"]))

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetGraphicsRunningProcesses_v3", lambda data: _processes(data["graphics"]))

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetGraphicsRunningProcesses_v2", lambda data: _processes(data["graphics"]))

    def nvmlDeviceGetTemperatureThreshold(self, handle: Mapping[str, Any], threshold: int) -> Any:
        return self._ask(handle, "nvmlDeviceGetTemperatureThreshold", lambda data: data["thresholds_c"][str(threshold)])

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetCurrentClocksEventReasons", lambda data: data["reasons"])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda data: data["reasons"])

    def nvmlDeviceGetTemperatureV(self, handle: Mapping[str, Any], sensor: int) -> Any:
        return self._ask(handle, "nvmlDeviceGetTemperatureV", lambda data: data["temperature_c"])

    def nvmlDeviceGetTemperature(self, handle: Mapping[str, Any], sensor: int) -> Any:
        return self._ask(handle, "nvmlDeviceGetTemperature", lambda data: data["temperature_c"])

    def nvmlDeviceGetClockInfo(self, handle: Mapping[str, Any], kind: int) -> Any:
        return self._ask(handle, "nvmlDeviceGetClockInfo", lambda data: data["clock_mhz"][str(kind)])

    def nvmlDeviceGetUtilizationRates(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(
            handle, "nvmlDeviceGetUtilizationRates", lambda data: SimpleNamespace(gpu=data["utilization"], memory=0)
        )

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetCurrPcieLinkGeneration", lambda data: data["pcie_generation"])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetMaxPcieLinkGeneration", lambda data: data["pcie_generation_max"])

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetCurrPcieLinkWidth", lambda data: data["pcie_width"])

    def _draw(self) -> None:
        """Let the energy counters of cards with a model go on to now."""
        now = monotonic_s()
        for data in self.cards:
            if data["model"]:
                data["energy_mj"] += int(_power_mw(data) * (now - self._drawn_until))
        self._drawn_until = now

    def _limits_set(self) -> dict[str, int]:
        return read_limits(self._limits) if self._limits is not None else {}

    def _ask(self, data: Mapping[str, Any], name: str, answer: Callable[[Mapping[str, Any]], Any]) -> Any:
        self.calls.append(name)
        if data["crash"] == name:
            os.kill(os.getpid(), signal.SIGSEGV)
        if data["hang"] == name:
            signal.pause()
        code = data["errors"].get(name, data["errors"].get("*", 0))
        if code:
            raise NVMLError(code)
        return answer(data)


def read_limits(path: Path) -> dict[str, int]:
    """Return the limits that were set, in mW by uuid, from the file that `FakeNvml` keeps them in."""
    limits: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return limits


def model_at(model: Sequence[Sequence[float]], limit_w: float) -> tuple[float, float]:
    """Return tokens per second and W drawn under a power limit, between the rows of a card's model."""
    if limit_w <= model[0][0]:
        return model[0][1], model[0][2]
    for (low_w, low_rate, low_drawn), (high_w, high_rate, high_drawn) in pairwise(model):
        if limit_w <= high_w:
            share = (limit_w - low_w) / (high_w - low_w)
            return low_rate + share * (high_rate - low_rate), low_drawn + share * (high_drawn - low_drawn)
    return model[-1][1], model[-1][2]


def _power_mw(data: Mapping[str, Any]) -> Any:
    return int(model_at(data["model"], data["limit_mw"] / 1000)[1] * 1000) if data["model"] else data["power_mw"]


def _processes(rows: Sequence[Sequence[Any]]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory_bytes) for pid, memory_bytes in rows]


def fake_child(scenario: Path) -> tuple[str, ...]:
    """Return the command line of a child whose machine is described in a file: FakeNvml's arguments as JSON.

    The file is read when the child starts, so that a test can change the machine between two of them.
    """
    return (sys.executable, "-m", "agent.cards.testing", str(scenario))


def write_scenario(path: Path, cards: Sequence[Mapping[str, Any]], **arguments: Any) -> None:
    path.write_text(json.dumps({"cards": cards, **arguments}))


if __name__ == "__main__":
    arguments = json.loads(Path(sys.argv[1]).read_text())
    fake = FakeNvml(arguments.pop("cards"), **arguments)
    run(fake, int(sys.argv[2]), fake.kernel)
