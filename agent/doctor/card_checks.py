"""Checks of the graphics cards: driver, devices, who uses them, what may be set, and whether CUDA starts."""

import importlib
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agent.cards.use import DESKTOP_PROGRAMS, CardReading
from agent.doctor.check import Finding, Patient, Probe, fail, ok, warn
from agent.engines.choice import DESKTOP_MARGIN_BYTES, GIB, runs_under_wsl
from agent.errors import NotRunning
from agent.status import read_status
from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_OK

# CUDA's first call after a start wakes the driver, which takes seconds, not minutes.
CUDA_TIMEOUT_S = 20.0
CUDA_DEADLINE_S = 25.0
# CUresult, from cuda.h.
_CUDA_UNKNOWN = 999
_CUDA_NO_DEVICE = 100
# capabilities(7): what setting a power limit asks for.
_CAP_SYS_ADMIN = 1 << 21

_START_CUDA = """
import ctypes, sys
try:
    library = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit("no libcuda.so.1")
print(library.cuInit(0))
"""
# By the names in os-release(5), the most particular first.
_DRIVER_COMMANDS = {
    "ubuntu": "sudo ubuntu-drivers install",
    "debian": "sudo apt install nvidia-driver",
    "fedora": "sudo dnf install akmod-nvidia",
    "arch": "sudo pacman -S nvidia",
    "suse": "sudo zypper install nvidia-driver-G06-kmp-default",
}
_LIBRARY_PLACES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
)


def check_driver(patient: Patient) -> Finding:
    """The kernel's module and the library beside it must be of one version (lyulyul/shine-cluster#30)."""
    module = _text(patient.path("/sys/module/nvidia/version"))
    libraries = _library_versions(patient)
    if not module and not libraries:
        if runs_under_wsl(patient.kernel_release) and patient.cards:
            return ok("the driver is Windows'")
        if not _has_card(patient):
            return ok("no NVIDIA card: engines run on the processor")
        return fail("there is an NVIDIA card and no driver for it", _driver_command(patient))
    if not module:
        return fail(f"the library {', '.join(libraries)} is installed and no driver is loaded", "sudo modprobe nvidia")
    if libraries and module not in libraries:
        return fail(
            f"the loaded driver is {module}, the library {', '.join(libraries)}: it was updated under a running system",
            "sudo reboot",
        )
    return ok(f"driver {module}")


def check_bindings(patient: Patient) -> Finding:
    """The distribution named pynvml takes the same module name (vllm-project/vllm#7649)."""
    pynvml = importlib.import_module("pynvml")
    try:
        impostor = version("pynvml")
    except PackageNotFoundError:
        impostor = ""
    if not hasattr(pynvml, "_nvmlGetFunctionPointer") or impostor:
        return fail(
            f"the module pynvml is not NVIDIA's own (package pynvml {impostor})",
            f"{sys.executable} -m pip uninstall -y pynvml nvidia-ml-py && {sys.executable} -m pip install nvidia-ml-py",
        )
    return ok(f"nvidia-ml-py {version('nvidia-ml-py')}")


def check_devices(patient: Patient) -> Finding:
    files = sorted(path.name for path in patient.path("/dev").glob("nvidia[0-9]*"))
    answering = [card for card in patient.cards if card.gpu.uuid.status == READING_STATUS_OK]
    if not files and not answering:
        return ok("no NVIDIA card")
    if not answering:
        return fail(f"{', '.join(files)} exist, and NVML lists no card: {patient.gpu_note}", "nvidia-smi -L")
    if len(answering) < len(patient.cards) or (files and len(files) != len(answering)):
        return fail(
            f"{len(answering)} of {max(len(files), len(patient.cards))} cards answer: one has fallen off the bus",
            "sudo dmesg | grep -i xid",
        )
    return ok(", ".join(card.gpu.name.value for card in answering))


def check_cuda(patient: Patient) -> Finding:
    """After a resume CUDA fails with "unknown error" until its module is loaded anew (pytorch/pytorch#88639)."""
    if not patient.cards:
        return ok("no NVIDIA card")
    done = subprocess.run(
        [sys.executable, "-I", "-c", _START_CUDA], capture_output=True, text=True, timeout=CUDA_TIMEOUT_S, check=False
    )
    answer = done.stdout.strip()
    if answer == "0":
        return ok("CUDA starts")
    if answer in (str(_CUDA_UNKNOWN), str(_CUDA_NO_DEVICE)):
        return fail(
            f"CUDA does not start (error {answer}), as after a resume: its module must be loaded anew",
            "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
        )
    return fail(f"CUDA does not start: {answer or done.stderr.strip() or 'it crashed'}", "nvidia-smi")


