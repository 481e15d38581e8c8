"""The driver carries out what the scheduler decides: what is signed and sent, told and recorded, in which order."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from coordinator.answers import LiveAnswer
from coordinator.errors import Reason
from coordinator.scheduler import events as e
from coordinator.scheduler.completed import Completed
from coordinator.scheduler.decisions import decision_in
from coordinator.scheduler.driver import PROMPT_CHUNK_BYTES
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.orders import HEADER_LIFETIME_MS
from coordinator.scheduler.testing import DIGEST, task_spec
from coordinator.scheduler.testing_driver import DriverHarness, FakeConnection, FakeSink, ended, sign_result
from coordinator.tasks_port import Accepted, AttemptBroken, AttemptStarted, Decision
from coordinator.testing import FakeTimers, FakeTokenizer
from inference.task import (
    FinishReason,
    NodeId,
    PositionLogprobs,
    PrivacyClass,
    Sampling,
    ServiceClass,
    TaskId,
    TaskSpec,
    pack_token_ids,
    prompt_sha256,
)
from protos import signing
from protos.slackwater.common.v1 import completion_pb2, statement_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

IDS = tuple(range(20, 28))  # as many as task_spec asks for


def opened_header(harness: DriverHarness, connection: FakeConnection) -> statement_pb2.TaskHeader:
    """Return the newest order, its signature checked as an agent checks it."""
    public_key = harness.signing_key.public_key().public_bytes_raw()
    payload = signing.open_envelope(connection.last_header(), signing.TASK_TYPE, [public_key])
    return statement_pb2.TaskHeader.FromString(payload)


# --- assigning ---------------------------------------------------------------------------------


def test_an_order_is_signed_for_one_node_and_says_all_that_was_decided() -> None:
    harness = DriverHarness()
    node = harness.ready("node-1")
    harness.submit(
        task_spec(
            "task-7",
            prompt=(10, 11, 12),
            max_tokens=8,
            sampling=Sampling(
                temperature=0.5,
                top_p=0.9,
                top_k=40,
                seed=2**63 - 1,
                presence_penalty=0.25,
                frequency_penalty=-0.5,
                repetition_penalty=1.25,
                logprobs=0,
            ),
            service_class=ServiceClass.STANDARD,
        )
    )
    header = opened_header(harness, node)
    assert len(header.nonce) == len(header.prompt_salt) == len(header.cache_salt) == 16
    now_ms = harness.clock.now_ms()
    assert header == statement_pb2.TaskHeader(
        cluster_id="cluster",
        node_id="node-1",
        task_id="task-7",
        attempt=1,
        lease_epoch=1,
        issued_at_ms=now_ms,
        not_after_ms=now_ms + HEADER_LIFETIME_MS,
        nonce=header.nonce,
        manifest_digest=DIGEST,
        kind=completion_pb2.TASK_KIND_GENERATE,
        sampling=completion_pb2.Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=2**63 - 1,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            logprobs=0,
        ),
        max_tokens=8,
        stop_token_ids=[2],
        prompt_token_count=3,
        prompt_salt=header.prompt_salt,
        prompt_sha256=prompt_sha256(header.prompt_salt, pack_token_ids((10, 11, 12))),
        first_index=0,
        service_class=completion_pb2.SERVICE_CLASS_STANDARD,
        privacy_class=completion_pb2.PRIVACY_CLASS_PUBLIC,
        cache_salt=header.cache_salt,
    )


def test_no_logprobs_asked_for_is_another_order_than_none_beside_the_chosen() -> None:
    harness = DriverHarness()
    node = harness.ready("a")
    harness.submit(task_spec(sampling=Sampling(logprobs=None)))
    assert not opened_header(harness, node).sampling.HasField("logprobs")


def test_two_orders_share_neither_nonce_nor_salt() -> None:
    """Equal prompts must not be seen to be equal. Mutation seen to fail here: a salt of zeros."""
    harness = DriverHarness()
    node = harness.ready("a")
    harness.submit(task_spec("one"))
    first = opened_header(harness, node)
    harness.submit(task_spec("two"))
    second = opened_header(harness, node)
    assert first.nonce != second.nonce
    assert first.prompt_salt != second.prompt_salt
    assert first.prompt_sha256 != second.prompt_sha256


@pytest.mark.parametrize("count", [1, 16_383, 16_384, 16_385, 40_000])
def test_the_ids_travel_beside_the_order_in_chunks_that_a_cancel_can_overtake(count: int) -> None:
    """Mutation seen to fail here: twice the chunk size."""
    assert PROMPT_CHUNK_BYTES == 64 * 1024
    harness = DriverHarness()
    node = harness.ready("a")
    prompt = [index % 900 for index in range(count)]
    harness.submit(task_spec(prompt=prompt))
    header = opened_header(harness, node)
    assert [chunk.chunk_index for chunk in node.chunks] == list(range(len(node.chunks)))
    assert node.sent_of("assignment")[-1].assignment.chunk_count == len(node.chunks)
    assert all(0 < len(chunk.token_ids) <= 64 * 1024 for chunk in node.chunks)
    assert {(chunk.task_id, chunk.attempt) for chunk in node.chunks} == {("task", 1)}
    packed = b"".join(chunk.token_ids for chunk in node.chunks)
    assert packed == pack_token_ids(prompt)
    assert header.prompt_sha256 == prompt_sha256(header.prompt_salt, packed)


def test_a_resumed_attempt_is_an_order_of_its_own_over_prompt_and_received_ids() -> None:
    harness = DriverHarness()
    first = harness.ready("a")
    sink = harness.submit()
    second = harness.ready("b")
    harness.clock.advance(0.25)
    harness.frame(first, 0, 20, 21)
    harness.driver.remove_connection(first)
    header = opened_header(harness, second)
    assert (header.attempt, header.lease_epoch, header.first_index, header.max_tokens) == (2, 2, 2, 6)
    assert b"".join(chunk.token_ids for chunk in second.chunks) == pack_token_ids((10, 11, 12, 20, 21))
    # At 100 tokens a second, one token takes 10 ms, and three tokens of prompt 0.1 ms each; 50 ms are the network's.
    decision = Decision(
        why="meets_target",
        engine_id="engine",
        cost_micro=7_000,
        first_token_ms=pytest.approx(60.3),
        token_ms=10.0,
        tail=1.5,
    )
    resumed = replace(decision, cost_micro=5_800, first_token_ms=pytest.approx(60.5))
    assert sink.fed == [
        AttemptStarted(attempt=1, node_id=NodeId("a"), first_index=0, decision=decision),
        (0, (20, 21), ()),
        AttemptBroken(
            attempt=1, node_id=NodeId("a"), reason="stream_lost", delivered_tokens=2, first_token_ms=pytest.approx(250)
        ),
        AttemptStarted(attempt=2, node_id=NodeId("b"), first_index=2, decision=resumed),
    ]


def test_the_row_of_an_attempt_keeps_why_it_went_there_what_was_expected_and_what_came() -> None:
    """Mutations seen to fail here: the pace in the tail's place; when the first token came, not how long it took."""
    harness = DriverHarness()
    node = harness.ready("a")
    sink = harness.submit()
    harness.clock.advance(0.25)
    harness.frame(node, 0, 20)
    harness.clock.advance(1.0)
    harness.frame(node, 1, 21)
    harness.driver.feed(e.TaskCancelled(TaskId("task")))
    (row,) = harness.records.attempts
    (begun, *_) = sink.fed
    assert isinstance(begun, AttemptStarted)
    assert decision_in(row) == begun.decision
    assert row.first_token_ms == pytest.approx(250.0)
    assert decision_in(replace(row, why=None)) is None, "an older release kept none"


