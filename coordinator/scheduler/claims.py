"""Whether what a node says about an attempt can be true. Pure.

A frame is held against the order, the ids that came before it and the model; a
finished attempt against its frames. What contradicts them ends the attempt
under the name of the contradiction, and counts against the node.
"""

from collections.abc import Sequence

from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.records import Attempt, Task
from inference.task import FinishReason, PositionLogprobs, TaskKind

# What a node cannot have said in good faith: it contradicts the order, the protocol or itself.
LIES = frozenset(
    {
        "frame_gap",
        "frame_conflict",
        "limit_exceeded",
        "id_out_of_range",
        "ids_after_stop",
        "logprobs_conflict",
        "statement_conflict",
        "false_stop",
        "false_length",
    }
)


def take_frame(task: Task, attempt: Attempt, frame: e.Frame, now: float) -> c.Deliver | str | None:
    """Take what is new in a frame: return it for delivery, or what is impossible about it, or None."""
    received, spec = task.received, task.spec
    ids, logprobs = frame.token_ids, frame.logprobs
    have = len(received)
    overlap = have - frame.first_index
    if overlap < 0:
        return "frame_gap"
    if overlap:
        known = received[frame.first_index : frame.first_index + len(ids)]
        if frame.first_index < attempt.first_index or list(ids[:overlap]) != list(known):
            return "frame_conflict"
        ids, logprobs = ids[overlap:], logprobs[overlap:]
    attempt.seen = True
    if not ids:
        return None
    count = len(ids)
    if spec.kind is not TaskKind.GENERATE or have + count > spec.max_tokens:
        return "limit_exceeded"
    if max(ids) >= spec.vocabulary_size:
        return "id_out_of_range"
    stops = spec.stop_token_ids
    if (have and received[-1] in stops) or (count > 1 and not frozenset(stops).isdisjoint(ids[:-1])):
        return "ids_after_stop"
    if spec.sampling.logprobs is None:
        logprobs = ()
    elif not _fit(logprobs, ids, spec.sampling.logprobs, spec.vocabulary_size):
        return "logprobs_conflict"
    received.extend(ids)
    attempt.tokens += count
    attempt.progressed_at = now
    return c.Deliver(spec.task_id, have, ids, logprobs)


def contradiction(task: Task, attempt: Attempt, event: e.AttemptFinished) -> str | None:
    """Return what a node's last word says that its frames do not, if anything."""
    if task.spec.kind is not TaskKind.GENERATE:
        return None
    received = task.received
    if list(event.token_ids) != list(received[attempt.first_index :]):
        return "statement_conflict"
    stopped = bool(received) and received[-1] in task.spec.stop_token_ids
    if event.finish_reason is FinishReason.STOP:
        return None if stopped else "false_stop"
    return None if len(received) == task.spec.max_tokens else "false_length"


def _fit(logprobs: Sequence[PositionLogprobs], ids: Sequence[int], alternatives: int, vocabulary_size: int) -> bool:
    """Return whether there is one position for each id, about that id, with no more alternatives than asked for."""
    return len(logprobs) == len(ids) and all(
        position.chosen.token_id == token_id
        and len(position.top) <= alternatives
        and all(other.token_id < vocabulary_size for other in position.top)
        for position, token_id in zip(logprobs, ids, strict=True)
    )
