"""After how long an engine has answered what it works on."""

import pytest

from coordinator.scheduler.busy import busy_s
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import NodeId

NODE = NodeId("a")


def test_an_engine_is_busy_until_its_longest_answer_is_done_at_most() -> None:
    """Mutations seen to fail here: the sum of the answers, the shortest of them, what is received not counted."""
    harness = SchedulerHarness()
    harness.connect("a", engine_view(slots=4, tokens_per_second=10.0))
    assert busy_s(harness.scheduler, NODE) == {}, "an engine without work is left out"
    for name, most in (("long", 100), ("short", 20)):
        harness.submit(task_spec(name, max_tokens=most))
    node = harness.scheduler.nodes[NODE]
    [engine_id] = node.engines
    step_s = node.placed[engine_id].rate.step_s(2)
    assert busy_s(harness.scheduler, NODE) == {engine_id: pytest.approx(100 * step_s)}
    harness.frames("a", 1, 0, *range(10, 70), task="long")
    assert busy_s(harness.scheduler, NODE) == {engine_id: pytest.approx(40 * step_s)}
    assert busy_s(harness.scheduler, NodeId("nobody")) == {}
