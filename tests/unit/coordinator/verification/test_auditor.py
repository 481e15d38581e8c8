"""Who is audited, by whom, and what the verdicts are told; over a real scheduler, nodes being played by the test."""

import asyncio
import hashlib
import json
import os
import random
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from coordinator.api.completion import logprobs_to_wire
from coordinator.ledger.entries import VERIFICATION_TENANT
from coordinator.scheduler import events as e
from coordinator.scheduler.testing import DIGEST, STOP_ID, VOCABULARY_SIZE, engine_view, task_spec
from coordinator.scheduler.testing_driver import DriverHarness, FakeConnection, ended, sign_result
from coordinator.store.sql import SqlStore
from coordinator.verification import canary_rounds
from coordinator.verification.auditor import WAITING_JOBS_MAX, Auditor, may_judge
from coordinator.verification.canary_rounds import CanaryRounds, ExaminedModel
from coordinator.verification.commands import RequestAudit
from coordinator.verification.events import AuditKind, Mode, Purpose, Use, VerdictState
from coordinator.verification.jobs import KEPT_MS, Job, KeptJobs
from coordinator.verification.record import AUDIT_RATE_MIN, PROBATION_AUDITS
from coordinator.verification.service import Verification, VerificationHooks
from coordinator.verification.tasks import AuditTasks
from coordinator.verification.testing import proof
from inference.calibration import Calibration, HonestBound
from inference.canaries import Canary, CanaryBank
from inference.manifest import Manifest
from inference.rescoring import Attempt
from inference.score_check import FAILED_LOG
from inference.task import (
    FinishReason,
    ManifestDigest,
    NodeId,
    OwnerId,
    PositionLogprobs,
    PrivacyClass,
    Sampling,
    TaskId,
    TaskKind,
    TaskSpec,
    TokenLogprob,
    pack_token_ids,
    scores_bytes,
    unpack_token_ids,
)
from protos.slackwater.common.v1 import completion_pb2, statement_pb2
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.node.v1 import node_service_pb2 as wire

Kind: TypeAlias = "completion_pb2.TaskKind.ValueType"

PROMPT = (10, 11, 12)
IDS = tuple(range(20, 28))
WAIT_S = 10.0
TOP = 5
CANDIDATES = 33

MANIFEST = Manifest(
    digest=DIGEST,
    name="m",
    revision="1",
    architecture="a",
    licence="Apache-2.0",
    dtype="float32",
    context_tokens=1000,
    vocabulary_size=VOCABULARY_SIZE,
    stop_token_ids=(STOP_ID,),
    files=(),
    origin="",
    kind=TaskKind.GENERATE,
)
CALIBRATION = Calibration(
    manifest_digest=DIGEST,
    model="m",
    dtype="float32",
    verifier="test",
    candidates=CANDIDATES,
    block_tokens=8,
    stakes=(0.2,),
    bounds=(
        HonestBound(
            temperature=0.0,
            mean_square=0.0001,
            measured_square=0.0001,
            mean_margin=0.001,
            block_variance=0.0,
            tokens=1,
        ),
    ),
)


def position(chosen: int, *, likely: bool) -> PositionLogprobs:
    """Return what a reference says of an id: the best of five, or far below them."""
    rivals = tuple(TokenLogprob(900 + rank, -1.0 - rank, rank) for rank in range(2, TOP + 1))
    best = TokenLogprob(chosen if likely else 901, -0.1, 1)
    return PositionLogprobs(best if likely else TokenLogprob(chosen, -9.0, 500), (best, *rivals))


def canary(name: str = "canary", temperature: float = 0.0, *, number: int = 0, profile: str = "") -> Canary:
    candidates, logprobs = [], []
    for one in (position(id_, likely=True) for id_ in IDS):
        candidates += [rival.token_id for rival in one.top]
        logprobs += [rival.logprob for rival in one.top]
    return Canary(
        name=name,
        temperature=temperature,
        seed=0,
        sampler_profile=profile,
        max_tokens=len(IDS),
        stop_token_ids=(STOP_ID,),
        prompt=pack_token_ids((*PROMPT[:-1], 600 + number)),
        output=pack_token_ids(IDS),
        candidates=pack_token_ids(candidates),
        logprobs=struct.pack(f"<{len(logprobs)}f", *logprobs),
        top=TOP,
    )


# Greedy answers, which say something of a node that names no sampler, and drawn ones, of which two are for scoring.
BANK = CanaryBank(
    manifest_digest=DIGEST,
    verifier="test",
    canaries=(
        *(canary(f"greedy-{number}", number=number) for number in range(8)),
        *(canary(f"drawn-{number}", 1.0, number=number, profile="another") for number in range(8)),
    ),
)


