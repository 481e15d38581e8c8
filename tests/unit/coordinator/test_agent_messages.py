"""What an agent says becomes events; what it may not say ends its stream."""

import math

import pytest
from structlog.testing import capture_logs

from coordinator.api.agent_messages import BATCH_FRAMES_MAX, LOGGED_CHARACTERS_MAX, AgentMessages, ProtocolViolation
from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.registry import REPORTED_ENGINES_MAX, FleetRegistry
from coordinator.ledger.holdback import Credits
from coordinator.scheduler.testing import DIGEST, task_spec
from coordinator.scheduler.testing_driver import DriverHarness, FakeConnection, FakeSink, ended, sign_result
from coordinator.store.port import NodeRow, OwnerRow
from inference.task import NodeId, OwnerId, PositionLogprobs, Sampling, TaskId, TokenLogprob
from protos.slackwater.common.v1 import capability_pb2, completion_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire


class Bench:
    """Two nodes, `a` ready and `b` waiting, and the messages of `a`."""

    def __init__(self) -> None:
        self.harness = DriverHarness()
        owner = OwnerRow(owner_id=OwnerId("owner"), name="owner", trusted=False, created_at_ms=0)
        self.registry = FleetRegistry([owner], [_row("a"), _row("b")])
        self.messages = AgentMessages(
            self.harness.driver,
            self.registry,
            self.harness.clock,
            lambda _: Credits(earned_micro=5, held_micro=7),
            self.harness.scheduler.asks,
        )
        self.node = self.harness.ready("a")

    def take(self, message: wire.ConnectRequest, connection: FakeConnection | None = None) -> None:
        self.messages.take(connection or self.node, message)

    def last_outcome(self) -> str:
        return self.harness.records.attempts[-1].outcome


def _row(name: str) -> NodeRow:
    return NodeRow(
        node_id=NodeId(name),
        owner_id=OwnerId("owner"),
        label="",
        signing_public_key=bytes(32),
        key_epoch=1,
        certificate_serial="0a",
        certificate_not_after_ms=0,
        enrolled_at_ms=0,
        banned_at_ms=None,
        ban_reason=None,
        draining=False,
    )


def engine(engine_id: str = "main", **changes: object) -> capability_pb2.Engine:
    fields: dict[str, object] = {
        "engine_id": engine_id,
        "manifest_digest": DIGEST,
        "status": capability_pb2.ENGINE_STATUS_READY,
        "slots": 4,
        "tokens_per_second": 100.0,
        **changes,
    }
    return capability_pb2.Engine(**fields)  # type: ignore[arg-type]


def frames(*batch: wire.Frame) -> wire.FrameBatch:
    return wire.FrameBatch(frames=batch)


def position(token_id: int) -> completion_pb2.PositionLogprobs:
    return completion_pb2.PositionLogprobs(chosen=completion_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1))