def test_an_attempt_without_a_token_has_no_first_one() -> None:
    harness = DriverHarness()
    harness.ready("a")
    harness.submit()
    harness.driver.feed(e.TaskCancelled(TaskId("task")))
    assert harness.records.attempts[0].first_token_ms is None


def test_a_cancelled_attempt_takes_its_waiting_chunks_with_it() -> None:
    """Mutation seen to fail here: no drop_chunks."""
    harness = DriverHarness()
    node = harness.ready("a")
    sink = harness.submit()
    harness.driver.feed(e.TaskCancelled(TaskId("task")))
    assert node.dropped == [("task", 1)]
    assert node.sent[-1] == wire.ConnectResponse(cancel=wire.Cancel(task_id="task", attempt=1))
    assert sink.failed is not None
    assert sink.failed.reason is Reason.TASK_CANCELLED


def test_whoever_a_full_queue_turns_away_is_told_when_slots_become_free() -> None:
    """Mutation seen to fail here: the time to come back dropped on the way."""
    harness = DriverHarness()
    harness.scheduler.limits = Limits(queue_tasks_max=2)
    node = harness.ready("a")
    for number in range(6):
        harness.submit(task_spec(f"task-{number}"))
    harness.clock.advance(30.0)
    # One answer ends after thirty seconds, and one of those that wait takes its place.
    harness.driver.feed(e.TaskStopped(TaskId("task-0"), 0))
    harness.submit(task_spec("waits"))
    turned_away = harness.submit(task_spec("turned away")).failed
    assert turned_away is not None
    assert turned_away.reason is Reason.QUEUE_FULL
    expected_s = harness.scheduler.quote(task_spec("asks"), harness.clock.monotonic())
    assert expected_s is not None
    # By then half of those in front are gone.
    assert turned_away.retry_after_s == pytest.approx(expected_s.wait_s / 2)
    assert turned_away.retry_after_s > 1.0
    assert turned_away.to_proto().retry_after_ms == round(turned_away.retry_after_s * 1000)
    assert node.sent_of("assignment")


