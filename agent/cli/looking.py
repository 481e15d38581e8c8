"""Commands that only look: status."""

import json
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from agent.cli.options import CONFIG_DEFAULT, ConfigOption, JsonOption, one_line_errors
from agent.clock import wall_ms
from agent.config import load_config
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
        with Live(render_status(told, wall_ms()), console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(WATCH_PERIOD_S)
                    live.update(render_status(read_status(state_dir), wall_ms()), refresh=True)
            except KeyboardInterrupt:
                return
