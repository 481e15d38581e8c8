"""An interactive answer whose first token is late is asked of a second engine; whichever begins first goes on alone.

Mutations seen to fail here: no budget; the loser runs on; the failure of one ends both; the hedge on the same node;
what is not interactive is hedged too; an answer that has begun is hedged.
"""

import pytest

from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import HEDGED, Limits
from coordinator.scheduler.records import Why
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import NodeId, ServiceClass, TaskId

# Each interactive task earns a second attempt, so that the tests need not send a hundred.
GENEROUS = Limits(hedge_share=1.0)


def orders(commands: list[c.Command]) -> list[c.Assign]:
    return [command for command in commands if isinstance(command, c.Assign)]


def records(commands: list[c.Command]) -> dict[NodeId, str]:
    return {command.node_id: command.outcome for command in commands if isinstance(command, c.RecordAttempt)}


def late(service_class: ServiceClass = ServiceClass.INTERACTIVE) -> tuple[SchedulerHarness, str, str]:
    """Return a fleet in which a task's first token is late, the node that has it, and the other one."""
    harness = SchedulerHarness(GENEROUS)
    for name in ("a", "b"):
        harness.connect(name, engine_view())
    [order] = orders(harness.submit(task_spec(service_class=service_class)))
    return harness, order.node_id, "b" if order.node_id == "a" else "a"


def hedged() -> tuple[SchedulerHarness, str, str]:
    harness, first, second = late()
    [order] = orders(harness.pass_time(0.8, alive=["a", "b"]))
    assert (order.node_id, order.attempt, order.choice.why) == (second, 2, Why.HEDGE)
    return harness, first, second


@pytest.mark.parametrize("winner", [1, 2])
def test_whichever_answers_first_goes_on_alone_and_nothing_is_delivered_twice(winner: int) -> None:
    harness, *names = hedged()
    loser = 3 - winner
    commands = harness.frames(names[winner - 1], winner, 0, 20, 21)
    assert [command.token_ids for command in commands if isinstance(command, c.Deliver)] == [(20, 21)]
    assert records(commands) == {names[loser - 1]: HEDGED}
    [cancel] = [command for command in commands if isinstance(command, c.CancelAttempt)]
    assert (cancel.connection_id, cancel.attempt) == (harness.connections[names[loser - 1]], loser)
    assert not harness.frames(names[loser - 1], loser, 0, 30, 31)
    harness.frames(names[winner - 1], winner, 2, *range(22, 28))
    [done] = [
        command
        for command in harness.finish(names[winner - 1], winner, range(20, 28))
        if isinstance(command, c.CompleteTask)
    ]
    assert (done.attempt, list(done.output_ids)) == (winner, list(range(20, 28)))


@pytest.mark.parametrize("broken", [1, 2])
def test_where_one_of_the_two_breaks_the_other_goes_on(broken: int) -> None:
    harness, *names = hedged()
    commands = harness.fail(names[broken - 1], broken, "engine_error")
    assert not orders(commands)
    assert harness.scheduler.tasks[TaskId("task")].attempt is not None
    other = 3 - broken
    assert [type(command) for command in harness.frames(names[other - 1], other, 0, 20)] == [c.Deliver]


def test_where_both_break_the_task_goes_on_as_after_any_failure() -> None:
    harness, first, second = hedged()
    harness.disconnect(first)
    harness.connect("c")
    assert [order.node_id for order in orders(harness.disconnect(second))] == ["c"]


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_task_that_is_cancelled_ends_on_both(attempt: int) -> None:
    harness, *names = hedged()
    assert records(harness.feed(e.TaskCancelled(TaskId("task"))))[NodeId(names[attempt - 1])] == "cancelled"


def test_no_more_than_the_budget_is_hedged() -> None:
    """A fleet that is slow as a whole would answer everything twice, and be slower."""
    harness = SchedulerHarness(Limits(hedge_share=0.25, hedges_saved_max=2.0))
    for name in "abcd":
        harness.connect(name, engine_view(slots=16))
    for number in range(12):
        harness.submit(task_spec(f"task-{number}"))
    assert len(orders(harness.pass_time(3.0, alive="abcd"))) == 2


def test_what_nobody_reads_as_it_comes_is_not_hedged_and_nothing_that_has_begun() -> None:
    harness, *_ = late(service_class=ServiceClass.STANDARD)
    for number in range(3):
        # These have earned some second attempts.
        harness.submit(task_spec(f"chat-{number}"))
        harness.feed(e.TaskCancelled(TaskId(f"chat-{number}")))
    assert not orders(harness.pass_time(15.0, alive=["a", "b"]))
    harness, first, _ = late()
    harness.frames(first, 1, 0, 20)
    assert not orders(harness.pass_time(3.0, alive=["a", "b"]))
