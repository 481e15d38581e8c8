"""The benchmark that the rows come from, run on a curve: the same arrivals, prompts of the same mean lengths.

Arrivals are known. The benchmark draws the gaps between requests from numpy's
gamma distribution of shape 1, that is exponentially, seed 42; 200 of them at
1 request/s come to 189.10 s, and its shortest runs at that load took 189.3 s.

Lengths are not: of each row only the means are on record. Prompts and answers
of ShareGPT are about log-normal, cut off where the benchmark or the people's
model cut them. Both shapes are constants of all rows, set so that tails of runs
have about the measured length (after the last request came, the longest answers
are still written). Which request has which length differs from draw to draw;
what is predicted is the mean over some draws.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean
from typing import Final

import numpy as np

from coordinator.planning.batching import Request, serve
from coordinator.planning.curves import EngineCurve

REQUESTS: Final = 200
BENCHMARK_SEED: Final = 42
# Each gap comes out a little longer than drawn: 189.29 s were taken for 189.10 s, 200 gaps.
GAP_EXCESS_MS: Final = 1.0
# Spread of the logarithm of lengths, and where they end. Prompts: the benchmark takes none above 1024 tokens.
PROMPT_SPREAD: Final = 1.3
PROMPT_TOKENS_MAX: Final = 1024
ANSWER_SPREAD: Final = 1.0
ANSWER_TOKENS_MAX: Final = 800
# The benchmark leaves shorter ones out.
TOKENS_MIN: Final = 4
# Of a prompt whose computed blocks are kept only what does not fill a block of 16 is computed: 8 tokens on average.
UNCACHED_TOKENS: Final = 8
# Sixteen would move tokens per second by 2 % at most and the median first token by 1 %, but for engines whose memory is
# full: there by up to 6 %.
DRAWS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run asked of an engine.

    Args:
        prompt_tokens_mean, answer_tokens_mean: per request.
        prompts_kept: the engine had computed the same prompts before, and had kept them.
    """

    requests_per_second: float
    prompt_tokens_mean: float
    answer_tokens_mean: float
    prompts_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """What came of it: answers' tokens per second, time to first token, and each answer's time per token after it."""

    tokens_per_second: float
    first_token_ms_p50: float
    first_token_ms_p90: float
    first_token_ms_p99: float
    token_ms_mean: float
    token_ms_p50: float
    token_ms_p90: float
    token_ms_p99: float


def predict(curve: EngineCurve, load: Load) -> LoadFigures:
    """Return what the benchmark would measure at that load on an engine with that curve. Deterministic.

    Raises:
        ValueError: the curve has no room for the longest request.
    """
    runs = [_run(curve, load, draw) for draw in range(DRAWS)]
    return LoadFigures(
        tokens_per_second=fmean(run.tokens_per_second for run in runs),
        first_token_ms_p50=fmean(run.first_token_ms_p50 for run in runs),
        first_token_ms_p90=fmean(run.first_token_ms_p90 for run in runs),
        first_token_ms_p99=fmean(run.first_token_ms_p99 for run in runs),
        token_ms_mean=fmean(run.token_ms_mean for run in runs),
        token_ms_p50=fmean(run.token_ms_p50 for run in runs),
        token_ms_p90=fmean(run.token_ms_p90 for run in runs),
        token_ms_p99=fmean(run.token_ms_p99 for run in runs),
    )


def _run(curve: EngineCurve, load: Load, draw: int) -> LoadFigures:
    requests, sent_ms = benchmark_requests(load, draw)
    answers = serve(curve, requests)
    first_ms = sorted(answer.first_token_ms - of.arrival_ms for answer, of in zip(answers, requests, strict=True))
    token_ms = sorted(
        (answer.last_token_ms - answer.first_token_ms) / (of.answer_tokens - 1)
        for answer, of in zip(answers, requests, strict=True)
    )
    # The benchmark waits one more gap after the last request, even if all are answered.
    duration_ms = max(sent_ms, max(answer.last_token_ms for answer in answers))
    return LoadFigures(
        tokens_per_second=1000.0 * sum(of.answer_tokens for of in requests) / duration_ms,
        first_token_ms_p50=quantile(first_ms, 0.5),
        first_token_ms_p90=quantile(first_ms, 0.9),
        first_token_ms_p99=quantile(first_ms, 0.99),
        token_ms_mean=fmean(token_ms),
        token_ms_p50=quantile(token_ms, 0.5),
        token_ms_p90=quantile(token_ms, 0.9),
        token_ms_p99=quantile(token_ms, 0.99),
    )


@cache
def benchmark_requests(load: Load, draw: int) -> tuple[tuple[Request, ...], float]:
    """Return the requests of a run, and when the benchmark stops sending.

    Args:
        draw: which of many ways to deal the lengths out.
    """
    prompts = lengths(load.prompt_tokens_mean, PROMPT_SPREAD, PROMPT_TOKENS_MAX)
    answers = lengths(load.answer_tokens_mean, ANSWER_SPREAD, ANSWER_TOKENS_MAX)
    dealing = random.Random(draw)
    dealing.shuffle(prompts)
    dealing.shuffle(answers)
    gaps_ms = [1000.0 * gap / load.requests_per_second + GAP_EXCESS_MS for gap in _unit_gaps()]
    requests = []
    now_ms = 0.0
    for prompt, answer, gap_ms in zip(prompts, answers, gaps_ms, strict=True):
        kept = max(0, prompt - UNCACHED_TOKENS) if load.prompts_kept else 0
        requests.append(Request(now_ms, prompt, answer, kept))
        now_ms += gap_ms
    return tuple(requests), now_ms


@cache
def _unit_gaps() -> tuple[float, ...]:
    return tuple(np.random.RandomState(BENCHMARK_SEED).gamma(1.0, 1.0, REQUESTS).tolist())


def lengths(mean: float, spread: float, longest: int) -> list[int]:
    """Return the lengths of all requests: quantiles of a log-normal distribution that is cut off, with that mean.

    Quantiles and not draws, so that no mean depends on luck. In ascending order.
    """
    if not TOKENS_MIN <= mean <= longest:
        raise ValueError(f"no lengths from {TOKENS_MIN} to {longest} tokens have a mean of {mean:g}")
    normal = NormalDist()
    shape = [math.exp(spread * normal.inv_cdf((place + 0.5) / REQUESTS)) for place in range(REQUESTS)]

    def cut(scale: float) -> list[float]:
        return [min(float(longest), max(float(TOKENS_MIN), scale * one)) for one in shape]

    # The mean grows with the scale; halving the logarithm's interval 60 times leaves nothing of it.
    low, high = TOKENS_MIN / shape[-1], longest / shape[0]
    for _ in range(60):
        middle = math.sqrt(low * high)
        if fmean(cut(middle)) > mean:
            high = middle
        else:
            low = middle
    return [round(length) for length in cut(low)]


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the value below which that share lies, between two values by proportion (numpy's default, as measured)."""
    place = share * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])