@dataclass
class Bench:
    """An auditor over a scheduler; nodes answer when the test says so."""

    store: SqlStore
    harness: DriverHarness = field(default_factory=DriverHarness)
    owners: dict[NodeId, OwnerId] = field(default_factory=dict)
    networks: dict[NodeId, str] = field(default_factory=dict)
    reserved: list[TaskSpec] = field(default_factory=list)
    requests: list[RequestAudit] = field(default_factory=list)
    rate_min: float = AUDIT_RATE_MIN
    spared: set[NodeId] = field(default_factory=set)

    def __post_init__(self) -> None:
        clock, driver = self.harness.clock, self.harness.driver
        self.verification = Verification(self.store, clock, self.hooks())
        tasks = AuditTasks(driver, self.reserved.append, 1)
        owner_of = self.owners.__getitem__
        self.auditor = Auditor(
            self.verification,
            driver,
            tasks,
            clock,
            bytes(32),
            owner_of,
            lambda node_id: self.networks.get(node_id),
            self.rate_min,
        )
        self.rounds = CanaryRounds(
            self.verification,
            self.auditor,
            driver,
            tasks,
            clock,
            owner_of,
            self.spared.__contains__,
            random.Random(1),
        )
        driver.tell_completed(self.auditor.completed)
        self.auditor.add_model(MANIFEST, CALIBRATION)
        self.rounds.add_model(
            ExaminedModel(
                manifest=MANIFEST,
                calibration=CALIBRATION,
                bank=BANK,
            )
        )

    def hooks(self) -> VerificationHooks:
        async def ban(node_id: NodeId, reason: str) -> None:
            raise AssertionError(f"{node_id} would be banned: {reason}")

        def request(asked: RequestAudit) -> None:
            self.requests.append(asked)
            self.auditor.requested(asked)

        return VerificationHooks(
            on_standing=lambda node_id, digest, use: self.harness.driver.feed(e.StandingChanged(node_id, digest, use)),
            on_audited=lambda node_id, good_until_ms: None,
            on_request=request,
            on_notify=lambda verdict: None,
            on_ban=ban,
        )

    @asynccontextmanager
    async def running(self, *, canaries: bool = False) -> AsyncIterator[None]:
        jobs = [self.verification.run(), self.auditor.run(), *([self.rounds.run()] if canaries else [])]
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def node(self, name: str, owner: str, *, trusted: bool = False) -> FakeConnection:
        self.owners[NodeId(name)] = OwnerId(owner)
        connection = self.harness.ready(name, owner=owner)
        self.harness.scheduler.nodes[NodeId(name)].trusted = trusted
        return connection

    async def prove(self, *names: str) -> None:
        """Have nodes be known as good."""
        for name in names:
            for made in proof(NodeId(name), DIGEST):
                await self.verification.tell(made)
            assert self.state(name) is VerdictState.OK

    def state(self, name: str) -> VerdictState | None:
        record = self.verification.verdicts.record(NodeId(name), DIGEST)
        return record.state if record else None

    def begin(self, node: FakeConnection, spec: TaskSpec | None = None) -> None:
        """Have a client's task run on a node, the only one that may take it."""
        spec = spec or task_spec(prompt=PROMPT)
        self.harness.submit(spec)
        self.harness.frame(node, 0, *IDS, task=spec.task_id)

    def finish(self, node: FakeConnection, task: str = "task", ids: Sequence[int] = IDS) -> None:
        header = next(
            one.assignment.header for one in node.sent_of("assignment") if opened(one.assignment.header).task_id == task
        )
        self.harness.driver.finish_attempt(node, ended(sign_result(node, header, ids), task=task))

    async def ordered(self, node: FakeConnection, kind: Kind, number: int = 1) -> SignedEnvelope:
        """Wait until a node has so many orders of a kind, while time passes; return that one."""

        def orders() -> list[SignedEnvelope]:
            sent = [one.assignment.header for one in node.sent_of("assignment")]
            return [header for header in sent if opened(header).kind == kind]

        async with asyncio.timeout(WAIT_S):
            while len(orders()) < number:
                self.harness.clock.advance(0.1)
                await asyncio.to_thread(os.sched_yield)
        return orders()[number - 1]

    async def score(self, node: FakeConnection, *, likely: bool, number: int = 1) -> statement_pb2.TaskHeader:
        """Wait for an order to score, and answer it."""
        envelope = await self.ordered(node, completion_pb2.TASK_KIND_SCORE, number)
        header = opened(envelope)
        packed = b"".join(chunk.token_ids for chunk in node.chunks if chunk.task_id == header.task_id)
        scores = tuple(position(id_, likely=likely) for id_ in unpack_token_ids(packed)[1:])
        digest = hashlib.sha256(scores_bytes(scores)).digest()
        statement = sign_result(node, envelope, (), output_sha256=digest, finish_reason=0)
        finished = wire.AttemptFinished(scores=logprobs_to_wire(scores))
        self.harness.driver.finish_attempt(node, ended(statement, task=header.task_id, finished=finished))
        return header


