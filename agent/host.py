"""What machine this is: operating system, processor, memory."""

import os
import platform
from pathlib import Path

import psutil

from protos.slackwater.common.v1 import capability_pb2

_CPUINFO = Path("/proc/cpuinfo")


def read_host(gpu_note: str) -> capability_pb2.Host:
    """Describe this machine; `gpu_note` says why it lists no GPU, and is empty where it lists one. Takes < 1 ms."""
    memory = psutil.virtual_memory()
    return capability_pb2.Host(
        operating_system=_operating_system(),
        cpu_model=_cpu_model(_CPUINFO),
        cpu_cores=_usable_cores(),
        memory_total_bytes=memory.total,
        memory_free_bytes=memory.available,
        gpu_note=gpu_note,
    )


def _operating_system() -> str:
    """Return name, version and kernel, for example "Ubuntu 24.04 LTS, Linux 6.8.0 x86_64"."""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        distribution = platform.freedesktop_os_release()
    except OSError:
        return kernel
    return f"{distribution['PRETTY_NAME']}, {kernel}"


def _cpu_model(cpuinfo: Path) -> str:
    """Return the processor's name; ARM kernels list none, so the machine type has to do there."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _usable_cores() -> int:
    """Return the cores that this process may use, which in a container or under taskset are fewer than exist."""
    return len(os.sched_getaffinity(0))