VIOLATIONS = {
    "an empty message": wire.ConnectRequest(),
    "a second Hello": wire.ConnectRequest(hello=wire.Hello(protocol_version=1)),
    "two engines with one id": wire.ConnectRequest(state=wire.NodeState(engines=[engine("x"), engine("x")])),
    "an engine without an id": wire.ConnectRequest(state=wire.NodeState(engines=[engine("")])),
    "a speed that is no number": wire.ConnectRequest(
        state=wire.NodeState(engines=[engine(tokens_per_second=math.nan)])
    ),
    "an infinite speed": wire.ConnectRequest(state=wire.NodeState(engines=[engine(tokens_per_second=math.inf)])),
    "a negative speed": wire.ConnectRequest(state=wire.NodeState(engines=[engine(tokens_per_second=-1.0)])),
    "an end without an outcome": wire.ConnectRequest(ended=wire.AttemptEnded(task_id="task", attempt=1)),
    "more frames than a node can run": wire.ConnectRequest(frames=frames(*[wire.Frame()] * (BATCH_FRAMES_MAX + 1))),
    "fewer logprobs than ids": wire.ConnectRequest(frames=frames(wire.Frame(token_ids=[1, 2], logprobs=[position(1)]))),
    "logprobs without ids": wire.ConnectRequest(frames=frames(wire.Frame(logprobs=[position(1)]))),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_what_the_protocol_does_not_allow_is_refused_and_touches_nothing(what: str) -> None:
    """Mutations seen to fail here: each check of agent_messages left out."""
    bench = Bench()
    engines_before = dict(bench.harness.scheduler.nodes[NodeId("a")].engines)
    with pytest.raises(ProtocolViolation) as caught:
        bench.take(VIOLATIONS[what])
    assert str(caught.value)
    assert bench.harness.scheduler.nodes[NodeId("a")].engines == engines_before
    assert bench.registry.find(NodeId("a")).report is None  # type: ignore[union-attr]  # the node is known


def test_a_report_that_no_machine_could_mean_is_refused() -> None:
    bench = Bench()
    many = [engine(str(number)) for number in range(REPORTED_ENGINES_MAX + 1)]
    with pytest.raises(SlackwaterError) as caught:
        bench.take(wire.ConnectRequest(state=wire.NodeState(engines=many)))
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert len(bench.harness.scheduler.nodes[NodeId("a")].engines) == 1


def test_frames_reach_whoever_follows_with_their_logprobs() -> None:
    bench = Bench()
    sink = bench.harness.submit(task_spec(sampling=Sampling(logprobs=0)))
    bench.take(
        wire.ConnectRequest(
            frames=frames(wire.Frame(task_id="task", attempt=1, token_ids=[20, 21], logprobs=map(position, (20, 21))))
        )
    )
    logprobs = tuple(PositionLogprobs(TokenLogprob(token_id, -0.5, 1)) for token_id in (20, 21))
    assert sink.fed[-1] == (0, (20, 21), logprobs)


def test_frames_of_several_tasks_come_in_one_message_and_those_of_none_are_dropped() -> None:
    bench = Bench()
    sinks = [bench.harness.submit(task_spec(name)) for name in ("one", "two")]
    bench.take(
        wire.ConnectRequest(
            frames=frames(
                wire.Frame(task_id="one", attempt=1, token_ids=[20]),
                wire.Frame(task_id="gone", attempt=1, token_ids=[30]),
                wire.Frame(task_id="two", attempt=2, token_ids=[40]),
                wire.Frame(task_id="two", attempt=1, token_ids=[50]),
            )
        )
    )
    assert [sink.ids for sink in sinks] == [[20], [50]]


def test_a_heartbeat_is_heard_and_answered_with_its_number_and_the_time() -> None:
    bench = Bench()
    bench.harness.clock.advance(3)
    bench.take(wire.ConnectRequest(heartbeat=wire.AgentHeartbeat(sequence=77)))
    (reply,) = bench.node.sent_of("heartbeat")
    now_ms = bench.harness.clock.now_ms()
    assert reply.heartbeat == wire.CoordinatorHeartbeat(
        sequence=77, coordinator_time_ms=now_ms, credits=wire.NodeCredits(earned_micro=5, held_micro=7)
    )
    assert bench.harness.scheduler.nodes[NodeId("a")].heard_at == bench.harness.clock.monotonic()
    assert bench.registry.find(NodeId("a")).last_seen_at_ms == now_ms  # type: ignore[union-attr]


def test_a_report_replaces_what_was_known() -> None:
    bench = Bench()
    bench.harness.submit()
    bench.take(
        wire.ConnectRequest(
            state=wire.NodeState(
                engines=[engine("new", slots=2, status=capability_pb2.ENGINE_STATUS_STARTING)],
                running=[wire.AttemptRef(task_id="task", attempt=1)],
                draining=True,
            )
        )
    )
    node = bench.harness.scheduler.nodes[NodeId("a")]
    (view,) = node.engines.values()
    assert (view.engine_id, view.ready, view.slots, node.accepting) == ("new", False, 2, False)
    assert set(node.tasks) == {"task"}
    assert bench.registry.find(NodeId("a")).running_attempts == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (wire.REFUSAL_REASON_BUSY, "refused_busy"),
        (wire.REFUSAL_REASON_PROMPT_MISMATCH, "refused_prompt_mismatch"),
        (wire.REFUSAL_REASON_CONSENT, "refused_consent"),
        (wire.REFUSAL_REASON_UNSPECIFIED, "refused_unspecified"),
        (99, "refused"),
    ],
)
def test_a_refusal_ends_the_attempt_under_its_name(reason: int, outcome: str) -> None:
    bench = Bench()
    bench.harness.submit()
    bench.take(wire.ConnectRequest(refused=wire.AssignmentRefused(task_id="task", attempt=1, reason=reason)))  # type: ignore[arg-type]
    assert bench.last_outcome() == outcome


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (wire.FAILURE_REASON_ENGINE_CRASHED, "engine_crashed"),
        (wire.FAILURE_REASON_OWNER_RETURNED, "owner_returned"),
        (wire.FAILURE_REASON_UNSPECIFIED, "unspecified"),
        (99, "unspecified"),
    ],
)
def test_a_failure_ends_the_attempt_under_its_name(reason: int, outcome: str) -> None:
    bench = Bench()
    bench.harness.submit()
    failed = wire.AttemptFailed(reason=reason)  # type: ignore[arg-type]
    bench.take(wire.ConnectRequest(ended=wire.AttemptEnded(task_id="task", attempt=1, failed=failed)))
    assert bench.last_outcome() == outcome


