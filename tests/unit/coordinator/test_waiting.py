"""What a task in the queue is said to wait for."""

from dataclasses import replace

from coordinator.scheduler.records import Waiting, WaitingFor
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import NodeId, PrivacyClass, ServiceClass, TaskId

TASK = TaskId("task")


def reason(harness: SchedulerHarness, task_id: TaskId = TASK) -> WaitingFor:
    waiting = harness.scheduler.waiting_for(task_id, harness.now)
    assert waiting is not None
    return waiting.reason


def test_without_a_node_that_may_take_it_a_task_waits_for_one() -> None:
    harness = SchedulerHarness()
    harness.submit(task_spec())
    assert reason(harness) is WaitingFor.NO_NODE
    harness.connect("a")
    assert harness.scheduler.waiting_for(TASK, harness.now) is None, "it runs"


def test_a_node_that_may_not_read_the_prompt_is_nobody() -> None:
    harness = SchedulerHarness()
    harness.connect("a")
    harness.submit(task_spec(privacy_class=PrivacyClass.TRUSTED_OWNERS))
    assert reason(harness) is WaitingFor.NO_NODE


def test_an_engine_that_was_asked_for_is_waited_for() -> None:
    """Mutation seen to fail here: LOADING told apart from NO_NODE by nothing."""
    harness = SchedulerHarness()
    harness.connect("a", engine_view(ready=False, unloaded=True))
    harness.submit(task_spec())
    assert reason(harness) is WaitingFor.LOADING


def test_where_all_are_full_a_slot_is_waited_for_and_the_time_counts_from_the_queue() -> None:
    """Mutation seen to fail here: the time counted from the submission."""
    harness = SchedulerHarness()
    harness.connect("a", engine_view(slots=1))
    harness.submit(task_spec())
    harness.now += 2.0
    harness.submit(task_spec("second"))
    harness.now += 0.5
    assert harness.scheduler.waiting_for(TaskId("second"), harness.now) == Waiting(WaitingFor.NO_FREE_SLOT, 0.5)
    harness.disconnect("a")
    harness.now += 1.0
    assert harness.scheduler.waiting_for(TASK, harness.now) == Waiting(WaitingFor.NO_NODE, 1.0)


def test_a_free_slot_that_would_be_late_is_not_waited_for() -> None:
    """The slow engine has room; the fast one alone keeps the target, and is full."""
    harness = SchedulerHarness()
    harness.connect("fast", engine_view(slots=1, tokens_per_second=100.0))
    harness.submit(task_spec("first"))
    harness.connect("slow", engine_view(slots=1, tokens_per_second=5.0))
    harness.submit(task_spec())
    assert reason(harness) is WaitingFor.TARGET


def test_a_node_where_it_failed_a_moment_ago_is_avoided() -> None:
    """Mutation seen to fail here: no look at what it avoids."""
    harness = SchedulerHarness()
    harness.connect("a")
    harness.submit(task_spec())
    harness.fail("a", 1, "engine_error")
    assert reason(harness) is WaitingFor.AVOIDING


def test_what_is_meant_for_one_node_waits_for_its_slots() -> None:
    harness = SchedulerHarness()
    harness.connect("a", engine_view(slots=1))
    harness.connect("b")
    harness.submit(replace(task_spec("first"), only_node=NodeId("a")))
    harness.submit(replace(task_spec(), only_node=NodeId("a")))
    assert reason(harness) is WaitingFor.NO_FREE_SLOT


def test_asking_changes_nothing_and_an_unknown_task_waits_for_nothing() -> None:
    harness = SchedulerHarness()
    harness.connect("a", engine_view(slots=1))
    harness.submit(task_spec("first"))
    harness.submit(task_spec(service_class=ServiceClass.BATCH))
    before = list(harness.scheduler.queue)
    assert reason(harness) is reason(harness) is WaitingFor.NO_FREE_SLOT
    assert list(harness.scheduler.queue) == before
    assert harness.scheduler.waiting_for(TaskId("nobody's"), harness.now) is None


def test_who_comes_later_gets_no_slot_before_who_has_waited_for_one() -> None:
    """The slow engine would be late for the first, which takes it once it has waited for long enough; the second would
    take it at once. Mutation seen to fail here: a task that comes looks for an engine although others wait.
    """
    harness = SchedulerHarness()
    harness.connect("fast", engine_view(slots=1, tokens_per_second=1000.0))
    harness.submit(task_spec("before"))
    harness.connect("slow", engine_view(slots=1, tokens_per_second=20.0))
    harness.submit(replace(task_spec("first"), service_class=ServiceClass.INTERACTIVE, max_ttft_ms=120))
    assert reason(harness, TaskId("first")) is WaitingFor.TARGET
    harness.now += 0.6
    harness.submit(replace(task_spec("second"), service_class=ServiceClass.INTERACTIVE, max_ttft_ms=60_000))
    assert harness.scheduler.tasks[TaskId("first")].attempt is not None
    assert reason(harness, TaskId("second")) is WaitingFor.NO_FREE_SLOT
