"""What verification has found decides who is given what; one scenario each."""

from dataclasses import replace

import pytest

from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.testing import DIGEST, SchedulerHarness, engine_view, task_spec
from coordinator.verification.events import NODE_WIDE, Use
from inference.task import ManifestDigest, NodeId, PrivacyClass, TaskId

A, B = NodeId("a"), NodeId("b")


def placed(commands: list[c.Command]) -> list[NodeId]:
    return [command.node_id for command in commands if isinstance(command, c.Assign)]


def fleet(*names: str, slots: int = 4) -> SchedulerHarness:
    harness = SchedulerHarness()
    for name in names:
        harness.connect(name, engine_view(slots=slots), trusted=True)
    return harness


def test_of_a_model_that_is_not_audited_the_owners_word_stands() -> None:
    harness = fleet("a")
    assert placed(harness.submit(task_spec(privacy_class=PrivacyClass.TRUSTED_OWNERS))) == [A]


def test_a_node_of_which_nothing_is_known_gets_public_work_of_an_audited_model_alone() -> None:
    """Mutation seen to fail here: `unknown` is EVERYTHING."""
    harness = fleet("a")
    harness.feed(e.AuditedModelsChanged(frozenset({DIGEST})))
    assert placed(harness.submit(task_spec("private", privacy_class=PrivacyClass.TRUSTED_OWNERS))) == []
    assert placed(harness.submit(task_spec("public"))) == [A]
    assert placed(harness.feed(e.StandingChanged(A, DIGEST, Use.EVERYTHING))) == [A]


@pytest.mark.parametrize("digest", [DIGEST, NODE_WIDE], ids=["model", "node"])
def test_a_quarantined_node_loses_what_runs_and_gets_canaries_alone(digest: ManifestDigest) -> None:
    """Mutations seen to fail here: _end_what_is_not_allowed ends nothing; only_node is looked at after the standing."""
    harness = fleet("a", "b")
    harness.feed(e.AuditedModelsChanged(frozenset({DIGEST})))
    [first] = placed(harness.submit(task_spec()))
    other = B if first == A else A
    harness.frames(first, 1, 0, 20, 21)
    moved = harness.feed(e.StandingChanged(first, digest, Use.CANARIES_ONLY))
    assert placed(moved) == [other]
    [resumed] = [command for command in moved if isinstance(command, c.Assign)]
    assert resumed.first_index == 2
    [record] = [command for command in moved if isinstance(command, c.RecordAttempt)]
    assert (record.node_id, record.outcome) == (first, "standing_lost")
    assert placed(harness.submit(task_spec("second"))) == [other]
    assert placed(harness.submit(replace(task_spec("canary"), only_node=first))) == [first]
    assert harness.scheduler.engines_ready(DIGEST) == 1


def test_a_banned_node_gets_not_even_canaries() -> None:
    harness = fleet("a")
    harness.feed(e.StandingChanged(A, NODE_WIDE, Use.NOTHING))
    assert placed(harness.submit(replace(task_spec("canary"), only_node=A))) == []


def test_a_task_for_one_node_waits_for_it_and_holds_up_nobody() -> None:
    """Mutation seen to fail here: `_wants` without the node."""
    harness = fleet("a", "b", slots=1)
    assert placed(harness.submit(replace(task_spec(), only_node=A))) == [A]
    assert placed(harness.submit(replace(task_spec("canary"), only_node=A))) == []
    assert placed(harness.submit(task_spec("anybody's"))) == [B]
    harness.frames("a", 1, 0, *range(20, 28))
    assert placed(harness.finish("a", 1, range(20, 28))) == [A]
    assert harness.scheduler.nodes[A].tasks.keys() == {TaskId("canary")}


def test_what_a_node_does_with_canaries_alone_is_timed_though_nobody_else_may_use_it() -> None:
    """Mutation seen to fail here: only engines that are offered have a rate."""
    harness = SchedulerHarness()
    harness.feed(e.StandingChanged(A, NODE_WIDE, Use.CANARIES_ONLY))
    harness.connect("a")
    canary = replace(task_spec(max_tokens=20), only_node=A)
    assert placed(harness.submit(canary)) == [A]
    for index in range(20):
        harness.now += 0.1
        harness.frames("a", 1, index, 20 + index)
    harness.finish("a", 1, range(20, 40))
    [engine] = harness.scheduler.nodes[A].placed.values()
    assert engine.rate.step_s(1) > 0.03
