"""Who has been silent, stuck or waiting for too long. Pure."""

from collections.abc import Iterable

from coordinator.scheduler.commands import TaskFailure
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.records import Attempt, Node, Task
from coordinator.scheduler.waking import Capacity
from inference.task import ServiceClass, TaskId

# When to come back where no engine is ready: nodes come and go in minutes, and engines load in tens of seconds.
RETRY_AFTER_S = 10.0


def forgive(nodes: Iterable[Node], tasks: Iterable[Task], gap: float, now: float) -> None:
    """Move every clock by the time that this process missed, but none into the future."""
    for node in nodes:
        node.heard_at = min(now, node.heard_at + gap)
        for attempt in node.tasks.values():
            attempt.started_at = min(now, attempt.started_at + gap)
            attempt.progressed_at = min(now, attempt.progressed_at + gap)
            attempt.began_at = min(now, attempt.began_at + gap)
    for task in tasks:
        task.queued_at = min(now, task.queued_at + gap)
        task.submitted_at = min(now, task.submitted_at + gap)


def is_silent(node: Node, now: float, limits: Limits) -> bool:
    """Whether a node that runs attempts has said nothing for too long."""
    if not node.tasks:
        return False
    # An idle node speaks rarely; from its first assignment on it owes a word.
    heard_at = max(node.heard_at, min(attempt.started_at for attempt in node.tasks.values()))
    return now - heard_at > limits.silence_busy_s


def stalled(node: Node, now: float, limits: Limits) -> list[TaskId]:
    """Return the tasks that do not advance on a node that speaks.

    A long prefill is no stall: before its first id an attempt has the time
    that its prompt may take at the slowest speed we accept. After it, an
    attempt is held against the others of its node.
    """
    newest = max((attempt.progressed_at for attempt in node.tasks.values() if attempt.tokens), default=0.0)
    return [
        task_id
        for task_id, attempt in node.tasks.items()
        if now - attempt.progressed_at > _patience_s(attempt, newest, limits)
    ]


def _patience_s(attempt: Attempt, newest: float, limits: Limits) -> float:
    if not attempt.tokens:
        return limits.first_token_s + attempt.prompt_tokens / limits.prefill_tokens_per_second_min
    others_advance = newest - attempt.progressed_at > limits.stall_s / 2
    return limits.stall_s if others_advance else limits.stall_alone_s


def queue_timeout(task: Task, capacity: Capacity, now: float, limits: Limits) -> tuple[TaskFailure, str] | None:
    """Return how a queued task fails and what is said of it, or None while it may wait."""
    waited_s = now - task.queued_at
    if waited_s > limits.no_capacity_wait_s and capacity is Capacity.NONE:
        message = f"no node that may take this task has the model {task.spec.model!r} ready"
        if task.refused_by:
            message += f"; the owners of {len(task.refused_by)} that have it do not accept such a task"
        return TaskFailure.NO_CAPACITY, message
    match capacity:
        case Capacity.COMING:
            # Only what is expected within `wake_wait_s` waits, and expectations are true within a factor of two.
            most_s = 2.0 * limits.wake_wait_s
        case Capacity.WAKING:
            most_s = limits.wake_wait_s
        case _:
            most_s = limits.queue_wait_s
    if waited_s > most_s and task.spec.service_class is not ServiceClass.BATCH:
        return TaskFailure.QUEUE_TIMEOUT, f"no slot became free within {most_s:g} s"
    return None