# --- ending ------------------------------------------------------------------------------------


def test_a_finished_task_hands_out_order_and_statement_as_they_were_sent() -> None:
    harness = DriverHarness()
    node = harness.ready("a")
    sink = harness.submit()
    harness.frame(node, 0, *IDS)
    harness.clock.advance(1.5)
    statement = sign_result(node, node.last_header(), IDS)
    harness.driver.finish_attempt(node, ended(statement))
    assert sink.finished is not None
    assert (sink.finished.header, sink.finished.statement) == (node.last_header(), statement)
    assert sink.finished.node_public_key == node.signing_public_key
    assert (sink.finished.prompt_tokens, sink.finished.completion_tokens) == (3, 8)
    assert sink.finished.finish_reason is FinishReason.LENGTH


def test_what_ended_is_recorded_with_counts_times_and_statement() -> None:
    harness = DriverHarness()
    node = harness.ready("a")
    harness.submit()
    submitted_at_ms = harness.clock.now_ms()
    harness.frame(node, 0, *IDS)
    harness.clock.advance(1.5)
    energy = {"energy_mj": 900, "energy_method": statement_pb2.ENERGY_METHOD_COUNTER}
    statement = sign_result(node, node.last_header(), IDS, **energy)
    harness.driver.finish_attempt(node, ended(statement))
    (task,) = harness.records.tasks
    assert (task.task_id, task.tenant_id, task.manifest_digest, task.outcome) == ("task", "tenant", DIGEST, "length")
    assert (task.prompt_tokens, task.completion_tokens) == (3, 8)
    assert (task.submitted_at_ms, task.ended_at_ms) == (submitted_at_ms, submitted_at_ms + 1500)
    (attempt,) = harness.records.attempts
    assert (attempt.task_id, attempt.attempt, attempt.node_id, attempt.lease_epoch) == ("task", 1, "a", 1)
    assert (attempt.first_index, attempt.delivered_tokens, attempt.outcome) == (0, 8, "finished")
    assert attempt.statement == statement.SerializeToString()
    assert (attempt.energy_mj, attempt.energy_method) == (900, "counter")
    assert (attempt.started_at_ms, attempt.ended_at_ms) == (submitted_at_ms, submitted_at_ms + 1500)


