"""The engine port: what an agent asks of whatever computes on the card.

Three kinds of process stand behind it (vLLM, the torch fallback, the fake of
the tests), and all speak the same HTTP over a Unix socket: the token-level
subset of vLLM's server (docs/engines.md). So one client serves all three, and
an engine's crash, hang or foreign Python version stays outside the daemon.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from inference.task import FinishReason, PositionLogprobs, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to continue.

    Args:
        request_id: names it for an abort.
        cache_salt: what is computed of the prompt may be used again for requests with the same one; None for none.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: Sequence[int]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Ids that arrived together; `finish_reason` is set on the last chunk, which may hold no id."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()  # empty, or one per id
    finish_reason: FinishReason | None = None


class EngineError(Exception):
    """The engine refused or broke off one request; others may go on."""


class EngineUnreachable(EngineError):
    """The engine process does not answer on its socket: it crashed, or was never up."""


class Engine(Protocol):
    """A running engine. Every method raises `EngineError` where the engine fails the call."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield chunks until one carries a finish reason. Closing the iterator aborts the sequence."""
        ...

    async def score(self, token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
        """Return log-probabilities of ids 1.. under teacher forcing, with `top` alternatives each."""
        ...

    async def embed(self, token_ids: Sequence[int]) -> list[float]:
        """Return one unit-length vector for the sequence."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a sequence; unknown ids are fine, since it may just have ended."""
        ...

    async def check_health(self, timeout_s: float) -> None:
        """Generate one real token; an open port proves nothing."""
        ...

    async def aclose(self) -> None:
        """Release the connection pool; the process is the supervisor's."""
        ...
