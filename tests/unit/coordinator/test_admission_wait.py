"""What would wait too long is refused at once, with the time to come back; a quiet hour before changes nothing."""

from dataclasses import replace

import pytest

from coordinator.scheduler import commands as c
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.queue import TaskQueue
from coordinator.scheduler.records import Task
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from coordinator.scheduler.turnover import LEFT_SHARE_MIN, MEMORY_S, Flow, Turnover
from inference.task import ServiceClass, TaskId, TaskSpec, TenantId


def refusals(commands: list[c.Command]) -> list[c.FailTask]:
    return [command for command in commands if isinstance(command, c.FailTask)]


def busy_fleet() -> SchedulerHarness:
    """Return one slot that has shown that an answer takes it 10 s, and runs another one."""
    harness = SchedulerHarness(Limits(queue_wait_s=20.0))
    harness.connect("a", engine_view(slots=1))
    harness.submit(task_spec("task"))
    harness.now += 10.0
    harness.frames("a", 1, 0, *range(20, 28))
    harness.finish("a", 1, range(20, 28))
    harness.now += 3600.0
    harness.submit(task_spec("running"))
    return harness


def pass_working_time(harness: SchedulerHarness, seconds: int) -> list[c.Command]:
    """Pass time in which the answer goes on, an id each four seconds."""
    commands: list[c.Command] = []
    for _ in range(0, seconds, 4):
        received = harness.scheduler.tasks[TaskId("running")].received
        commands += harness.frames("a", 1, len(received), 1, task="running")
        commands += harness.pass_time(4.0, alive=["a"])
    return commands


def test_a_task_that_would_wait_too_long_is_refused_and_told_when_half_of_the_queue_is_gone() -> None:
    """Mutations seen to fail here: how long the queue takes is not looked at; batch tasks are refused too."""
    harness = busy_fleet()
    # The one that runs takes 10 s, and each that waits as much: the third would begin after 30 s.
    for number in range(2):
        assert not refusals(harness.submit(task_spec(f"t{number}")))
    [refused] = refusals(harness.submit(task_spec("too late")))
    assert refused.failure is c.TaskFailure.QUEUE_FULL
    assert refused.retry_after_s == 15.0
    assert not refusals(harness.submit(task_spec("batch", service_class=ServiceClass.BATCH)))


def test_who_waited_too_long_or_came_late_is_told_by_how_long_those_in_front_have_waited() -> None:
    """Those whose answers came late made the queue slower than it looked; those who wait now will not wait for ever.

    Mutations seen to fail here: a constant; how long those in front have waited is not looked at.
    """
    harness = busy_fleet()
    for name in ("first", "second"):
        assert not refusals(harness.submit(task_spec(name)))
    pass_working_time(harness, 16)
    # The one in the middle is given up in 4 s, long before the 10 s or more that the work in front of it takes.
    [refused] = refusals(harness.submit(task_spec("late")))
    assert refused.retry_after_s == pytest.approx(4.0)
    [first, second] = refusals(pass_working_time(harness, 8))
    assert first.failure is second.failure is c.TaskFailure.QUEUE_TIMEOUT
    assert (first.retry_after_s, second.retry_after_s) == (1.0, 1.0)


class CountingQueue(TaskQueue):
    """Counts how often somebody walks along it."""

    walks = 0

    def middle_ahead(self, spec: TaskSpec, now: float) -> TaskId | None:
        self.walks += 1
        return super().middle_ahead(spec, now)


def test_of_many_that_wait_in_vain_together_one_walk_along_the_queue_tells_all() -> None:
    """A walk for each of 4,096, of as many tenants, took 4.5 s in which no token went out.

    Mutation seen to fail here: one for each.
    """
    harness = SchedulerHarness(Limits(queue_wait_s=1.0))
    queue = harness.scheduler.queue = CountingQueue()
    harness.connect("a", engine_view(slots=1))
    for number in range(50):
        harness.submit(replace(task_spec(f"t{number}"), tenant_id=TenantId(f"tenant {number}")))
    timed_out = refusals(harness.pass_time(1.2, alive=["a"]))
    assert len(timed_out) == 49
    assert queue.walks == 1


def test_a_quote_says_the_wait_and_what_comes_after_it() -> None:
    """Mutation seen to fail here: the tasks ahead are not counted."""
    harness = busy_fleet()
    harness.submit(task_spec("t0"))
    quote = harness.scheduler.quote(task_spec("asks"), harness.now)
    assert quote is not None
    assert (quote.met, quote.wait_s) == (False, 20.0)
    assert quote.first_token_s > 20.0
    assert TaskId("asks") not in harness.scheduler.tasks


