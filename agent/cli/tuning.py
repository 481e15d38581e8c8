"""Commands that change what the machine holds and how hard it works: models, calibrate-power."""

import asyncio
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from agent.cli.options import CONFIG_DEFAULT, ConfigOption, JsonOption, act_as_owner, one_line_errors
from agent.clock import wall_ms
from agent.config import load_config
from agent.daemon import marker_of
from agent.errors import DiskFailed, ModelRefused
from agent.identity import keep_owners, load_identity, lock_state_dir
from agent.model_store.cli import fetch_model, models_json, models_table, removed_text
from agent.model_store.fetch import FetchFailed
from agent.model_store.store import FetchUnderWay, ModelInUse, ModelStore, ModelUnknown
from agent.model_supply import open_store
from agent.power.calibrate import calibrate_machine
from agent.power.calibration import calibration_table
from inference.manifest import ManifestError

# Of each of three measurements: an energy counter needs seconds, a card a while until it is warm.
CALIBRATION_S = 30.0

models = typer.Typer(no_args_is_help=False, help="The models on this machine: list, fetch, remove, evict.")


@models.callback(invoke_without_command=True)
def list_models(context: typer.Context, config: ConfigOption = CONFIG_DEFAULT, as_json: JsonOption = False) -> None:
    """List the models in the store."""
    if context.invoked_subcommand is not None:
        return
    with one_line_errors():
        found = _store(config).models()
        if as_json:
            print(json.dumps(models_json(found)))
        else:
            Console(file=sys.stdout, highlight=False).print(models_table(found, wall_ms()))


@models.command()
def fetch(name: str, config: ConfigOption = CONFIG_DEFAULT) -> None:
    """Fetch a model of the fleet now, by name or digest; it resumes where it was."""
    with one_line_errors():
        settings = load_config(config)
        act_as_owner(settings.state_dir)
        identity = load_identity(settings.state_dir)
        try:
            asyncio.run(fetch_model(name, open_store(settings, identity), settings.models, identity, Console()))
        except (ManifestError, FetchFailed) as error:
            raise ModelRefused(f"model {name}: {error}") from error
        except OSError as error:
            raise DiskFailed(f"model {name}: {error}") from error


@models.command()
def remove(name: str, config: ConfigOption = CONFIG_DEFAULT) -> None:
    """Remove a model that is not in use, by name or digest."""
    with one_line_errors():
        try:
            print(removed_text(_store(config).remove(name)))
        except (ModelUnknown, ModelInUse, FetchUnderWay) as error:
            raise ModelRefused(str(error)) from error


@models.command()
def evict(config: ConfigOption = CONFIG_DEFAULT) -> None:
    """Remove every model that is not in use."""
    with one_line_errors():
        print(removed_text(_store(config).evict_unused()))


def calibrate_power(
    config: ConfigOption = CONFIG_DEFAULT,
    seconds: Annotated[float, typer.Option(help="Of each of the three measurements.")] = CALIBRATION_S,
) -> None:
    """Find the power cap with the fewest joules per token, at 5 % less speed at most. Stop the agent first."""
    with one_line_errors():
        settings = load_config(config)
        with lock_state_dir(settings.state_dir):
            try:
                results = calibrate_machine(
                    settings.engines,
                    load_identity(settings.state_dir).release_keys,
                    settings.state_dir,
                    marker_of(settings.state_dir),
                    seconds=seconds,
                    tell=lambda line: print(line, file=sys.stderr, flush=True),
                )
            finally:
                # A cap takes root, and what it leaves is the service's.
                keep_owners(settings.state_dir)
        for result in results:
            print("\n".join(calibration_table(result)))


def _store(config: "ConfigOption") -> ModelStore:
    settings = load_config(config)
    act_as_owner(settings.state_dir)
    return open_store(settings, load_identity(settings.state_dir))
