"""Commands that look at what is known of this node: status, receipts, verdicts and the appeal against one."""

import asyncio
import json
import sys
import time
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from agent.cli.options import CONFIG_DEFAULT, ConfigOption, JsonOption, one_line_errors
from agent.clock import wall_ms
from agent.config import load_config
from agent.identity import load_identity
from agent.ledger.receipts import fetch_receipts
from agent.status import read_status
from agent.status_view import render_status
from agent.verdicts import appeal as ask_for_appeal
from agent.verdicts import fetch_verdicts
from protos.verdict import verdict_lines, verdict_to_json

WATCH_PERIOD_S = 1.0
# Where nobody says how wide a line is: enough for a sentence beside a card's name.
PIPED_COLUMNS = 140


def status(
    config: ConfigOption = CONFIG_DEFAULT,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Tell how the agent on this machine stands: cards, engines, connection."""
    with one_line_errors():
        state_dir = load_config(config).state_dir
        told = read_status(state_dir)
        if as_json:
            print(json.dumps(told))
            return
        # Rich leaves colours out where this is no terminal, or NO_COLOR is set.
        console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
        if not watch:
            console.print(render_status(told, wall_ms()))
            return
        with suppress(KeyboardInterrupt, BrokenPipeError):
            _watch(state_dir, console)


def _watch(state_dir: Path, console: Console) -> None:
    """Show how the agent stands, again and again: in place on a terminal, one below the other elsewhere."""
    if not console.is_terminal:
        while True:
            console.print(render_status(read_status(state_dir), wall_ms()))
            console.file.flush()
            time.sleep(WATCH_PERIOD_S)
    with Live(render_status(read_status(state_dir), wall_ms()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_PERIOD_S)
            live.update(render_status(read_status(state_dir), wall_ms()), refresh=True)


def receipts(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Id of a task that this node has worked at.")],
    config: ConfigOption = CONFIG_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Show what the coordinator's ledger holds about this node's attempts at a task, after checking every proof."""
    with one_line_errors():
        identity = load_identity(load_config(config).state_dir)
        fetched = asyncio.run(fetch_receipts(identity, task))
    if as_json:
        rows = [
            {
                "index": one.proven.index,
                "log_size": one.proven.checkpoint.size,
                "entry": one.proven.entry.decode(),
                # For whoever checks it with the SDK, and trusts neither this node nor the coordinator.
                "receipt": b64encode(one.receipt).decode(),
            }
            for one in fetched
        ]
        print(json.dumps({"task_id": task, "receipts": rows}))
        return
    for one in (receipt.proven for receipt in fetched):
        print(f"entry {one.index} of {one.checkpoint.size}, proven: {one.entry.decode()}")


def why(config: ConfigOption = CONFIG_DEFAULT, as_json: JsonOption = False) -> None:
    """Tell what the coordinator's audits have found of this node, newest first, and what each verdict stands on."""
    with one_line_errors():
        verdicts = asyncio.run(fetch_verdicts(load_identity(load_config(config).state_dir)))
    if as_json:
        print(json.dumps({"verdicts": [verdict_to_json(verdict) for verdict in verdicts]}))
        return
    if not verdicts:
        print("no verdict yet: this node is in probation, which ends after ten good audits of a model")
    for verdict in verdicts:
        print("\n".join(verdict_lines(verdict)))


def appeal(
    verdict: Annotated[str, typer.Argument(metavar="VERDICT", help="Id of the quarantine, as `why` shows it.")],
    config: ConfigOption = CONFIG_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Have another verifier repeat what a quarantine stands on. How it ends, `why` tells."""
    with one_line_errors():
        appealed = asyncio.run(ask_for_appeal(load_identity(load_config(config).state_dir), verdict))
    if as_json:
        print(json.dumps({"appealed": verdict_to_json(appealed)}))
        return
    print(f"the appeal against {appealed.verdict_id} is taken up; another verifier measures, and `why` tells the end")
