"""Graphics cards for tests: a stand-in for the module `pynvml`, driven by data, and a child that serves it.

python -m agent.testing_hardware SCENARIO PARENT     as `agent.nvml_child`, with the machine of SCENARIO (JSON)
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent.nvml_child import run

NOT_SUPPORTED = 3
NO_PERMISSION = 4
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
        "energy_mj": 123_456_789,
        "temperature_c": 41,
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
    ) -> None:
        self.cards = cards
        self.calls: list[str] = []
        self._init_error = init_error
        self._count_error = count_error
        self._driver = driver
        self._missing = frozenset(missing)

    def _nvmlGetFunctionPointer(self, name: str) -> None:
        """Only NVIDIA's own module has this; it is how impostors are told."""

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
            handle, name, lambda data: SimpleNamespace(total=data["memory_total"], free=data["memory_free"])
        )

    def nvmlDeviceGetPowerUsage(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetPowerUsage", lambda data: data["power_mw"])

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetEnforcedPowerLimit", lambda data: data["limit_mw"])

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetPowerManagementLimitConstraints", lambda data: data["limits_mw"])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Mapping[str, Any]) -> Any:
        return self._ask(handle, "nvmlDeviceGetTotalEnergyConsumption", lambda data: data["energy_mj"])

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


def fake_child(scenario: Path) -> tuple[str, ...]:
    """Return the command line of a child whose machine is described in a file: FakeNvml's arguments as JSON.

    The file is read when the child starts, so that a test can change the machine between two of them.
    """
    return (sys.executable, "-m", "agent.testing_hardware", str(scenario))


def write_scenario(path: Path, cards: Sequence[Mapping[str, Any]], **arguments: Any) -> None:
    path.write_text(json.dumps({"cards": cards, **arguments}))


if __name__ == "__main__":
    arguments = json.loads(Path(sys.argv[1]).read_text())
    run(FakeNvml(arguments.pop("cards"), **arguments), int(sys.argv[2]))
