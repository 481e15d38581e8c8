"""The commands under `slackwater ledger`: balances, the journal, and credit for a tenant."""

import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.session import ExitCode, Settings, UsageError, connected

MICRO_PER_CREDIT = 1_000_000

ledger = typer.Typer(no_args_is_help=True, help="What work has cost and earned, in credits.", rich_markup_mode=None)


@ledger.command("show")
def show_ledger(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show balances: all of them with an admin key, your own with another."""
    from slackwater.cli import output

    with connected(context) as client:
        output.show(client.ledger_accounts(), as_json, output.accounts_table)


@ledger.command("export")
def export_ledger(context: typer.Context) -> None:
    """Print the journal, one entry a line, exactly as it is hashed: all with an admin key, your own with another.

    \b
    Example:
      slackwater ledger export > journal.jsonl
    """
    with connected(context) as client:
        following = 0
        while page := client.ledger_entries(following):
            for one in page:
                typer.echo(one.entry.decode())
            following = page[-1].sequence + 1


@ledger.command("verify")
def verify_books(
    context: typer.Context,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="HEX",
            help="The coordinator's public key, better not had from the coordinator; kept after the first time.",
        ),
    ] = None,
    state_file: Annotated[
        Path | None,
        typer.Option(
            "--state",
            help="What was seen last time; else ~/.local/state/slackwater/ledger-ADDRESS.json, by coordinator.",
        ),
    ] = None,
    counted_file: Annotated[
        Path | None,
        typer.Option("--counted", help="JSON lines with task_id, completion_tokens, perhaps prompt_tokens: your own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check the ledger without trusting the coordinator: all of it with an admin key, your own entries with another.

    Prints a line for each check. Exit status 0: nothing failed; 6: at least one check failed.

    \b
    Examples:
      slackwater ledger verify --key 3f1c...   the first time
      slackwater ledger verify                 from then on: also that the log has only grown
    """
    from slackwater.cli.ledger_check import verify_ledger
    from slackwater.cli.ledger_state import default_path, parse_keys, read_counted, read_state, write_state
    from slackwater.cli.output import clean

    settings = context.find_object(Settings)
    with connected(context) as client:
        assert settings is not None, "the callback of the app sets it"
        assert settings.address is not None, "connected has looked"
        path = state_file or default_path(settings.address)
        state = read_state(path)
        given = parse_keys(keys or [])
        state.keys = given or state.keys
        if not state.keys:
            raise UsageError("no key of the coordinator is known yet: pass --key HEX, as its operator has told it")
        checks = verify_ledger(client, state, read_counted(counted_file))
        if checks[0].outcome == "holds":
            # Else a wrong --key would take the place of the right one.
            write_state(path, state)
        failed = any(check.outcome == "fails" for check in checks)
        if as_json:
            typer.echo(json.dumps({"holds": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
        for check in () if as_json else checks:
            typer.echo(f"{check.outcome:<8}{check.name:<12}{clean(check.detail)}")
        if failed:
            raise typer.Exit(ExitCode.UNVERIFIED)


@ledger.command("grant")
def grant_credit(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="As `slackwater keys list` shows it.")],
    credits: Annotated[float, typer.Argument(help="How many credits.")],
    grant_id: Annotated[
        str | None, typer.Option("--id", help="Your own name of this grant: sent again, it is given once.")
    ] = None,
) -> None:
    """Give an API key credit; from the first grant on, it can spend no more than it was given (administrators)."""
    amount_micro = round(credits * MICRO_PER_CREDIT)
    if amount_micro < 1:
        raise UsageError("give more than 0 credits")
    with connected(context) as client:
        balance_micro = client.grant_credit(key_id, amount_micro, grant_id=grant_id or secrets.token_hex(8))
        typer.echo(json.dumps({"key_id": key_id, "balance_micro": balance_micro}))
