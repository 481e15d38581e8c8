"""Reading graphics cards through NVML, and setting their power limit. Every call of NVML goes through `query`.

NVML is asked card by card and reading by reading: what a card does not offer,
what needs a permission and what fails is a status beside the value, and none
of it hides another reading or another card. Cards are joined by uuid; an index
is only valid within one listing.

This module runs in the watched child (`agent.cards.nvml_child`), because NVML has
crashed and hung its callers when a card was lost.
"""

from typing import Any

import psutil

from agent.cards.details import SLEEPING, CardDetails, LimitOutcome, LimitRequest
from agent.cards.nvml_processes import KERNEL, Kernel, list_processes
from agent.cards.nvml_query import (
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NOT_FOUND,
    Reading,
    ReadingStatus,
    Unavailable,
    ask,
    describe_init_error,
    part,
    query,
)
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

# No card has less or more: 0, a garbled structure and "not available" as a number lie outside.
MEMORY_PLAUSIBLE_BYTES = (256 * 1024**2, 1024**4)
# Drivers round a limit to what the card's regulator can do.
LIMIT_TOLERANCE_MW = 1000

# nvmlTemperatureSensors_t, nvmlTemperatureThresholds_t, nvmlClockType_t.
_SENSOR_CORE = 0
_THRESHOLD_SHUTDOWN = 0
_THRESHOLD_SLOWDOWN = 1
_CLOCK_GRAPHICS = 0
_CLOCK_MEMORY = 2

_MILLIWATTS_PER_WATT = 1000.0

_RESULT_OF_CODE = {INVALID_ARGUMENT: "out_of_range", NOT_FOUND: "lost", GPU_IS_LOST: "lost"}
_RESULT_OF_STATUS = {
    READING_STATUS_OK: "ok",
    READING_STATUS_UNSUPPORTED: "unsupported",
    READING_STATUS_DENIED: "denied",
    READING_STATUS_TIMEOUT: "timeout",
    READING_STATUS_LOST: "lost",
}


