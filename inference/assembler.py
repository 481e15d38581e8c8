"""Ids to text for one answer: detokenizing and stop strings. Pure.

Sits above failover: it is fed ids in order, whichever attempt produced them,
and so never sees a seam.
"""

from collections.abc import Sequence
from typing import NamedTuple

from inference.text import Detokenizer


class Piece(NamedTuple):
    """What ids made certain. One is made for every token, where a frozen dataclass takes three times as long."""

    text: str
    # Ids of the whole answer up to and including the one that completed a
    # stop string; None while none has matched. Nothing is emitted after it.
    stopped_at: int | None = None


class Assembler:
    """Assembles one answer.

    The stop string whose last character comes first wins; of two that end
    together, the longer one. So the text does not depend on how the ids were
    cut into frames.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        """Stop strings must not be empty."""
        if "" in stop:
            raise ValueError("a stop string is empty")
        self._detokenizer = detokenizer
        # Longest first, so that of two that end together the longer is found.
        self._matchers = [_Matcher(text) for text in sorted(stop, key=len, reverse=True)]
        self._beginnings = frozenset(text[0] for text in stop)
        # Text not emitted, because a stop string may begin with it.
        self._held = ""
        self._ids_seen = 0
        self._stopped_at: int | None = None

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Return the text that these ids make certain."""
        if self._stopped_at is not None:
            return Piece("", self._stopped_at)
        if not self._matchers:
            self._ids_seen += len(token_ids)
            return Piece(self._detokenizer.feed(token_ids))
        emitted: list[str] = []
        for token_id in token_ids:
            self._ids_seen += 1
            emitted.append(self._match(self._detokenizer.feed((token_id,))))
            if self._stopped_at is not None:
                break
        return Piece("".join(emitted), self._stopped_at)

    def finish(self) -> str:
        """Return the text held back as a possible stop string; an incomplete character is dropped."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> str:
        """Return what of held and new text may be shown; notes a completed stop string."""
        if not self._held and self._beginnings.isdisjoint(text):
            return text
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            for matcher in self._matchers:
                if matcher.step(character):
                    self._held = ""
                    self._stopped_at = self._ids_seen
                    return pending[: position - len(matcher.text)]
        shown = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[shown:]
        return pending[:shown]


class _Matcher:
    """Knuth, Morris and Pratt: how much of a string the text so far ends with, at a constant cost per character."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # Length of the longest beginning of the string that the text ends with.
        self.matched = 0
        # The same for each beginning of the string, itself excepted.
        self._fallback = [0, 0]
        length = 0
        for character in text[1:]:
            while length and character != text[length]:
                length = self._fallback[length]
            length += character == text[length]
            self._fallback.append(length)

    def step(self, character: str) -> bool:
        """Take one character; whether it completes the string."""
        matched, text = self.matched, self.text
        while matched and character != text[matched]:
            matched = self._fallback[matched]
        matched += character == text[matched]
        self.matched = matched
        return matched == len(text)
