"""Putting the agent's service on a machine and taking it off again.

Everything that is put down is in `plan_files`; taking it off removes exactly that, whether or not it was put down by
this version. With `root`, all of it happens below another directory and no program of the machine is called: for
images, and for tests.
"""

import grp
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agent.config import AgentConfig
from agent.engines.settling import UNNAMED
from agent.errors import AgentError, ConfigInvalid, ExitStatus
from agent.identity import give_all
from agent.service.units import (
    COMPANION,
    DIRECTORY,
    SERVICE,
    USER,
    UnitPlan,
    companion_unit,
    system_unit,
    sysusers,
    user_unit,
)
from agent.signals.settings import SOCKET_NAME

# `systemctl stop` waits for the agent, which waits for its engines.
COMMAND_TIMEOUT_S = 60.0
# Who may open cards and input devices, by the names that distributions give.
DEVICE_GROUPS = ("video", "render", "input")
# Where docs/agent.md has the owner put the configuration; removed with it.
CONFIG_DIRECTORY = "slackwater"

Report = Callable[[str], None]


class ServiceFailed(AgentError):
    """The operator must read what the service manager said."""

    exit_status = ExitStatus.CONFIG_INVALID


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the service is put.

    Args:
        root: "/" or a directory that stands for it.
        user_session: a service of the person who calls, not of the machine.
        home: of that person.
        run: calls a program of the machine; tests record instead.
    """

    root: Path = Path("/")
    user_session: bool = False
    home: Path = field(default_factory=Path.home)
    run: Callable[[Sequence[str]], str] = field(default=lambda command: _run(command))

    @property
    def live(self) -> bool:
        return self.root == Path("/")

    def place(self, path: Path) -> Path:
        """Return where an absolute path of the machine lies below the root."""
        return self.root / path.relative_to("/")


def plan_units(config: AgentConfig, config_path: Path, *, power_cap: bool = False) -> UnitPlan:
    """Return what the units say about the agent that runs now and the engines that it is configured for."""
    python = Path(sys.executable)
    interpreters = [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2]]
    # Those of install-engine lie in the state directory.
    engines = [engine.python.parent.parent for engine in config.engines if engine.python != UNNAMED]
    models = [engine.model_directory for engine in config.engines if not engine.model]
    return UnitPlan(
        # By module and not by script: the script's first line may be longer than the kernel takes.
        command=(str(python), "-P", "-m", "agent"),
        config=config_path.resolve(),
        state_dir=config.state_dir,
        read=tuple(path.absolute() for path in (*interpreters, *engines, *models, config_path.resolve().parent)),
        write=() if config.models.directory is None else (config.models.directory.absolute(),),
        groups=tuple(name for name in DEVICE_GROUPS if _group_exists(name)),
        power_cap=power_cap,
    )


def plan_files(plan: UnitPlan, machine: Machine) -> dict[Path, str]:
    """Return every file of the service, with its text."""
    if machine.user_session:
        units = machine.home / ".config/systemd/user"
        socket = f"%t/{DIRECTORY}/{SOCKET_NAME}"
        return {units / SERVICE: user_unit(plan), units / COMPANION: companion_unit(plan, socket)}
    return {
        Path("/etc/systemd/system", SERVICE): system_unit(plan),
        Path("/etc/systemd/user", COMPANION): companion_unit(plan),
        Path("/etc/sysusers.d/slackwater-agent.conf"): sysusers(plan),
    }


def install_service(plan: UnitPlan, machine: Machine, report: Report, *, dry_run: bool = False) -> None:
    """Put the service down, enable it and start it; safe to run again after an update.

    Raises:
        ConfigInvalid: not called as root, where that is needed.
        ServiceFailed: the service manager refuses; what it said is in the message.
    """
    files = plan_files(plan, machine)
    if dry_run:
        for path, text in files.items():
            report(f"# {machine.place(path)}\n{text}")
        return
    _check_caller(machine)
    for path, text in files.items():
        place = machine.place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        report(f"wrote {place}")
    if not machine.live:
        return
    if machine.user_session:
        machine.run(["systemctl", "--user", "daemon-reload"])
        machine.run(["systemctl", "--user", "enable", SERVICE, COMPANION])
        machine.run(["systemctl", "--user", "restart", SERVICE, COMPANION])
        report("started; it ends when you log out unless lingering is on: loginctl enable-linger")
        return
    machine.run(["systemd-sysusers", "/etc/sysusers.d/slackwater-agent.conf"])
    for directory in plan.write:
        # The unit may write there, and not make it.
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    for directory in (plan.state_dir, *plan.write):
        _hand_over(directory)
    machine.run(["systemctl", "daemon-reload"])
    machine.run(["systemctl", "--global", "enable", COMPANION])
    machine.run(["systemctl", "enable", SERVICE])
    machine.run(["systemctl", "restart", SERVICE])
    report(f"started as user {USER}")
    _tell_companions("start", machine, report)


def uninstall(
    plan: UnitPlan,
    machine: Machine,
    report: Report,
    *,
    clean_up: Callable[[], None],
    purge: bool = False,
) -> None:
    """Stop the agent, end every engine of it and remove the service; with `purge`, its state and its user too.

    Args:
        clean_up: called once the service is stopped, where there is a state directory: ends what is left of it.

    Raises:
        ConfigInvalid: not called as root, where that is needed, or an agent runs that is no service.
        ServiceFailed: the service does not stop.
        AgentError: whatever `clean_up` raises; the files stay then, so that it can be tried again.
    """
    _check_caller(machine)
    files = plan_files(plan, machine)
    manager = ["systemctl", "--user"] if machine.user_session else ["systemctl"]
    installed = any(machine.place(path).exists() for path in files)
    if machine.live and installed:
        own = [SERVICE, COMPANION] if machine.user_session else [SERVICE]
        machine.run([*manager, "disable", "--now", *own])
        # A unit that failed is remembered until it is told to be forgotten; one that did not is not even loaded.
        with suppress(ServiceFailed):
            machine.run([*manager, "reset-failed", SERVICE])
        if not machine.user_session:
            machine.run(["systemctl", "--global", "disable", COMPANION])
            _tell_companions("stop", machine, report)
    state = machine.place(plan.state_dir)
    if state.exists():
        clean_up()
    for path in files:
        place = machine.place(path)
        if place.exists():
            place.unlink()
            report(f"removed {place}")
    if machine.live and installed:
        machine.run([*manager, "daemon-reload"])
    if not purge:
        if state.exists():
            report(f"kept {state} (identity, models, engines); `uninstall --purge` removes it")
        return
    for directory in plan.write:
        report(f"kept {machine.place(directory)}: models lie there because you said so")
    config = machine.place(plan.config)
    if state.exists():
        shutil.rmtree(state)
        report(f"removed {state}")
    if config.exists():
        config.unlink()
        report(f"removed {config}")
        if config.parent.name == CONFIG_DIRECTORY and not any(config.parent.iterdir()):
            config.parent.rmdir()
    if machine.live and not machine.user_session and _user_exists(USER):
        machine.run(["userdel", USER])
        report(f"removed the user {USER}")


def _tell_companions(verb: str, machine: Machine, report: Report) -> None:
    """Start or stop the companion in every session that is open now; later sessions do it by themselves."""
    sessions = machine.place(Path("/run/user"))
    for uid in sorted(path.name for path in sessions.iterdir() if path.name.isdecimal()) if sessions.is_dir() else ():
        manager = ["systemctl", f"--machine={uid}@.host", "--user"]
        try:
            machine.run([*manager, "daemon-reload"])
            machine.run([*manager, verb, COMPANION])
        except ServiceFailed as error:
            # A session that is just closing has no manager; what it misses is done when the person logs in again.
            report(f"the companion of user {uid} was not told to {verb}: {error}")


def _check_caller(machine: Machine) -> None:
    if machine.live and not machine.user_session and os.geteuid() != 0:
        raise ConfigInvalid(
            "a service of the machine needs root: call it with sudo, or with --user-session for a service of your own"
        )
    if machine.live and machine.user_session and os.geteuid() == 0:
        raise ConfigInvalid("--user-session is for the person who logs in: call it without sudo")


def _hand_over(owned: Path) -> None:
    """Give what `join` and `install-engine` made as root to the agent's user."""
    if not owned.exists():
        return
    user = pwd.getpwnam(USER)
    give_all(owned, user.pw_uid, user.pw_gid)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceFailed(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().replace("\n", " | ")
        raise ServiceFailed(f"`{' '.join(command)}` ended with status {done.returncode}: {said}")
    return done.stdout


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _user_exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