class Nvml:
    """The library, opened. `module` is `pynvml` of the distribution nvidia-ml-py, or a fake of it.

    Args:
        kernel: what tells about processes.

    Raises:
        Unavailable: it cannot be used on this machine.
    """

    def __init__(self, module: Any, kernel: Kernel = KERNEL) -> None:
        self._module = module
        self._kernel = kernel
        # Uuids by PCI address: of a card that has fallen asleep meanwhile, only the address may be asked for.
        self._uuids: dict[str, TextReading] = {}
        # The distribution named `pynvml` takes the same module name and returns bytes for strings in places.
        if not hasattr(module, "_nvmlGetFunctionPointer"):
            raise Unavailable(
                "the module pynvml is not NVIDIA's: uninstall the package pynvml and reinstall nvidia-ml-py",
                lasting=True,
            )
        try:
            module.nvmlInit()
        except Exception as error:
            raise describe_init_error(error) from error
        self._driver_version = _text(ask(self._module, "nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """Return how many cards there are.

        Raises:
            Unavailable: it cannot be told.
        """
        reading = ask(self._module, ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"))
        if reading.status != READING_STATUS_OK:
            raise Unavailable("NVML does not list its cards: see the agent's log", lasting=False)
        return int(reading.value)

    def read_card(
        self, index: int, asleep: frozenset[str] = frozenset(), marker: str = ""
    ) -> tuple[capability_pb2.Gpu, CardDetails | None]:
        """Return what the fleet and what this machine needs to know of one card.

        A card that cannot be opened has the reason as the status of all its readings, and no details.

        Args:
            asleep: PCI addresses ("0000:01:00.0") of cards that must not be woken.
            marker: how the markers of our engines' processes start.
        """
        opened = ask(self._module, ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"), index)
        if not opened.ok:
            return blank_card(opened.status), None
        handle = opened.value
        address = self._pci_address(handle)
        if asleep and address in asleep:
            # NVML keeps the address in memory, but any other query would wake the card.
            card = blank_card(READING_STATUS_UNSUPPORTED)
            if address in self._uuids:
                card.uuid.CopyFrom(self._uuids[address])
            return card, SLEEPING
        card = self._read_identity(handle)
        if address and card.uuid.status == READING_STATUS_OK:
            self._uuids[address] = card.uuid
        self._read_memory(handle, card)
        self._read_power(handle, card)
        self._read_activity(handle, card)
        return card, self._read_details(handle, card, marker)

    def set_power_limit(self, request: LimitRequest) -> LimitOutcome:
        """Set a card's power limit, unless somebody else changed it; needs root or CAP_SYS_ADMIN."""
        opened = ask(self._module, "nvmlDeviceGetHandleByUUID", request.uuid)
        if not opened.ok:
            return _failed(opened, "the card cannot be opened")
        before = self._limit_set(opened.value)
        if not before.ok:
            return _failed(before, "the card does not tell its power limit")
        if request.expected_mw is not None and not _near(before.value, request.expected_mw):
            now_w = before.value / _MILLIWATTS_PER_WATT
            return LimitOutcome(result="changed", limit_w=now_w, detail=f"somebody else set it to {now_w:.0f} W")
        done = ask(self._module, "nvmlDeviceSetPowerManagementLimit", opened.value, request.limit_mw)
        if not done.ok:
            return _failed(done, "the power limit cannot be set")
        after = self._limit_set(opened.value)
        if after.ok and _near(after.value, before.value) and not _near(after.value, request.limit_mw):
            detail = "the card takes a power limit and does not apply it"
            return LimitOutcome(result="unsupported", limit_w=after.value / _MILLIWATTS_PER_WATT, detail=detail)
        return LimitOutcome(result="ok", limit_w=after.value / _MILLIWATTS_PER_WATT if after.ok else None)

    def _read_identity(self, handle: Any) -> capability_pb2.Gpu:
        capability = ask(self._module, "nvmlDeviceGetCudaComputeCapability", handle)
        if capability.status == READING_STATUS_OK:
            major, minor = capability.value
            capability = Reading(f"{major}.{minor}", READING_STATUS_OK)
        return capability_pb2.Gpu(
            uuid=_text(ask(self._module, "nvmlDeviceGetUUID", handle)),
            name=_text(ask(self._module, "nvmlDeviceGetName", handle)),
            compute_capability=_text(capability),
            driver_version=self._driver_version,
        )

    def _read_memory(self, handle: Any, card: capability_pb2.Gpu) -> None:
        memory = self._memory_info(handle)
        nothing_told = memory.value.total == 0 if memory.ok else memory.status == READING_STATUS_UNSUPPORTED
        if nothing_told and any(name in card.name.value for name in UNIFIED_MEMORY_NAMES):
            host = psutil.virtual_memory()
            card.unified_memory = True
            card.memory_total_bytes.CopyFrom(_number(Reading(host.total, READING_STATUS_OK)))
            card.memory_free_bytes.CopyFrom(_number(Reading(host.available, READING_STATUS_OK)))
            return
        card.memory_total_bytes.CopyFrom(_positive(part(memory, "total")))
        if card.memory_total_bytes.status == READING_STATUS_OK:
            card.memory_free_bytes.CopyFrom(_number(part(memory, "free")))
        else:
            card.memory_free_bytes.status = card.memory_total_bytes.status

    def _memory_info(self, handle: Any) -> Reading:
        """Return total, free and used; a part that reports what cannot be has an error for them."""
        # Version 2 tells the driver's reserve apart; the two count "free" differently, so one card uses one of them.
        version = getattr(self._module, "nvmlMemory_v2", None)
        memory = ask(self._module, "nvmlDeviceGetMemoryInfo", handle, version) if version is not None else query(None)
        if memory.status == READING_STATUS_UNSUPPORTED or memory.code == INVALID_ARGUMENT:
            memory = ask(self._module, "nvmlDeviceGetMemoryInfo", handle)
        if not memory.ok or memory.value.total == 0:
            return memory
        least, most = MEMORY_PLAUSIBLE_BYTES
        value = memory.value
        plausible = least <= value.total <= most and max(value.free, value.used) <= value.total
        return memory if plausible else Reading(None, READING_STATUS_ERROR)

    def _read_power(self, handle: Any, card: capability_pb2.Gpu) -> None:
        limits = ask(self._module, "nvmlDeviceGetPowerManagementLimitConstraints", handle)
        limit = ask(self._module, ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"), handle)
        card.power_draw_w.CopyFrom(_watts(ask(self._module, "nvmlDeviceGetPowerUsage", handle)))
        card.power_limit_w.CopyFrom(_watts(limit))
        card.power_limit_min_w.CopyFrom(_watts(part(limits, 0)))
        card.power_limit_max_w.CopyFrom(_watts(part(limits, 1)))
        card.energy_mj.CopyFrom(_positive(ask(self._module, "nvmlDeviceGetTotalEnergyConsumption", handle)))

    def _read_activity(self, handle: Any, card: capability_pb2.Gpu) -> None:
        temperature = ask(self._module, "nvmlDeviceGetTemperatureV", handle, _SENSOR_CORE)
        if temperature.status == READING_STATUS_UNSUPPORTED:
            temperature = ask(self._module, "nvmlDeviceGetTemperature", handle, _SENSOR_CORE)
        utilization = ask(self._module, "nvmlDeviceGetUtilizationRates", handle)
        generation = ask(self._module, "nvmlDeviceGetCurrPcieLinkGeneration", handle)
        generation_max = ask(self._module, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
        card.temperature_c.CopyFrom(_number(temperature))
        card.clock_graphics_mhz.CopyFrom(_number(ask(self._module, "nvmlDeviceGetClockInfo", handle, _CLOCK_GRAPHICS)))
        card.clock_memory_mhz.CopyFrom(_number(ask(self._module, "nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY)))
        card.utilization_percent.CopyFrom(_number(part(utilization, "gpu")))
        card.pcie_generation.CopyFrom(_number(generation))
        card.pcie_generation_max.CopyFrom(_number(generation_max))
        card.pcie_width.CopyFrom(_number(ask(self._module, "nvmlDeviceGetCurrPcieLinkWidth", handle)))

    def _read_details(self, handle: Any, card: capability_pb2.Gpu, marker: str) -> CardDetails:
        total = card.memory_total_bytes
        before = _value(part(self._memory_info(handle), "used"))
        listed = list_processes(
            self._module,
            handle,
            marker=marker,
            memory_total_bytes=int(total.value) if total.status == READING_STATUS_OK else None,
            kernel=self._kernel,
        )
        after = _value(part(self._memory_info(handle), "used"))
        used = None if before is None or after is None or card.unified_memory else int(min(before, after))
        reasons = _value(
            ask(
                self._module,
                ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
                handle,
            )
        )
        default = ask(self._module, "nvmlDeviceGetPowerManagementDefaultLimit", handle)
        return CardDetails(
            processes=listed.processes,
            processes_note=listed.note,
            processes_absent=listed.absent,
            memory_used_bytes=used,
            slowdown_c=_value(ask(self._module, "nvmlDeviceGetTemperatureThreshold", handle, _THRESHOLD_SLOWDOWN)),
            shutdown_c=_value(ask(self._module, "nvmlDeviceGetTemperatureThreshold", handle, _THRESHOLD_SHUTDOWN)),
            clock_event_reasons=None if reasons is None else int(reasons),
            power_limit_set_w=_value(self._limit_set(handle), _MILLIWATTS_PER_WATT),
            power_limit_default_w=_value(default, _MILLIWATTS_PER_WATT),
        )

    def _limit_set(self, handle: Any) -> Reading:
        return ask(self._module, "nvmlDeviceGetPowerManagementLimit", handle)

    def _pci_address(self, handle: Any) -> str:
        reading = ask(self._module, ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo"), handle)
        if reading.status != READING_STATUS_OK:
            return ""
        return f"{reading.value.domain:04x}:{reading.value.bus:02x}:{reading.value.device:02x}.0"


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


def _failed(reading: Reading, what: str) -> LimitOutcome:
    result = _RESULT_OF_CODE.get(reading.code) or _RESULT_OF_STATUS.get(reading.status, "error")
    return LimitOutcome(result=result, detail=f"{what}: {result.replace('_', ' ')} (code {reading.code})")


def _near(one_mw: int, other_mw: int) -> bool:
    return abs(one_mw - other_mw) <= LIMIT_TOLERANCE_MW


def _value(reading: Reading, divisor: float = 1.0) -> float | None:
    """Return the number read, or None where there is none."""
    return reading.value / divisor if reading.ok and reading.value is not None else None


def _positive(reading: Reading) -> NumberReading:
    """Return a reading for which 0 is what parts say that do not have it (mlco2/codecarbon#1316)."""
    number = _number(reading)
    return NumberReading(status=READING_STATUS_UNSUPPORTED) if reading.ok and number.value == 0 else number


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
