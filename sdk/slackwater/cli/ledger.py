"""The commands under `slackwater ledger`: balances, the journal, and credit for a tenant."""

import json
import secrets
from typing import Annotated

import typer

from slackwater.cli.session import UsageError, connected

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
