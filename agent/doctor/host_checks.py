"""Checks of the machine around the agent: files, disk, service, session."""

import os
import pwd
import shutil
import subprocess
from pathlib import Path

from agent.daemon import marker_of
from agent.doctor.check import Finding, Patient, Probe, fail, ok, warn
from agent.engines.choice import runs_under_wsl
from agent.engines.fence import FenceKind, probe_fence
from agent.engines.processes import find_marked
from agent.errors import NothingTold, NotRunning
from agent.service.units import COMPANION, SERVICE
from agent.status import read_status

# Starts two interpreters inside each kind of fence.
FENCE_DEADLINE_S = 30.0
SYSTEMCTL_TIMEOUT_S = 4.0


def check_config(patient: Patient) -> Finding:
    if patient.config is None:
        return fail(patient.config_error, patient.edit)
    return ok(f"{patient.config_path} is valid")


def check_state_directory(patient: Patient) -> Finding:
    directory = patient.settings.state_dir
    try:
        status = directory.stat()
    except FileNotFoundError:
        return fail(f"{directory} does not exist: this machine has not joined", patient.command("join --file -"))
    owner = _user_name(status.st_uid)
    if status.st_mode & 0o077:
        return fail(
            f"{directory} has mode {status.st_mode & 0o777:o}: others can reach its keys", f"sudo chmod 700 {directory}"
        )
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        return fail(
            f"{directory} belongs to {owner}: this command cannot see into it", patient.command("doctor", root=True)
        )
    strangers = [path.name for path in directory.iterdir() if path.lstat().st_uid != status.st_uid]
    if strangers:
        return fail(
            f"{', '.join(sorted(strangers)[:3])} in {directory} belongs to somebody else than {owner}",
            f"sudo chown -R {owner} {directory}",
        )
    return ok(f"{directory} belongs to {owner} alone")


def check_disk(patient: Patient) -> Finding:
    place = _existing(patient.settings.state_dir)
    usage = shutil.disk_usage(place)
    floor = patient.settings.models.free_floor(usage.total)
    words = f"{_gb(usage.free)} free at {place}, {_gb(floor)} must stay free"
    if usage.free < floor:
        return fail(f"{words}: no model can be fetched", f"du -xh {place} | sort -h | tail -n 20")
    return ok(words)


def check_wsl(patient: Patient) -> Finding:
    if not runs_under_wsl(patient.kernel_release):
        return ok("not WSL")
    libraries = patient.path("/usr/lib/wsl/lib")
    if not (libraries / "libcuda.so.1").exists():
        return fail(f"{libraries} has no CUDA: the Windows driver is missing or too old", "powershell.exe wsl --update")
    return warn(
        "WSL: Windows' programs and input cannot be seen from here, and no power limit can be set",
        patient.command("pause"),
    )


def check_cgroup(patient: Patient) -> Finding:
    """Nothing depends on it: engines are found by their marker. A unit's cgroup is the net below."""
    if not patient.path("/sys/fs/cgroup/cgroup.controllers").exists():
        return warn(
            "no unified cgroup: were the agent killed, children of its engines could live on until it starts again",
            patient.command("install-service", root=True),
        )
    group = patient.path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    return ok(f"unified cgroups; this command runs in {group}")


def check_service(patient: Patient) -> Finding:
    machine = patient.path(f"/etc/systemd/system/{SERVICE}")
    own = Path.home() / ".config/systemd/user" / SERVICE
    if not patient.path("/run/systemd/system").exists():
        return warn(
            "this system was not started by systemd: nothing starts the agent by itself", patient.command("run")
        )
    if machine.exists():
        state = _systemctl("is-enabled", SERVICE)
        if state != "enabled":
            return warn(f"{SERVICE} is {state}: it does not start with the machine", f"sudo systemctl enable {SERVICE}")
        return ok(f"{SERVICE} is enabled and {_systemctl('is-active', SERVICE)}")
    if own.exists():
        lingers = patient.path(f"/var/lib/systemd/linger/{_user_name(os.geteuid())}").exists()
        if not lingers:
            return warn("the service of your session ends when you log out", "loginctl enable-linger")
        return ok("the service of your session runs also while you are logged out")
    return warn(
        "no service is installed: nothing starts the agent by itself", patient.command("install-service", root=True)
    )


def check_companion(patient: Patient) -> Finding:
    """Where people have a desktop, only a process in their session sees their screen."""
    sessions = patient.path("/run/user")
    users = sorted(int(path.name) for path in sessions.iterdir() if path.name.isdecimal()) if sessions.is_dir() else []
    people = [uid for uid in users if uid >= 1000]
    running = companion_uids(patient.path("/proc"))
    without = [uid for uid in people if uid not in running]
    if without:
        names = ", ".join(_user_name(uid) for uid in without)
        return warn(
            f"{names} logged in without a companion: films, games and some input are not seen",
            f"systemctl --user enable --now {COMPANION}",
        )
    return ok(f"{len(people)} people logged in, each with a companion" if people else "nobody has a session")


def check_fence(patient: Patient) -> Finding:
    fence = probe_fence()
    if fence.kind is FenceKind.NONE:
        return warn(
            "UNFENCED: engines run with network and with the agent's keys in reach", "sudo apt install bubblewrap"
        )
    return ok(f"engines run without network and keys ({fence.kind.value}), as just tried")


def check_leftovers(patient: Patient) -> Finding:
    marker = marker_of(patient.settings.state_dir)
    found = find_marked(f"{marker}/")
    try:
        running = read_status(patient.settings.state_dir)
    except NothingTold:
        return ok(f"an agent runs, or starts, with {len(found)} engine processes")
    except NotRunning:
        if found:
            return fail(
                f"no agent runs, and engine processes {_pids(found)} do: they may hold a card's memory",
                patient.command("clean-up"),
            )
        return ok("no agent runs, and no engine process is left")
    return ok(f"the agent runs (pid {running['pid']}) with {len(found)} engine processes")


HOST_PROBES = (
    Probe("configuration", check_config),
    Probe("platform", check_wsl),
    Probe("cgroups", check_cgroup),
    Probe("service", check_service),
    Probe("session companion", check_companion),
    Probe("fence", check_fence, FENCE_DEADLINE_S),
)
# Left out where the configuration is not valid.
STATE_PROBES = (
    Probe("state directory", check_state_directory),
    Probe("disk", check_disk),
    Probe("left-over engines", check_leftovers),
)


def _systemctl(verb: str, unit: str) -> str:
    """Return what systemctl says in one word; "unknown" where it says nothing."""
    try:
        done = subprocess.run(
            ["systemctl", verb, unit], capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def companion_uids(proc: Path) -> set[int]:
    """Return the users who run a companion."""
    found = set()
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            try:
                if b"agent.session_companion" in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.add(entry.stat().st_uid)
            except OSError:
                # Ended meanwhile.
                continue
    return found


def _existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _pids(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 10**9:.1f} GB"