def opened(envelope: SignedEnvelope) -> statement_pb2.TaskHeader:
    return statement_pb2.TaskHeader.FromString(envelope.payload)


async def until(held: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not held():
            # What it waits for has no event of its own, and some of it is done in a thread.
            await asyncio.to_thread(os.sched_yield)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}"))


async def test_an_answer_is_scored_by_a_node_of_another_owner_and_found_good(bench: Bench) -> None:
    """Mutations seen to fail here: choose_verifier without may_verify; the reference begins one id late; 20 rivals
    asked for, whatever the calibration has."""
    node = bench.node("a", "one")
    async with bench.running():
        await bench.prove("sibling", "peer")
        bench.begin(node)
        sibling, peer = bench.node("sibling", "one"), bench.node("peer", "two")
        bench.finish(node)
        header = await bench.score(peer, likely=True)
        await until(lambda: bench.state("a") is not None)
    record = bench.verification.verdicts.record(NodeId("a"), DIGEST)
    assert record is not None
    assert (record.good_in_a_row, record.good_tokens) == (1, len(IDS))
    # As many rivals as honest output was measured with: more would make its margins larger.
    assert (header.prompt_token_count, header.sampling.logprobs) == (len(PROMPT) + len(IDS), CANDIDATES)
    assert not sibling.sent_of("assignment")
    assert [spec.tenant_id for spec in bench.reserved] == [VERIFICATION_TENANT]


async def test_ids_that_the_model_does_not_give_are_confirmed_by_a_second_verifier_and_end_in_quarantine(
    bench: Bench,
) -> None:
    """Mutations seen to fail here: `requested` does nothing; `confirms` left out; the first verifier is asked again."""
    node = bench.node("a", "one")
    async with bench.running():
        await bench.prove("b", "c")
        bench.begin(node)
        peers = [bench.node("b", "two"), bench.node("c", "three")]
        bench.finish(node)
        await until(lambda: any(peer.sent_of("assignment") for peer in peers))
        first, second = peers if peers[0].sent_of("assignment") else peers[::-1]
        await bench.score(first, likely=False)
        await until(lambda: bench.requests != [])
        assert bench.state("a") is VerdictState.WATCH
        assert not second.sent_of("assignment") or len(bench.requests) == 1
        await bench.score(second, likely=False)
        await until(lambda: [row.state for row in bench.store.verdicts_of(NodeId("a"))][:1] == ["quarantined"])
        assert "impossible_id, confirmed by a second verifier" in bench.store.verdicts_of(NodeId("a"))[0].reason
        # Acted on once it is stored.
        standings = bench.harness.scheduler.standings
        await until(lambda: standings.use(NodeId("a"), DIGEST) is Use.CANARIES_ONLY)
    bench.harness.submit(task_spec("next", prompt=PROMPT))
    assert len(node.sent_of("assignment")) == 1


async def test_where_nobody_may_verify_nothing_is_held_against_anybody(bench: Bench) -> None:
    node = bench.node("a", "one")
    async with bench.running():
        bench.begin(node)
        bench.node("unproven", "two")
        bench.finish(node)
        await until(lambda: bench.store.audits_of(["task.1"]) != [])
    [row] = bench.store.audits_of(["task.1"])
    assert (row.not_measured, row.counted) == ("no_verifier", False)
    assert bench.state("a") is None


async def test_a_neighbour_does_not_judge(bench: Bench) -> None:
    """One person may have two accounts in one house. Mutations seen to fail here: either side's network left out."""
    node = bench.node("a", "one")
    bench.networks = {NodeId(name): "203.0.113.0/24" for name in "ab"}
    async with bench.running():
        await bench.prove("b")
        bench.begin(node)
        neighbour = bench.node("b", "two")
        bench.finish(node)
        await until(lambda: bench.store.audits_of(["task.1"]) != [] or neighbour.sent_of("assignment") != [])
    [row] = bench.store.audits_of(["task.1"])
    assert row.not_measured == "no_verifier"


