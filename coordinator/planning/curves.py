"""How fast one engine is: the time of its steps, and what fits into it. Pure; plain floats, so that it is cheap to ask.

An engine with continuous batching works in steps. In each it computes one token
of every answer that it writes, and as much of waiting prompts as is allowed:

    step = base + per_sequence * answers + per_kv_token * tokens in memory + per_prompt_token * prompt tokens

`base` is mostly reading the weights, which all answers share: it is why a batch
costs little more than one answer. The other terms are linear, as the work is.
What 4 to 6 loads with the same mean lengths can tell apart are the first two,
the prompts' share and a constant per request; a token of context is taken from
the card's memory bandwidth (hardware.py).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCurve:
    """The curve of one engine.

    Args:
        step_base_ms: what a step takes before any work.
        step_sequence_ms: added by each answer in the batch.
        step_kv_token_ms: added by each token of context, prompts and answers, of those answers.
        prefill_token_ms: added by each token of a prompt that is computed.
        request_ms: what a request waits outside of steps, once: HTTP, tokenizing, the first frame.
        kv_tokens_max: tokens of context that fit into memory, of all answers together.
        slots_max: answers at once.
        step_tokens_max: tokens that one step computes, prompts and answers together.
    """

    step_base_ms: float
    step_sequence_ms: float
    step_kv_token_ms: float
    prefill_token_ms: float
    request_ms: float
    kv_tokens_max: int
    slots_max: int
    step_tokens_max: int

    def __post_init__(self) -> None:
        added = (self.step_sequence_ms, self.step_kv_token_ms, self.prefill_token_ms, self.request_ms)
        if self.step_base_ms <= 0.0 or min(added) < 0.0:
            raise ValueError("a curve's times are not negative, and a step takes some")
        # Each answer computes a token per step, and some must be left for prompts.
        if self.kv_tokens_max < 1 or self.slots_max < 1 or self.step_tokens_max <= self.slots_max:
            raise ValueError("a curve needs room for one answer, and more tokens in a step than slots")

    def step_ms(self, batch: int, kv_tokens: float) -> float:
        """Return how long a step takes that computes a token of each of `batch` answers over their `kv_tokens`."""
        return self.step_base_ms + self.step_sequence_ms * batch + self.step_kv_token_ms * kv_tokens

    def steps_ms(self, batch: int, kv_tokens: float, steps: int) -> float:
        """Return how long so many steps of the same answers take, whose context grows by a token each."""
        growth = 0.5 * self.step_kv_token_ms * batch * steps * (steps - 1)
        return steps * self.step_ms(batch, kv_tokens) + growth

    def steps_to_reach(self, batch: int, kv_tokens: float, span_ms: float) -> int:
        """Return the least number of such steps, one at least, that take so long or longer."""
        steps = max(1, math.ceil(self._steps_in(batch, kv_tokens, span_ms)))
        # The root is rounded; what `steps_ms` says decides.
        while steps > 1 and self.steps_ms(batch, kv_tokens, steps - 1) >= span_ms:
            steps -= 1
        while self.steps_ms(batch, kv_tokens, steps) < span_ms:
            steps += 1
        return steps

    def steps_ended(self, batch: int, kv_tokens: float, span_ms: float) -> int:
        """Return how many such steps have ended after so long."""
        reaching = self.steps_to_reach(batch, kv_tokens, span_ms)
        return reaching if self.steps_ms(batch, kv_tokens, reaching) <= span_ms else reaching - 1

    def _steps_in(self, batch: int, kv_tokens: float, span_ms: float) -> float:
        """Solve steps_ms(n) = span: n * first + growth * n * (n - 1) / 2."""
        growth_ms, first_ms = self.step_kv_token_ms * batch, self.step_ms(batch, kv_tokens)
        linear_ms = first_ms - 0.5 * growth_ms
        # The form of the root that has no difference of near numbers, and none to divide by where nothing grows.
        return 2.0 * span_ms / (linear_ms + math.sqrt(linear_ms**2 + 2.0 * growth_ms * span_ms))

    def prefill_ms(self, prompt_tokens: int) -> float:
        """Return what computing so many tokens of prompts adds to the step, or steps, that do it."""
        return self.prefill_token_ms * prompt_tokens
