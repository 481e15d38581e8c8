"""Finding and ending the processes of an engine: by its marker and its group, never by a name.

An engine's children may leave its process group, and may outlive it holding the
card's memory (vllm-project/vllm#55510). All inherit the environment it was
started with, so the marker variable in it finds them.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# In the environment of every engine process: "<agent's marker>/<engine id>".
MARKER_VARIABLE = "SLACKWATER_ENGINE_MARKER"

_PROC = Path("/proc")
# States of processes that hold nothing any more and only wait for their parent.
_DEAD_STATES = frozenset("ZX")
# From one look at the process table to the next while processes are dying.
_POLL_S = 0.05


def find_marked(prefix: str) -> set[int]:
    """Return the live processes whose marker starts with `prefix`; the caller itself is never among them."""
    wanted = f"{MARKER_VARIABLE}={prefix}".encode()
    return {pid for pid in _pids() if pid != os.getpid() and _is_alive(pid) and _has_marker(pid, wanted)}


def is_marked(pid: int, prefix: str) -> bool:
    """Whether a process carries a marker that starts with `prefix`. Reads two small files, of this process only."""
    return _is_alive(pid) and _has_marker(pid, f"{MARKER_VARIABLE}={prefix}".encode())


def find_group(group_id: int) -> set[int]:
    """Return the live members of a process group."""
    members = set()
    for pid in _pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group_id and _is_alive(pid):
                members.add(pid)
    return members


def find_members(marker: str, group_id: int) -> set[int]:
    """Return the live processes of one engine: those with its exact marker, and its group's, where one is named."""
    exact = find_marked(f"{marker}\0")
    return exact | find_group(group_id) if group_id else exact


def terminate(marker: str, group_id: int, grace_s: float, confirm_s: float) -> tuple[int, ...]:
    """End all processes of one engine: SIGTERM to the group, after `grace_s` SIGKILL to every member.

    Blocks until none is left, at most `grace_s + confirm_s`; run it in a thread.

    Returns:
        The processes that are still there, sorted: SIGKILL does not end one that is stuck in the driver.
    """
    if grace_s > 0 and group_id:
        with suppress(ProcessLookupError):
            os.killpg(group_id, signal.SIGTERM)
        _wait_until_gone(marker, group_id, grace_s)
    return kill(marker, group_id, confirm_s)


def kill(marker: str, group_id: int, confirm_s: float) -> tuple[int, ...]:
    """SIGKILL every process of one engine until none is left, at most `confirm_s`; return the survivors."""
    deadline = time.monotonic() + confirm_s
    while True:
        members = find_members(marker, group_id)
        if not members:
            return ()
        for pid in members:
            _send_kill(pid)
        if time.monotonic() >= deadline:
            return tuple(sorted(find_members(marker, group_id)))
        time.sleep(_POLL_S)


def kill_marked(prefix: str, confirm_s: float) -> tuple[set[int], set[int]]:
    """SIGKILL every process whose marker starts with `prefix`; return those killed and those that survive it."""
    deadline = time.monotonic() + confirm_s
    found: set[int] = set()
    while True:
        alive = find_marked(prefix)
        found |= alive
        if not alive or time.monotonic() >= deadline:
            return found - alive, alive
        for pid in alive:
            _send_kill(pid)
        time.sleep(_POLL_S)


def _wait_until_gone(marker: str, group_id: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and find_members(marker, group_id):
        time.sleep(_POLL_S)


def _send_kill(pid: int) -> None:
    # The process may have ended since it was found, which is what was wanted.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir(_PROC) if entry.isdecimal())


def _is_alive(pid: int) -> bool:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The command name, in parentheses, may itself hold parentheses and spaces.
    return stat.rpartition(")")[2].split()[0] not in _DEAD_STATES


def _has_marker(pid: int, wanted: bytes) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        # Ended meanwhile, or another user's: none of ours.
        return False
    return environment.startswith(wanted) or b"\0" + wanted in environment