async def test_an_operator_may_have_every_answer_of_a_proven_node_audited(tmp_path: Path) -> None:
    """Mutation seen to fail here: the operator's share is not looked at. One in eleven is drawn then."""
    bench = Bench(SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}"), rate_min=1.0)
    node = bench.node("a", "one")
    tasks = [f"task-{number}" for number in range(3)]
    async with bench.running():
        await bench.prove("a")
        for task in tasks:
            bench.begin(node, task_spec(task, prompt=PROMPT))
            bench.finish(node, task)
        await until(lambda: len(bench.store.audits_of([f"{task}.1" for task in tasks])) == len(tasks))


async def test_a_verifier_that_leaves_makes_no_fault(bench: Bench) -> None:
    node = bench.node("a", "one")
    async with bench.running():
        await bench.prove("b")
        bench.begin(node)
        peer = bench.node("b", "two")
        bench.finish(node)
        await bench.ordered(peer, completion_pb2.TASK_KIND_SCORE)
        bench.harness.driver.remove_connection(peer)
        for _ in range(2_000):
            bench.harness.clock.advance(0.1)
            bench.harness.driver.feed(e.Ticked())
        await until(lambda: bench.store.audits_of(["task.1"]) != [])
    [row] = bench.store.audits_of(["task.1"])
    assert row.not_measured
    assert bench.state("a") is None


async def test_where_a_verifier_gives_no_scores_another_one_is_asked(bench: Bench) -> None:
    """Mutation seen to fail here: one verifier is all."""
    node = bench.node("a", "one")
    async with bench.running():
        await bench.prove("b", "c")
        bench.begin(node)
        peers = [bench.node("b", "two"), bench.node("c", "three")]
        bench.finish(node)
        await until(lambda: any(peer.sent_of("assignment") for peer in peers))
        silent, other = peers if peers[0].sent_of("assignment") else peers[::-1]
        bench.harness.driver.remove_connection(silent)
        scoring = asyncio.create_task(bench.score(other, likely=True))
        # `score` lets time pass.
        async with asyncio.timeout(WAIT_S):
            while not scoring.done():
                bench.harness.driver.feed(e.Ticked())
                await asyncio.to_thread(os.sched_yield)
        await until(lambda: bench.store.audits_of(["task.1"]) != [])
    [row] = bench.store.audits_of(["task.1"])
    assert (row.not_measured, row.verifier) == (None, other.node_id)


async def test_each_attempt_of_a_resumed_answer_is_judged_by_itself(bench: Bench) -> None:
    """Mutation seen to fail here: the attempt's prompt without what was delivered before it."""
    first = bench.node("a", "one")
    async with bench.running():
        await bench.prove("c")
        bench.harness.submit(task_spec(prompt=PROMPT))
        bench.harness.frame(first, 0, *IDS[:3])
        second = bench.node("b", "two")
        bench.harness.driver.remove_connection(first)
        bench.harness.frame(second, 3, *IDS[3:], attempt=2)
        peer = bench.node("c", "three")
        bench.harness.driver.finish_attempt(
            second, ended(sign_result(second, second.last_header(), IDS[3:]), attempt=2)
        )
        orders = [await bench.score(peer, likely=True), await bench.score(peer, likely=True, number=2)]
        assert sorted(order.prompt_token_count for order in orders) == [len(PROMPT) + 3, len(PROMPT) + 8]
        await until(lambda: bench.state("a") is not None and bench.state("b") is not None)
    tokens = {row.audit_id: row.tokens for row in bench.store.audits_of(["task.1", "task.2"])}
    assert tokens == {"task.1": 3, "task.2": 5}


@pytest.mark.parametrize("afterwards", ["another profile", "gone"])
async def test_draws_are_judged_by_the_profile_that_the_engine_had_when_it_was_chosen(
    bench: Bench, afterwards: str
) -> None:
    """What a node says of its engine later, or that it has left, takes no drawn answer from its judge.

    Mutation seen to fail here: the profile as the node's engine reports it when the task is over.
    """
    first = bench.node("a", "one")
    drawn = replace(task_spec(prompt=PROMPT), sampling=Sampling(temperature=1.0, seed=1))
    async with bench.running():
        await bench.prove("c")
        bench.harness.submit(drawn)
        bench.harness.frame(first, 0, *IDS[:3])
        if afterwards == "gone":
            second = bench.node("b", "two")
            bench.harness.driver.remove_connection(first)
            bench.harness.frame(second, 3, *IDS[3:], attempt=2)
        else:
            changed = replace(engine_view(), sampler_profile="another")
            bench.harness.driver.feed(
                e.NodeReported(
                    node_id=first.node_id,
                    connection_id=first.connection_id,
                    engines=(changed,),
                    accepting=True,
                    running=frozenset({(drawn.task_id, 1)}),
                )
            )
            bench.harness.frame(first, 3, *IDS[3:])
        peer = bench.node("c", "three")
        if afterwards == "gone":
            result = sign_result(second, second.last_header(), IDS[3:])
            bench.harness.driver.finish_attempt(second, ended(result, attempt=2))
            await bench.score(peer, likely=True, number=2)
        else:
            bench.finish(first)
        await bench.score(peer, likely=True)
        await until(lambda: bench.store.audits_of(["task.1"]) != [])
    [row] = bench.store.audits_of(["task.1"])
    assert row.not_measured is None, row


