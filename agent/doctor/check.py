"""What a check is, and how many of them run: each by itself, each with a deadline, none able to end another."""

import os
import queue
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from agent.cards.use import CardReading
from agent.cli.options import CONFIG_DEFAULT
from agent.config import AgentConfig

# Most checks read a few files. What takes longer hangs: a network file system, a driver, a name server.
DEADLINE_S = 5.0


class Status(StrEnum):
    OK = "ok"
    # Works, and not as well or as safely as it could.
    WARN = "warn"
    # Does not work, or must not go on so.
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Args:
        cause: one sentence in words that an owner understands.
        fix: one command for a shell; empty where nothing is to be done.
    """

    status: Status
    cause: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding with the name of its check; a line of the table."""

    name: str
    status: Status
    cause: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """The machine under examination.

    Args:
        config: None where the file is not valid; `config_error` says why.
        root: stands before every path of the system that is looked at; tests have their own.
        cards: newest readings; `gpu_note` says why there are none.
        full: take minutes where minutes are needed: hash every model.
        now_ms: Unix milliseconds.
    """

    config_path: Path
    config: AgentConfig | None
    config_error: str = ""
    root: Path = Path("/")
    cards: tuple[CardReading, ...] = ()
    gpu_note: str = ""
    full: bool = False
    now_ms: int
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    kernel_release: str = field(default_factory=lambda: os.uname().release)

    def command(self, words: str, *, root: bool = False) -> str:
        """Return a command of the agent's as a person has to type it for this configuration."""
        place = "" if self.config_path == CONFIG_DEFAULT else f" --config {shlex.quote(str(self.config_path))}"
        return f"{'sudo ' if root else ''}slackwater-agent {words}{place}"

    @property
    def edit(self) -> str:
        """Return the command that opens the configuration."""
        return f"${{EDITOR:-nano}} {shlex.quote(str(self.config_path))}"

    def path(self, absolute: str) -> Path:
        """Return a path of the system, below the root of this machine."""
        return self.root / absolute.lstrip("/")

    @property
    def settings(self) -> AgentConfig:
        """The configuration, for checks that run only where it is valid."""
        assert self.config is not None, "checks that need the configuration are left out without it"
        return self.config


@dataclass(frozen=True, slots=True)
class Probe:
    """One check before it has run.

    Args:
        look: looks at the machine; may block, may raise.
    """

    name: str
    look: Callable[[Patient], Finding]
    deadline_s: float = DEADLINE_S


def ok(cause: str) -> Finding:
    return Finding(Status.OK, cause)


def warn(cause: str, fix: str) -> Finding:
    return Finding(Status.WARN, cause, fix)


def fail(cause: str, fix: str) -> Finding:
    return Finding(Status.FAIL, cause, fix)


def run_checks(patient: Patient, probes: Sequence[Probe]) -> list[Check]:
    """Run every check and return the results in the order of the probes; never raises for what a check does.

    All run at once, so the whole takes as long as the slowest.
    """
    results: list[queue.SimpleQueue[Finding]] = [queue.SimpleQueue() for _ in probes]
    for probe, result in zip(probes, results, strict=True):
        # A thread of its own that no exit waits for: one that hangs in the kernel must not keep the doctor.
        threading.Thread(target=_look, args=(probe, patient, result), name=probe.name, daemon=True).start()
    checks = []
    for probe, result in zip(probes, results, strict=True):
        try:
            finding = result.get(timeout=probe.deadline_s)
        except queue.Empty:
            finding = fail(
                f"no answer within {probe.deadline_s:g} s: a disk, driver or network hangs", "sudo dmesg | tail -n 50"
            )
        checks.append(Check(probe.name, finding.status, finding.cause, finding.fix))
    return checks


def exit_status(checks: Sequence[Check]) -> int:
    """Return 1 where a check failed, else 0: a warning is no failure."""
    return int(any(check.status is Status.FAIL for check in checks))


def _look(probe: Probe, patient: Patient, result: "queue.SimpleQueue[Finding]") -> None:
    try:
        result.put(probe.look(patient))
    except Exception as error:
        # Whatever a check trips over is its own finding, and the others' answers stand.
        result.put(fail(f"the check itself failed: {type(error).__name__}: {error}", patient.command("logs")))
