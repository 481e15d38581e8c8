"""The fleet as it changes."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.live import Live

from slackwater.cli import output
from slackwater.fleet import Node

if TYPE_CHECKING:
    from slackwater.blocking import Client


def watch_nodes(client: "Client", *, as_json: bool) -> None:
    """Show every change until interrupted: a table on a terminal, else one line for each."""
    if as_json or not sys.stdout.isatty():
        for node in client.watch_nodes():
            typer.echo(json.dumps(asdict(node)) if as_json else output.node_line(node))
        return
    console = output.console()
    nodes: dict[str, Node] = {}
    with Live(output.nodes_table([]), console=console) as live:
        for node in client.watch_nodes():
            nodes[node.node_id] = node
            live.update(output.nodes_table(nodes.values()))