async def test_a_private_answer_is_scored_by_a_trusted_owner_or_by_nobody(bench: Bench) -> None:
    """Mutation seen to fail here: the audit is submitted as public."""
    node = bench.node("a", "one", trusted=True)
    spec = task_spec(prompt=PROMPT, privacy_class=PrivacyClass.TRUSTED_OWNERS)
    async with bench.running():
        # As if it had been proven, but with every answer of it still being audited.
        bench.harness.driver.feed(e.StandingChanged(NodeId("a"), DIGEST, Use.EVERYTHING))
        await bench.prove("b", "c")
        bench.begin(node, spec)
        stranger = bench.node("b", "two")
        bench.finish(node)
        await until(lambda: bench.store.audits_of(["task.1"]) != [])
        bench.begin(node, replace(spec, task_id=TaskId("second")))
        trusted = bench.node("c", "three", trusted=True)
        bench.finish(node, "second")
        header = await bench.score(trusted, likely=True)
    assert header.privacy_class == completion_pb2.PRIVACY_CLASS_TRUSTED_OWNERS
    assert not stranger.sent_of("assignment")


async def test_what_waits_is_bounded_and_what_is_too_much_is_not_measured(bench: Bench) -> None:
    request = RequestAudit(
        node_id=NodeId("a"),
        manifest_digest=ManifestDigest(DIGEST),
        purpose=Purpose.CONFIRM,
        answers="audit",
        audit_ids=("gone",),
        besides=frozenset(),
        attempt=1,
    )
    for number in range(WAITING_JOBS_MAX + 1):
        bench.auditor.requested(replace(request, attempt=number))
    async with bench.running():
        last = f"audit.confirm.{WAITING_JOBS_MAX}"
        await until(lambda: len(bench.store.audits_of([last, "audit.confirm.0"])) == 2)
    reasons = {row.audit_id: row.not_measured for row in bench.store.audits_of([last, "audit.confirm.0"])}
    assert reasons == {last: "too_many_audits_wait", "audit.confirm.0": "ids_are_gone"}


def kept_job(number: int) -> Job:
    attempt = Attempt(
        prompt_ids=list(PROMPT),
        output_ids=list(IDS),
        sampling=Sampling(temperature=0.0),
        sampler_profile="",
        stop_token_ids=(STOP_ID,),
        max_tokens=len(IDS),
        finish_reason=FinishReason.LENGTH,
        reference=[position(id_, likely=True) for id_ in IDS],
    )
    return Job(
        audit_id=f"kept-{number}",
        kind=AuditKind.CANARY,
        node_id=NodeId("a"),
        owner_id=OwnerId("one"),
        manifest_digest=DIGEST,
        privacy_class=PrivacyClass.PUBLIC,
        attempt=attempt,
        at_ms=number,
    )


def appeal(audit_ids: tuple[str, ...]) -> RequestAudit:
    return RequestAudit(
        node_id=NodeId("a"),
        manifest_digest=DIGEST,
        purpose=Purpose.APPEAL,
        answers="verdict",
        audit_ids=audit_ids,
        besides=frozenset(),
        attempt=1,
    )


async def test_an_appeal_is_measured_by_one_verifier_as_a_whole(bench: Bench) -> None:
    """Mutation seen to fail here: the verifier is drawn by each audit's own id."""
    bench.owners[NodeId("a")] = OwnerId("one")
    names = [f"kept-{number}" for number in range(6)]
    for number in range(6):
        bench.auditor.keep(kept_job(number))
    async with bench.running():
        await bench.prove("b", "c")
        peers = [bench.node("b", "two"), bench.node("c", "three")]
        bench.auditor.requested(appeal(tuple(names)))
        await until(lambda: any(peer.sent_of("assignment") for peer in peers))
        judge = next(peer for peer in peers if peer.sent_of("assignment"))
        for number in range(1, 7):
            await bench.score(judge, likely=True, number=number)
    assert [len(peer.sent_of("assignment")) for peer in peers if peer is not judge] == [0]


