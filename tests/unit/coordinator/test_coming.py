"""Tasks for a model that no engine has ready and that one is to have: they wait, or are told how long it takes."""

from dataclasses import replace

from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.records import WaitingFor
from coordinator.scheduler.testing import DIGEST, SchedulerHarness, engine_view, task_spec
from inference.task import EngineId, ManifestDigest, NodeId, PrivacyClass, ServiceClass, TaskId

OTHER = ManifestDigest("sha256:" + "1" * 64)
TASK = TaskId("task")


def coming(harness: SchedulerHarness, wait_s: float | None) -> None:
    harness.feed(e.ModelsComing({} if wait_s is None else {OTHER: wait_s}))


def failures(commands: list[c.Command]) -> list[tuple[c.TaskFailure, float | None]]:
    return [(one.failure, one.retry_after_s) for one in commands if isinstance(one, c.FailTask)]


def models_sent(commands: list[c.Command]) -> list[tuple[tuple[str, str], ...]]:
    return [one.models_wanted for one in commands if isinstance(one, c.SendDesired)]


def test_a_task_waits_for_its_model_as_long_as_it_is_expected_and_runs_when_it_is_there() -> None:
    """Fails when such a task fails as one that nobody can serve, or is said to wait for nobody."""
    harness = SchedulerHarness()
    harness.connect("a")
    coming(harness, 200.0)
    assert failures(harness.submit(task_spec(digest=OTHER))) == []
    for _ in range(40):
        assert failures(harness.pass_time(5.0)) == []
    waiting = harness.scheduler.waiting_for(TASK, harness.now)
    assert waiting is not None
    assert waiting.reason is WaitingFor.LOADING
    commands = harness.report("a", engine_view(digest=OTHER))
    assert [one.node_id for one in commands if isinstance(one, c.Assign)] == ["a"]


def test_a_wait_that_is_too_long_is_said_at_once_but_to_a_batch() -> None:
    """Fails when Retry-After is another figure than the estimate, or everybody waits."""
    harness = SchedulerHarness()
    coming(harness, 1800.0)
    assert failures(harness.submit(task_spec(digest=OTHER))) == [(c.TaskFailure.NO_CAPACITY, 1800.0)]
    harness.now += 600.0
    assert failures(harness.submit(task_spec(digest=OTHER))) == [(c.TaskFailure.NO_CAPACITY, 1200.0)]
    batch = task_spec("batch", digest=OTHER, service_class=ServiceClass.BATCH)
    assert failures(harness.submit(batch)) == []


def test_a_quote_says_the_same_wait() -> None:
    """Fails when a quote of a model that comes is none, or promises the target."""
    harness = SchedulerHarness()
    assert harness.scheduler.quote(task_spec(digest=OTHER), harness.now) is None
    coming(harness, 120.0)
    quote = harness.scheduler.quote(task_spec(digest=OTHER), harness.now)
    assert quote is not None
    assert (quote.met, quote.wait_s, quote.first_token_s) == (False, 120.0, 120.0)
    harness.connect("a", engine_view(digest=OTHER))
    ready = harness.scheduler.quote(task_spec(digest=OTHER), harness.now)
    assert ready is not None
    assert ready.wait_s == 0.0


def test_a_model_that_comes_no_more_leaves_the_task_as_any_that_nobody_serves() -> None:
    """Fails when what was once promised counts for ever."""
    harness = SchedulerHarness()
    coming(harness, 100.0)
    harness.submit(task_spec(digest=OTHER))
    harness.pass_time(60.0)
    coming(harness, None)
    assert [failure for failure, _ in failures(harness.pass_time(1.0))] == [c.TaskFailure.NO_CAPACITY]


def test_a_promise_that_is_not_kept_ends_the_wait() -> None:
    """Fails when a task waits for ever for what is always about to come."""
    harness = SchedulerHarness()
    coming(harness, 100.0)
    harness.submit(task_spec(digest=OTHER))
    ended = []
    for _ in range(121):
        coming(harness, 100.0)
        ended += failures(harness.pass_time(5.0))
    assert [failure for failure, _ in ended] == [c.TaskFailure.QUEUE_TIMEOUT]


def test_only_public_prompts_wait_for_a_node_that_is_not_known_yet() -> None:
    """Fails when a prompt for trusted owners counts on any node."""
    harness = SchedulerHarness()
    coming(harness, 50.0)
    private = task_spec(digest=OTHER, privacy_class=PrivacyClass.TRUSTED_OWNERS)
    assert harness.scheduler.quote(private, harness.now) is None


def test_what_is_wanted_of_an_open_engine_is_said_until_its_report_agrees_also_over_a_new_stream() -> None:
    """Messages get lost. Fails when it is said once, said although it is heard, or forgotten with the stream."""
    harness = SchedulerHarness()
    wanted = ((EngineId("engine"), OTHER),)
    deaf, heard = (replaced(*digests) for digests in ((DIGEST,), (OTHER,)))
    harness.connect("a", deaf)
    assert models_sent(harness.feed(e.ModelsWanted(NodeId("a"), wanted))) == [wanted]
    assert models_sent(harness.report("a", deaf)) == [wanted]
    assert models_sent(harness.report("a", heard)) == []
    assert models_sent(harness.report("a", replaced(DIGEST, OTHER))) == [], "it refuses"
    assert models_sent(harness.report("a", engine_view())) == [], "it is not open any more"
    harness.disconnect("a")
    assert models_sent(harness.connect("a", deaf)) == [wanted, wanted]


def replaced(*digests: ManifestDigest) -> e.EngineView:
    return replace(engine_view(), heard=frozenset(digests))
