"""Arguments that need a look at the world: stdin, the only model, a node by its label."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slackwater.cli.session import UsageError, write_secret

if TYPE_CHECKING:
    from slackwater.blocking import Client

# More text than any model's context holds; beyond it a pipe is a mistake.
STDIN_CHARACTERS_MAX = 16 * 1024 * 1024

MICRO_PER_CREDIT = 1_000_000
MICRO_CREDITS_MIN = 1
# A billion credits: the coordinator's numbers end a little above.
MICRO_CREDITS_MAX = 10**15


def read_prompt(prompt: str | None) -> str:
    """Return the prompt, or stdin where it is absent or "-"."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError("nothing to ask: give a PROMPT, or pipe one in")
    text = sys.stdin.read(STDIN_CHARACTERS_MAX + 1)
    if len(text) > STDIN_CHARACTERS_MAX:
        raise UsageError(f"stdin has more than {STDIN_CHARACTERS_MAX} characters")
    if not text.strip():
        raise UsageError("nothing to ask: stdin is empty")
    return text


def only_model(client: "Client") -> str:
    """Return the name of the fleet's only model."""
    names = sorted({model.name for model in client.models()})
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError("the coordinator has no model; an administrator registers one")
    raise UsageError(f"the fleet serves several models; pass --model with one of: {', '.join(names)}")


def micro_credits(credits: float) -> int:
    """Return an amount of credits in micro-credits."""
    if not MICRO_CREDITS_MIN <= credits * MICRO_PER_CREDIT <= MICRO_CREDITS_MAX:
        raise UsageError(f"{credits:g} credits are no price; give a number from 0.000001 to a billion")
    return round(credits * MICRO_PER_CREDIT)


def find_node_id(client: "Client", name: str) -> str:
    """Return the id of the one node with this id, beginning of an id, or label."""
    nodes = client.nodes()
    matches = [node.node_id for node in nodes if node.node_id == name]
    matches = matches or [node.node_id for node in nodes if node.label == name or node.node_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{name} stands for several nodes: {', '.join(matches)}")
    raise UsageError(f"no node has the id or label {name}; `slackwater nodes` lists them")


def give_secret(secret: str, out: Path | None, note: str) -> None:
    """Write a secret to its file, or print it alone on stdout; what it is goes to stderr."""
    if out is None:
        typer.echo(secret)
        typer.echo(note, err=True)
    else:
        write_secret(out, secret)
        typer.echo(f"{note}: {out}", err=True)