async def test_an_appeal_is_not_measured_by_a_part_of_the_evidence(bench: Bench) -> None:
    """Whoever waits until most of it is forgotten would win. Mutation seen to fail here: what is left is measured."""
    bench.owners[NodeId("a")] = OwnerId("one")
    bench.auditor.keep(kept_job(2))
    async with bench.running():
        await bench.prove("b")
        verifier = bench.node("b", "two")
        bench.auditor.requested(appeal(("kept-1", "kept-2")))
        await until(lambda: bench.store.audits_of(["verdict.appeal.1"]) != [] or verifier.sent_of("assignment") != [])
    [row] = bench.store.audits_of(["verdict.appeal.1"])
    assert row.not_measured == "ids_are_gone"


async def test_an_appeal_about_a_private_answer_too_goes_to_nobody_who_may_not_read_it(bench: Bench) -> None:
    """Mutation seen to fail here: only the first of the answers is looked at when the verifier is chosen."""
    bench.auditor.keep(kept_job(1))
    bench.auditor.keep(replace(kept_job(2), privacy_class=PrivacyClass.TRUSTED_OWNERS))
    async with bench.running():
        await bench.prove("b")
        stranger = bench.node("b", "two")
        bench.auditor.requested(appeal(("kept-1", "kept-2")))
        await until(lambda: bench.store.audits_of(["verdict.appeal.1"]) != [] or stranger.sent_of("assignment") != [])
    [row] = bench.store.audits_of(["verdict.appeal.1"])
    assert row.not_measured == "no_verifier"
    assert not stranger.sent_of("assignment")


def test_what_is_kept_for_a_dispute_takes_four_bytes_an_id() -> None:
    """A reference of 20 candidates for each id would be gigabytes in a large fleet. Mutation seen: kept as it came."""
    kept = KeptJobs()
    kept.add(kept_job(1))
    [job] = kept.find(["kept-1"])
    assert (job.attempt.reference, list(job.ids)) == ((), [*PROMPT, *IDS])
    assert isinstance(job.attempt.prompt_ids, array)
    assert isinstance(job.attempt.output_ids, array)


def test_what_stands_against_a_node_is_kept_and_the_rest_for_a_day() -> None:
    """Mutations seen to fail here: evidence is forgotten like all else; what is kept stops the forgetting."""
    kept = KeptJobs()
    for number in range(4):
        kept.add(kept_job(number))
    asked = []

    def evidence() -> set[str]:
        asked.append(True)
        return {"kept-1"}

    kept.forget(KEPT_MS, evidence)
    assert not asked, "nothing is old yet"
    kept.forget(KEPT_MS + 3, evidence)
    assert [job.audit_id for job in kept.find([f"kept-{number}" for number in range(4)])] == ["kept-1", "kept-3"]


# --- canaries ----------------------------------------------------------------------------------


async def answered(bench: Bench, node: FakeConnection, ids: Sequence[int], number: int = 1) -> None:
    header = opened(await bench.ordered(node, completion_pb2.TASK_KIND_GENERATE, number))
    bench.harness.frame(node, 0, *ids, task=header.task_id)
    bench.finish(node, header.task_id, ids)


def has_audits(bench: Bench, number: int) -> bool:
    record = bench.verification.verdicts.record(NodeId("a"), DIGEST)
    return record is not None and record.audits == number


@pytest.fixture
def no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CanaryRounds, "_kind", lambda rounds, pair: AuditKind.CANARY)


