"""The scheduler's rules, one scenario each; any history is the simulation's to test."""

from coordinator.ledger.prices import Price
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.records import Why
from coordinator.scheduler.testing import STOP_ID, SchedulerHarness, engine_view, task_spec
from inference.task import FinishReason, NodeId, PrivacyClass, Sampling, ServiceClass, TaskId, TaskSpec


def of_kind(commands: list[c.Command], kind: type[c.Command]) -> list[c.Command]:
    return [command for command in commands if isinstance(command, kind)]


def assigned(commands: list[c.Command]) -> c.Assign:
    (command,) = [command for command in commands if isinstance(command, c.Assign)]
    return command


def failed(commands: list[c.Command]) -> c.FailTask:
    (command,) = [command for command in commands if isinstance(command, c.FailTask)]
    return command


def running_on(harness: SchedulerHarness, name: str, spec: TaskSpec | None = None) -> c.Assign:
    """Connect one node and have it run the task."""
    harness.connect(name)
    return assigned(harness.submit(spec or task_spec()))


def test_of_what_asks_the_same_the_faster_engine_is_taken_and_of_equally_fast_ones_the_emptier() -> None:
    harness = SchedulerHarness()
    harness.connect("slow", engine_view(tokens_per_second=50))
    for name in ("a", "b"):
        harness.connect(name, engine_view(tokens_per_second=100))
    placed = [assigned(harness.submit(task_spec(f"t{i}"))).node_id for i in range(9)]
    assert placed == ["a", "b"] * 4 + ["slow"]


def test_a_task_without_a_free_slot_waits_and_goes_as_soon_as_one_is_free() -> None:
    harness = SchedulerHarness()
    harness.connect("a", engine_view(slots=1))
    harness.submit(task_spec())
    assert not of_kind(harness.submit(task_spec("second")), c.Assign)
    harness.frames("a", 1, 0, *range(20, 28))
    assert assigned(harness.finish("a", 1, range(20, 28))).spec.task_id == "second"


def test_interactive_tasks_overtake_batch_tasks_in_the_queue() -> None:
    harness = SchedulerHarness()
    harness.submit(task_spec("batch", service_class=ServiceClass.BATCH))
    harness.submit(task_spec("chat", service_class=ServiceClass.INTERACTIVE))
    harness.connect("a", engine_view(slots=1))
    (running,) = harness.scheduler.nodes[NodeId("a")].tasks
    assert running == "chat"


def test_ids_are_delivered_once_whatever_is_repeated() -> None:
    """Mutation seen to fail here: drop the overlap arithmetic in _take_frame."""
    harness = SchedulerHarness()
    running_on(harness, "a")
    assert of_kind(harness.frames("a", 1, 0, 20, 21), c.Deliver) == [c.Deliver(TaskId("task"), 0, (20, 21), ())]
    assert not of_kind(harness.frames("a", 1, 0, 20, 21), c.Deliver)
    assert of_kind(harness.frames("a", 1, 1, 21, 22), c.Deliver) == [c.Deliver(TaskId("task"), 2, (22,), ())]


def test_a_gap_or_a_changed_id_ends_the_attempt_and_resumes_elsewhere() -> None:
    for first_index, ids, outcome in ((3, (23,), "frame_gap"), (1, (99, 22), "frame_conflict")):
        harness = SchedulerHarness()
        running_on(harness, "a")
        harness.connect("b")
        harness.frames("a", 1, 0, 20, 21)
        commands = harness.frames("a", 1, first_index, *ids)
        (record,) = of_kind(commands, c.RecordAttempt)
        assert isinstance(record, c.RecordAttempt)
        assert record.outcome == outcome
        resumed = assigned(commands)
        assert (resumed.node_id, resumed.first_index, list(resumed.prompt_ids)) == ("b", 2, [10, 11, 12, 20, 21])
        assert of_kind(commands, c.CancelAttempt), "the liar is told to stop"


def test_what_a_node_may_not_send_is_never_delivered() -> None:
    cases = {
        "id_out_of_range": (20, 5000),
        "limit_exceeded": tuple(range(20, 29)),
        "ids_after_stop": (20, STOP_ID, 21),
    }
    for outcome, ids in cases.items():
        harness = SchedulerHarness()
        running_on(harness, "a")
        commands = harness.frames("a", 1, 0, *ids)
        assert not of_kind(commands, c.Deliver), outcome
        (record,) = of_kind(commands, c.RecordAttempt)
        assert isinstance(record, c.RecordAttempt)
        assert record.outcome == outcome


