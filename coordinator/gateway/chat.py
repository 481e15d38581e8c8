"""POST /v1/chat/completions: the shape of its answers."""

import json
from collections.abc import Sequence

from coordinator.gateway.logprobs import chat_logprobs
from coordinator.gateway.schema import Call, chat_call
from coordinator.gateway.wire import MARK, AnswerHead, Endpoint, around_text, event, usage, usage_event
from coordinator.tasks_port import Delta, Finished
from inference.text import Tokenizer


class ChatEvents:
    """The chunks of one streamed chat answer."""

    def __init__(self, head: AnswerHead, call: Call, tokenizer: Tokenizer) -> None:
        self._fields = head.fields("chat.completion.chunk")
        self._include_usage = call.include_usage
        self._tokenizer = tokenizer
        self.opening = self._chunk({"role": "assistant", "content": ""})
        self._before, self._after = around_text(self._document({"content": MARK}))

    def text(self, text: str) -> str:
        return self._before + json.dumps(text) + self._after

    def with_logprobs(self, delta: Delta) -> str:
        content = chat_logprobs(delta.logprobs, self._tokenizer)
        return self._chunk({"content": delta.text}, logprobs={"content": content, "refusal": None})

    def closing(self, finished: Finished) -> str:
        last = self._chunk({}, finish_reason=finished.finish_reason.value)
        return last + usage_event(self._fields, finished) if self._include_usage else last

    def _chunk(self, delta: dict[str, object], **choice: object) -> str:
        return event(self._document(delta, **choice))

    def _document(
        self, delta: dict[str, object], *, logprobs: object = None, finish_reason: object = None
    ) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        document: dict[str, object] = {**self._fields, "choices": [choice]}
        if self._include_usage:
            document["usage"] = None
        return document


def whole_chat(
    head: AnswerHead, call: Call, tokenizer: Tokenizer, deltas: Sequence[Delta], finished: Finished
) -> dict[str, object]:
    """Return the body of an answer that was not streamed."""
    logprobs: dict[str, object] | None = None
    if call.task.sampling.logprobs is not None:
        positions = [position for delta in deltas for position in delta.logprobs]
        logprobs = {"content": chat_logprobs(positions, tokenizer), "refusal": None}
    message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finished.finish_reason.value,
    }
    return {**head.fields("chat.completion"), "choices": [choice], "usage": usage(finished)}


CHAT = Endpoint(name="chat", check=chat_call, id_prefix="chatcmpl-", events=ChatEvents, whole=whole_chat)