def test_a_failed_task_is_recorded_with_its_reason() -> None:
    harness = DriverHarness()
    harness.submit()
    harness.driver.feed(e.TaskCancelled(TaskId("task")))
    assert [row.outcome for row in harness.records.tasks] == ["task_cancelled"]
    assert harness.records.attempts == []


def test_a_statement_that_does_not_hold_costs_the_attempt_and_another_node_finishes() -> None:
    harness = DriverHarness()
    liar = harness.ready("a")
    sink = harness.submit()
    honest = harness.ready("b")
    harness.frame(liar, 0, 20, 21)
    with capture_logs() as logs:
        harness.driver.finish_attempt(liar, ended(sign_result(liar, liar.last_header(), (20, 21), attempt=9)))
    assert [entry["event"] for entry in logs] == ["statement_refused"]
    assert [row.outcome for row in harness.records.attempts] == ["statement_invalid"]
    assert harness.records.attempts[0].statement is None
    harness.frame(honest, 2, *IDS[2:], attempt=2)
    harness.driver.finish_attempt(honest, ended(sign_result(honest, honest.last_header(), IDS[2:]), attempt=2))
    assert sink.ids == list(IDS)
    assert sink.finished is not None


def test_a_late_statement_changes_nothing_and_is_a_sign_of_life_all_the_same() -> None:
    """Mutation seen to fail here: return without feeding NodeHeard."""
    harness = DriverHarness()
    node = harness.ready("a")
    harness.submit()
    late = ended(sign_result(node, node.last_header(), ()))
    harness.driver.feed(e.TaskCancelled(TaskId("task")))
    harness.clock.advance(5)
    harness.driver.finish_attempt(node, late)
    assert harness.scheduler.nodes[NodeId("a")].heard_at == harness.clock.monotonic()
    assert [row.outcome for row in harness.records.attempts] == ["cancelled"]


def test_whoever_looks_at_answers_is_told_of_a_completed_task_with_all_its_attempts() -> None:
    """Mutation seen to fail here: told before the client."""
    harness = DriverHarness()
    told: list[Completed] = []
    first, second = harness.ready("a"), harness.ready("b")
    sink = harness.submit()
    running, other = (first, second) if first.sent_of("assignment") else (second, first)
    harness.driver.tell_completed(lambda completed: told.append(completed) if sink.finished else None)
    harness.frame(running, 0, *IDS[:3])
    harness.driver.remove_connection(running)
    harness.frame(other, 3, *IDS[3:], attempt=2)
    harness.driver.finish_attempt(other, ended(sign_result(other, other.last_header(), IDS[3:]), attempt=2))
    [completed] = told
    assert (completed.spec.task_id, list(completed.output_ids), completed.finish_reason) == (
        "task",
        list(IDS),
        FinishReason.LENGTH,
    )
    assert [(row.node_id, row.first_index, row.delivered_tokens, row.outcome) for row in completed.attempts] == [
        (running.node_id, 0, 3, "stream_lost"),
        (other.node_id, 3, 5, "finished"),
    ]
    # Of the node that has gone too.
    assert completed.sampler_profiles == {1: "position-hash-v1", 2: "position-hash-v1"}


def sent_again(node: FakeConnection, *, to: FakeConnection | None = None, **changes: object) -> wire.AttemptEnded:
    """Return the result of the node's last order as it comes over a later stream."""
    header = (to or node).last_header()
    finished = wire.AttemptFinished(header=header)
    return ended(sign_result(node, header, IDS, **changes), finished=finished)