def test_a_lost_stream_resumes_from_the_last_received_id_with_what_is_left_of_the_limit() -> None:
    harness = SchedulerHarness()
    first = running_on(harness, "a")
    harness.connect("b")
    harness.frames("a", 1, 0, 20, 21, 22)
    resumed = assigned(harness.disconnect("a"))
    assert (resumed.node_id, resumed.attempt, resumed.first_index, resumed.max_tokens) == ("b", 2, 3, 5)
    assert list(resumed.prompt_ids) == [10, 11, 12, 20, 21, 22]
    assert resumed.lease_epoch > first.lease_epoch


def test_late_frames_of_an_old_attempt_are_dropped() -> None:
    """The frozen agent wakes up and sends what it had in hand."""
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.connect("b")
    harness.frames("a", 1, 0, 20)
    assert assigned(harness.pass_time(3, alive=["b"])).node_id == "b"
    assert not of_kind(harness.frames("a", 1, 1, 21), c.Deliver)
    assert of_kind(harness.frames("b", 2, 1, 21), c.Deliver)


def test_late_words_about_an_old_attempt_do_not_touch_the_new_one_on_the_same_node() -> None:
    """Mutation seen to fail here: leave the attempt number out of _take_frames."""
    harness = SchedulerHarness(Limits(avoid_s=0.0))
    running_on(harness, "a")
    harness.frames("a", 1, 0, 20)
    assert assigned(harness.fail("a", 1, "engine_stalled")).attempt == 2
    assert not harness.fail("a", 1, "cancelled")
    assert not harness.frames("a", 1, 1, 99)
    assert of_kind(harness.frames("a", 2, 1, 21), c.Deliver)


def test_a_silent_node_loses_its_tasks_within_three_seconds_and_gets_none_until_it_speaks() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a")
    assert not of_kind(harness.pass_time(2.3), c.RecordAttempt)
    (record,) = of_kind(harness.pass_time(0.4), c.RecordAttempt)
    assert isinstance(record, c.RecordAttempt)
    assert record.outcome == "node_silent"
    assert not of_kind(harness.pass_time(6), c.Assign), "not given back to the silent node"
    harness.feed(e.NodeHeard(NodeId("a"), harness.connections["a"]))
    assert harness.scheduler.tasks[TaskId("task")].attempt is not None


def test_an_idle_node_owes_a_word_only_from_its_first_assignment_on() -> None:
    harness = SchedulerHarness()
    harness.connect("a")
    harness.pass_time(9)
    harness.submit(task_spec())
    assert not of_kind(harness.pass_time(2.3), c.RecordAttempt)


def test_a_coordinator_that_was_asleep_blames_nobody() -> None:
    """Mutation seen to fail here: leave out timeouts.forgive."""
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.frames("a", 1, 0, 20)
    harness.pass_time(0.5, alive=["a"])
    harness.now += 10.0
    assert not of_kind(harness.feed(e.Ticked()), c.RecordAttempt)
    assert not of_kind(harness.pass_time(2.0), c.RecordAttempt)
    assert of_kind(harness.pass_time(1.0), c.RecordAttempt), "silence after waking counts"


def test_a_long_prefill_with_live_heartbeats_is_no_stall() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a", task_spec(prompt=range(3, 900)))
    assert not of_kind(harness.pass_time(60, alive=["a"]), c.RecordAttempt)


def test_a_task_silent_while_the_others_advance_has_stalled() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a", task_spec(max_tokens=500))
    harness.submit(task_spec("other", max_tokens=500))
    harness.frames("a", 1, 0, 20)
    records: list[c.Command] = []
    for index in range(60):
        harness.frames("a", 1, index, 20, task="other")
        records += of_kind(harness.pass_time(0.1), c.RecordAttempt)
    (record,) = records
    assert isinstance(record, c.RecordAttempt)
    assert (record.task_id, record.outcome) == ("task", "stalled")


def test_a_drained_node_hands_over_what_runs_and_gets_nothing_new() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.connect("b")
    harness.frames("a", 1, 0, 20)
    commands = harness.feed(e.DrainChanged(NodeId("a"), True))
    assert assigned(commands).node_id == "b"
    (desired,) = of_kind(commands, c.SendDesired)
    assert isinstance(desired, c.SendDesired)
    assert desired.drain
    assert not desired.attempts
    assert assigned(harness.submit(task_spec("next"))).node_id == "b"


