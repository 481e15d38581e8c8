"""The text of everything that `install-service` puts down: units, the user, and nothing that decides.

Two forms. For the machine: a system unit under a user of its own, and in each person's session a companion that tells
whether somebody is there, since the hardened unit sees neither a screen nor a session's bus. For one person: a unit of
that person's own service manager, which needs no root, and sees what that person's session sees.

Why engines have no unit of their own: see docs/agent.md, "How an engine is closed in".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.errors import ExitStatus

SERVICE = "slackwater-agent.service"
COMPANION = "slackwater-companion.service"
USER = "slackwater"
# The name that systemd gives directories below /var/lib and /run.
DIRECTORY = "slackwater-agent"

# The event loop answers within milliseconds; a minute is a process that hangs, or a machine that was suspended.
WATCHDOG_S = 60
# Engines get two seconds, then SIGKILL and ten to be gone; the goodbye to the coordinator takes one.
STOP_S = 30
RESTART_S = 5
# What only a person can mend; a restart would say the same again.
_LASTING = (
    ExitStatus.CONFIG_INVALID,
    ExitStatus.ENROLMENT_REFUSED,
    ExitStatus.NOT_JOINED,
    ExitStatus.SUPERSEDED,
    ExitStatus.BANNED,
    ExitStatus.VERSION_UNSUPPORTED,
    ExitStatus.NO_ENGINE,
)
# Places that the system unit covers.
_HOMES = (Path("/home"), Path("/root"))

# What an agent needs none of, and what its fence needs.
_HARDENING = (
    "NoNewPrivileges=yes",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "SystemCallArchitectures=native",
    "# The fence of the engines is made of namespaces and mounts; engines compile code as they run, so memory may",
    "# be written and executed.",
    "RestrictNamespaces=user net mnt ipc",
    "SystemCallFilter=@system-service @mount",
    "SystemCallErrorNumber=EPERM",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """What the units of one installation have to know.

    Args:
        command: how the agent is called, without its subcommand.
        config: the agent's TOML file.
        state_dir: where it keeps its state.
        read: directories that it must read: interpreters, packages, models.
        write: directories beside `state_dir` that it must write: a store of models elsewhere.
        groups: groups that own the cards' and input devices; only such as exist.
        power_cap: grant what setting a card's power limit needs, which is CAP_SYS_ADMIN: nearly all of root.
    """

    command: tuple[str, ...]
    config: Path
    state_dir: Path
    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    groups: tuple[str, ...] = ()
    power_cap: bool = False


def system_unit(plan: UnitPlan) -> str:
    """Return the unit of an agent that belongs to the machine."""
    capabilities = "CAP_SYS_ADMIN" if plan.power_cap else ""
    usual = Path("/var/lib", DIRECTORY)
    shown = [path for path in plan.read if any(path.is_relative_to(home) for home in _HOMES)]
    lines = [
        *_head(
            plan,
            "Wants=network-online.target",
            "After=network-online.target systemd-logind.service nvidia-persistenced.service",
        ),
        f"User={USER}",
        f"Group={USER}",
        *([f"SupplementaryGroups={' '.join(plan.groups)}"] if plan.groups else []),
        f"StateDirectory={DIRECTORY}",
        "StateDirectoryMode=0700",
        f"RuntimeDirectory={DIRECTORY}",
        "RuntimeDirectoryMode=0755",
        # Sockets and temporary files of the engines; short, since the path of a socket has 107 bytes.
        f"Environment=XDG_RUNTIME_DIR=/run/{DIRECTORY}",
        f"Environment=HOME={plan.state_dir}",
        "",
        "# Nothing of the machine can be written but the state directory, and no home directory is seen.",
        "ProtectSystem=strict",
        *[f"ReadWritePaths={quote(str(path))}" for path in _outermost([*plan.write, plan.state_dir]) if path != usual],
        "# /run/user stays: whoever has a directory there is logged in, which the agent must know.",
        "TemporaryFileSystem=/home:ro /root:ro",
        *[f"BindReadOnlyPaths={quote(str(path))}" for path in _outermost(shown)],
        "PrivateTmp=yes",
        "UMask=0077",
        "",
        "# Cards, input devices (to see that somebody is there) and nothing else.",
        "DevicePolicy=closed",
        "DeviceAllow=char-nvidia* rw",
        "DeviceAllow=/dev/dxg rw",
        "DeviceAllow=char-input r",
        "",
        f"CapabilityBoundingSet={capabilities}",
        f"AmbientCapabilities={capabilities}",
        *_HARDENING,
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def user_unit(plan: UnitPlan) -> str:
    """Return the unit of an agent that belongs to one person and needs no root.

    What a user's manager cannot promise everywhere (name spaces, devices) is left to the fence, which proves itself.
    """
    lines = [
        *_head(plan),
        # Where the companion of the same person reports: below %t, which is /run/user/UID.
        f"RuntimeDirectory={DIRECTORY}",
        "RuntimeDirectoryMode=0700",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictRealtime=yes",
        "SystemCallArchitectures=native",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def companion_unit(plan: UnitPlan, socket: str = "") -> str:
    """Return the unit of the companion that runs in each person's session.

    Args:
        socket: where it reports; empty for the machine's agent.
    """
    python = plan.command[0]
    reports = f" --socket {socket}" if socket else ""
    lines = [
        "[Unit]",
        "Description=Slackwater companion: tells the agent whether somebody uses this machine",
        "PartOf=graphical-session.target",
        "After=graphical-session.target",
        "",
        "[Service]",
        f"ExecStart={quote(python)} -P -m agent.session_companion{reports}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "MemoryDenyWriteExecute=yes",
        "RestrictAddressFamilies=AF_UNIX",
        "SystemCallArchitectures=native",
        "UMask=0077",
        "",
        "[Install]",
        "WantedBy=graphical-session.target",
    ]
    return "\n".join(lines) + "\n"


def sysusers(plan: UnitPlan) -> str:
    """Return the description of the agent's user for systemd-sysusers(8)."""
    return f'u {USER} - "Slackwater agent" {plan.state_dir} /usr/sbin/nologin\n'


def quote(text: str) -> str:
    """Return a word as it must stand in a unit file, where % and $ and quotes mean something (systemd.syntax(7))."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(character in text for character in " \t'\";\\") else escaped


def _head(plan: UnitPlan, *order: str) -> list[str]:
    command = " ".join(quote(part) for part in plan.command)
    config = quote(str(plan.config))
    return [
        "[Unit]",
        "Description=Slackwater agent: lends this machine's idle graphics cards",
        *order,
        "# Ten starts in ten minutes: whatever is wrong then is not cured by an eleventh.",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=10",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={command} run --config {config}",
        "# Whatever ended the agent: no engine holds a card, and each card has its own power limit again.",
        f"ExecStopPost={command} clean-up --config {config}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={' '.join(str(int(status)) for status in _LASTING)}",
        f"WatchdogSec={WATCHDOG_S}",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "# An engine that the kernel ends for its memory is the agent's to restart.",
        "OOMPolicy=continue",
    ]


def _outermost(paths: Sequence[Path]) -> list[Path]:
    """Return these paths without those that lie below another of them."""
    unique = sorted(set(paths))
    return [path for path in unique if not any(path != other and path.is_relative_to(other) for other in unique)]
