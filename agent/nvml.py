"""Reading graphics cards through NVML. Every call of NVML in the project goes through `query`.

NVML is asked card by card and reading by reading: what a card does not offer,
what needs a permission and what fails is a status beside the value, and none
of it hides another reading or another card. Cards are joined by uuid; an index
is only valid within one listing.

This module runs in the watched child (`agent.nvml_child`), because NVML has
crashed and hung its callers when a card was lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import psutil

from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_DENIED,
    READING_STATUS_ERROR,
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_TIMEOUT,
    READING_STATUS_UNSUPPORTED,
    NumberReading,
    TextReading,
)

# Parts whose memory is the host's: NVML answers "not supported" or a total of 0 there (ollama/ollama PR#12619).
UNIFIED_MEMORY_NAMES = ("GB10", "Thor", "Orin", "Xavier", "Tegra", "Jetson")

# nvmlReturn_t, from nvml.h.
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_DRIVER_NOT_LOADED = 9
_TIMEOUT = 10
_LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_LIBRARY_MISMATCH = 18
_ARGUMENT_VERSION_MISMATCH = 25
_NOT_READY = 27
_UNKNOWN = 999

_STATUS_OF_CODE = {
    _NOT_SUPPORTED: READING_STATUS_UNSUPPORTED,
    _FUNCTION_NOT_FOUND: READING_STATUS_UNSUPPORTED,
    # An older driver that knows a structure's earlier version only.
    _ARGUMENT_VERSION_MISMATCH: READING_STATUS_UNSUPPORTED,
    _NO_PERMISSION: READING_STATUS_DENIED,
    _TIMEOUT: READING_STATUS_TIMEOUT,
    _GPU_IS_LOST: READING_STATUS_LOST,
    _RESET_REQUIRED: READING_STATUS_LOST,
}

# nvmlTemperatureSensors_t, nvmlClockType_t.
_SENSOR_CORE = 0
_CLOCK_GRAPHICS = 0
_CLOCK_MEMORY = 2

_MILLIWATTS_PER_WATT = 1000.0

ReadingStatus: TypeAlias = "capability_pb2.ReadingStatus.ValueType"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of NVML: `value` counts only with status OK."""

    value: Any
    status: ReadingStatus


class Unavailable(Exception):
    """NVML as a whole cannot be used; `note` says why and what to do.

    `lasting` is set where only a reboot or an installation changes it, so that asking again soon is pointless.
    """

    def __init__(self, note: str, *, lasting: bool) -> None:
        super().__init__(note)
        self.note = note
        self.lasting = lasting


def query(function: Callable[..., Any] | None, *arguments: object) -> Reading:
    """Call one NVML function and turn whatever happens into a reading.

    Args:
        function: None stands for a function that this version of the library lacks.
    """
    if function is None:
        return Reading(None, READING_STATUS_UNSUPPORTED)
    try:
        return Reading(function(*arguments), READING_STATUS_OK)
    except Exception as error:
        # NVMLError, its mismatch error that is none, decoding errors: none of them may end the listing.
        code = getattr(error, "value", None)
        status = _STATUS_OF_CODE.get(code, READING_STATUS_ERROR) if isinstance(code, int) else READING_STATUS_ERROR
        return Reading(None, status)