def test_a_penalised_stream_fails_loudly_instead_of_changing_its_rules() -> None:
    """Mutation seen to fail here: let resumable() answer True always."""
    harness = SchedulerHarness()
    running_on(harness, "a", task_spec(sampling=Sampling(presence_penalty=0.5)))
    harness.connect("b")
    harness.frames("a", 1, 0, 20)
    assert failed(harness.disconnect("a")).failure is c.TaskFailure.MIGRATION_IMPOSSIBLE


def test_a_penalised_answer_that_nobody_has_read_begins_again() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a", task_spec(sampling=Sampling(presence_penalty=0.5), streaming=False))
    harness.connect("b")
    harness.frames("a", 1, 0, 20)
    commands = harness.disconnect("a")
    assert of_kind(commands, c.Discard)
    assert (assigned(commands).first_index, list(assigned(commands).prompt_ids)) == (0, [10, 11, 12])


def test_an_answer_whose_last_id_arrived_is_complete_though_the_goodbye_was_lost() -> None:
    for ids, reason in (((20, STOP_ID), FinishReason.STOP), (tuple(range(20, 28)), FinishReason.LENGTH)):
        harness = SchedulerHarness()
        running_on(harness, "a")
        harness.frames("a", 1, 0, *ids)
        (completed,) = of_kind(harness.disconnect("a"), c.CompleteTask)
        assert isinstance(completed, c.CompleteTask)
        assert (completed.finish_reason, completed.completion_tokens) == (reason, len(ids))
        assert completed.statement is None


def test_a_statement_that_the_frames_contradict_is_not_believed() -> None:
    """Mutation seen to fail here: return None from _contradiction."""
    cases = [
        ((20, 21), (20, 22), FinishReason.LENGTH, "statement_conflict"),
        ((20, 21), (20,), FinishReason.LENGTH, "statement_conflict"),
        ((20, 21), (20, 21), FinishReason.LENGTH, "false_length"),
        ((20, 21), (20, 21), FinishReason.STOP, "false_stop"),
    ]
    for sent, stated, reason, outcome in cases:
        harness = SchedulerHarness()
        running_on(harness, "a")
        harness.frames("a", 1, 0, *sent)
        commands = harness.finish("a", 1, stated, reason)
        assert not of_kind(commands, c.CompleteTask)
        (record,) = of_kind(commands, c.RecordAttempt)
        assert isinstance(record, c.RecordAttempt)
        assert record.outcome == outcome


def test_a_stop_string_completes_the_task_and_cancels_the_attempt() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.frames("a", 1, 0, 20, 21)
    commands = harness.feed(e.TaskStopped(TaskId("task"), 2))
    (completed,) = of_kind(commands, c.CompleteTask)
    assert isinstance(completed, c.CompleteTask)
    assert (completed.finish_reason, completed.completion_tokens) == (FinishReason.STOP, 2)
    assert of_kind(commands, c.CancelAttempt)


def test_a_cancelled_task_is_cancelled_at_its_engine_too() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a")
    commands = harness.feed(e.TaskCancelled(TaskId("task")))
    assert of_kind(commands, c.CancelAttempt) == [c.CancelAttempt(harness.connections["a"], TaskId("task"), 1)]
    assert failed(commands).failure is c.TaskFailure.TASK_CANCELLED


def test_a_task_that_kills_every_engine_is_given_up() -> None:
    harness = SchedulerHarness(Limits(avoid_s=0.0))
    attempt = running_on(harness, "a").attempt
    harness.connect("b")
    commands: list[c.Command] = []
    for _ in range(20):
        name = harness.scheduler.tasks[TaskId("task")].attempt
        assert name is not None
        commands = harness.fail(name.node_id, attempt, "engine_crashed")
        if of_kind(commands, c.FailTask):
            break
        attempt = assigned(commands).attempt
    assert failed(commands).failure is c.TaskFailure.ATTEMPTS_EXHAUSTED
    assert attempt == Limits().fruitless_attempts_max
    assert "engine_crashed" in failed(commands).message