def taken(node: FakeConnection) -> list[tuple[str, int]]:
    return [(one.result_taken.task_id, one.result_taken.attempt) for one in node.sent_of("result_taken")]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_result_that_comes_after_the_stream_was_lost_is_taken_and_its_proof_kept(restarted: bool) -> None:
    """Mutations seen to fail here: no `result_taken`; `_record_late` left out."""
    harness = DriverHarness()
    node = harness.ready("a")
    harness.submit()
    harness.frame(node, 0, *IDS[:2])
    result = sent_again(node, energy_mj=7, energy_method=statement_pb2.ENERGY_METHOD_COUNTER)
    harness.driver.remove_connection(node)
    if restarted:
        # Nothing is remembered but the key.
        harness = DriverHarness(harness.signing_key)
    back = harness.ready("a")
    back.key = node.key
    harness.driver.finish_attempt(back, result)
    assert taken(back) == [("task", 1)]
    [row] = harness.records.late_statements
    assert (row.task_id, row.attempt, row.node_id, row.energy_mj, row.energy_method) == ("task", 1, "a", 7, "counter")
    assert row.statement == result.finished.statement.SerializeToString()


@pytest.mark.parametrize("forged", ["header", "signature", "node", "energy"])
def test_a_late_result_that_proves_nothing_is_taken_but_not_kept(forged: str) -> None:
    """It must not come again for ever. Mutation seen to fail here: each of the checks left out."""
    harness = DriverHarness()
    node, other = harness.ready("a"), harness.ready("b")
    harness.submit()
    harness.submit(task_spec("task-b"))
    result = sent_again(node)
    match forged:
        case "header":
            forged_header = signing.seal(signing.TASK_TYPE, node.last_header().payload, Ed25519PrivateKey.generate())
            result.finished.header.CopyFrom(forged_header)
        case "signature":
            result.finished.statement.signatures[0].signature = bytes(64)
        case "node":
            result = sent_again(node, to=other, node_id="a")
            result.task_id = "task-b"
        case _:
            result = sent_again(node, energy_mj=10**12, energy_method=statement_pb2.ENERGY_METHOD_COUNTER)
    harness.driver.feed(e.TaskCancelled(TaskId("task")))
    with capture_logs() as logs:
        harness.driver.finish_attempt(node, result)
    assert taken(node) == [(result.task_id, 1)]
    assert harness.records.late_statements == []
    assert [one["event"] for one in logs] == ["statement_refused"]


def test_nobody_ends_the_attempt_of_another_node() -> None:
    """Mutation seen to fail here: finish_attempt looks at the attempt's number alone (it is blamed in the log)."""
    harness = DriverHarness()
    node = harness.ready("a")
    sink = harness.submit()
    stranger = harness.ready("b")
    harness.frame(node, 0, *IDS)
    with capture_logs() as logs:
        harness.driver.finish_attempt(stranger, ended(sign_result(stranger, node.last_header(), IDS)))
    assert (sink.finished, logs, harness.records.attempts) == (None, [], [])


# --- stop strings, and other effects that are events -------------------------------------------


def live_answer(harness: DriverHarness, spec: TaskSpec, stop: Sequence[str]) -> LiveAnswer:
    accepted = Accepted(
        task_id=spec.task_id, model="model", manifest_digest=DIGEST, prompt_tokens=3, resumable=True, seed=0
    )
    return LiveAnswer(
        accepted=accepted,
        tokenizer=FakeTokenizer(),
        stop=stop,
        streaming=spec.streaming,
        detach_grace_s=1.0,
        call_later=FakeTimers().call_later,
        on_stop_string=lambda count: harness.driver.feed(e.TaskStopped(spec.task_id, count)),
        on_abandoned=lambda: harness.driver.feed(e.TaskCancelled(spec.task_id)),
        on_ended=lambda: None,
    )


def test_a_stop_string_ends_the_task_down_to_the_node_and_the_ids_after_it_count_for_nothing() -> None:
    harness = DriverHarness()
    node = harness.ready("a")
    spec = task_spec(max_tokens=40)
    answer = live_answer(harness, spec, ["STOP"])
    harness.submit_to(answer, spec)
    harness.frame(node, 0, *b"go STOP it")
    summary = answer.summary()
    assert (summary.status, summary.completion_tokens) == ("finished", 7)
    assert [attempt.outcome for attempt in summary.attempts] == ["stopped"]
    assert node.sent[-1] == wire.ConnectResponse(cancel=wire.Cancel(task_id="task", attempt=1))
    assert [(row.outcome, row.completion_tokens) for row in harness.records.tasks] == [("stop", 7)]
    harness.frame(node, 10, *b" more")
    assert answer.token_count == 7