@pytest.fixture
def scores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CanaryRounds, "_kind", lambda rounds, pair: AuditKind.SCORE)
    monkeypatch.setattr(canary_rounds, "LOOK_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("no_scores")
async def test_a_node_of_which_nothing_is_known_gets_canaries_and_a_good_answer_counts_for_it(bench: Bench) -> None:
    node = bench.node("a", "one")
    async with bench.running(canaries=True):
        await answered(bench, node, IDS)
        await until(lambda: bench.state("a") is not None)
    record = bench.verification.verdicts.record(NodeId("a"), DIGEST)
    assert record is not None
    assert (record.state, record.good_tokens, record.log_m) == (VerdictState.PROBATION, len(IDS), 0.0)


@pytest.mark.usefixtures("no_scores")
async def test_canaries_alone_quarantine_a_node_that_answers_with_another_model(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation seen to fail here: the answer is not compared (`finding_of` of an empty attempt)."""
    monkeypatch.setattr(canary_rounds, "LOOK_INTERVAL_S", 0.001)
    node = bench.node("a", "one")
    async with bench.running(canaries=True):
        for number in range(1, 40):
            if bench.state("a") is VerdictState.QUARANTINED:
                break
            await answered(bench, node, [500, *IDS[1:]], number)
            await until(partial(has_audits, bench, number))
        assert bench.state("a") is VerdictState.QUARANTINED


async def test_no_canary_is_asked_twice_before_all_were(bench: Bench) -> None:
    node = bench.node("a", "one")
    pair = (NodeId("a"), DIGEST)
    names = [bench.rounds.choose(pair, "", BANK).name for _ in range(12)]
    assert node.node_id == "a"
    assert len(set(names[:6])) == 6
    assert sorted(names[:6]) == sorted(names[6:])


async def test_three_of_four_canaries_are_drawn_where_draws_can_be_recomputed(bench: Bench) -> None:
    """Mutation seen to fail here: any canary that fits, each as likely."""
    pair = (NodeId("a"), DIGEST)
    drawn = [bench.rounds.choose(pair, "another", BANK).temperature > 0.0 for _ in range(400)]
    assert 260 <= drawn.count(True) <= 340
    assert not any(bench.rounds.choose(pair, "a third", BANK).temperature for _ in range(40))


# Each prompt greedily, and drawn by three samplers; two prompts are for scoring.
SAMPLERS = ("first", "second", "third")
MIXED_BANK = CanaryBank(
    manifest_digest=DIGEST,
    verifier="test",
    canaries=(
        *(canary(f"greedy-{number}", number=number) for number in range(8)),
        *(canary(f"{name}-{number}", 1.0, number=number, profile=name) for number in range(8) for name in SAMPLERS),
    ),
)


def chosen(bench: Bench, pair: tuple[NodeId, ManifestDigest], profile: str, count: int) -> list[Canary]:
    return [bench.rounds.choose(pair, profile, MIXED_BANK) for _ in range(count)]


@pytest.mark.parametrize("profile", SAMPLERS)
async def test_a_node_draws_with_its_own_sampler_alone_and_as_often_as_with_any_other(
    bench: Bench, profile: str
) -> None:
    """Fails when every drawn canary fits every profile, and when only the first profile's are chosen."""
    asked = chosen(bench, (NodeId("a"), DIGEST), profile, 400)
    assert {one.sampler_profile for one in asked if one.drawn} == {profile}
    assert 260 <= sum(one.drawn for one in asked) <= 340
    assert not {one.prompt for one in asked} & {one.prompt for one in MIXED_BANK.to_score}


async def test_a_node_whose_engine_changes_its_sampler_gets_no_prompt_to_draw_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a canary is spent by its name: the same words came again under the new profile. And when a greedy
    answer spends the drawn ones: it would be asked again before all were."""
    pair = (NodeId("a"), DIGEST)
    monkeypatch.setattr(canary_rounds, "SAMPLED_SHARE", 1.0)
    drawn = [one for profile in ("first", "second") for one in chosen(bench, pair, profile, 2)]
    monkeypatch.setattr(canary_rounds, "SAMPLED_SHARE", 0.0)
    greedy = chosen(bench, pair, "third", 6)
    monkeypatch.setattr(canary_rounds, "SAMPLED_SHARE", 1.0)
    drawn += chosen(bench, pair, "third", 2)
    assert [one.sampler_profile for one in drawn] == [profile for profile in SAMPLERS for _ in range(2)]
    everything = {one.prompt for one in MIXED_BANK.to_answer}
    assert {one.prompt for one in drawn} == {one.prompt for one in greedy} == everything
    assert (len(drawn), len(everything), any(one.drawn for one in greedy)) == (6, 6, False)
    # All had: those of its sampler again, each once.
    assert {one.prompt for one in chosen(bench, pair, "third", 6)} == everything


# --- scores of canaries ------------------------------------------------------------------------


@pytest.mark.usefixtures("scores_alone")
async def test_a_node_that_makes_scores_up_is_quarantined_by_the_second_and_may_appeal_to_a_verifier(
    bench: Bench,
) -> None:
    """Mutations seen to fail here: every distance passes; the job is not kept; the appeal compares with the bank."""
    node = bench.node("a", "one")
    async with bench.running(canaries=True):
        header = await bench.score(node, likely=False)
        # As when it is asked to verify others.
        assert (header.prompt_token_count, header.sampling.logprobs) == (len(PROMPT) + len(IDS), CANDIDATES)
        await until(partial(has_audits, bench, 1))
        assert bench.state("a") is VerdictState.WATCH
        await bench.score(node, likely=False, number=2)
        await until(lambda: bench.state("a") is VerdictState.QUARANTINED)
    [quarantine] = [row for row in bench.store.verdicts_of(NodeId("a")) if row.state == "quarantined"]
    audits = bench.store.audits_of(json.loads(quarantine.audit_ids))
    assert {(row.kind, row.verifier, row.hard) for row in audits} == {("score", "coordinator", None)}
    # Which it was, and not what it asks.
    assert {json.loads(row.detail)["canary"] for row in audits} == {one.name for one in BANK.to_score}
    # Another verifier finds the same of the same ids as the node: it is not the node that is wrong.
    async with bench.running():
        await bench.prove("b")
        peer = bench.node("b", "two")
        await bench.verification.appeal(NodeId("a"), quarantine.verdict_id)
        for number in range(1, 3):
            await bench.score(peer, likely=False, number=number)
        await until(lambda: bench.state("a") is VerdictState.PROBATION)


@pytest.mark.usefixtures("scores_alone")
async def test_good_scores_earn_no_trust(bench: Bench) -> None:
    """Who reads with the whole model may decode with less of it. Mutation seen to fail here: SCORE in OUTPUT_KINDS."""
    node = bench.node("a", "one")
    async with bench.running(canaries=True):
        for number in range(1, PROBATION_AUDITS + 2):
            await bench.score(node, likely=True, number=number)
            await until(partial(has_audits, bench, number))
    record = bench.verification.verdicts.record(NodeId("a"), DIGEST)
    assert record is not None
    assert (record.state, record.good_in_a_row, record.log_m) == (VerdictState.PROBATION, 0, 0.0)


async def test_three_scores_come_before_the_tenth_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a node that makes scores up is quarantined before it may judge others. Mutation seen to fail here: one of
    ten is scored."""
    monkeypatch.setattr(canary_rounds, "LOOK_INTERVAL_S", 0.001)
    node = bench.node("a", "one")
    kinds: list[Kind] = []
    async with bench.running(canaries=True):
        while kinds.count(completion_pb2.TASK_KIND_GENERATE) < PROBATION_AUDITS:
            async with asyncio.timeout(WAIT_S):
                while len(node.sent_of("assignment")) == len(kinds):
                    bench.harness.clock.advance(0.1)
                    await asyncio.to_thread(os.sched_yield)
            kinds.append(opened(node.sent_of("assignment")[-1].assignment.header).kind)
            number = kinds.count(kinds[-1])
            if kinds[-1] == completion_pb2.TASK_KIND_SCORE:
                await bench.score(node, likely=True, number=number)
            else:
                await answered(bench, node, IDS, number)
            await until(partial(has_audits, bench, len(kinds)))
    assert kinds.count(completion_pb2.TASK_KIND_SCORE) == 3


async def test_no_prompt_is_both_scored_and_answered_however_often_a_node_is_asked(bench: Bench) -> None:
    """Its answer is in what was scored: a node could keep a table. Mutation seen to fail here: nothing is set apart."""
    pair = (NodeId("a"), DIGEST)
    scored = {bench.rounds.choose_scored(pair, BANK).prompt for _ in range(40)}
    answered_prompts = {bench.rounds.choose(pair, "another", BANK).prompt for _ in range(200)}
    assert (len(scored), len(answered_prompts)) == (2, 6)
    assert not scored & answered_prompts


async def test_who_has_shown_no_good_score_judges_nobody(bench: Bench) -> None:
    """Mutations seen to fail here: OK alone is enough; a shadow is not looked at."""
    node = bench.node("a", "one")
    async with bench.running():
        *answers, scored = proof(NodeId("unproven"), DIGEST)
        for made in answers:
            await bench.verification.tell(made)
        assert bench.state("unproven") is VerdictState.OK
        bench.begin(node)
        bench.node("unproven", "two")
        bench.finish(node)
        await until(lambda: bench.store.audits_of(["task.1"]) != [])
        judges = partial(may_judge, bench.verification.verdicts, NodeId("unproven"), DIGEST)
        assert not judges()
        await bench.verification.set_mode("score", Mode.SHADOW)
        assert judges()
        await bench.verification.set_mode("score", Mode.ACTIVE)
        assert not judges()
        await bench.verification.tell(scored)
        assert judges()
        await bench.verification.tell(replace(scored, audit_id="failed", log_evidence=FAILED_LOG))
        assert not judges()
    [row] = bench.store.audits_of(["task.1"])
    assert row.not_measured == "no_verifier"
