"""Ids to text for one answer: detokenizing and stop strings. Pure.

Sits above failover: it is fed ids in order, whichever attempt produced them,
and so never sees a seam.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from inference.text import Detokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    # Ids of the whole answer up to and including the one that completed a
    # stop string; None while none has matched. Nothing is emitted after it.
    stopped_at: int | None = None


class Assembler:
    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None: ...

    def feed(self, token_ids: Sequence[int]) -> Piece: ...

    def finish(self) -> str:
        """Return the text held back as a possible stop string; an incomplete character is dropped."""
        ...
