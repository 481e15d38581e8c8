"""Fits an engine's curve to the measured loads of one configuration.

What the rows can tell:

- time per token against load: `step_base_ms` and `step_sequence_ms`, as load
  sets how many answers share a step;
- first tokens, and the time per token of the one run with cold prompt caches:
  `prefill_token_ms`; first tokens where prompts were kept: `request_ms`;
- a queue at the highest loads: `kv_tokens_max`. Where none shows the rows only
  say that it is not smaller, and the estimate from memory sizes stays.

The curve is the one whose run of the benchmark (benchmark.py) comes nearest to
the measured figures, in least squares of the logarithms of their ratios, each in
units of what it may be off; Levenberg-Marquardt, as the run is nonlinear in the
curve. Residuals beyond two units count linearly (Huber), so that an anomaly does
not bend the rest. What rows leave open stays at its starting value, which counts
as one weak observation.

Whether prompts were kept is inferred, as nobody wrote it down: the load that ran
first, the highest, found nothing; later ones found everything where prompts and
answers of a whole run fit into memory, and nothing elsewhere, as the least
recently used go first and prompts return in the same order (data/README.md).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.benchmark import ANSWER_TOKENS_MAX, PROMPT_TOKENS_MAX, Load, predict
from coordinator.planning.curves import EngineCurve
from coordinator.planning.hardware import (
    CARDS,
    MODELS,
    kv_token_read_ms,
    kv_tokens_estimate,
    prefill_token_estimate_ms,
)
from coordinator.planning.rows import Configuration, MeasuredRow

# The highest load ran first, on an engine that had seen no prompt.
FIRST_LOAD: Final = 32.0
# Taken from vLLM's usual settings, not from the rows: those have 200 requests, and nobody wrote the flags down.
SLOTS_MAX: Final = 256
STEP_TOKENS_MAX: Final = 2048
# A first guess: one frame over HTTP on the same host.
REQUEST_MS: Final = 5.0
# By how much (of a logarithm) each figure may be off: repetitions differ by up to 1 % in the first, 2 % in the second
# and 3 % in the third; the lengths, which are not known, add to that, and most to the last two.
TOLERANCES: Final = {
    "tokens_per_second": 0.03,
    "token_ms_mean": 0.03,
    "first_token_ms_p50": 0.1,
    "first_token_ms_p90": 0.3,
    "first_token_ms_p99": 1.0,
}
_PACE_ONLY: Final = ("tokens_per_second", "token_ms_mean")
# How well starting values are known, as logarithms: base, sequence, prefill, request, memory.
_DOUBTS: Final = np.array([1.0, 3.0, 0.5, 1.0, 0.25])
# The search moves multiples of the starting values, and keeps them above these.
_LEAST: Final = np.array([0.3, 0.02, 0.1, 0.1, 0.2])
# Wide enough to see over the jumps of a run in steps.
_DIFFERENCES: Final = np.array([0.05, 0.15, 0.05, 0.1, 0.1])
_ROUNDS_MAX: Final = 12
_GAIN_MIN: Final = 0.003

_Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """What was asked and what came of it, the mean over repetitions."""

    load: Load
    figures: Mapping[str, float]


def first_token_is_odd(configuration: Configuration) -> bool:
    """Return whether first tokens were measured that no engine explains: on several RTX 4090 (data/README.md)."""
    return configuration.card == "RTX-4090" and configuration.cards > 1


def measured_loads(rows: Sequence[MeasuredRow]) -> dict[float, MeasuredLoad]:
    """Return the loads of one configuration's rows, by requests per second, ascending.

    Raises:
        ValueError: there are none, or of several configurations.
    """
    if len({row.configuration for row in rows}) != 1:
        raise ValueError("loads are of one configuration")
    by_load: dict[float, list[MeasuredRow]] = {}
    for row in sorted(rows, key=lambda row: row.requests_per_second):
        by_load.setdefault(row.requests_per_second, []).append(row)
    return {requests_per_second: _measured_load(repeated) for requests_per_second, repeated in by_load.items()}


def _measured_load(rows: Sequence[MeasuredRow]) -> MeasuredLoad:
    row = rows[0]
    configuration = row.configuration
    memory = kv_tokens_estimate(MODELS[configuration.model], CARDS[configuration.card], configuration.cards)
    load = Load(
        requests_per_second=row.requests_per_second,
        prompt_tokens_mean=row.prompt_tokens / row.requests,
        answer_tokens_mean=fmean(row.answer_tokens / row.requests for row in rows),
        prompts_kept=row.requests_per_second < FIRST_LOAD and row.prompt_tokens + row.answer_tokens <= memory,
    )
    figures = {
        "tokens_per_second": fmean(row.answer_tokens_per_second for row in rows),
        "token_ms_mean": fmean(row.token_ms_mean for row in rows),
        "first_token_ms_p50": fmean(row.first_token_ms_p50 for row in rows),
        "first_token_ms_p90": fmean(row.first_token_ms_p90 for row in rows),
        "first_token_ms_p99": fmean(row.first_token_ms_p99 for row in rows),
    }
    return MeasuredLoad(load, figures)


def fit_curve(configuration: Configuration, loads: Sequence[MeasuredLoad]) -> EngineCurve:
    """Return the curve that explains the loads best. Deterministic.

    Raises:
        ValueError: fewer than two loads, which do not tell a step's base from what an answer adds.
        KeyError: the model or card has no sizes in hardware.py.
    """
    if len({load.load.requests_per_second for load in loads}) < 2:
        raise ValueError(f"{configuration}: a curve needs two loads")
    start = _start(configuration, loads)
    names = _PACE_ONLY if first_token_is_odd(configuration) else tuple(TOLERANCES)

    def residuals(multiples: _Vector) -> _Vector:
        curve = _scaled(start, multiples)
        off = [
            _huber(math.log(getattr(predicted, name) / load.figures[name]) / TOLERANCES[name])
            for load in loads
            for predicted in (predict(curve, load.load),)
            for name in names
        ]
        return np.concatenate([off, np.log(multiples) / _DOUBTS])

    return _scaled(start, _least_squares(residuals))


def _start(configuration: Configuration, loads: Sequence[MeasuredLoad]) -> EngineCurve:
    """Return the curve to begin with: a line through time per token against answers at once, the rest from sizes.

    Answers at once by Little's law: tokens per second times time per token.
    """
    model, card = MODELS[configuration.model], CARDS[configuration.card]
    token_ms = np.array([load.figures["token_ms_mean"] for load in loads])
    batch = np.array([load.figures["tokens_per_second"] for load in loads]) * token_ms / 1000.0
    line = np.stack([np.ones(len(loads)), batch], axis=1) / token_ms[:, None]
    base, sequence = np.linalg.lstsq(line, np.ones(len(loads)), rcond=None)[0].tolist()
    least_ms = float(token_ms.min())
    # The rows of models that barely fit were measured with more memory than the default; something is there.
    longest = PROMPT_TOKENS_MAX + ANSWER_TOKENS_MAX
    return EngineCurve(
        step_base_ms=max(base, 0.5 * least_ms),
        # Less than the line says: it counts prompts, which share steps, as answers.
        step_sequence_ms=0.6 * max(sequence, 0.002 * least_ms),
        step_kv_token_ms=kv_token_read_ms(model, card, configuration.cards),
        prefill_token_ms=prefill_token_estimate_ms(model, card, configuration.cards),
        request_ms=REQUEST_MS,
        kv_tokens_max=round(max(kv_tokens_estimate(model, card, configuration.cards), 2 * longest)),
        slots_max=SLOTS_MAX,
        step_tokens_max=STEP_TOKENS_MAX,
    )


def _scaled(start: EngineCurve, multiples: _Vector) -> EngineCurve:
    base, sequence, prefill, request, memory = multiples.tolist()
    return EngineCurve(
        step_base_ms=start.step_base_ms * base,
        step_sequence_ms=start.step_sequence_ms * sequence,
        step_kv_token_ms=start.step_kv_token_ms,
        prefill_token_ms=start.prefill_token_ms * prefill,
        request_ms=start.request_ms * request,
        kv_tokens_max=max(round(start.kv_tokens_max * memory), PROMPT_TOKENS_MAX + ANSWER_TOKENS_MAX),
        slots_max=start.slots_max,
        step_tokens_max=start.step_tokens_max,
    )


def _huber(residual: float) -> float:
    """Return what has, squared, Huber's loss: beyond two units it grows linearly."""
    size = abs(residual)
    return residual if size <= 2.0 else math.copysign(math.sqrt(4.0 * size - 4.0), residual)


def _least_squares(residuals: Callable[[_Vector], _Vector]) -> _Vector:
    """Return the multiples with the least sum of squares that Levenberg and Marquardt's method finds from ones."""
    at = np.ones(len(_DOUBTS))
    off = residuals(at)
    damping = 0.01
    for _ in range(_ROUNDS_MAX):
        slopes = np.stack(
            [
                (residuals(at + step * unit) - off) / step
                for step, unit in zip(_DIFFERENCES, np.eye(len(at)), strict=True)
            ],
            axis=1,
        )
        before = float(off @ off)
        for _ in range(4):
            normal = slopes.T @ slopes
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ off)
            tried = np.maximum(_LEAST, at + np.clip(move, -1.0, 1.0))
            tried_off = residuals(tried)
            if tried_off @ tried_off < before:
                at, off, damping = tried, tried_off, damping / 5.0
                break
            damping *= 6.0
        if before - float(off @ off) < _GAIN_MIN * before:
            break
    return at
