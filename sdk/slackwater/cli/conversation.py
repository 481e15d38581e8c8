"""Printing an answer as it comes."""

import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from slackwater.cli.output import clean
from slackwater.errors import SlackwaterError
from slackwater.events import AttemptBroken, AttemptStarted, Delta, Event

if TYPE_CHECKING:
    from slackwater.blocking import BlockingAnswer


def converse(answer: "BlockingAnswer", *, show_events: bool, verify: bool) -> None:
    """Stream the text to stdout, notices to stderr; leaving early cancels the task."""
    screen = _Screen()
    with answer:
        try:
            for event in answer:
                if isinstance(event, Delta):
                    screen.write(event.text)
                elif show_events:
                    screen.notice(_notice(event))
        except (SlackwaterError, KeyboardInterrupt):
            screen.end_line()
            raise
    screen.end_line()
    if verify:
        statement = answer.verify()
        # An older coordinator does not tell its keys.
        order = "which the coordinator had signed for it"
        if not statement.header_signature_checked:
            order = "without a check of the coordinator's own signature"
        last = statement.first_index + len(statement.token_ids) - 1
        screen.notice(
            f"verified: node {statement.node_id} signed tokens {statement.first_index} to {last} of task "
            f"{statement.task_id} (attempt {statement.attempt}), {order}"
        )


class _Screen:
    """Stdout and stderr, which may be the same terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._notices = Console(stderr=True, highlight=False)
        self._line_open = False

    def write(self, text: str) -> None:
        if text:
            # A pipe gets the bytes of the answer; a terminal none that could steer it.
            sys.stdout.write(clean(text) if self._terminal else text)
            sys.stdout.flush()
            self._line_open = not text.endswith("\n")

    def notice(self, text: str) -> None:
        if text:
            if self._terminal and self._notices.is_terminal:
                self.end_line()
            self._notices.print(clean(text), style="dim", markup=False, soft_wrap=True)

    def end_line(self) -> None:
        if self._line_open:
            typer.echo()
            self._line_open = False


def _notice(event: Event) -> str:
    match event:
        case AttemptStarted(attempt=1):
            return f"node {event.node_id} answers"
        case AttemptStarted():
            return f"node {event.node_id} goes on at token {event.first_index} (attempt {event.attempt})"
        case AttemptBroken():
            return f"node {event.node_id} was lost after {event.delivered_tokens} tokens: {event.reason}"
        case _:
            return ""