def test_a_signed_end_finishes_the_task() -> None:
    bench = Bench()
    sink = bench.harness.submit(task_spec(max_tokens=1))
    bench.take(wire.ConnectRequest(frames=frames(wire.Frame(task_id="task", attempt=1, token_ids=[20]))))
    bench.take(wire.ConnectRequest(ended=ended(sign_result(bench.node, bench.node.last_header(), (20,)))))
    assert sink.finished is not None


def test_what_a_node_explains_is_logged_once_cut_short_and_not_for_news_of_the_past() -> None:
    """Mutations seen to fail here: log the detail whole; log whatever comes."""
    bench = Bench()
    bench.harness.submit()
    failed = wire.AttemptFailed(reason=wire.FAILURE_REASON_ENGINE_ERROR, detail="x" * 10_000)
    message = wire.AttemptEnded(task_id="task", attempt=1, failed=failed)
    with capture_logs() as logs:
        bench.take(wire.ConnectRequest(ended=message))
        bench.take(wire.ConnectRequest(ended=message))
        bench.take(wire.ConnectRequest(refused=wire.AssignmentRefused(task_id="nobody's", attempt=1, detail="noise")))
    (entry,) = logs
    assert (entry["event"], entry["reason"], len(entry["detail"])) == (
        "attempt_failed",
        "engine_error",
        LOGGED_CHARACTERS_MAX,
    )


def test_a_node_cannot_end_or_feed_the_attempt_of_another() -> None:
    """Mutation seen to fail here: the connection left out of _take_frames and _is_from."""
    bench = Bench()
    sink: FakeSink = bench.harness.submit()
    stranger = bench.harness.ready("b")
    bench.take(wire.ConnectRequest(frames=frames(wire.Frame(task_id="task", attempt=1, token_ids=[666]))), stranger)
    failed = wire.AttemptFailed(reason=wire.FAILURE_REASON_ENGINE_ERROR)
    bench.take(wire.ConnectRequest(ended=wire.AttemptEnded(task_id="task", attempt=1, failed=failed)), stranger)
    bench.take(wire.ConnectRequest(refused=wire.AssignmentRefused(task_id="task", attempt=1)), stranger)
    assert (sink.ids, bench.harness.records.attempts) == ([], [])
    assert bench.harness.driver.runs(bench.node, TaskId("task"), 1)


def test_every_message_is_a_sign_of_life() -> None:
    """Mutation seen to fail here: a heartbeat that is not fed to the scheduler."""
    messages: list[wire.ConnectRequest] = [
        wire.ConnectRequest(heartbeat=wire.AgentHeartbeat()),
        wire.ConnectRequest(frames=frames()),
        wire.ConnectRequest(state=wire.NodeState()),
        wire.ConnectRequest(refused=wire.AssignmentRefused()),
        wire.ConnectRequest(ended=wire.AttemptEnded(failed=wire.AttemptFailed())),
        wire.ConnectRequest(ended=wire.AttemptEnded(finished=wire.AttemptFinished())),
    ]
    for message in messages:
        bench = Bench()
        bench.harness.clock.advance(5)
        bench.take(message)
        heard_at = bench.harness.scheduler.nodes[NodeId("a")].heard_at
        assert heard_at == bench.harness.clock.monotonic(), message