def test_classes_below_wait_for_those_above_that_have_yet_to_come() -> None:
    """One of two slots goes to an interactive task each 10 s. Mutation seen to fail here: all of it is left."""
    turnover = Turnover()
    turnover.began(ServiceClass.BATCH, 0.0)
    turnover.ended(10.0, whole=True)
    for _ in range(2):
        turnover.began(ServiceClass.BATCH, 0.0)
    now = 0.0
    for number in range(60):
        now = 10.0 * number
        turnover.began(ServiceClass.INTERACTIVE, now)
        turnover.ended(10.0, whole=True)
    assert turnover.slot_s(ServiceClass.INTERACTIVE, now) == pytest.approx(5.0)
    assert turnover.slot_s(ServiceClass.BATCH, now) == pytest.approx(10.0, rel=0.2)
    # Whatever those above take, somebody below moves up in the end.
    for _ in range(600):
        turnover.began(ServiceClass.INTERACTIVE, now)
        turnover.ended(10.0, whole=True)
    assert turnover.slot_s(ServiceClass.BATCH, now) == pytest.approx(5.0 / LEFT_SHARE_MIN)


def test_a_flow_is_known_from_its_beginning_and_fades() -> None:
    """Mutations seen to fail here: the time since the first one is not looked at; nothing fades."""
    flow = Flow(0.0)
    for number in range(21):
        flow.note(0.5 * number)
    assert flow.per_s(10.0) == pytest.approx(2.0, rel=0.1)
    assert flow.per_s(10.0 + 2 * MEMORY_S) < 0.2


def test_those_in_front_are_due_before_and_as_many_of_other_tenants_as_take_turns() -> None:
    """Mutations seen to fail here: whoever is due later counts; all of another tenant count."""
    queue = TaskQueue()
    for number in range(5):
        spec = replace(task_spec(f"o{number}"), tenant_id=TenantId("other"))
        queue.add(Task(spec=spec, submitted_at=float(number), queued_at=0.0))
    for name, submitted_at in (("mine", 0.0), ("later", 10.0)):
        queue.add(Task(spec=task_spec(name), submitted_at=submitted_at, queued_at=0.0))
    assert queue.ahead(task_spec("asks"), 5.0) == 1 + 2
    assert queue.ahead(task_spec("asks", service_class=ServiceClass.BATCH), 5.0) == 7


def test_an_idle_fleet_meets_its_target_and_an_empty_one_has_no_quote() -> None:
    harness = SchedulerHarness()
    assert harness.scheduler.quote(task_spec(), harness.now) is None
    harness.connect("a", engine_view(tokens_per_second=100.0))
    quote = harness.scheduler.quote(task_spec(), harness.now)
    assert quote is not None
    assert quote.met
    assert quote.wait_s == 0.0
    assert 0.0 < quote.first_token_s < 1.0
    assert quote.token_s == 0.01
    harness.connect("a", engine_view(tokens_per_second=2.0))
    slow = harness.scheduler.quote(task_spec(), harness.now)
    assert slow is not None
    assert not slow.met


def test_answers_that_were_broken_off_do_not_make_the_others_look_short() -> None:
    """Mutation seen to fail here: every end counts."""
    turnover = Turnover()
    for duration_s, whole in ((8.0, True), (0.1, False)):
        turnover.began(ServiceClass.BATCH, 0.0)
        turnover.ended(duration_s, whole=whole)
    assert turnover.slot_s(ServiceClass.BATCH, 0.0) == 0.0
    for _ in range(4):
        turnover.began(ServiceClass.BATCH, 0.0)
    assert turnover.slot_s(ServiceClass.BATCH, 0.0) == 2.0


def test_a_queue_that_batches_have_filled_takes_whoever_goes_before_them() -> None:
    """Mutation seen to fail here: all that wait are counted."""
    harness = SchedulerHarness(Limits(queue_tasks_max=2))
    harness.connect("a", engine_view(slots=1))
    harness.submit(task_spec("runs"))
    for number in range(2):
        assert not refusals(harness.submit(task_spec(f"batch-{number}", service_class=ServiceClass.BATCH)))
    assert refusals(harness.submit(task_spec("one more", service_class=ServiceClass.BATCH)))
    for number in range(2):
        assert not refusals(harness.submit(task_spec(f"reader-{number}")))
    assert refusals(harness.submit(task_spec("third reader")))
