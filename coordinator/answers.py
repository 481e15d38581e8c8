"""One task as its followers see it: events in, text assembled, history kept.

An `Answer` is the sink of the scheduler's deliveries and the source of an
edge's events. It never awaits while it is fed; followers are woken once per
batch. Where nobody may come back (no detach grace) what was read is dropped;
otherwise the history stays, so that a follower can attach from any index.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from coordinator.errors import Reason, SlackwaterError
from coordinator.tasks_port import (
    Accepted,
    AnswerEvent,
    AttemptBroken,
    AttemptStarted,
    AttemptSummary,
    Delta,
    Failed,
    Finished,
    TaskSummary,
)
from inference.assembler import Assembler
from inference.task import PositionLogprobs
from inference.text import Tokenizer

# Text that a detached task may pile up before it is given up (DESIGN section 4).
DETACHED_TEXT_CHARACTERS_MAX = 1_000_000


class LiveAnswer:
    """Implements coordinator.tasks_port.Answer.

    Args:
        on_stop_string: called with the token count when a stop string was completed.
        on_abandoned: called when nobody followed for `detach_grace_s`.
    """

    def __init__(
        self,
        accepted: Accepted,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        streaming: bool,
        detach_grace_s: float,
        on_stop_string: Callable[[int], None],
        on_abandoned: Callable[[], None],
    ) -> None:
        self._accepted = accepted
        self._tokenizer = tokenizer
        self._stop = stop
        self._assembler = Assembler(tokenizer.detokenizer(), stop)
        self._detach_grace_s = detach_grace_s
        # An answer that does not stream may begin again, so nothing of it is told before its end.
        self._withheld: list[Delta] | None = None if streaming else []
        self._on_stop_string = on_stop_string
        self._on_abandoned = on_abandoned
        self._events: list[AnswerEvent] = [accepted]
        self._dropped = 0  # events before the first of _events
        self._token_count = 0
        self._stopped = False
        self._ended = False
        self._followers = 0
        self._detach_timer: asyncio.TimerHandle | None = None
        self._detached_characters = 0
        self._wakers: list[asyncio.Future[None]] = []

    @property
    def accepted(self) -> Accepted:
        return self._accepted

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def token_count(self) -> int:
        """Ids delivered so far."""
        return self._token_count

    def summary(self) -> TaskSummary:
        """Return how the task stands. Complete only while the history is kept."""
        outcome = self.outcome
        attempts: dict[int, AttemptSummary] = {}
        for event in self._events:
            if isinstance(event, AttemptStarted):
                attempts[event.attempt] = AttemptSummary(
                    attempt=event.attempt,
                    node_id=event.node_id,
                    first_index=event.first_index,
                    delivered_tokens=self._token_count - event.first_index,
                    outcome="running",
                    signed=False,
                )
            elif isinstance(event, AttemptBroken):
                attempts[event.attempt] = replace(
                    attempts[event.attempt], delivered_tokens=event.delivered_tokens, outcome=event.reason
                )
        if isinstance(outcome, Finished) and attempts:
            last = max(attempts)
            # A stop string ends an answer before its node could sign.
            ended = "finished" if outcome.statement else "stopped"
            if attempts[last].outcome == "running":
                attempts[last] = replace(attempts[last], outcome=ended, signed=outcome.statement is not None)
        return TaskSummary(
            task_id=self._accepted.task_id,
            status=_status(outcome, bool(attempts)),
            prompt_tokens=self._accepted.prompt_tokens,
            completion_tokens=self._token_count,
            attempts=tuple(attempts.values()),
            error=outcome.error if isinstance(outcome, Failed) else None,
        )

    @property
    def outcome(self) -> Finished | Failed | None:
        last = self._events[-1] if self._events else None
        return last if isinstance(last, Finished | Failed) else None

    # --- fed by the scheduler's driver -----------------------------------------------------

    def start_attempt(self, event: AttemptStarted) -> None:
        self._append(event)

    def break_attempt(self, event: AttemptBroken) -> None:
        self._append(event)

    def deliver(self, first_index: int, token_ids: Sequence[int], logprobs: tuple[PositionLogprobs, ...]) -> None:
        if self._stopped:
            return  # The node went on for a moment; the answer ended before.
        assert first_index == self._token_count, "ids are delivered in order, once"
        piece = self._assembler.feed(token_ids)
        if piece.stopped_at is not None:
            kept = piece.stopped_at - first_index
            token_ids, logprobs = token_ids[:kept], logprobs[:kept]
            self._stopped = True
        self._token_count += len(token_ids)
        self._tell(Delta(first_index=first_index, token_ids=tuple(token_ids), text=piece.text, logprobs=logprobs))
        if piece.stopped_at is not None:
            self._on_stop_string(piece.stopped_at)
        elif not self._followers:
            self._detached_characters += len(piece.text)
            if self._detached_characters > DETACHED_TEXT_CHARACTERS_MAX:
                self._on_abandoned()

    def discard(self) -> None:
        """Forget all ids: the task begins again, and nobody has read them."""
        assert self._withheld is not None, "only what nobody has read may begin again"
        self._assembler = Assembler(self._tokenizer.detokenizer(), self._stop)
        self._withheld.clear()
        self._token_count = 0

    def finish(self, event: Finished) -> None:
        text = "" if self._stopped else self._assembler.finish()
        if text:
            self._tell(Delta(first_index=self._token_count, token_ids=(), text=text))
        if self._withheld:
            self._append(_merged(self._withheld))
        self._end(event)

    def fail(self, error: SlackwaterError) -> None:
        self._end(Failed(error))

    def _end(self, event: Finished | Failed) -> None:
        self._ended = True
        if self._detach_timer is not None:
            self._detach_timer.cancel()
        self._append(event)

    def _tell(self, delta: Delta) -> None:
        if self._withheld is None:
            self._append(delta)
        else:
            self._withheld.append(delta)

    def _append(self, event: AnswerEvent) -> None:
        self._events.append(event)
        if self._wakers:
            wakers, self._wakers = self._wakers, []
            for waker in wakers:
                if not waker.done():
                    waker.set_result(None)

    # --- followed by an edge ---------------------------------------------------------------

    async def follow(self, from_index: int = 0) -> AsyncGenerator[tuple[AnswerEvent, ...], None]:
        """See coordinator.tasks_port.Answer.follow."""
        self._followers += 1
        if self._detach_timer is not None:
            self._detach_timer.cancel()
            self._detach_timer = None
        position = self._dropped
        try:
            while True:
                batch = self._events[position - self._dropped :]
                position += len(batch)
                if batch:
                    if self._detach_grace_s == 0:
                        self._dropped += len(self._events) - (1 if self._ended else 0)
                        self._events = self._events[-1:] if self._ended else []
                    if from_index:
                        batch = [event for event in batch if not _is_before(event, from_index)]
                    yield tuple(batch)
                elif self._ended:
                    return
                else:
                    waker = asyncio.get_running_loop().create_future()
                    self._wakers.append(waker)
                    await waker
        finally:
            self._followers -= 1
            if not self._followers and not self._ended:
                self._detach()

    def _detach(self) -> None:
        self._detached_characters = 0
        if self._detach_grace_s == 0:
            self._on_abandoned()
        else:
            loop = asyncio.get_running_loop()
            self._detach_timer = loop.call_later(self._detach_grace_s, self._abandon)

    def _abandon(self) -> None:
        if not self._followers and not self._ended:
            self._on_abandoned()


def _merged(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        first_index=deltas[0].first_index,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(position for delta in deltas for position in delta.logprobs),
    )


def _status(outcome: Finished | Failed | None, started: bool) -> str:
    if outcome is None:
        return "running" if started else "queued"
    if isinstance(outcome, Finished):
        return "finished"
    return "cancelled" if outcome.error.reason is Reason.TASK_CANCELLED else "failed"


def _is_before(event: AnswerEvent, from_index: int) -> bool:
    """Whether a follower that has seen the ids before `from_index` has seen this delta."""
    return isinstance(event, Delta) and event.first_index < from_index
