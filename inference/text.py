"""Text to token ids and back: chat template, tokenizer, detokenizer.

Runs at the coordinator (or in an SDK on the direct path), never on a node.
Needs no torch.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


class TemplateError(ValueError):
    """The model's chat template refused the messages; the text is the template's."""


class Tokenizer:
    """One model's text side, read from its tokenizer files."""

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer": ...

    @property
    def vocabulary_size(self) -> int: ...

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt text that asks the model to answer the chat."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> "array[int]": ...

    def encode(self, text: str) -> "array[int]": ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(self) -> "Detokenizer": ...


class Detokenizer:
    """Turns ids into text as they come; holds back what is not yet a whole character."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...
