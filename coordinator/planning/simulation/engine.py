"""One engine with continuous batching that is told of requests as they come. Pure.

The rules are those of `planning/batching.py`, which is given all requests
beforehand; for the same requests both give the same answers, to the last bit.
Here requests come and are cancelled while the engine runs, and it can be asked
at any time how far it is.

Theory of operation. Time passes in *blocks*: one step that computes prompts, or
as many steps as are alike. A block is planned to its end; whoever comes or goes
in between cuts it at the end of the step that is under way, as a real engine
looks at its queue between steps. So a request costs a few blocks, however long
its answer is.
"""

import heapq
import math
from collections import deque
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from coordinator.planning.curves import EngineCurve

Key = TypeVar("Key")


class What(Enum):
    FIRST_TOKEN = "first_token"
    ANSWER_ENDED = "answer_ended"


class Happening(NamedTuple, Generic[Key]):
    """What became of a request, and when. Told once each; the first token before the end."""

    at_ms: float
    what: What
    key: Key


class _Sequence(Generic[Key]):
    """A request and how far it is. Compared by its number when two end in the same step."""

    __slots__ = ("answer_tokens", "began", "begun_once", "key", "number", "produced", "prompt_tokens", "to_compute")

    def __init__(self, key: Key, number: int, prompt_tokens: int, answer_tokens: int, cached_tokens: int) -> None:
        self.key = key
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.to_compute = prompt_tokens - cached_tokens
        # Tokens of the answer, without those since `began`.
        self.produced = 0
        # The step in which it began to grow; -1 while it does not.
        self.began = -1
        self.begun_once = False

    @property
    def held(self) -> int:
        """Tokens of memory that it takes once it is let in, the next one of its answer included."""
        return self.prompt_tokens + self.produced + 1