def test_owners_who_do_not_consent_cost_a_task_no_more_than_a_try_each() -> None:
    """Mutation seen to fail: `refused_consent` left out of BLAMELESS."""
    harness = SchedulerHarness()
    harness.connect("a")
    commands = harness.submit(task_spec())
    refusing = [f"n{number}" for number in range(Limits().fruitless_attempts_max)]
    for name in refusing:
        harness.connect(name)
        order = assigned(commands)
        commands = harness.fail(order.node_id, order.attempt, "refused_consent")
    harness.connect("willing")
    assert harness.scheduler.tasks[TaskId("task")].attempt is not None


def test_a_task_that_no_owner_accepts_fails_in_words_and_holds_up_nobody() -> None:
    """Each node was asked again every few seconds, for ever, and the client was told nothing.

    Mutations seen to fail here: ask a node again; let such a task count as proof that there is no room.
    """
    harness = SchedulerHarness()
    harness.connect("a")
    harness.connect("b")
    commands = harness.submit(task_spec())
    for _ in range(2):
        order = assigned(commands)
        commands = harness.fail(order.node_id, order.attempt, "refused_consent")
    assert harness.scheduler.tasks[TaskId("task")].refused_by == {"a", "b"}
    # Another task, for the same model, is welcome at the same nodes.
    assert assigned(harness.submit(task_spec("short"))).node_id in ("a", "b")
    commands = []
    until = harness.now + Limits().no_capacity_wait_s + 1
    while harness.now < until and not of_kind(commands, c.FailTask):
        harness.now += 0.2
        for name in ("a", "b"):
            harness.feed(e.NodeHeard(NodeId(name), harness.connections[name]))
        commands = harness.feed(e.Ticked())
        assert not of_kind(commands, c.Assign)
    assert failed(commands).failure is c.TaskFailure.NO_CAPACITY
    assert "the owners of 2 that have it do not accept such a task" in failed(commands).message


def test_of_two_connections_with_one_identity_the_newer_boot_wins() -> None:
    harness = SchedulerHarness()
    harness.connect("a", boot_started_at_ms=100)
    old = harness.connections["a"]
    harness.submit(task_spec())
    commands = harness.connect("a", boot_started_at_ms=200)
    assert c.CloseConnection(old, c.CloseReason.SUPERSEDED) in commands
    new = harness.connections["a"]
    late = harness.connect("a", boot_started_at_ms=150)
    assert c.CloseConnection(harness.connections["a"], c.CloseReason.SUPERSEDED) in late
    assert harness.scheduler.nodes[NodeId("a")].connection_id == new


def test_of_two_streams_of_one_start_the_newer_stays_in_whatever_order_they_arrive() -> None:
    """A stream that an agent had given up arrived after the next one, and the agent was told to go for good.

    Mutation seen to fail here: compare the starts alone.
    """
    harness = SchedulerHarness()
    harness.connect("a", boot_started_at_ms=100, stream_number=2)
    second = harness.connections["a"]
    commands = harness.connect("a", boot_started_at_ms=100, stream_number=1)
    assert c.CloseConnection(harness.connections["a"], c.CloseReason.REPLACED) in commands
    assert harness.scheduler.nodes[NodeId("a")].connection_id == second
    commands = harness.connect("a", boot_started_at_ms=100, stream_number=3)
    assert c.CloseConnection(second, c.CloseReason.REPLACED) in commands


def test_a_banned_node_is_cut_off_and_its_tasks_move() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.connect("b")
    commands = harness.feed(e.NodeBanned(NodeId("a")))
    assert of_kind(commands, c.CloseConnection)
    assert assigned(commands).node_id == "b"


def test_a_report_without_an_attempt_that_was_seen_ends_it_and_one_too_many_is_answered() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.report("a", engine_view(), [("task", 1)])
    (desired,) = of_kind(harness.report("a", engine_view(), [("task", 1), ("ghost", 7)]), c.SendDesired)
    assert isinstance(desired, c.SendDesired)
    assert desired.attempts == ((TaskId("task"), 1),)
    (record,) = of_kind(harness.report("a", engine_view()), c.RecordAttempt)
    assert isinstance(record, c.RecordAttempt)
    assert record.outcome == "lost_by_node"


def test_without_any_engine_a_task_waits_a_while_and_then_fails_with_a_time_to_retry() -> None:
    harness = SchedulerHarness()
    harness.submit(task_spec())
    assert not of_kind(harness.pass_time(9), c.FailTask)
    given_up = failed(harness.pass_time(2))
    assert given_up.failure is c.TaskFailure.NO_CAPACITY
    assert given_up.retry_after_s


