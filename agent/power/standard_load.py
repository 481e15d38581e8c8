"""What an engine does while its card is measured, and what can go wrong with that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from agent.errors import AgentError
from inference.engine import Engine, EngineError, GenerateRequest
from inference.manifest import Manifest
from inference.task import Sampling

_PROMPT_TOKENS = 128
_ANSWER_TOKENS_MAX = 512


class CalibrationRefused(AgentError):
    """This card cannot be calibrated; says why and what to do."""


class EngineLost(CalibrationRefused):
    """The engine failed while it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardLoad:
    """What the engine does while it is measured: `streams` answers at a time, greedy, from fixed prompts.

    Args:
        warmup_s: before the measurement, so that every stream answers and the card is warm.
        seconds: of the measurement; counters of energy move in steps, so that less than ten say little.
    """

    streams: int
    warmup_s: float = 15.0
    seconds: float = 60.0


class Work:
    """The streams that keep an engine busy."""

    def __init__(self, engine: Engine, manifest: Manifest) -> None:
        self.tokens = 0
        self.failed: Exception | None = None
        self._engine = engine
        self._manifest = manifest

    def check(self, cap_w: float) -> None:
        """Raise what ended a stream, if anything did."""
        if isinstance(self.failed, EngineError):
            raise EngineLost(f"the engine failed at {cap_w:.0f} W: {self.failed}") from self.failed
        if self.failed is not None:
            raise self.failed

    async def stream(self, number: int) -> None:
        """Have one answer after another generated until cancellation or the engine's failure."""
        size = self._manifest.vocabulary_size
        prompt_tokens = min(_PROMPT_TOKENS, max(1, self._manifest.context_tokens // 2))
        answer = 0
        try:
            while True:
                request = GenerateRequest(
                    request_id=f"calibrate-{number}-{answer}",
                    # Fixed, and different from stream to stream, so that no prefix is computed once for all.
                    prompt_ids=[(number * 31 + place * 7) % size for place in range(prompt_tokens)],
                    sampling=Sampling(temperature=0.0),
                    max_tokens=max(1, min(_ANSWER_TOKENS_MAX, self._manifest.context_tokens - prompt_tokens)),
                    stop_token_ids=(),
                )
                # The port promises an iterator that can be closed, which AsyncIterator does not say.
                async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        self.tokens += len(chunk.token_ids)
                answer += 1
        except Exception as error:
            # For whoever measures; a stream that ended would otherwise pass for a slow card.
            self.failed = error


@asynccontextmanager
async def working(engine: Engine, manifest: Manifest, load: StandardLoad) -> AsyncIterator[Work]:
    work = Work(engine, manifest)
    streams = [asyncio.create_task(work.stream(number)) for number in range(load.streams)]
    try:
        yield work
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
