"""POST /v1/completions: the shape of its answers."""

import json
from collections.abc import Sequence

from coordinator.gateway.logprobs import CompletionLogprobs
from coordinator.gateway.schema import Call, completion_call
from coordinator.gateway.wire import MARK, AnswerHead, Endpoint, around_text, event, usage, usage_event
from coordinator.tasks_port import Delta, Finished
from inference.text import Tokenizer

_OBJECT = "text_completion"


class CompletionEvents:
    """The chunks of one streamed completion. There is no opening one: text needs no role."""

    opening = ""

    def __init__(self, head: AnswerHead, call: Call, tokenizer: Tokenizer) -> None:
        self._fields = head.fields(_OBJECT)
        self._include_usage = call.include_usage
        self._logprobs = CompletionLogprobs(tokenizer)
        self._before, self._after = around_text(self._document(MARK))

    def text(self, text: str) -> str:
        return self._before + json.dumps(text) + self._after

    def with_logprobs(self, delta: Delta) -> str:
        return event(self._document(delta.text, logprobs=self._logprobs.take(delta.logprobs)))

    def closing(self, finished: Finished) -> str:
        last = event(self._document("", finish_reason=finished.finish_reason.value))
        return last + usage_event(self._fields, finished) if self._include_usage else last

    def _document(self, text: str, *, logprobs: object = None, finish_reason: object = None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        document: dict[str, object] = {**self._fields, "choices": [choice]}
        if self._include_usage:
            document["usage"] = None
        return document


def whole_completion(
    head: AnswerHead, call: Call, tokenizer: Tokenizer, deltas: Sequence[Delta], finished: Finished
) -> dict[str, object]:
    """Return the body of an answer that was not streamed."""
    logprobs: dict[str, list[object]] | None = None
    if call.task.sampling.logprobs is not None:
        positions = [position for delta in deltas for position in delta.logprobs]
        logprobs = CompletionLogprobs(tokenizer).take(positions)
    choice = {
        "index": 0,
        "text": "".join(delta.text for delta in deltas),
        "logprobs": logprobs,
        "finish_reason": finished.finish_reason.value,
    }
    return {**head.fields(_OBJECT), "choices": [choice], "usage": usage(finished)}


COMPLETIONS = Endpoint(
    name="completions",
    check=completion_call,
    id_prefix="cmpl-",
    events=CompletionEvents,
    whole=whole_completion,
)
