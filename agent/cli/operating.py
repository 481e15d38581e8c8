"""Commands of whoever keeps an agent installed: doctor, logs, engines, the service."""

import json
import logging
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich.console import Console

from agent.cli.options import CONFIG_DEFAULT, ConfigOption, JsonOption, act_as_owner, one_line_errors
from agent.config import load_config
from agent.doctor.bundle import write_bundle
from agent.doctor.check import exit_status, run_checks
from agent.doctor.examine import as_json, as_table, meet, plan, summary
from agent.engines.install import install_engine as install
from agent.engines.install import make_recipe
from agent.errors import DiskFailed
from agent.identity import keep_owners, load_identity, lock_state_dir
from agent.logs import LINES_DEFAULT, LogPlaces, follow_lines, journal_command, last_lines
from agent.service.clean_up import clean_up as clean_up_after
from agent.service.install import Machine, plan_units
from agent.service.install import install_service as install_units
from agent.service.install import uninstall as remove_all

UserSessionOption = Annotated[
    bool, typer.Option("--user-session", help="A service of your own session, without root, instead of the machine's.")
]
RootOption = Annotated[
    Path, typer.Option("--root", help="Write below this directory and call no program of this machine; for images.")
]


class EngineKind(StrEnum):
    TORCH = "torch"
    VLLM = "vllm"


def doctor(
    config: ConfigOption = CONFIG_DEFAULT,
    as_json_: JsonOption = False,
    full: Annotated[bool, typer.Option("--full", help="Read every byte of every model; minutes.")] = False,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Also write a zip file to send along with a question; no secrets.")
    ] = None,
) -> None:
    """Examine this machine: what is wrong, why, and one command that mends it. Status 1 where something fails."""
    _be_quiet()
    patient = meet(config, full=full)
    checks = run_checks(patient, plan(patient))
    with one_line_errors():
        if bundle is not None:
            try:
                write_bundle(bundle, checks, config, None if patient.config is None else patient.config.state_dir)
            except OSError as error:
                raise DiskFailed(f"cannot write {bundle}: {error.strerror}") from error
    if as_json_:
        print(json.dumps(as_json(checks)))
    else:
        Console(highlight=False).print(as_table(checks))
        print(summary(checks))
        if bundle is not None:
            print(f"wrote {bundle}: read it before you send it")
    raise SystemExit(exit_status(checks))


def logs(
    config: ConfigOption = CONFIG_DEFAULT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written; Ctrl-C ends it.")] = False,
    engine: Annotated[str | None, typer.Option("--engine", help="Of this engine's newest start.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = LINES_DEFAULT,
) -> None:
    """Show the log of the agent, or of one engine. There is never a prompt or an answer in it."""
    with one_line_errors():
        places = LogPlaces(load_config(config).state_dir)
        if engine is None:
            command = journal_command(lines, follow)
            if command is not None:
                os.execvp(command[0], command)

        def newest() -> Path:
            return places.agent if engine is None else places.engine(engine)

        for line in last_lines(newest(), lines):
            print(line)
        try:
            for line in follow_lines(newest) if follow else ():
                print(line, flush=True)
        except KeyboardInterrupt:
            raise SystemExit(0) from None


def install_engine(
    kind: Annotated[EngineKind, typer.Argument(help="torch runs anywhere; vllm needs an NVIDIA card.")],
    config: ConfigOption = CONFIG_DEFAULT,
    python: Annotated[Path | None, typer.Option("--python", help="Interpreter to build on, 3.11 or newer.")] = None,
) -> None:
    """Install an engine into an environment of its own; safe to repeat, and goes on where it was stopped."""
    _be_quiet()
    with one_line_errors():
        settings = load_config(config)
        cards = meet(config).cards
        act_as_owner(settings.state_dir)
        engine = install(make_recipe(kind, gpu=bool(cards)), settings.state_dir, _say, python=python)
        print(
            f'{engine.python}: for engines of kind "{engine.kind}" or "auto" that name no python, from their next start'
        )


def install_service(
    config: ConfigOption = CONFIG_DEFAULT,
    user_session: UserSessionOption = False,
    power_cap: Annotated[
        bool, typer.Option("--power-cap", help="Let it set power limits, which takes CAP_SYS_ADMIN: nearly root.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and write none.")] = False,
    root: RootOption = Path("/"),
) -> None:
    """Have systemd run the agent from now on: hardened, watched, and started with the machine."""
    with one_line_errors():
        settings = load_config(config)
        if root == Path("/") and not dry_run:
            # Without an identity the service would end at once, and say so only in its log.
            load_identity(settings.state_dir)
        plan_ = plan_units(settings, config, power_cap=power_cap)
        install_units(plan_, Machine(root=root, user_session=user_session), _say, dry_run=dry_run)


def uninstall(
    config: ConfigOption = CONFIG_DEFAULT,
    user_session: UserSessionOption = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove identity, models, engines, configuration and user.")
    ] = False,
    root: RootOption = Path("/"),
) -> None:
    """Stop the agent, end its engines and take the service off this machine."""
    _be_quiet()
    with one_line_errors():
        settings = load_config(config)
        machine = Machine(root=root, user_session=user_session)

        def clean_up_here() -> None:
            with lock_state_dir(settings.state_dir):
                try:
                    clean_up_after(settings.state_dir, _say)
                finally:
                    keep_owners(settings.state_dir)

        remove_all(plan_units(settings, config), machine, _say, clean_up=clean_up_here, purge=purge)


def clean_up(config: ConfigOption = CONFIG_DEFAULT) -> None:
    """End what an agent that is gone left behind: engine processes and power limits. The service calls it."""
    with one_line_errors():
        settings = load_config(config)
        with lock_state_dir(settings.state_dir):
            try:
                clean_up_after(settings.state_dir, _say)
            finally:
                keep_owners(settings.state_dir)


def _say(line: str) -> None:
    print(line, flush=True)


def _be_quiet() -> None:
    """Leave the log out of what a person reads: what matters is in the findings."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
