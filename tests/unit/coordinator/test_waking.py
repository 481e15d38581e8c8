"""Engines that nobody used are unloaded; a task that waits for one brings it up again.

Mutations seen to fail here: ask once and never again; ask although a slot is free; let a task that waits for an engine
that is coming up fail as one that nobody can serve.
"""

from dataclasses import replace

from coordinator.scheduler import commands as c
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import NodeId

UNLOADED = engine_view(ready=False, unloaded=True)
STARTING = engine_view(ready=False, starting=True)
BROKEN = engine_view(ready=False)


def wanted(commands: list[c.Command]) -> list[tuple[str, ...]]:
    return [command.engines_wanted for command in commands if isinstance(command, c.SendDesired)]


def assigned(commands: list[c.Command]) -> list[str]:
    return [command.node_id for command in commands if isinstance(command, c.Assign)]


def failures(commands: list[c.Command]) -> list[c.TaskFailure]:
    return [command.failure for command in commands if isinstance(command, c.FailTask)]


def test_a_task_that_finds_the_model_unloaded_has_it_loaded_and_runs() -> None:
    harness = SchedulerHarness()
    harness.connect("a", UNLOADED)
    assert wanted(harness.submit(task_spec())) == [("engine",)]
    assert wanted(harness.report("a", STARTING)) == []
    commands = harness.report("a", engine_view())
    assert assigned(commands) == ["a"]
    assert wanted(commands) == []


def test_what_is_wanted_is_said_again_to_a_node_that_did_not_hear_it() -> None:
    harness = SchedulerHarness()
    harness.connect("a", UNLOADED)
    harness.submit(task_spec())
    assert wanted(harness.report("a", UNLOADED)) == [("engine",)]


def test_an_engine_with_a_free_slot_lets_the_others_sleep() -> None:
    harness = SchedulerHarness()
    harness.connect("a", UNLOADED)
    harness.connect("b")
    commands = harness.submit(task_spec())
    assert assigned(commands) == ["b"]
    assert wanted(commands) == []


def test_as_many_are_woken_as_the_tasks_that_wait_need() -> None:
    harness = SchedulerHarness()
    for name in "abc":
        harness.connect(name, engine_view(slots=2, ready=False, unloaded=True))
    woken = [names for number in range(3) for names in wanted(harness.submit(task_spec(f"task-{number}")))]
    assert woken == [("engine",), ("engine",)]


def test_a_node_whose_engine_fails_to_come_up_is_not_waited_for() -> None:
    harness = SchedulerHarness()
    harness.connect("a", UNLOADED)
    harness.submit(task_spec())
    harness.report("a", BROKEN)
    assert failures(harness.pass_time(11)) == [c.TaskFailure.NO_CAPACITY]


def test_a_task_waits_for_an_engine_that_comes_up_for_as_long_as_large_models_take() -> None:
    harness = SchedulerHarness()
    harness.connect("a", UNLOADED)
    harness.submit(task_spec())
    harness.report("a", STARTING)
    limits = harness.scheduler.limits
    assert failures(harness.pass_time(limits.wake_wait_s - 1)) == []
    assert failures(harness.pass_time(2)) == [c.TaskFailure.QUEUE_TIMEOUT]


def test_a_task_for_one_node_alone_does_not_wait_for_the_engines_of_others() -> None:
    """Mutation seen to fail here: what others have ready counts for it."""
    harness = SchedulerHarness()
    harness.connect("a")
    harness.submit(replace(task_spec(), only_node=NodeId("b")))
    assert failures(harness.pass_time(11, alive=["a"])) == [c.TaskFailure.NO_CAPACITY]


def test_an_unloaded_model_is_one_that_can_be_had() -> None:
    harness = SchedulerHarness()
    harness.connect("a", UNLOADED)
    assert harness.scheduler.engines_ready(UNLOADED.manifest_digest) == 1


def test_an_owner_who_returned_is_sent_nothing_until_the_next_report() -> None:
    """Mutation seen to fail here: keep the engine for ready until its report says otherwise."""
    harness = SchedulerHarness()
    harness.connect("a")
    harness.submit(task_spec("task"))
    harness.fail("a", 1, "owner_returned")
    assert assigned(harness.submit(task_spec("other"))) == []
    assert assigned(harness.report("a", engine_view())) == ["a", "a"]
