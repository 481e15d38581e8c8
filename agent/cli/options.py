"""What every command shares: the configuration's place, errors in one line, logs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import structlog
import typer

from agent.errors import AgentError
from agent.logs import FileLog, under_journal

CONFIG_VARIABLE = "SLACKWATER_AGENT_CONFIG"
# Where install-service puts it.
CONFIG_DEFAULT = Path("/etc/slackwater/agent.toml")

# Whether it can be read is found out by reading it, which says so in one line.
ConfigOption = Annotated[
    Path, typer.Option("--config", envvar=CONFIG_VARIABLE, readable=False, help="The agent's TOML file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print what the agent can explain as one line, and leave with the status that belongs to it."""
    try:
        yield
    except AgentError as error:
        print(f"slackwater-agent: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error


def act_as_owner(state_dir: Path) -> None:
    """Become the user whom the state directory belongs to, where this is root. For good: there is no way back.

    What `sudo` leaves there, the service's user must be able to read and to replace.
    """
    if os.geteuid() != 0 or not state_dir.exists():
        return
    owner = state_dir.stat()
    if owner.st_uid != 0:
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)


def log_to_standard_error() -> None:
    """Keep the log out of what a command prints, until one of them asks for more."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def configure_log(state_dir: Path) -> None:
    """Send the log to standard error; where no journal reads that, to the state directory's rotating file as well.

    Raises:
        ConfigInvalid: the state directory cannot be used.
    """
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if under_journal() else [FileLog(state_dir)]),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
