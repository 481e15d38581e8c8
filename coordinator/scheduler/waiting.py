"""What a task in the queue waits for, in one word. Pure."""

from coordinator.scheduler.policy import Router
from coordinator.scheduler.records import Node, Task, WaitingFor
from coordinator.scheduler.waking import Capacity


def waiting_for(task: Task, capacity: Capacity, only: Node | None, router: Router, now: float) -> WaitingFor:
    """Return what keeps a task in the queue: the first reason that holds. Args: `only` as in `Router.choose`."""
    match capacity:
        case Capacity.NONE:
            return WaitingFor.NO_NODE
        case Capacity.WAKING | Capacity.COMING:
            return WaitingFor.LOADING
        case Capacity.READY:
            pass
    if router.choose(task, now, only=only) is not None:
        return WaitingFor.TURN
    if task.avoid_until and router.choose(task, now, only=only, avoiding=False) is not None:
        return WaitingFor.AVOIDING
    # What is meant for one node waits for that node's slots alone.
    if only is not None or not router.has_free_slot(task.spec):
        return WaitingFor.NO_FREE_SLOT
    return WaitingFor.RESERVE if router.keeps_out(task) else WaitingFor.TARGET