def test_a_full_queue_refuses_and_a_long_wait_ends() -> None:
    harness = SchedulerHarness(Limits(queue_tasks_max=1, queue_wait_s=5))
    harness.connect("a", engine_view(slots=1))
    harness.submit(task_spec())
    harness.submit(task_spec("waits"))
    assert failed(harness.submit(task_spec("refused"))).failure is c.TaskFailure.QUEUE_FULL
    ended = [command for command in harness.pass_time(6, alive=["a"]) if isinstance(command, c.FailTask)]
    assert [(command.task_id, command.failure) for command in ended] == [("waits", c.TaskFailure.QUEUE_TIMEOUT)]


def test_a_deadline_ends_a_running_task() -> None:
    harness = SchedulerHarness()
    running_on(harness, "a", task_spec(deadline_s=2))
    commands = harness.pass_time(2.5, alive=["a"])
    assert failed(commands).failure is c.TaskFailure.DEADLINE_EXCEEDED
    assert of_kind(commands, c.CancelAttempt)


def test_only_nodes_of_trusted_owners_read_a_trusted_prompt_also_after_a_failover() -> None:
    """Mutation seen to fail here: let Node.takes ignore the privacy class."""
    harness = SchedulerHarness()
    harness.connect("stranger")
    harness.connect("friend", trusted=True)
    spec = task_spec(privacy_class=PrivacyClass.TRUSTED_OWNERS)
    assert assigned(harness.submit(spec)).node_id == "friend"
    assert not of_kind(harness.disconnect("friend"), c.Assign)


def test_a_task_that_avoids_the_only_free_node_does_not_keep_it_from_those_behind() -> None:
    """Mutation seen to fail here: nobody else looks for an engine where one task found none."""
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.fail("a", 1, "engine_error")
    assert assigned(harness.submit(task_spec("second"))).spec.task_id == "second"
    assert harness.scheduler.tasks[TaskId("task")].attempt is None


def test_a_task_whose_owners_all_came_back_goes_on_as_soon_as_one_of_them_is_gone_again() -> None:
    """Mutation seen to fail here: avoid a node whose owner came back as one that failed."""
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.connect("b")
    assert assigned(harness.fail("a", 1, "owner_returned")).node_id == "b"
    assert not of_kind(harness.fail("b", 2, "refused_engine_not_ready"), c.Assign), "neither is ready"
    assert assigned(harness.report("a", engine_view())).node_id == "a"


def test_a_node_whose_owner_comes_back_again_and_again_is_avoided() -> None:
    """Else one that only says so uses up a task's attempts in a moment.

    Mutation seen to fail here: never avoid a node whose owner came back.
    """
    harness = SchedulerHarness()
    running_on(harness, "a")
    harness.fail("a", 1, "owner_returned")
    assert assigned(harness.report("a", engine_view())).attempt == 2
    harness.fail("a", 2, "owner_returned")
    assert not of_kind(harness.report("a", engine_view()), c.Assign)
    assert assigned(harness.pass_time(harness.scheduler.limits.avoid_s + 0.1, alive=["a"])).attempt == 3
    harness.fail("a", 3, "owner_returned")
    assert not of_kind(harness.report("a", engine_view()), c.Assign), "and it is not forgotten meanwhile"


CHEAP, DEAR = Price(100_000, 400_000), Price(150_000, 600_000)
# The default list leaves 200000/800000.
TOO_MUCH = Price(100_000, 800_001)


def test_the_least_ask_wins_for_as_long_as_its_engine_keeps_the_target() -> None:
    """Mutations seen to fail: choose by speed alone; the least ask however slow it has become."""
    harness = SchedulerHarness()
    harness.connect("a", engine_view(ask=DEAR, slots=8, tokens_per_second=100))
    # A step takes 76.9 ms with one answer, and 1.54 ms more with each: the fourth would be above the 80 ms that count.
    harness.connect("b", engine_view(ask=CHEAP, slots=8, tokens_per_second=13))
    placed = [assigned(harness.submit(task_spec(f"t{number}"))) for number in range(6)]
    assert [order.node_id for order in placed] == ["b", "b", "b", "a", "a", "a"]
    assert [order.ask for order in placed] == [CHEAP] * 3 + [DEAR] * 3


