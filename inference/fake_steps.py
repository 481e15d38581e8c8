"""Steps of a fake engine that is as fast as a real one: how long each takes, and whose prompts it completes. Pure.

An engine with continuous batching computes in each step one token of every
answer, and as much of waiting prompts as fits beside them. The times are those
of `coordinator.planning.curves`, and the order of prompts is that of its queue;
memory is taken for large enough.
"""

from typing import Annotated, Generic, TypeVar

import msgspec

Key = TypeVar("Key")
_Ms = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]


class StepTimes(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What a step takes: base + sequence * answers + kv_token * their context + prefill_token * prompt tokens.

    Args:
        request_ms: what a request waits outside of steps, once.
        step_tokens_max: tokens that one step computes, of prompts and answers together.
    """

    step_base_ms: Annotated[float, msgspec.Meta(gt=0, le=3_600_000)]
    step_sequence_ms: _Ms
    step_kv_token_ms: _Ms
    prefill_token_ms: _Ms
    request_ms: _Ms
    step_tokens_max: Annotated[int, msgspec.Meta(ge=1)]


class StepPlan(Generic[Key]):
    """The prompts that wait to be computed, first come, first served."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._left: dict[Key, int] = {}

    def add(self, key: Key, prompt_tokens: int) -> None:
        self._left[key] = prompt_tokens

    def drop(self, key: Key) -> None:
        """Forget a prompt, if it still waits."""
        self._left.pop(key, None)

    def next(self, answers: int, kv_tokens: int) -> tuple[float, list[Key]]:
        """Return seconds of the next step, and whose prompts are complete at its end: their first tokens are there.

        Args:
            answers: that are under way, with so many tokens of context.
        """
        times, complete = self.times, []
        room = max(1, times.step_tokens_max - answers)
        computed = 0
        for key, left in list(self._left.items()):
            taken = min(left, room - computed)
            computed += taken
            if taken == left:
                complete.append(key)
                del self._left[key]
            else:
                self._left[key] = left - taken
            if computed == room:
                break
        answers += len(complete)
        step_ms = times.step_base_ms + times.step_sequence_ms * answers + times.step_kv_token_ms * kv_tokens
        return (step_ms + times.prefill_token_ms * computed) / 1000.0, complete
