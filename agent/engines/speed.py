"""How fast an engine is, measured by a short generation when it has started. Self-reported, and labelled so."""

import asyncio
import contextlib

from agent.clock import monotonic_s
from inference.engine import Engine, EngineError, GenerateRequest
from inference.manifest import Manifest
from inference.task import Sampling, TaskKind

# Tokens of the measurement and the longest it may take: it delays the first task by as much.
MEASURED_TOKENS = 32
MEASURE_TIMEOUT_S = 5.0
_PROMPT_TOKENS = 16


async def measure_tokens_per_second(engine: Engine, manifest: Manifest) -> float:
    """Return tokens per second of one short greedy sequence; 0 for a model that makes vectors.

    Raises:
        EngineError: the engine failed it, or made no token in time.
    """
    if manifest.kind is TaskKind.EMBED:
        return 0.0
    request = GenerateRequest(
        request_id="measure",
        # Any ids will do; a step of seven keeps them apart from the special ids at the start of most vocabularies.
        prompt_ids=[index * 7 % manifest.vocabulary_size for index in range(1, _PROMPT_TOKENS + 1)],
        sampling=Sampling(temperature=0.0),
        max_tokens=max(1, min(MEASURED_TOKENS, manifest.context_tokens - _PROMPT_TOKENS)),
        stop_token_ids=(),
    )
    started_at = first_at = monotonic_s()
    first_count = count = 0
    chunks = engine.generate(request)
    # A slow engine is cut off: the rate over what came is as good.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MEASURE_TIMEOUT_S):
            async for chunk in chunks:
                if count == 0:
                    first_at, first_count = monotonic_s(), len(chunk.token_ids)
                count += len(chunk.token_ids)
    if count == 0:
        raise EngineError(f"no token within {MEASURE_TIMEOUT_S:g} s")
    ended_at = monotonic_s()
    if count > first_count:
        # Without the first chunk, whose time is that of the prefill.
        return (count - first_count) / max(ended_at - first_at, 1e-6)
    return count / max(ended_at - started_at, 1e-6)
