"""One task as its followers see it: events in, text assembled, history kept.

An `Answer` is the sink of the scheduler's deliveries and the source of an
edge's events. It never awaits while it is fed; followers are woken once per
batch. Where nobody may come back (no detach grace) what was read is dropped;
otherwise the history stays (about 220 bytes a token), so that a follower can
attach from any index.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from coordinator.errors import Reason, SlackwaterError
from coordinator.stated_energy import stated_energy
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
from inference.task import FinishReason, PositionLogprobs
from inference.text import Tokenizer

# Text that a detached task may pile up before it is given up (DESIGN section 4).
DETACHED_TEXT_CHARACTERS_MAX = 1_000_000


class Timer(Protocol):
    def cancel(self) -> None: ...


# An event loop's `call_later`: seconds, and what to call then.
CallLater = Callable[[float, Callable[[], None]], Timer]


class LiveAnswer:
    """Implements coordinator.tasks_port.Answer.

    With a grace the answer is detached until somebody follows it, and again
    when nobody does any more. Without one there is one follower, whose closing
    ends the task; whoever submits such a task must follow it at once.

    Args:
        on_stop_string: called with the token count when a stop string was completed.
        on_abandoned: called when nobody followed for `detach_grace_s`.
        on_ended: called once, after the last event.
    """

    def __init__(
        self,
        accepted: Accepted,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        streaming: bool,
        detach_grace_s: float,
        call_later: CallLater,
        on_stop_string: Callable[[int], None],
        on_abandoned: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._accepted = accepted
        self._tokenizer = tokenizer
        self._stop = stop
        self._assembler = Assembler(tokenizer.detokenizer(), stop)
        self._detach_grace_s = detach_grace_s
        # An answer that does not stream may begin again, so nothing of it is told before its end.
        self._withheld: list[Delta] | None = None if streaming else []
        self._call_later = call_later
        self._on_stop_string = on_stop_string
        self._on_abandoned = on_abandoned
        self._on_ended = on_ended
        self._events: list[AnswerEvent] = [accepted]
        self._outcome: Finished | Failed | None = None
        self._token_count = 0
        self._stopped = False
        self._followers = 0
        self._detach_timer: Timer | None = None
        self._detached_characters = 0
        # Of followers that have read everything so far.
        self._wakers: set[asyncio.Future[None]] = set()
        if detach_grace_s:
            self._detach()

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
        outcome = self._outcome
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
                    decision=event.decision,
                )
            elif isinstance(event, AttemptBroken):
                attempts[event.attempt] = replace(
                    attempts[event.attempt],
                    delivered_tokens=event.delivered_tokens,
                    outcome=event.reason,
                    first_token_ms=event.first_token_ms,
                )
        if isinstance(outcome, Finished) and attempts:
            # A stop string ends an answer before its node could sign.
            ended = "finished" if outcome.statement else "stopped"
            for number in [number for number, attempt in attempts.items() if attempt.outcome == "running"]:
                attempts[number] = replace(
                    attempts[number],
                    outcome=ended,
                    signed=outcome.statement is not None,
                    energy=stated_energy(outcome.statement) if outcome.statement else None,
                    first_token_ms=outcome.first_token_ms,
                )
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
        """The last event, once it is told."""
        return self._outcome

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
        if self._stopped:
            self._on_stop_string(self._token_count)
        elif not self._followers:
            self._detached_characters += len(piece.text)
            if self._detached_characters > DETACHED_TEXT_CHARACTERS_MAX:
                self._on_abandoned()

    def discard(self) -> None:
        """Forget all ids: the task begins again, and nobody has read them."""
        assert self._withheld is not None, "only what nobody has read may begin again"
        if self._stopped:
            return  # Complete already; the stop just was not heard of before the node was given up.
        self._assembler = Assembler(self._tokenizer.detokenizer(), self._stop)
        self._withheld.clear()
        self._token_count = 0

    def finish(self, event: Finished) -> None:
        if self._stopped:
            # Whatever else came to pass before the stop was heard of.
            event = replace(event, finish_reason=FinishReason.STOP, completion_tokens=self._token_count, statement=None)
        elif text := self._assembler.finish():
            self._tell(Delta(first_index=self._token_count, token_ids=(), text=text))
        if self._withheld:
            self._append(_merged(self._withheld))
        self._end(event)

    def fail(self, error: SlackwaterError) -> None:
        self._end(Failed(error))

    def _end(self, event: Finished | Failed) -> None:
        self._outcome = event
        if self._detach_timer is not None:
            self._detach_timer.cancel()
        self._append(event)
        self._on_ended()

    def _tell(self, delta: Delta) -> None:
        if self._withheld is None:
            self._append(delta)
        else:
            self._withheld.append(delta)

    def _append(self, event: AnswerEvent) -> None:
        self._events.append(event)
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)

    # --- followed by an edge ---------------------------------------------------------------

    async def follow(self, from_index: int = 0) -> AsyncGenerator[tuple[AnswerEvent, ...], None]:
        """See coordinator.tasks_port.Answer.follow."""
        keeps_history = self._detach_grace_s > 0
        assert keeps_history or not (self._followers or from_index), "what was read is gone"
        self._followers += 1
        if self._detach_timer is not None:
            self._detach_timer.cancel()
            self._detach_timer = None
        position = 0
        try:
            while True:
                batch = tuple(self._events[position:] if position else self._events)
                if batch:
                    if keeps_history:
                        position += len(batch)
                    else:
                        self._events.clear()
                    if from_index:
                        batch = tuple(self._unseen(batch, from_index))
                    if batch:
                        yield batch
                elif self._outcome is not None:
                    return
                else:
                    await self._news()
        finally:
            self._followers -= 1
            if not self._followers and self._outcome is None:
                self._detach()

    async def _news(self) -> None:
        """Wait for the next event."""
        waker = asyncio.get_running_loop().create_future()
        self._wakers.add(waker)
        try:
            await waker
        finally:
            self._wakers.discard(waker)

    def _unseen(self, events: Iterable[AnswerEvent], from_index: int) -> Iterator[AnswerEvent]:
        """Leave out what a follower has seen that has the ids before `from_index`."""
        for event in events:
            if not isinstance(event, Delta) or event.first_index >= from_index:
                yield event
            elif event.first_index + len(event.token_ids) > from_index:
                yield self._cut(event, from_index)

    def _cut(self, delta: Delta, from_index: int) -> Delta:
        """Return the part of a delta from an index on, with the text that its ids complete."""
        # Which text belongs to which ids is not kept; assembling once more tells.
        assembler = Assembler(self._tokenizer.detokenizer(), self._stop)
        for event in self._events:
            if isinstance(event, Delta) and event.first_index < delta.first_index:
                assembler.feed(event.token_ids)
        seen = from_index - delta.first_index
        seen_text = assembler.feed(delta.token_ids[:seen]).text
        return Delta(
            first_index=from_index,
            token_ids=delta.token_ids[seen:],
            text=delta.text[len(seen_text) :],
            logprobs=delta.logprobs[seen:],
        )

    def _detach(self) -> None:
        self._detached_characters = 0
        if self._detach_grace_s == 0:
            self._on_abandoned()
        else:
            self._detach_timer = self._call_later(self._detach_grace_s, self._on_abandoned)


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