def test_a_slow_engine_gets_no_work_for_asking_little() -> None:
    harness = SchedulerHarness()
    harness.connect("slow", engine_view(ask=Price(0, 0), tokens_per_second=12))
    harness.connect("fast", engine_view(ask=DEAR, tokens_per_second=100))
    assert assigned(harness.submit(task_spec())).node_id == "fast"
    # For a batch it is fast enough.
    assert assigned(harness.submit(task_spec("batch", service_class=ServiceClass.BATCH))).node_id == "slow"


def test_an_engine_that_turned_out_to_be_slow_does_not_hide_the_others_of_its_kind() -> None:
    """It gets nothing, and so is the emptiest of those that were like it.

    Mutation seen to fail here: an engine stays with those that it was like.
    """
    harness = SchedulerHarness()
    for name in ("a", "b"):
        harness.connect(name, engine_view(tokens_per_second=100, slots=8))
    slow = assigned(harness.submit(task_spec("task", max_tokens=20)))
    for index in range(20):
        harness.now += 5.0
        harness.feed(e.NodeHeard(NodeId("a"), harness.connections["a"]))
        harness.frames(slow.node_id, 1, index, 20 + index)
    harness.finish(slow.node_id, 1, range(20, 40))
    placed = [assigned(harness.submit(task_spec(f"t{number}"))) for number in range(3)]
    assert slow.node_id not in [order.node_id for order in placed]
    assert {order.choice.why for order in placed} == {Why.MEETS_TARGET}


def test_what_the_ask_comes_to_counts_not_one_part_of_it() -> None:
    """Mutation seen to fail: the asks compared as pairs."""
    harness = SchedulerHarness()
    harness.connect("long prompts", engine_view(ask=Price(0, 400_000)))
    harness.connect("long answers", engine_view(ask=Price(200_000, 300_000)))
    assert assigned(harness.submit(task_spec("a", prompt=range(3, 103), max_tokens=1))).node_id == "long prompts"
    harness.connect("long prompts", engine_view(ask=Price(0, 400_000)))
    assert assigned(harness.submit(task_spec("b", prompt=[3], max_tokens=100))).node_id == "long answers"


def test_who_asks_too_much_gets_no_work_and_is_no_capacity_until_it_asks_less() -> None:
    """Mutations seen to fail: the ask not looked at in `candidates`; in `serving`."""
    harness = SchedulerHarness()
    harness.connect("a", engine_view(ask=TOO_MUCH))
    assert harness.scheduler.engines_ready(task_spec().manifest_digest) == 0
    assert not of_kind(harness.submit(task_spec()), c.Assign)
    assert assigned(harness.report("a", engine_view(ask=CHEAP))).ask == CHEAP
    harness = SchedulerHarness()
    harness.connect("a", engine_view(ask=TOO_MUCH))
    harness.submit(task_spec())
    commands = harness.pass_time(Limits().no_capacity_wait_s + 0.5, alive=["a"])
    assert failed(commands).failure is c.TaskFailure.NO_CAPACITY
    harness.connect("b", engine_view(ready=False, unloaded=True, ask=TOO_MUCH))
    commands = harness.submit(task_spec("other"))
    assert not of_kind(commands, c.SendDesired), "an engine is loaded for work that it does not get"


def test_an_attempt_keeps_its_ask_whatever_is_reported_while_it_runs() -> None:
    """Mutation seen to fail: the record made with the ask of the newest report."""
    harness = SchedulerHarness()
    harness.connect("a", engine_view(ask=CHEAP))
    harness.submit(task_spec())
    harness.report("a", engine_view(ask=TOO_MUCH), running=[("task", 1)])
    harness.frames("a", 1, 0, *range(20, 28))
    [record] = of_kind(harness.finish("a", 1, range(20, 28)), c.RecordAttempt)
    assert isinstance(record, c.RecordAttempt)
    assert record.ask == CHEAP


def test_an_owner_who_asked_for_more_meanwhile_is_blamed_for_nothing_and_asked_again_after_its_report() -> None:
    """Mutation seen to fail: `refused_ask` left out of ENGINE_DOWN."""
    harness = SchedulerHarness()
    harness.connect("a", engine_view(ask=CHEAP))
    harness.submit(task_spec())
    assert not of_kind(harness.fail("a", 1, "refused_ask"), c.Assign)
    assert assigned(harness.report("a", engine_view(ask=DEAR))).ask == DEAR
