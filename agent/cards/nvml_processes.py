"""Who has a context on a card, through NVML and the kernel.

A structure of the wrong version was seen to give a plausible list of wrong
processes (NVIDIA/go-nvml#21, #75; XuehaiPan/nvitop#79), and in a container the
numbers are the host's. So a list that cannot be right is no list.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.cards.details import GpuProcess
from agent.cards.nvml_query import (
    ARGUMENT_VERSION_MISMATCH,
    FUNCTION_NOT_FOUND,
    Reading,
    ask,
    query,
)
from agent.engines.processes import is_marked
from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_UNSUPPORTED

# PROC_PID_INIT_INO of the kernel: the namespace in which NVML counts.
_HOST_NAMESPACE = "pid:[4026531836]"
# A version of the call that this driver does not have; anything else would fail in every version.
_TRY_AN_OLDER = (FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH)
# More contexts than a card can hold at some hundred MB each; a count beyond it is a structure misread.
PROCESSES_MAX = 512
_NOT_AVAILABLE = 2**64 - 1
_INSUFFICIENT_SIZE = 7


class _ProcessInfoV1(ctypes.Structure):
    """nvmlProcessInfo_v1_t, which the binding no longer has."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernel knows of processes; tests have another.

    Args:
        same_namespace: the kernel numbers processes for us as it does for the driver.
        exists: whether there is such a process, also one that is hidden from us.
        name: of a process; empty where it is hidden.
        is_ours: whether the process has a marker that starts so.
    """

    same_namespace: Callable[[], bool]
    exists: Callable[[int], bool]
    name: Callable[[int], str]
    is_ours: Callable[[int, str], bool]


@dataclass(frozen=True, slots=True)
class ProcessList:
    """The processes of a card; None with a note where they are not known, as in `CardDetails`."""

    processes: tuple[GpuProcess, ...] | None
    note: str = ""
    absent: bool = False


def list_processes(
    module: Any, handle: Any, *, marker: str, memory_total_bytes: int | None, kernel: "Kernel | None" = None
) -> ProcessList:
    """Return the processes with a context on the card.

    Args:
        module: `pynvml`, or a fake of it.
        marker: how the markers of our engines start; empty where there are none.
        memory_total_bytes: of the card, to tell a list that cannot be right.
    """
    kernel = kernel or KERNEL
    if not kernel.same_namespace():
        note = "processes have other numbers here than on the host (a container, or WSL)"
        return ProcessList(None, note, absent=True)
    kinds: dict[int, str] = {}
    memory: dict[int, int | None] = {}
    for kind, name in (("compute", "nvmlDeviceGetComputeRunningProcesses"), ("graphics", _GRAPHICS)):
        reading = _read(module, name, handle)
        if not reading.ok:
            absent = reading.status == READING_STATUS_UNSUPPORTED
            why = "the driver does not list them" if absent else f"NVML fails to list them (code {reading.code})"
            return ProcessList(None, why, absent)
        for process in reading.value:
            kinds[process.pid] = "both" if process.pid in kinds else kind
            memory[process.pid] = _memory(process.usedGpuMemory)
    if _implausible(kinds, memory, memory_total_bytes, kernel):
        return ProcessList(None, "the driver's list of processes cannot be right: it and its library differ")
    return ProcessList(
        tuple(
            GpuProcess(pid, kernel.name(pid), kind, memory[pid], bool(marker) and kernel.is_ours(pid, marker))
            for pid, kind in sorted(kinds.items())
            # The driver forgets a process some time after the kernel did.
            if kernel.exists(pid)
        )
    )


_GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"


def _read(module: Any, name: str, handle: Any) -> Reading:
    reading = Reading(None, READING_STATUS_UNSUPPORTED, FUNCTION_NOT_FOUND)
    for function in (f"{name}_v3", f"{name}_v2"):
        reading = ask(module, function, handle)
        if reading.code not in _TRY_AN_OLDER:
            return reading
    first = query(_list_first_version, module, name, handle)
    return reading if first.code in _TRY_AN_OLDER else first


def _list_first_version(module: Any, name: str, handle: Any) -> list[_ProcessInfoV1]:
    """Call the first version of the function, which drivers up to R450 have and the binding does not offer."""
    function = module._nvmlGetFunctionPointer(name)
    count = ctypes.c_uint(0)
    code = function(handle, ctypes.byref(count), None)
    if code == 0:
        return []
    if code == _INSUFFICIENT_SIZE:
        # Twice as many and some, since processes start in the meantime.
        count.value = min(count.value, PROCESSES_MAX) * 2 + 5
        rows = (_ProcessInfoV1 * count.value)()
        code = function(handle, ctypes.byref(count), rows)
        if code == 0:
            return list(rows)[: count.value]
    raise module.NVMLError(code)


def _memory(value: int | None) -> int | None:
    return None if value is None or value == _NOT_AVAILABLE else value


def _implausible(
    kinds: dict[int, str], memory: dict[int, int | None], memory_total_bytes: int | None, kernel: Kernel
) -> bool:
    if len(kinds) > PROCESSES_MAX or any(pid <= 0 for pid in kinds):
        return True
    if memory_total_bytes is not None and any(used > memory_total_bytes for used in memory.values() if used):
        return True
    # One process may have ended since it was listed, all of several have not.
    return len(kinds) > 1 and not any(kernel.exists(pid) for pid in kinds)


def _same_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _HOST_NAMESPACE
    except OSError:
        # Without /proc nothing here can be judged.
        return False


def _exists(pid: int) -> bool:
    # Not by /proc: mounted with hidepid, or in a unit with ProtectProc, it hides other users' processes, and with them
    # the owner's game.
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _name(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        # Hidden, or just gone.
        return ""


KERNEL = Kernel(_same_namespace, _exists, _name, is_marked)
