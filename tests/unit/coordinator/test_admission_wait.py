"""What would wait too long is refused at once, with the time to come back; a quiet hour before changes nothing."""

from coordinator.scheduler import commands as c
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from coordinator.scheduler.turnover import Turnover
from inference.task import ServiceClass, TaskId


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


def test_a_task_behind_twice_the_longest_wait_is_refused_and_told_when_there_will_be_room() -> None:
    """Mutations seen to fail here: how long the queue takes is not looked at; batch tasks are refused too."""
    harness = busy_fleet()
    # Each waits 10 s more than the one before it: the sixth 50 s.
    for number in range(5):
        assert not refusals(harness.submit(task_spec(f"t{number}")))
    [refused] = refusals(harness.submit(task_spec("too late")))
    assert refused.failure is c.TaskFailure.QUEUE_FULL
    assert refused.retry_after_s == 50.0 - 20.0
    assert not refusals(harness.submit(task_spec("batch", service_class=ServiceClass.BATCH)))


def test_a_quote_says_the_wait_and_what_comes_after_it() -> None:
    """Mutation seen to fail here: the tasks ahead are not counted."""
    harness = busy_fleet()
    for number in range(2):
        harness.submit(task_spec(f"t{number}"))
    quote = harness.scheduler.quote(task_spec("asks"), harness.now)
    assert quote is not None
    assert (quote.met, quote.wait_s) == (False, 20.0)
    assert quote.first_token_s > 20.0
    assert TaskId("asks") not in harness.scheduler.tasks


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
        turnover.began()
        turnover.ended(duration_s, whole=whole)
    assert turnover.slot_s() == 0.0
    for _ in range(4):
        turnover.began()
    assert turnover.slot_s() == 2.0