class Nvml:
    """The library, opened. `module` is `pynvml` of the distribution nvidia-ml-py, or a fake of it.

    Raises:
        Unavailable: it cannot be used on this machine.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        # The distribution named `pynvml` takes the same module name and returns bytes for strings in places.
        if not hasattr(module, "_nvmlGetFunctionPointer"):
            raise Unavailable(
                "the module pynvml is not NVIDIA's: uninstall the package pynvml and reinstall nvidia-ml-py",
                lasting=True,
            )
        try:
            module.nvmlInit()
        except Exception as error:
            raise _describe_init_error(error) from error
        self._driver_version = _text(query(self._function("nvmlSystemGetDriverVersion")))

    def count(self) -> int:
        """Return how many cards there are.

        Raises:
            Unavailable: it cannot be told.
        """
        reading = query(self._function("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"))
        if reading.status != READING_STATUS_OK:
            raise Unavailable("NVML does not list its cards: see the agent's log", lasting=False)
        return int(reading.value)

    def read_card(self, index: int, asleep: frozenset[str] = frozenset()) -> capability_pb2.Gpu:
        """Return the readings of one card; one that cannot be opened has the reason as the status of all of them.

        Args:
            asleep: PCI addresses ("0000:01:00.0") of cards that must not be woken.
        """
        handle = query(self._function("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"), index)
        if handle.status != READING_STATUS_OK:
            return blank_card(handle.status)
        if asleep and self._pci_address(handle.value) in asleep:
            # NVML keeps identities in memory, but any other query would wake the card.
            return blank_card(READING_STATUS_UNSUPPORTED)
        card = self._read_identity(handle.value)
        self._read_memory(handle.value, card)
        self._read_power(handle.value, card)
        self._read_activity(handle.value, card)
        return card

    def _read_identity(self, handle: Any) -> capability_pb2.Gpu:
        capability = query(self._function("nvmlDeviceGetCudaComputeCapability"), handle)
        if capability.status == READING_STATUS_OK:
            major, minor = capability.value
            capability = Reading(f"{major}.{minor}", READING_STATUS_OK)
        return capability_pb2.Gpu(
            uuid=_text(query(self._function("nvmlDeviceGetUUID"), handle)),
            name=_text(query(self._function("nvmlDeviceGetName"), handle)),
            compute_capability=_text(capability),
            driver_version=self._driver_version,
        )

    def _read_memory(self, handle: Any, card: capability_pb2.Gpu) -> None:
        function = self._function("nvmlDeviceGetMemoryInfo")
        # Version 2 tells the driver's reserve apart; the two count "free" differently, so one card uses one of them.
        version = getattr(self._module, "nvmlMemory_v2", None)
        memory = query(function, handle, version) if version is not None else query(None)
        if memory.status in (READING_STATUS_UNSUPPORTED, READING_STATUS_ERROR):
            memory = query(function, handle)
        unified_part = any(name in card.name.value for name in UNIFIED_MEMORY_NAMES)
        answered = memory.status == READING_STATUS_OK
        if (answered and memory.value.total == 0) or (memory.status == READING_STATUS_UNSUPPORTED and unified_part):
            host = psutil.virtual_memory()
            card.unified_memory = True
            card.memory_total_bytes.CopyFrom(_number(Reading(host.total, READING_STATUS_OK)))
            card.memory_free_bytes.CopyFrom(_number(Reading(host.available, READING_STATUS_OK)))
            return
        card.memory_total_bytes.CopyFrom(_number(_part(memory, "total")))
        card.memory_free_bytes.CopyFrom(_number(_part(memory, "free")))

    def _read_power(self, handle: Any, card: capability_pb2.Gpu) -> None:
        limits = query(self._function("nvmlDeviceGetPowerManagementLimitConstraints"), handle)
        limit = self._function("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
        card.power_draw_w.CopyFrom(_watts(query(self._function("nvmlDeviceGetPowerUsage"), handle)))
        card.power_limit_w.CopyFrom(_watts(query(limit, handle)))
        card.power_limit_min_w.CopyFrom(_watts(_part(limits, 0)))
        card.power_limit_max_w.CopyFrom(_watts(_part(limits, 1)))
        card.energy_mj.CopyFrom(_number(query(self._function("nvmlDeviceGetTotalEnergyConsumption"), handle)))

    def _read_activity(self, handle: Any, card: capability_pb2.Gpu) -> None:
        temperature = query(self._function("nvmlDeviceGetTemperatureV"), handle, _SENSOR_CORE)
        if temperature.status == READING_STATUS_UNSUPPORTED:
            temperature = query(self._function("nvmlDeviceGetTemperature"), handle, _SENSOR_CORE)
        clock = self._function("nvmlDeviceGetClockInfo")
        utilization = query(self._function("nvmlDeviceGetUtilizationRates"), handle)
        generation = query(self._function("nvmlDeviceGetCurrPcieLinkGeneration"), handle)
        generation_max = query(self._function("nvmlDeviceGetMaxPcieLinkGeneration"), handle)
        card.temperature_c.CopyFrom(_number(temperature))
        card.clock_graphics_mhz.CopyFrom(_number(query(clock, handle, _CLOCK_GRAPHICS)))
        card.clock_memory_mhz.CopyFrom(_number(query(clock, handle, _CLOCK_MEMORY)))
        card.utilization_percent.CopyFrom(_number(_part(utilization, "gpu")))
        card.pcie_generation.CopyFrom(_number(generation))
        card.pcie_generation_max.CopyFrom(_number(generation_max))
        card.pcie_width.CopyFrom(_number(query(self._function("nvmlDeviceGetCurrPcieLinkWidth"), handle)))

    def _pci_address(self, handle: Any) -> str:
        reading = query(self._function("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo"), handle)
        if reading.status != READING_STATUS_OK:
            return ""
        return f"{reading.value.domain:04x}:{reading.value.bus:02x}:{reading.value.device:02x}.0"

    def _function(self, *names: str) -> Callable[..., Any] | None:
        """Return the first of these functions that the library has: names come and go between its releases."""
        for name in names:
            function: Callable[..., Any] | None = getattr(self._module, name, None)
            if function is not None:
                return function
        return None


def blank_card(status: ReadingStatus) -> capability_pb2.Gpu:
    """Return a card all of whose readings have this status and no value."""
    card = capability_pb2.Gpu()
    set_status(card, status, {field.name for field in capability_pb2.Gpu.DESCRIPTOR.fields})
    return card


def set_status(card: capability_pb2.Gpu, status: ReadingStatus, names: set[str]) -> None:
    """Replace the named readings of a card by this status and no value."""
    for field in capability_pb2.Gpu.DESCRIPTOR.fields:
        if field.message_type is not None and field.name in names:
            reading = getattr(card, field.name)
            reading.Clear()
            reading.status = status


def _describe_init_error(error: Exception) -> Unavailable:
    code = getattr(error, "value", None)
    if code in (_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED):
        return Unavailable("no NVIDIA driver", lasting=True)
    if code == _LIBRARY_MISMATCH or type(error).__name__ == "NVMLLibraryMismatchError":
        return Unavailable("driver needs a reboot: library and kernel module have different versions", lasting=True)
    if code == _NO_PERMISSION:
        return Unavailable(
            "no permission to open /dev/nvidia*: add the agent's user to the device's group", lasting=True
        )
    if code == _NOT_READY:
        return Unavailable("the cards are not ready yet: the fabric manager is still starting", lasting=False)
    if code == _GPU_IS_LOST:
        return Unavailable("a card has fallen off the bus: reboot, and check its power cables", lasting=False)
    if code == _UNKNOWN:
        # NVIDIA/nvidia-container-toolkit#48: the device cgroup drops the card at a daemon-reload.
        return Unavailable("NVML fails with an unknown error: recreate the container, or reboot", lasting=False)
    return Unavailable(f"NVML does not start: {_describe(error)}", lasting=False)


def _describe(error: Exception) -> str:
    """Return what an error says of itself; the library's own errors may fail even at that before it is open."""
    code = getattr(error, "value", None)
    return f"{type(error).__name__} (code {code})" if isinstance(code, int) else f"{type(error).__name__}: {error}"


def _part(reading: Reading, key: str | int) -> Reading:
    """Return one part of a reading that has several."""
    if reading.status != READING_STATUS_OK:
        return reading
    value = reading.value[key] if isinstance(key, int) else getattr(reading.value, key)
    return Reading(value, READING_STATUS_OK)


def _number(reading: Reading) -> NumberReading:
    if reading.status != READING_STATUS_OK:
        return NumberReading(status=reading.status)
    # NVML_VALUE_NOT_AVAILABLE arrives as None.
    if reading.value is None:
        return NumberReading(status=READING_STATUS_UNSUPPORTED)
    return NumberReading(status=READING_STATUS_OK, value=float(reading.value))


def _watts(reading: Reading) -> NumberReading:
    number = _number(reading)
    number.value /= _MILLIWATTS_PER_WATT
    return number


def _text(reading: Reading) -> TextReading:
    if reading.status != READING_STATUS_OK:
        return TextReading(status=reading.status)
    value = reading.value
    # Older bindings return bytes, and under WSL names were seen that are no UTF-8 (gpuopenanalytics/pynvml#53).
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return TextReading(status=READING_STATUS_OK, value=text)
