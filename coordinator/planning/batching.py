"""One engine with continuous batching that serves a list of requests: a queue, step by step. Pure.

The rules are those of vLLM's scheduler (version 1), as far as they show in its
times:

1. A step computes one token of every answer in the batch, then prompts in order
   of arrival until it has computed as many tokens as one step may; a long prompt
   is cut and goes on in the next step.
2. A prompt is let in when its tokens fit into memory beside what is there. What
   its answer will need is not reserved.
3. So memory can run out while answers grow. Then the youngest one gives its
   place up, returns to the head of the queue and is computed again, its tokens
   so far included, once there is room (preemption).
4. The step that computes the last of a prompt yields the answer's first token.

How long a step takes is the curve's business. Steps between which nothing
changes are taken at once, so that a run costs a few operations per request.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.curves import EngineCurve


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Args:
        arrival_ms: not before that of the one in front of it.
        prompt_tokens, answer_tokens: at least one each.
        cached_tokens: of the prompt, computed before and kept by the engine; fewer than the prompt has.
    """

    arrival_ms: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """When a request's first and last token came, on the clock of its arrival, and how often it gave its place up."""

    first_token_ms: float
    last_token_ms: float
    preemptions: int


def serve(curve: EngineCurve, requests: Sequence[Request]) -> list[Answer]:
    """Return the answers of one engine that has nothing else to do, in the order of the requests.

    Raises:
        ValueError: a request could never be served, or they are not in order of arrival.
    """
    for request in requests:
        if min(request.prompt_tokens, request.answer_tokens) < 1:
            raise ValueError("a request needs at least one token of prompt and of answer")
        if not 0 <= request.cached_tokens < request.prompt_tokens:
            raise ValueError("some token of a prompt has to be computed")
        if request.prompt_tokens + request.answer_tokens > curve.kv_tokens_max:
            raise ValueError("a request does not fit into the engine's memory")
    if any(later.arrival_ms < earlier.arrival_ms for earlier, later in itertools.pairwise(requests)):
        raise ValueError("requests must be in order of arrival")
    engine = _Engine(curve, requests)
    while engine.unfinished:
        engine.step()
    return engine.answers()


class _Engine:
    """Requests are known by their place in the list. `kv_tokens` never exceeds the curve's limit."""

    def __init__(self, curve: EngineCurve, requests: Sequence[Request]) -> None:
        self._curve = curve
        self._requests = requests
        self._now_ms = 0.0
        self._steps = 0
        self._arrived = 0
        self.unfinished = len(requests)
        self.kv_tokens = 0
        # What is left to compute of each prompt, and how many tokens of each answer are there.
        self._to_compute = [request.prompt_tokens - request.cached_tokens for request in requests]
        self._produced = [0] * len(requests)
        self._preemptions = [0] * len(requests)
        self._first_ms = [math.nan] * len(requests)
        self._last_ms = [math.nan] * len(requests)
        self._waiting: deque[int] = deque()
        # Let in, the oldest first: prompts that are partly computed, and answers with the step they began to grow in.
        self._prompts: deque[int] = deque()
        self._growing: dict[int, int] = {}
        # (step in which it ends, request, step in which it began to grow); stale where the last differs from above.
        self._ends: list[tuple[int, int, int]] = []

    def step(self) -> None:
        """Take one step, or as many as are alike."""
        self._let_arrive()
        if not (self._waiting or self._prompts or self._growing):
            self._now_ms = self._requests[self._arrived].arrival_ms
            self._let_arrive()
        self._make_room()
        batch = len(self._growing)
        computed, begun = self._compute_prompts(self._curve.step_tokens_max - batch)
        if computed:
            steps = 1
            took_ms = self._curve.step_ms(batch + len(begun), self.kv_tokens) + self._curve.prefill_ms(computed)
        else:
            steps = self._steps_alike()
            took_ms = self._curve.steps_ms(batch, self.kv_tokens, steps)
        self._now_ms += took_ms
        self._steps += steps
        self.kv_tokens += steps * batch
        self._begin(begun)
        self._end_answers()

    def answers(self) -> list[Answer]:
        wait_ms = self._curve.request_ms
        return [
            Answer(first + wait_ms, last + wait_ms, preemptions)
            for first, last, preemptions in zip(self._first_ms, self._last_ms, self._preemptions, strict=True)
        ]

    def _let_arrive(self) -> None:
        while self._arrived < len(self._requests) and self._requests[self._arrived].arrival_ms <= self._now_ms:
            self._waiting.append(self._arrived)
            self._arrived += 1

    def _held(self, request: int) -> int:
        """Tokens of memory that a request takes once it is let in, the next one of its answer included."""
        return self._requests[request].prompt_tokens + self._produced[request] + 1

    def _make_room(self) -> None:
        """Take the youngest out until each of the others can grow by one token. One alone always can."""
        while self.kv_tokens + len(self._growing) > self._curve.kv_tokens_max:
            if self._prompts:
                request = self._prompts.pop()
                self.kv_tokens -= self._held(request)
            else:
                request, began = self._growing.popitem()
                self._produced[request] += self._steps - began
                self.kv_tokens -= self._held(request) - 1
            self._to_compute[request] = self._held(request) - 1
            self._preemptions[request] += 1
            self._waiting.appendleft(request)

    def _compute_prompts(self, tokens_max: int) -> tuple[int, list[int]]:
        """Return how many tokens of prompts this step computes, and the requests whose prompts it completes."""
        left = tokens_max
        begun: list[int] = []
        for _ in range(len(self._prompts)):
            left -= self._compute(self._prompts.popleft(), left, begun)
        batch = len(self._growing)
        while left > 0 and self._waiting:
            held = self._held(self._waiting[0])
            if self.kv_tokens + held + batch > self._curve.kv_tokens_max:
                break
            if batch + len(begun) + len(self._prompts) >= self._curve.slots_max:
                break
            self.kv_tokens += held
            left -= self._compute(self._waiting.popleft(), left, begun)
        return tokens_max - left, begun

    def _compute(self, request: int, tokens_max: int, begun: list[int]) -> int:
        computed = min(self._to_compute[request], tokens_max)
        self._to_compute[request] -= computed
        if self._to_compute[request]:
            self._prompts.append(request)
        else:
            begun.append(request)
        return computed

    def _steps_alike(self) -> int:
        """Return how many steps pass until an answer ends, a request arrives or memory is full; at least one."""
        while self._growing.get(self._ends[0][1]) != self._ends[0][2]:
            heapq.heappop(self._ends)
        batch = len(self._growing)
        steps = min(self._ends[0][0] - self._steps, (self._curve.kv_tokens_max - self.kv_tokens) // batch)
        if self._arrived < len(self._requests):
            gap_ms = self._requests[self._arrived].arrival_ms - self._now_ms
            steps = min(steps, self._curve.steps_to_reach(batch, self.kv_tokens, gap_ms))
        return max(1, steps)

    def _begin(self, begun: Sequence[int]) -> None:
        for request in begun:
            self._produced[request] += 1
            if math.isnan(self._first_ms[request]):
                self._first_ms[request] = self._now_ms
            left = self._requests[request].answer_tokens - self._produced[request]
            self._growing[request] = self._steps
            heapq.heappush(self._ends, (self._steps + left, request, self._steps))

    def _end_answers(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            _, request, began = heapq.heappop(self._ends)
            if self._growing.get(request) != began:
                continue
            del self._growing[request]
            self.kv_tokens -= self._requests[request].prompt_tokens + self._requests[request].answer_tokens
            self._last_ms[request] = self._now_ms
            self.unfinished -= 1