def check_use(patient: Patient) -> Finding:
    if not patient.cards:
        return ok("no NVIDIA card")
    unseen = [card for card in patient.cards if card.details is None or card.details.processes is None]
    if unseen:
        why = next((card.details.processes_note for card in unseen if card.details is not None), "it does not answer")
        return warn(
            f"who uses {_name(unseen[0])} cannot be told: {why or 'the driver does not list it'}",
            patient.command("pause"),
        )
    others = [
        f"{process.name or 'a hidden process'} (pid {process.pid}) on {_name(card)}"
        for card in patient.cards
        for process in (card.details.processes if card.details is not None else None) or ()
        if not process.ours and process.name not in DESKTOP_PROGRAMS
    ]
    if others:
        return warn(f"used by {', '.join(others[:4])}: not lent while that runs", "nvidia-smi")
    return ok("nobody but the desktop uses a card")


def check_memory(patient: Patient) -> Finding:
    if not patient.cards:
        return ok("no NVIDIA card")
    lines, tight = [], False
    for card in patient.cards:
        free, total = card.gpu.memory_free_bytes, card.gpu.memory_total_bytes
        if not free.status == total.status == READING_STATUS_OK or total.value <= 0:
            lines.append(f"{_name(card)} does not tell its memory")
            continue
        tight = tight or free.value < 2 * DESKTOP_MARGIN_BYTES
        lines.append(f"{_name(card)} {free.value / GIB:.1f} of {total.value / GIB:.1f} GiB free")
    words = f"{', '.join(lines)}; {DESKTOP_MARGIN_BYTES / GIB:g} GiB of each stay with its desktop"
    return warn(f"{words}: hardly any model fits", "nvidia-smi") if tight else ok(words)


def check_power_cap(patient: Patient) -> Finding:
    """Setting a limit asks for CAP_SYS_ADMIN, which the agent has only if its service was installed so."""
    settable = [card for card in patient.cards if card.gpu.power_limit_max_w.status == READING_STATUS_OK]
    if not settable:
        return ok("no card whose power limit can be set: fewer answers at once instead")
    pid = "self"
    if patient.config is not None:
        try:
            pid = str(read_status(patient.config.state_dir)["pid"])
        except NotRunning:
            # Then this command's own permission is what can be told.
            pid = "self"
    status = _text(patient.path(f"/proc/{pid}/status"))
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if effective is not None and int(effective[1], 16) & _CAP_SYS_ADMIN:
        return ok("the power limit can be set")
    return warn(
        "the agent may not set a power limit: it runs fewer answers at once instead",
        patient.command("install-service --power-cap", root=True),
    )


CARD_PROBES = (
    Probe("driver", check_driver),
    Probe("NVML bindings", check_bindings),
    Probe("cards", check_devices),
    Probe("CUDA", check_cuda, CUDA_DEADLINE_S),
    Probe("who uses the cards", check_use),
    Probe("card memory", check_memory),
    Probe("power limit", check_power_cap),
)


def _has_card(patient: Patient) -> bool:
    devices = patient.path("/sys/bus/pci/devices")
    cards = devices.iterdir() if devices.is_dir() else ()
    return any(_text(one / "vendor") == "0x10de" and _text(one / "class").startswith("0x03") for one in cards)


def _driver_command(patient: Patient) -> str:
    """Return how this distribution installs the driver."""
    release = _text(patient.path("/etc/os-release"))
    family = set(re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)"?$', release, re.MULTILINE))
    names = {name for entry in family for name in entry.split()}
    for name, command in _DRIVER_COMMANDS.items():
        if name in names:
            return command
    return "xdg-open https://www.nvidia.com/drivers"


def _library_versions(patient: Patient) -> list[str]:
    """Return the versions of NVML that are installed, by the names of their files."""
    found = set()
    for place in _LIBRARY_PLACES:
        for path in patient.path(place).glob("libnvidia-ml.so.*.*"):
            found.add(path.name.removeprefix("libnvidia-ml.so."))
    return sorted(found)


def _name(card: CardReading) -> str:
    return card.gpu.name.value or card.uuid or "a card"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        # Not every machine has every file.
        return ""
