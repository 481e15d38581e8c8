"""NVIDIA's cards as the kernel sees them, whether or not a driver does. Reading this wakes none of them."""

from pathlib import Path

_NVIDIA_VENDOR = "0x10de"
# PCI class of display controllers: VGA (0x0300) and 3D (0x0302).
_DISPLAY_CLASS = "0x03"


def read_power_states(sysfs: Path) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the PCI addresses of NVIDIA's cards that sleep now, that have ever slept, and that are awake."""
    asleep: set[str] = set()
    sleepers: set[str] = set()
    awake: set[str] = set()
    for device in sysfs.iterdir() if sysfs.is_dir() else ():
        if _read(device / "vendor") != _NVIDIA_VENDOR or not _read(device / "class").startswith(_DISPLAY_CLASS):
            continue
        (asleep if _read(device / "power/runtime_status") == "suspended" else awake).add(device.name)
        if _read(device / "power/control") == "auto" and _read(device / "power/runtime_suspended_time") not in (
            "",
            "0",
        ):
            sleepers.add(device.name)
    return frozenset(asleep), frozenset(sleepers), frozenset(awake)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        # Not every kernel and bus has every file.
        return ""
