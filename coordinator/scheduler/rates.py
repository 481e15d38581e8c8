"""How long an engine takes for a step and for a prompt, learned from what it did. Pure.

An engine that batches takes a step for one token of every answer that it
writes. A step with `b` answers lasts about `base + slope * b`, a first token
about `wait + slope * prompt tokens in front of it`. Both are lines, fitted to
the coordinator's own observations, the newest counting most, and tied to what
was known before by a few observations' weight.
"""

import math
from dataclasses import dataclass, field
from typing import Final

# The share of its weight that an observation keeps with each that follows: about the last fifty count.
KEPT: Final = 0.98
# What was known before counts as so many observations.
PRIOR_WEIGHT: Final = 1.0
# Of a step with one answer. Fitted curves of single cards add 0.2 to 0.6 % per answer, of several cards 2 to 3 %
# (coordinator/planning/data/curves.csv); a CPU adds 5 %.
SEQUENCE_SHARE: Final = 0.02
# A token of a prompt takes between a 40th (several cards) and a 300th of a step (same source). A slow guess costs a
# little time once; a fast one a late first token.
PROMPT_TOKEN_SHARE: Final = 0.01
# Network, queues and the first frame, until an answer has shown it.
FIRST_TOKEN_WAIT_S: Final = 0.05
# How much later than predicted one first token in twenty may be before it counts against the engine.
TAIL_QUANTILE: Final = 0.95
TAIL_STEP: Final = 0.1
TAIL_START: Final = 1.5
TAIL_MAX: Final = 20.0


class Line:
    """A line y = a + b x through observations that fade, with neither part below zero.

    Args:
        scale: a typical x, at which the prior's slope is worth one observation.

    Attributes:
        prior: (a, b) that is taken for true before anything was observed.
    """

    __slots__ = ("_scale", "_sums", "prior")

    def __init__(self, scale: float) -> None:
        self.prior = (0.0, 0.0)
        self._scale = scale
        # Of 1, x, y, xx, xy.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, x: float, y: float) -> None:
        """Take in an observation."""
        n, sx, sy, sxx, sxy = self._sums
        k = KEPT
        self._sums = (k * n + 1.0, k * sx + x, k * sy + y, k * sxx + x * x, k * sxy + x * y)

    def fit(self) -> tuple[float, float]:
        """Return (a, b): least squares, with a ridge towards the prior."""
        n, sx, sy, sxx, sxy = self._sums
        a0, b0 = self.prior
        ridge = PRIOR_WEIGHT * self._scale * self._scale
        # Normal equations of the observations, one at x = 0 that says a0, and one about the slope alone.
        n += PRIOR_WEIGHT
        sy += PRIOR_WEIGHT * a0
        sxx += ridge
        sxy += ridge * b0
        determinant = n * sxx - sx * sx
        a = (sy * sxx - sx * sxy) / determinant
        b = (n * sxy - sx * sy) / determinant
        if b < 0.0:
            return sy / n, 0.0
        if a < 0.0:
            return 0.0, sxy / sxx
        return a, b


@dataclass(slots=True)
class Rate:
    """What is believed of one engine with one model, as numbers that cost nothing to ask.

    Args:
        tokens_per_second: of one answer, known before anything was observed; positive.

    Attributes:
        step_base_s, step_sequence_s: a step with b answers takes base + b * sequence.
        wait_s, prompt_token_s: a first token takes a step and wait, and this per token of prompt in front of it.
        tail: so much later than predicted is one first token in twenty.
    """

    tokens_per_second: float
    step_base_s: float = field(init=False)
    step_sequence_s: float = field(init=False)
    wait_s: float = field(init=False)
    prompt_token_s: float = field(init=False)
    tail: float = TAIL_START
    _steps: Line = field(init=False)
    _first_tokens: Line = field(init=False)

    def __post_init__(self) -> None:
        self._steps = Line(scale=8.0)
        self._first_tokens = Line(scale=500.0)
        self.expect(self.tokens_per_second)

    def expect(self, tokens_per_second: float) -> None:
        """Change what was known before; what was observed stays."""
        self.tokens_per_second = tokens_per_second
        step_s = 1.0 / tokens_per_second
        self._steps.prior = (step_s * (1.0 - SEQUENCE_SHARE), step_s * SEQUENCE_SHARE)
        self._first_tokens.prior = (FIRST_TOKEN_WAIT_S, step_s * PROMPT_TOKEN_SHARE)
        self.step_base_s, self.step_sequence_s = self._steps.fit()
        self.wait_s, self.prompt_token_s = self._first_tokens.fit()

    def step_s(self, sequences: float) -> float:
        """Return how long one token of each of so many answers takes."""
        return self.step_base_s + self.step_sequence_s * sequences

    def first_token_s(self, prompt_tokens: int, sequences: int) -> float:
        """Return when an answer begins. Args: tokens of prompts in front of it, its own included; answers then."""
        return self.wait_s + self.prompt_token_s * prompt_tokens + self.step_s(sequences)

    def saw_steps(self, sequences: float, token_s: float) -> None:
        """Learn from an answer that went on beside so many, itself included, in the mean."""
        self._steps.add(sequences, token_s)
        self.step_base_s, self.step_sequence_s = self._steps.fit()

    def saw_first_token(self, prompt_tokens: int, sequences: int, took_s: float) -> None:
        """Learn from an answer's first token."""
        late = took_s > self.tail * self.first_token_s(prompt_tokens, sequences)
        # Robbins and Monro, 1951: moves until as many lie above as the quantile leaves.
        tail = self.tail * math.exp(TAIL_STEP * (TAIL_QUANTILE if late else TAIL_QUANTILE - 1.0))
        self.tail = min(TAIL_MAX, max(1.0, tail))
        self._first_tokens.add(prompt_tokens, max(0.0, took_s - self.step_s(sequences)))
        self.wait_s, self.prompt_token_s = self._first_tokens.fit()
