"""Commands that only look: status, receipts."""

import asyncio
import json
import sys
import time
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
        proven = asyncio.run(fetch_receipts(identity, task))
    if as_json:
        rows = [{"index": one.index, "log_size": one.checkpoint.size, "entry": one.entry.decode()} for one in proven]
        print(json.dumps({"task_id": task, "receipts": rows}))
        return
    for one in proven:
        print(f"entry {one.index} of {one.checkpoint.size}, proven: {one.entry.decode()}")
