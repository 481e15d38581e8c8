"""The largest request rate that one engine serves within a class's targets. Pure.

Two limits, and the smaller one counts:

1. Throughput: how fast answers end while requests wait all the time, taken
   between the first and the last fifth of them so that filling and draining the
   batch do not count. A finite run would hide an overload: its queue ends with it.
2. Targets: the largest rate at which the quantiles of first token and pace are
   met, found by bisection over the same requests with their gaps scaled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.planning.batching import Request, serve
from coordinator.planning.curves import EngineCurve

# The rate is found to about a thousandth of the throughput.
HALVINGS: Final = 10
# The part of a saturated run that is filling and draining, at each end.
EDGE_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request without a rate: its gap before it is in units of the mean gap."""

    unit_gap: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a class promises; None leaves a promise out.

    Args:
        first_token_ms: from sending a request to its first token.
        token_ms: mean time per token after it, of one answer.
        quantile: the share of requests that must keep each of both, in (0, 1).
    """

    first_token_ms: float | None
    token_ms: float | None
    quantile: float


def largest_rate(curve: EngineCurve, traffic: Sequence[Arrival], targets: Targets) -> float:
    """Return requests per second that one engine serves within the targets; 0 where it never does."""
    if any(one.prompt_tokens + one.answer_tokens > curve.kv_tokens_max for one in traffic):
        return 0.0
    high = _throughput(curve, traffic)
    if meets(curve, traffic, targets, high):
        return high
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if meets(curve, traffic, targets, middle):
            low = middle
        else:
            high = middle
    return low


def meets(curve: EngineCurve, traffic: Sequence[Arrival], targets: Targets, requests_per_second: float) -> bool:
    """Return whether an engine keeps the targets at that rate."""
    if targets.first_token_ms is None and targets.token_ms is None:
        return True
    requests = []
    now_ms = 0.0
    for one in traffic:
        now_ms += 1000.0 * one.unit_gap / requests_per_second
        requests.append(Request(now_ms, one.prompt_tokens, one.answer_tokens))
    answers = serve(curve, requests)
    first_ms = [answer.first_token_ms - of.arrival_ms for answer, of in zip(answers, requests, strict=True)]
    token_ms = [
        (answer.last_token_ms - answer.first_token_ms) / max(1, of.answer_tokens - 1)
        for answer, of in zip(answers, requests, strict=True)
    ]
    return _kept(first_ms, targets.first_token_ms, targets.quantile) and _kept(
        token_ms, targets.token_ms, targets.quantile
    )


def _kept(values_ms: Sequence[float], most_ms: float | None, quantile: float) -> bool:
    if most_ms is None:
        return True
    return sum(value <= most_ms for value in values_ms) >= math.ceil(quantile * len(values_ms))


def _throughput(curve: EngineCurve, traffic: Sequence[Arrival]) -> float:
    answers = serve(curve, [Request(0.0, one.prompt_tokens, one.answer_tokens) for one in traffic])
    ends_ms = sorted(answer.last_token_ms for answer in answers)
    edge = int(EDGE_SHARE * len(ends_ms))
    first, last = edge, len(ends_ms) - 1 - edge
    return 1000.0 * (last - first) / (ends_ms[last] - ends_ms[first])