class Engine(Generic[Key]):
    """Feed it requests in order of time; ask `next_ms` when to look again.

    Requests are known by a key of the caller's choice. Times are in
    milliseconds on the caller's clock; `request_ms` of the curve is the
    caller's to add.
    """

    def __init__(self, curve: EngineCurve) -> None:
        self.curve = curve
        # The end of the block; infinite where nothing is to do.
        self.next_ms = math.inf
        self.busy_ms = 0.0
        self.preemptions = 0
        self.prefilled_tokens = 0
        self.kv_tokens = 0
        self._steps = 0
        self._numbered = 0
        self._sequences: dict[Key, _Sequence[Key]] = {}
        self._cancelled: list[_Sequence[Key]] = []
        self._happened: list[Happening[Key]] = []
        self._waiting: deque[_Sequence[Key]] = deque()
        # Let in, the oldest first: prompts that are partly computed, and answers.
        self._prompts: deque[_Sequence[Key]] = deque()
        self._growing: dict[_Sequence[Key], None] = {}
        # (step in which it ends, number, step in which it began, sequence); stale where it began in another one.
        self._ends: list[tuple[int, int, int, _Sequence[Key]]] = []
        # The block.
        self._start_ms = 0.0
        self._batch = 0
        self._block_steps = 0
        self._block_prompts = 0
        self._begun: list[_Sequence[Key]] = []

    def __len__(self) -> int:
        """Count the requests that are not answered yet."""
        return len(self._sequences)

    def submit(self, key: Key, prompt_tokens: int, answer_tokens: int, at_ms: float, *, cached_tokens: int = 0) -> None:
        """Take a request, not before any time that the engine was told of.

        Raises:
            ValueError: it could never be served.
        """
        if min(prompt_tokens, answer_tokens) < 1 or not 0 <= cached_tokens < prompt_tokens:
            raise ValueError("a request needs a token of prompt to compute and one of answer at least")
        if prompt_tokens + answer_tokens > self.curve.kv_tokens_max:
            raise ValueError("a request does not fit into the engine's memory")
        self._interrupt(at_ms)
        sequence = _Sequence(key, self._numbered, prompt_tokens, answer_tokens, cached_tokens)
        self._numbered += 1
        self._sequences[key] = sequence
        self._waiting.append(sequence)
        if self.next_ms == math.inf:
            # Idle: the next step begins now, with whoever else comes in this moment.
            self._start_ms = self.next_ms = at_ms

    def cancel(self, key: Key, at_ms: float) -> None:
        """Give a request up; it leaves at the end of the step. One that has ended is passed over."""
        self._interrupt(at_ms)
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._cancelled.append(sequence)

    def advance(self, to_ms: float) -> list[Happening[Key]]:
        """Let time pass; return what happened since the last call, in order."""
        while self.next_ms <= to_ms:
            self._end_block()
        happened, self._happened = self._happened, []
        return happened

    def busy_ms_until(self, at_ms: float) -> float:
        """Return for how long it has computed so far; `at_ms` lies in the current block."""
        return self.busy_ms if self.next_ms == math.inf else self.busy_ms + at_ms - self._start_ms

    def tokens(self, key: Key, at_ms: float) -> int:
        """Return how many tokens of an answer are there; `at_ms` lies in the current block."""
        sequence = self._sequences[key]
        if sequence.began < 0:
            return sequence.produced
        ended = 0
        if not self._block_prompts and self._block_steps > 1:
            ended = self.curve.steps_ended(self._batch, self.kv_tokens, at_ms - self._start_ms)
        return sequence.produced + self._steps + min(ended, self._block_steps) - sequence.began

    def _interrupt(self, at_ms: float) -> None:
        """End all blocks before that time, and cut the one that is under way at the end of its step."""
        while self.next_ms < at_ms:
            self._end_block()
        if self._block_prompts or self._block_steps <= 1:
            return
        steps = self.curve.steps_to_reach(self._batch, self.kv_tokens, at_ms - self._start_ms)
        if steps < self._block_steps:
            self._block_steps = steps
            self.next_ms = self._start_ms + self.curve.steps_ms(self._batch, self.kv_tokens, steps)

    def _end_block(self) -> None:
        self.busy_ms += self.next_ms - self._start_ms
        self._start_ms = self.next_ms
        self._steps += self._block_steps
        self.kv_tokens += self._block_steps * self._batch
        self._begin_answers()
        self._end_answers()
        self._drop_cancelled()
        self._plan_block()

    def _plan_block(self) -> None:
        self._block_steps = self._block_prompts = self._batch = 0
        if not (self._waiting or self._prompts or self._growing):
            self.next_ms = math.inf
            return
        self._make_room()
        curve, batch = self.curve, len(self._growing)
        self._batch = batch
        computed = self._compute_prompts(curve.step_tokens_max - batch) if self._waiting or self._prompts else 0
        self._block_prompts = computed
        if computed:
            self._block_steps = 1
            took_ms = curve.step_ms(batch + len(self._begun), self.kv_tokens) + curve.prefill_ms(computed)
            self.prefilled_tokens += computed
        else:
            self._block_steps = self._steps_alike()
            took_ms = curve.steps_ms(batch, self.kv_tokens, self._block_steps)
        self.next_ms = self._start_ms + took_ms

    def _make_room(self) -> None:
        """Take the youngest out until each of the others can grow by one token. One alone always can."""
        while self.kv_tokens + len(self._growing) > self.curve.kv_tokens_max:
            if self._prompts:
                sequence = self._prompts.pop()
                self.kv_tokens -= sequence.held
            else:
                sequence, _ = self._growing.popitem()
                self._stop_growing(sequence)
            sequence.to_compute = sequence.held - 1
            self.preemptions += 1
            self._waiting.appendleft(sequence)

    def _stop_growing(self, sequence: _Sequence[Key]) -> None:
        sequence.produced += self._steps - sequence.began
        sequence.began = -1
        self.kv_tokens -= sequence.held - 1

    def _compute_prompts(self, tokens_max: int) -> int:
        """Return how many tokens of prompts this step computes; note whose prompts it completes."""
        left, curve, batch = tokens_max, self.curve, len(self._growing)
        for _ in range(len(self._prompts)):
            left -= self._compute(self._prompts.popleft(), left)
        while left > 0 and self._waiting:
            held = self._waiting[0].held
            if self.kv_tokens + held + batch > curve.kv_tokens_max:
                break
            if batch + len(self._begun) + len(self._prompts) >= curve.slots_max:
                break
            self.kv_tokens += held
            left -= self._compute(self._waiting.popleft(), left)
        return tokens_max - left

    def _compute(self, sequence: _Sequence[Key], tokens_max: int) -> int:
        computed = min(sequence.to_compute, tokens_max)
        sequence.to_compute -= computed
        (self._prompts if sequence.to_compute else self._begun).append(sequence)
        return computed

    def _steps_alike(self) -> int:
        """Return how many steps pass until an answer ends or memory is full; at least one."""
        ends = self._ends
        while ends[0][3].began != ends[0][2]:
            heapq.heappop(ends)
        room = (self.curve.kv_tokens_max - self.kv_tokens) // len(self._growing)
        return max(1, min(ends[0][0] - self._steps, room))

    def _begin_answers(self) -> None:
        for sequence in self._begun:
            sequence.produced += 1
            if not sequence.begun_once:
                sequence.begun_once = True
                self._happened.append(Happening(self._start_ms, What.FIRST_TOKEN, sequence.key))
            self._growing[sequence] = None
            sequence.began = self._steps
            left = sequence.answer_tokens - sequence.produced
            heapq.heappush(self._ends, (self._steps + left, sequence.number, self._steps, sequence))
        self._begun.clear()

    def _end_answers(self) -> None:
        ends = self._ends
        while ends and ends[0][0] <= self._steps:
            _, _, began, sequence = heapq.heappop(ends)
            if sequence.began != began:
                continue
            del self._growing[sequence]
            sequence.began = -1
            self.kv_tokens -= sequence.prompt_tokens + sequence.answer_tokens
            if self._sequences.pop(sequence.key, None) is not None:
                self._happened.append(Happening(self._start_ms, What.ANSWER_ENDED, sequence.key))

    def _drop_cancelled(self) -> None:
        for sequence in self._cancelled:
            if sequence in self._growing:
                del self._growing[sequence]
                self._stop_growing(sequence)
            elif sequence in self._prompts:
                self._prompts.remove(sequence)
                self.kv_tokens -= sequence.held
            elif sequence in self._waiting:
                self._waiting.remove(sequence)
        self._cancelled.clear()
