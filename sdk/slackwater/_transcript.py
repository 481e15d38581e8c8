"""What a client has seen of one answer, and when to try again. Pure.

An answer is a row of token ids. A stream that broke is taken up by attaching
from `next_index`, the first id that has not arrived; the coordinator then
sends the beginning (accepted, attempts) once more and leaves out the deltas
before that index. `Transcript` drops whatever it has seen, so that its reader
gets every event once, and refuses a gap, so that no text is lost unnoticed.

One text belongs to no id: what was held back as a possible stop string and
turned out to be none comes as a delta without ids when the answer is over. A
re-attached stream repeats it; `_tail` remembers how much of it was read.
"""

from slackwater.errors import MalformedAnswer
from slackwater.events import (
    Accepted,
    AttemptBroken,
    AttemptStarted,
    Completion,
    Delta,
    Event,
    Finished,
    PositionLogprobs,
)

# Four times the longest context that any open model has; a stream that goes on beyond it is broken.
TOKENS_MAX = 4 * 1024 * 1024

# The coordinator keeps a task whose stream broke for 30 s (detach grace); later there is nothing to attach to.
REATTACH_WINDOW_S = 30.0
# The first try is immediate, since most breaks are one lost connection; then the pause doubles up to the maximum.
REATTACH_PAUSE_FIRST_S = 0.05
REATTACH_PAUSE_MAX_S = 2.0


class Transcript:
    """Every event of one answer, once."""

    def __init__(self, *, from_index: int = 0) -> None:
        self.from_index = from_index
        self.next_index = from_index
        self.accepted: Accepted | None = None
        self.started: AttemptStarted | None = None
        self.broken: list[AttemptBroken] = []
        self.finished: Finished | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self._texts: list[str] = []
        self._tail = ""
        self._tail_repeated = ""

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def reattached(self) -> None:
        """Expect the stream to begin again, with the deltas from `next_index` on."""
        self._tail_repeated = self._tail

    def accept(self, event: Event) -> Event | None:
        """Return what is new in an event, None where nothing is.

        Raises:
            MalformedAnswer: ids are missing, belong to another task, or are too many.
        """
        match event:
            case Accepted():
                return self._accept_accepted(event)
            case AttemptStarted():
                if self.started is not None and event.attempt <= self.started.attempt:
                    return None
                self.started = event
                return event
            case AttemptBroken():
                if any(event.attempt == known.attempt for known in self.broken):
                    return None
                self.broken.append(event)
                return event
            case Delta():
                return self._accept_delta(event)
            case Finished():
                self.finished = event
                return event

    def completion(self) -> Completion:
        """Return the whole answer; only after `Finished`."""
        if self.accepted is None or self.finished is None:
            raise MalformedAnswer("the coordinator finished a task that it had not accepted")
        return Completion(
            task_id=self.accepted.task_id,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finished.finish_reason,
            usage=self.finished.usage,
            broken_attempts=tuple(self.broken),
        )

    def _accept_accepted(self, event: Accepted) -> Accepted | None:
        if self.accepted is None:
            self.accepted = event
            return event
        if event.task_id != self.accepted.task_id:
            raise MalformedAnswer(
                f"the coordinator answered for task {event.task_id}, asked was {self.accepted.task_id}"
            )
        return None

    def _accept_delta(self, delta: Delta) -> Delta | None:
        if not delta.token_ids:
            return self._accept_tail(delta)
        end = delta.first_index + len(delta.token_ids)
        if end <= self.next_index:
            return None
        if delta.first_index != self.next_index:
            raise MalformedAnswer(
                f"the coordinator sent ids {delta.first_index} to {end - 1}, expected was {self.next_index}"
            )
        if end > self.from_index + TOKENS_MAX:
            raise MalformedAnswer(f"the answer has more than {TOKENS_MAX} ids")
        if delta.logprobs and len(delta.logprobs) != len(delta.token_ids):
            raise MalformedAnswer(f"{len(delta.logprobs)} logprobs came with {len(delta.token_ids)} ids")
        self.next_index = end
        self._tail = self._tail_repeated = ""
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self._texts.append(delta.text)
        return delta

    def _accept_tail(self, delta: Delta) -> Delta | None:
        if delta.first_index > self.next_index:
            raise MalformedAnswer(
                f"the coordinator sent text at index {delta.first_index}, expected was {self.next_index}"
            )
        repeated = min(len(self._tail_repeated), len(delta.text))
        if delta.text[:repeated] != self._tail_repeated[:repeated]:
            raise MalformedAnswer("the coordinator repeated text after a re-attachment, but not the same")
        self._tail_repeated = self._tail_repeated[repeated:]
        text = delta.text[repeated:]
        if not text:
            return None
        self._tail += text
        self._texts.append(text)
        return Delta(first_index=delta.first_index, token_ids=(), text=text)


class ReattachPause:
    """How long to wait before the next attachment; the window begins anew with each event that arrives."""

    def __init__(self, window_s: float = REATTACH_WINDOW_S) -> None:
        self._window_s = window_s
        self._broken_at: float | None = None
        self._pause_s = 0.0

    def progressed(self) -> None:
        self._broken_at = None
        self._pause_s = 0.0

    def next_pause_s(self, now: float, jitter: float, retry_after_s: float | None = None) -> float | None:
        """Return seconds to wait, None when the window is over.

        Args:
            now: seconds on a monotonic clock.
            jitter: from 0 to 1; spreads clients that lost the same coordinator.
            retry_after_s: what the coordinator asked for.
        """
        if self._broken_at is None:
            self._broken_at = now
        pause_s = max(self._pause_s * (0.5 + jitter / 2), retry_after_s or 0.0)
        self._pause_s = min(max(self._pause_s * 2, REATTACH_PAUSE_FIRST_S), REATTACH_PAUSE_MAX_S)
        return None if now + pause_s - self._broken_at > self._window_s else pause_s
