"""What the two completion endpoints share on the wire, and what each has to say for itself."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.gateway.body import Check
from coordinator.gateway.schema import Call
from coordinator.tasks_port import Accepted, Delta, Finished
from inference.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every part of one answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str
    # Which revision answered: OpenAI's field for "the back end has changed".
    fingerprint: str

    @classmethod
    def of(cls, id_prefix: str, accepted: Accepted, created: int) -> "AnswerHead":
        return cls(
            id=id_prefix + accepted.task_id,
            created=created,
            model=accepted.model,
            fingerprint="fp_" + accepted.manifest_digest.removeprefix("sha256:")[:16],
        )

    def fields(self, object_: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": object_,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class EventFormat(Protocol):
    """Turns the parts of one answer into server-sent events."""

    opening: str

    def text(self, text: str) -> str:
        """Return the event of a piece of text. Runs for every frame, so it only joins strings."""
        ...

    def with_logprobs(self, delta: Delta) -> str: ...

    def closing(self, finished: Finished) -> str:
        """Return the events after the last piece, up to but without [DONE]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One completion endpoint."""

    name: str
    check: Check[Call]
    id_prefix: str
    events: Callable[[AnswerHead, Call, Tokenizer], EventFormat]
    whole: Callable[[AnswerHead, Call, Tokenizer, Sequence[Delta], Finished], dict[str, object]]


def usage(finished: Finished) -> dict[str, object]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def event(document: dict[str, object]) -> str:
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n"


def usage_event(fields: dict[str, object], finished: Finished) -> str:
    # `choices` is there and empty: clients that find a choice here count its text twice.
    return event({**fields, "choices": [], "usage": usage(finished)})


# Stands in for the text when a frame's event is cut into what comes before it and after it.
MARK = "\x00"


def around_text(document: dict[str, object]) -> tuple[str, str]:
    """Return the event of `document` before and after the text `MARK` in it."""
    before, _, after = event(document).partition(json.dumps(MARK))
    return before, after
