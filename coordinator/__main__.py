"""slackwater-coordinator: run a fleet from one machine.

Everything but `run` works on the database alone, beside a running coordinator
or without one; `simulate` needs neither. Secrets are printed once or written to files, never taken from
the command line.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NoReturn

import structlog
import typer

from coordinator.api.fleet_service import add_owner, new_owner
from coordinator.api.verdict_desk import read_all_verdicts
from coordinator.api_keys import create_api_key
from coordinator.app import serve
from coordinator.clock import SystemClock
from coordinator.config import Config, load_config
from coordinator.enrolment.service import TOKEN_LIFETIME_S_MAX, EnrolmentAuthority
from coordinator.errors import SlackwaterError
from coordinator.keys import CoordinatorKeys
from coordinator.planning.catalog import PRICES
from coordinator.planning.plan_command import PLAN_EPILOG, plan_fleet
from coordinator.served_models import load_release_keys, register_configured
from coordinator.simulate_command import simulate
from coordinator.startup import ExitCode, StartupError
from coordinator.state_dir import ensure_admin_key, open_state, read_addresses
from coordinator.store.port import StoreError
from coordinator.store.sql import SqlStore
from inference.task import NodeId, TenantId
from protos.verdict import verdict_lines, verdict_to_json

_EPILOG = (
    'A first fleet: write a configuration (state_dir = "/var/lib/slackwater", release_keys = ["release.pub"]), '
    "then `init`, `owner add alice`, `join-string alice` for each machine of hers, `key create my-app`, and `run`. "
    "Exit statuses are those of sysexits.h: 2 a wrong command line, 64 a wrong argument, "
    "65 a file's content is wrong (hash, signature), "
    "66 a named file is missing, 69 the database cannot be used, 70 a bug, 74 the disk is full or broken, "
    "75 a port or the state directory is in use, 77 no permission, 78 wrong configuration."
)

app = typer.Typer(help=__doc__, epilog=_EPILOG, no_args_is_help=True, add_completion=False)
owner_app = typer.Typer(help="Owners: who lends machines, and whom reputation and earnings belong to.")
key_app = typer.Typer(help="API keys: for tenants, who submit work, and administrators.")
model_app = typer.Typer(help="Models: signed manifests with their tokenizer files.")
verdict_app = typer.Typer(help="Verdicts: what audits have found of a node, and on which evidence.")
app.add_typer(owner_app, name="owner", no_args_is_help=True)
app.add_typer(key_app, name="key", no_args_is_help=True)
app.add_typer(model_app, name="model", no_args_is_help=True)
app.add_typer(verdict_app, name="verdicts", no_args_is_help=True)
app.command()(simulate)

ConfigPath = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        envvar="SLACKWATER_CONFIG",
        # Whether it can be read is found out by reading it, which says so in one line.
        readable=False,
        help="TOML file; coordinator/config.py lists the keys.",
    ),
]
_DEFAULT_CONFIG = Path("coordinator.toml")


@app.command()
def init(config_path: ConfigPath = _DEFAULT_CONFIG) -> None:
    """Make state directory, keys, database and the first admin key. Safe to run twice; `run` does the same."""
    with _opened(config_path) as (config, store, keys):
        admin_key_file = ensure_admin_key(config.state_dir, store, SystemClock().now_ms())
        print(f"state directory: {config.state_dir}")
        print(f"CA certificate for clients: {config.state_dir / 'ca.pem'} (pin sha256:{keys.ca_pin.hex()})")
        if admin_key_file is None:
            print("admin key: there is one already; `key create NAME --role admin` makes another")
        else:
            print(f"admin key: written to {admin_key_file}; move it to where you keep secrets")


@app.command()
def run(config_path: ConfigPath = _DEFAULT_CONFIG) -> None:
    """Run the coordinator until SIGTERM or SIGINT. The log goes to standard error, one JSON object a line."""
    with _one_line_errors():
        config = load_config(config_path, os.environ)
        asyncio.run(_run(config))


@app.command("join-string")
def join_string(
    owner: Annotated[str, typer.Argument(help="The owner's name or id.")],
    lifetime_s: Annotated[int, typer.Option(min=1, max=TOKEN_LIFETIME_S_MAX, help="Seconds until it expires.")] = (
        TOKEN_LIFETIME_S_MAX
    ),
    config_path: ConfigPath = _DEFAULT_CONFIG,
) -> None:
    """Print a join string for one machine of an owner. It is a secret: pass it on as one."""
    with _opened(config_path) as (config, store, keys):
        row = store.find_owner(owner)
        if row is None:
            raise StartupError(ExitCode.BAD_USAGE, f"there is no owner {owner!r}; `owner add` makes one")
        authority = EnrolmentAuthority(
            store,
            keys,
            SystemClock(),
            cluster_id=store.cluster_id(),
            certificate_lifetime=timedelta(hours=config.certificate_hours),
        )
        host, port = _public_address(config)
        string, _ = authority.create_join_string(row.owner_id, host, port, lifetime_s)
        print(string.encode())


@owner_app.command("add")
def owner_add(
    name: str,
    trusted: Annotated[bool, typer.Option(help="May serve tasks for trusted owners only.")] = False,
    config_path: ConfigPath = _DEFAULT_CONFIG,
) -> None:
    """Register an owner and print the id."""
    with _opened(config_path) as (_, store, _keys):
        owner = new_owner(name, trusted=trusted, now_ms=SystemClock().now_ms())
        add_owner(store, owner)
        print(owner.owner_id)


@owner_app.command("list")
def owner_list(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    config_path: ConfigPath = _DEFAULT_CONFIG,
) -> None:
    """List the owners."""
    with _opened(config_path) as (_, store, _keys):
        rows = [{"owner_id": row.owner_id, "name": row.name, "trusted": row.trusted} for row in store.owners()]
        _print_rows(rows, as_json)


@key_app.command("create")
def key_create(
    name: str,
    role: Annotated[str, typer.Option(help="tenant or admin")] = "tenant",
    config_path: ConfigPath = _DEFAULT_CONFIG,
) -> None:
    """Make an API key and print it; it cannot be shown again."""
    with _opened(config_path) as (_, store, _keys):
        _, secret = create_api_key(store, name, role, SystemClock().now_ms())
        print(secret)


@key_app.command("list")
def key_list(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    config_path: ConfigPath = _DEFAULT_CONFIG,
) -> None:
    """List the API keys, without secrets."""
    with _opened(config_path) as (_, store, _keys):
        rows = [
            {"key_id": row.key_id, "name": row.name, "role": row.role, "revoked": row.revoked_at_ms is not None}
            for row in store.api_keys()
        ]
        _print_rows(rows, as_json)


@key_app.command("revoke")
def key_revoke(key_id: str, config_path: ConfigPath = _DEFAULT_CONFIG) -> None:
    """End an API key. A running coordinator notices within five seconds."""
    with _opened(config_path) as (_, store, _keys):
        row = store.revoke_api_key(TenantId(key_id), SystemClock().now_ms())
        if row is None:
            raise StartupError(ExitCode.BAD_USAGE, f"there is no API key {key_id!r}; `key list` shows them")
        print(f"revoked {row.key_id} ({row.name})")


@model_app.command("add")
def model_add(directory: Path, config_path: ConfigPath = _DEFAULT_CONFIG) -> None:
    """Register the model in a directory (manifest.envelope and tokenizer files); served from the next `run` on."""
    with _opened(config_path) as (config, store, _keys):
        release_keys = load_release_keys(config.release_keys)
        row = register_configured(store, directory, release_keys, SystemClock().now_ms())
        print(f"{row.name} {row.manifest_digest}")


@verdict_app.command("list")
def verdicts_list(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Id of a node, as `slackwater nodes` shows it.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array, with the evidence.")] = False,
    config_path: ConfigPath = _DEFAULT_CONFIG,
) -> None:
    """List the newest verdicts on a node, newest first, those of rules in shadow too."""
    with _opened(config_path) as (_, store, _keys):
        verdicts = read_all_verdicts(store, NodeId(node))
        if as_json:
            print(json.dumps([verdict_to_json(verdict) for verdict in verdicts]))
            return
        for verdict in verdicts:
            print("\n".join(verdict_lines(verdict)))


@app.command("plan", epilog=PLAN_EPILOG)
def plan(
    input_path: Annotated[Path, typer.Argument(metavar="INPUT.toml", help="Loads, targets, caps and churn.")],
    prices_path: Annotated[
        Path,
        typer.Option(
            "--prices",
            metavar="FILE",
            show_default="planning/data/prices.toml of the package, dated",
            help="Prices of cards, electricity and carbon; a changed copy of the default.",
        ),
    ] = PRICES,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write charts (SVG) there.")] = None,
) -> None:
    """Find the cheapest mix of engines for a load, check it by simulation, and say what its cost depends on."""
    with _one_line_errors():
        plan_fleet(input_path, prices_path, as_json, plots)


async def _run(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(config, SystemClock(), stop)


def _public_address(config: Config) -> tuple[str, int]:
    host, port = config.advertised_hosts[0], config.public_listen.port
    if port == 0:
        addresses = read_addresses(config.state_dir)
        if addresses is None:
            raise StartupError(
                ExitCode.TRY_AGAIN, "public_listen has port 0, so the port is known once the coordinator has run"
            )
        port = addresses.public_port
    return host, port


@contextmanager
def _opened(config_path: Path) -> Iterator[tuple[Config, SqlStore, CoordinatorKeys]]:
    with _one_line_errors():
        config = load_config(config_path, os.environ)
        with open_state(config, SystemClock()) as (store, keys):
            yield config, store, keys


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except StartupError as error:
        _exit(error.exit_code, str(error))
    except SlackwaterError as error:
        _exit(ExitCode.BAD_USAGE, error.message)
    except StoreError as error:
        _exit(ExitCode.UNAVAILABLE, str(error))


def _exit(code: ExitCode, message: str) -> NoReturn:
    print(f"slackwater-coordinator: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _print_rows(rows: list[dict[str, object]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("\t".join(str(value) for value in row.values()))


def _configure_log() -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def main() -> None:
    _configure_log()
    app()


if __name__ == "__main__":
    main()
