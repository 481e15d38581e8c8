"""Commands of an agent's life: join, run, check-config."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.options import CONFIG_DEFAULT, ConfigOption, act_as_owner, configure_log, one_line_errors
from agent.config import AgentConfig, load_config
from agent.daemon import Daemon
from agent.enrolment import FleetTerms
from agent.enrolment import join as join_fleet
from agent.errors import ConfigInvalid, EnrolmentRefused
from agent.events import Exit, StopRequested
from agent.identity import Identity, load_identity, lock_state_dir
from agent.owner.asks import describe_asks
from agent.owner.consent import describe

# A join string has about two hundred characters; whatever is longer is another file.
JOIN_FILE_CHARACTERS_MAX = 4096
JOIN_VARIABLE = "SLACKWATER_JOIN"
# For scripts, which may run agents of releases that know no --yes.
ACCEPT_VARIABLE = "SLACKWATER_ACCEPT_TERMS"
ANSWER_CHARACTERS_MAX = 64


def join(
    config: ConfigOption = CONFIG_DEFAULT,
    file: Annotated[
        str | None,
        typer.Option("--file", help=f"File with the join string, or - for standard input; else ${JOIN_VARIABLE}."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", envvar=ACCEPT_VARIABLE, help="Print the terms and join without asking.")
    ] = False,
) -> None:
    """Make this machine a node of the fleet that a join string names, once its owner has read the terms."""
    with one_line_errors():
        settings = load_config(config)

        def agree(terms: FleetTerms) -> None:
            print("\n".join([*terms.describe(), "", *_consented(settings), ""]), flush=True)
            if not yes:
                _ask(can_ask=file != "-" and sys.stdin.isatty())

        # Read first: it may be root's alone.
        join_string = _read_join_string(file)
        act_as_owner(settings.state_dir)
        with lock_state_dir(settings.state_dir):
            identity = join_fleet(join_string, settings.state_dir, settings.label, agree)
        print(f"joined as node {identity.node_id}")


def run(config: ConfigOption = CONFIG_DEFAULT) -> None:
    """Serve the fleet until SIGTERM or SIGINT."""
    with one_line_errors():
        settings = load_config(config)
        act_as_owner(settings.state_dir)
        configure_log(settings.state_dir)
        with lock_state_dir(settings.state_dir):
            end = asyncio.run(_serve(settings, config, load_identity(settings.state_dir)))
    if end.detail:
        print(f"slackwater-agent: {end.detail}", file=sys.stderr)
    raise SystemExit(end.status)


def check_config(config: ConfigOption = CONFIG_DEFAULT) -> None:
    """Check a configuration file, say what it consents to, and start nothing."""
    with one_line_errors():
        settings = load_config(config)
        print(f"{config} is valid: {len(settings.engines)} engines, state in {settings.state_dir}")
        print("\n".join(_consented(settings)))


def _consented(settings: AgentConfig) -> list[str]:
    return [*describe(settings.consent), *describe_asks(settings.asks)]


async def _serve(settings: AgentConfig, config: Path, identity: Identity) -> Exit:
    daemon = Daemon(settings, identity, config_file=config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.feed, StopRequested())
    return await daemon.run()


def _ask(*, can_ask: bool) -> None:
    """Have the owner agree to what was printed.

    Raises:
        ConfigInvalid: there is nobody to ask.
        EnrolmentRefused: the answer is not yes.
    """
    if not can_ask:
        raise ConfigInvalid("nothing was joined: nobody can be asked here; read the terms above, then give --yes")
    print("Join this fleet on these terms? [y/N] ", end="", flush=True)
    if sys.stdin.readline(ANSWER_CHARACTERS_MAX).strip().lower() not in ("y", "yes"):
        raise EnrolmentRefused("nothing was joined, as you wished; the join string stays good until it expires")


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
