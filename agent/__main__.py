"""The command line: slackwater-agent join | run | status | check-config."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import structlog
import typer

from agent.config import AgentConfig, load_config
from agent.daemon import Daemon
from agent.enrolment import join as join_fleet
from agent.errors import AgentError, ConfigInvalid
from agent.events import Exit, StopRequested
from agent.identity import Identity, load_identity, lock_state_dir
from agent.status import format_status, read_status

# A join string has about two hundred characters; whatever is longer is another file.
JOIN_FILE_CHARACTERS_MAX = 4096
JOIN_VARIABLE = "SLACKWATER_JOIN"

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Lends this machine's graphics cards to a fleet.",
    epilog="Exit status: 0 stopped as asked, 1 a bug, 2 configuration, 3 join refused, 4 not joined, "
    "5 a newer agent uses this identity, 6 banned, 7 protocol version, 8 no usable model, 9 not running, "
    "10 disk full or broken.",
)
# Whether it can be read is found out by reading it, which says so in one line.
ConfigOption = Annotated[Path, typer.Option("--config", readable=False, help="The agent's TOML file.")]


@app.command()
def join(
    config: ConfigOption,
    file: Annotated[
        str | None,
        typer.Option("--file", help=f"File with the join string, or - for standard input; else ${JOIN_VARIABLE}."),
    ] = None,
) -> None:
    """Make this machine a node of the fleet that a join string names."""
    with _one_line_errors():
        settings = load_config(config)
        with lock_state_dir(settings.state_dir):
            identity = join_fleet(_read_join_string(file), settings.state_dir, settings.label)
        print(f"joined as node {identity.node_id}")


@app.command()
def run(config: ConfigOption) -> None:
    """Serve the fleet until SIGTERM or SIGINT."""
    _configure_log()
    with _one_line_errors():
        settings = load_config(config)
        with lock_state_dir(settings.state_dir):
            end = asyncio.run(_serve(settings, load_identity(settings.state_dir)))
    if end.detail:
        print(f"slackwater-agent: {end.detail}", file=sys.stderr)
    raise SystemExit(end.status)


@app.command()
def status(config: ConfigOption, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Tell how the agent on this machine stands."""
    with _one_line_errors():
        told = read_status(load_config(config).state_dir)
        print(json.dumps(told) if as_json else "\n".join(format_status(told)))


@app.command("check-config")
def check_config(config: ConfigOption) -> None:
    """Check a configuration file and start nothing."""
    with _one_line_errors():
        settings = load_config(config)
        print(f"{config} is valid: {len(settings.engines)} engines, state in {settings.state_dir}")


async def _serve(settings: AgentConfig, identity: Identity) -> Exit:
    daemon = Daemon(settings, identity)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.feed, StopRequested())
    return await daemon.run()


def _read_join_string(file: str | None) -> str:
    if file is None:
        if JOIN_VARIABLE not in os.environ:
            raise ConfigInvalid(
                f"give the join string with --file PATH, on standard input with --file -, or in ${JOIN_VARIABLE}"
            )
        return os.environ[JOIN_VARIABLE]
    if file == "-":
        return sys.stdin.read(JOIN_FILE_CHARACTERS_MAX)
    try:
        with open(file, encoding="utf-8") as text:
            return text.read(JOIN_FILE_CHARACTERS_MAX)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"cannot read the join string from {file}: {error}") from error


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except AgentError as error:
        print(f"slackwater-agent: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error


def _configure_log() -> None:
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def main() -> None:
    """Entry point of `slackwater-agent`."""
    app()


if __name__ == "__main__":
    main()