class EagerSink(FakeSink):
    """Cancels another task as soon as it is given an id."""

    def __init__(self, harness: DriverHarness, victim: str) -> None:
        super().__init__()
        self._harness = harness
        self._victim = victim

    def deliver(self, first_index: int, token_ids: Sequence[int], logprobs: tuple[PositionLogprobs, ...]) -> None:
        super().deliver(first_index, token_ids, logprobs)
        self._harness.driver.feed(e.TaskCancelled(TaskId(self._victim)))


def test_an_event_from_within_a_delivery_waits_for_the_commands_before_it() -> None:
    """Mutation seen to fail here: feed handles at once (the scheduler forgets the commands it was about to return)."""
    harness = DriverHarness()
    node = harness.ready("a")
    harness.submit_to(EagerSink(harness, "second"), task_spec("first"))
    second = harness.submit(task_spec("second"))
    harness.frames(node, e.Frame(TaskId("first"), 1, 0, (20,)), e.Frame(TaskId("second"), 1, 0, (30, 31)))
    assert second.ids == [30, 31]
    assert second.failed is not None
    assert harness.records.attempts[-1].delivered_tokens == 2


# --- connections and stopping ------------------------------------------------------------------


def test_of_two_starts_of_one_node_the_newer_stays() -> None:
    harness = DriverHarness()
    newer = harness.connect("a", boot_started_at_ms=2)
    older = harness.connect("a", boot_started_at_ms=1)
    assert (newer.closed, older.closed) == ([], [wire.CLOSING_REASON_SUPERSEDED])
    newest = harness.connect("a", boot_started_at_ms=3)
    assert newer.closed == [wire.CLOSING_REASON_SUPERSEDED]
    # Their streams end in any order, and take nothing with them.
    harness.driver.remove_connection(older)
    harness.driver.remove_connection(newer)
    assert harness.scheduler.nodes[NodeId("a")].connection_id == newest.connection_id


def test_every_desired_state_has_a_greater_number_than_those_before() -> None:
    harness = DriverHarness()
    first = harness.connect("a")
    again = harness.connect("a", boot_started_at_ms=1)
    numbers = [message.desired.sequence for node in (first, again) for message in node.sent_of("desired")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 2


def test_a_stop_ends_every_task_with_its_reason_and_a_record_and_says_goodbye() -> None:
    """Mutation seen to fail here: end the sinks alone, behind the scheduler's back."""
    harness = DriverHarness()
    node = harness.ready("a")
    running = harness.submit(task_spec("running", streaming=False, sampling=Sampling(presence_penalty=0.5)))
    queued = harness.submit(task_spec("queued", privacy_class=PrivacyClass.TRUSTED_OWNERS))
    harness.frame(node, 0, 20, task="running")
    harness.driver.stop("the coordinator is stopping")
    for sink in (running, queued):
        assert sink.failed is not None
        assert (sink.failed.reason, sink.failed.message) == (Reason.COORDINATOR_STOPPING, "the coordinator is stopping")
    assert [row.outcome for row in harness.records.tasks] == ["coordinator_stopping"] * 2
    assert [(row.outcome, row.delivered_tokens) for row in harness.records.attempts] == [("coordinator_stopping", 1)]
    assert node.closed == [wire.CLOSING_REASON_STOPPING]
    # What the agents still say, and their leaving, finds nothing to do.
    other = harness.ready("b")
    harness.frame(node, 1, 21, task="running")
    harness.driver.remove_connection(node)
    assert not other.sent_of("assignment")
    assert len(harness.records.attempts) == 1
