"""What must be true once no agent runs: no engine of it is left, and each card has its owner's power limit again."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from agent.cards.hardware import HardwareMonitor
from agent.daemon import marker_of
from agent.engines.files import engines_directory, remove_runtime_directory
from agent.engines.processes import kill_marked
from agent.errors import AgentError, ExitStatus
from agent.power.limits import restore_leftovers

# From SIGKILL until a process without a stuck driver call is gone.
KILL_CONFIRM_S = 10.0

Report = Callable[[str], None]


class CleanUpFailed(AgentError):
    """The operator must reboot: what holds the card cannot be ended."""

    exit_status = ExitStatus.NOT_CONFIRMED


def clean_up(state_dir: Path, report: Report) -> None:
    """End every engine process of this state directory, remove its temporary files, put power limits back.

    The caller holds the lock of the state directory. Blocks for some seconds.

    Raises:
        CleanUpFailed: processes survive SIGKILL; the limits are back all the same.
    """
    ended, survivors = kill_marked(f"{marker_of(state_dir)}/", KILL_CONFIRM_S)
    if ended:
        report(f"ended engine processes {_listed(ended)}")
    if engines_directory(state_dir).is_dir():
        for directory in engines_directory(state_dir).iterdir():
            remove_runtime_directory(directory)
    for line in asyncio.run(_restore(state_dir)):
        report(line)
    if survivors:
        raise CleanUpFailed(f"processes {_listed(survivors)} survive SIGKILL (the driver holds them): reboot")


async def _restore(state_dir: Path) -> list[str]:
    hardware = HardwareMonitor()
    try:
        return await restore_leftovers(state_dir, hardware)
    finally:
        await hardware.aclose()


def _listed(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
