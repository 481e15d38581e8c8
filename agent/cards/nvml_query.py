"""Calling NVML so that whatever happens is a value: a reading with its status, or the reason why there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_DENIED,
    READING_STATUS_ERROR,
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_TIMEOUT,
    READING_STATUS_UNSUPPORTED,
)

# nvmlReturn_t, from nvml.h.
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIBRARY_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
NOT_READY = 27
UNKNOWN = 999

_STATUS_OF_CODE = {
    NOT_SUPPORTED: READING_STATUS_UNSUPPORTED,
    FUNCTION_NOT_FOUND: READING_STATUS_UNSUPPORTED,
    # An older driver that knows a structure's earlier version only.
    ARGUMENT_VERSION_MISMATCH: READING_STATUS_UNSUPPORTED,
    NO_PERMISSION: READING_STATUS_DENIED,
    TIMEOUT: READING_STATUS_TIMEOUT,
    GPU_IS_LOST: READING_STATUS_LOST,
    RESET_REQUIRED: READING_STATUS_LOST,
}

ReadingStatus: TypeAlias = "capability_pb2.ReadingStatus.ValueType"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of NVML: `value` counts only with status OK, `code` is nvmlReturn_t where the library gave one."""

    value: Any
    status: ReadingStatus
    code: int = 0

    @property
    def ok(self) -> bool:
        return self.status == READING_STATUS_OK


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
        return Reading(None, READING_STATUS_UNSUPPORTED, FUNCTION_NOT_FOUND)
    try:
        return Reading(function(*arguments), READING_STATUS_OK)
    except Exception as error:
        # NVMLError, its mismatch error that is none, decoding errors: none of them may end the listing.
        code = getattr(error, "value", None)
        if type(error).__name__ == "NVMLLibraryMismatchError":
            # Of the binding and the library, which an older version of the same function may bridge.
            return Reading(None, READING_STATUS_ERROR, FUNCTION_NOT_FOUND)
        if not isinstance(code, int):
            return Reading(None, READING_STATUS_ERROR)
        return Reading(None, _STATUS_OF_CODE.get(code, READING_STATUS_ERROR), code)


def ask(module: Any, names: str | Sequence[str], *arguments: object) -> Reading:
    """Call the first of these functions that there is: names come and go between releases.

    The binding may have one that the driver's library under it lacks, which shows in the call only.
    """
    reading = Reading(None, READING_STATUS_UNSUPPORTED, FUNCTION_NOT_FOUND)
    for name in (names,) if isinstance(names, str) else names:
        reading = query(getattr(module, name, None), *arguments)
        if reading.code != FUNCTION_NOT_FOUND:
            break
    return reading


def part(reading: Reading, key: str | int) -> Reading:
    """Return one part of a reading that has several."""
    if not reading.ok:
        return reading
    value = reading.value[key] if isinstance(key, int) else getattr(reading.value, key)
    return Reading(value, READING_STATUS_OK)


def describe_init_error(error: Exception) -> Unavailable:
    """Return what a failure of nvmlInit means to the owner of the machine."""
    code = getattr(error, "value", None)
    if code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
        return Unavailable("no NVIDIA driver", lasting=True)
    if code == LIBRARY_MISMATCH or type(error).__name__ == "NVMLLibraryMismatchError":
        return Unavailable("driver needs a reboot: library and kernel module have different versions", lasting=True)
    if code == NO_PERMISSION:
        return Unavailable(
            "no permission to open /dev/nvidia*: add the agent's user to the device's group", lasting=True
        )
    if code == NOT_READY:
        return Unavailable("the cards are not ready yet: the fabric manager is still starting", lasting=False)
    if code == GPU_IS_LOST:
        return Unavailable("a card has fallen off the bus: reboot, and check its power cables", lasting=False)
    if code == UNKNOWN:
        # NVIDIA/nvidia-container-toolkit#48: the device cgroup drops the card at a daemon-reload.
        return Unavailable("NVML fails with an unknown error: recreate the container, or reboot", lasting=False)
    return Unavailable(f"NVML does not start: {_describe(error)}", lasting=False)


def _describe(error: Exception) -> str:
    """Return what an error says of itself; the library's own errors may fail even at that before it is open."""
    code = getattr(error, "value", None)
    return f"{type(error).__name__} (code {code})" if isinstance(code, int) else f"{type(error).__name__}: {error}"
