"""Challenges over one call each: honest provers, and calls that break every rule. Proofs are small, and real."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.api.testing import FakeClock
from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.registry import FleetRegistry
from coordinator.store.port import NodeRow, OwnerRow
from coordinator.store.sql import SqlStore
from coordinator.store.testing import node_row
from coordinator.verification import challenge_agenda, challenge_rounds, challenge_targets
from coordinator.verification.challenge_agenda import MISSES_MAX
from coordinator.verification.challenge_replies import REPLY_BYTES_MAX, REPLY_PARTS_MAX
from coordinator.verification.challenge_rounds import ChallengeRounds
from coordinator.verification.challenges import READY_DEADLINE_MS
from coordinator.verification.events import AuditMeasured, AuditNotMeasured, Event
from coordinator.verification.service import Verification
from coordinator.verification.testing import quiet_hooks
from inference.challenge import schedule
from inference.challenge.arithmetic import NumpyArithmetic
from inference.challenge.compute import ComputeSize
from inference.challenge.expansion import Residues
from inference.challenge.prover import ProverSession
from inference.challenge.schedule import DeviceClass
from inference.task import NodeId, OwnerId
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.node.v1 import challenge_pb2 as pb
from protos.slackwater.node.v1 import node_service_pb2 as wire

ONE, TWO = NodeId("node-one"), NodeId("node-two")
CERTIFICATE = b"c" * 32
BOOT = b"boot"
PATIENCE_S = 20.0

Part = wire.AnswerChallengeRequest


@dataclass
class Connection:
    node_id: NodeId
    told: "asyncio.Queue[wire.ConnectResponse]" = field(default_factory=asyncio.Queue)

    def send(self, message: wire.ConnectResponse) -> None:
        self.told.put_nowait(message)

    async def challenge_id(self) -> str:
        """Return the challenge that waits for the node next."""
        async with asyncio.timeout(PATIENCE_S):
            return (await self.told.get()).challenge_waiting.challenge_id


def _row(node_id: NodeId) -> NodeRow:
    return node_row(node_id, "owner")


class HeardVerification(Verification):
    """Keeps what it was told of challenges."""

    def __init__(self, store: SqlStore, clock: FakeClock) -> None:
        super().__init__(store, clock, quiet_hooks())
        self.said: asyncio.Queue[str | None] = asyncio.Queue()
        self.stored: list[asyncio.Future[None]] = []

    def tell(self, event: Event) -> "asyncio.Future[None]":
        assert isinstance(event, AuditMeasured | AuditNotMeasured)
        self.said.put_nowait(event.hard if isinstance(event, AuditMeasured) else event.reason)
        self.stored.append(super().tell(event))
        return self.stored[-1]


class Fleet:
    """A coordinator's rounds over a real registry, store and verdicts."""

    def __init__(self, store: SqlStore) -> None:
        self.clock = FakeClock()
        owner = OwnerRow(owner_id=OwnerId("owner"), name="alice", trusted=False, created_at_ms=1)
        self.registry = FleetRegistry([owner], [_row(ONE), _row(TWO)])
        self.verification = HeardVerification(store, self.clock)
        self.rounds = ChallengeRounds(
            self.registry, store, self.verification, self.clock, lambda node_id: OwnerId("owner")
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Fleet"]:
        tasks = [asyncio.create_task(self.verification.run()), asyncio.create_task(self.rounds.run())]
        await asyncio.sleep(0)
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def join(self, node_id: NodeId = ONE) -> Connection:
        connection = Connection(node_id)
        self.rounds.joined(connection, BOOT, "ipv4:127.0.0.1:1")
        self.registry.connected(node_id, connection, "1", 1)
        host = capability_pb2.Host(cpu_model="a processor", cpu_cores=4)
        self.registry.reported(node_id, wire.NodeState(host=host), 1)
        return connection

    def shown(self, node_id: NodeId = ONE) -> bool:
        view = self.registry.find(node_id)
        assert view is not None
        return view.verified

    async def hear(self, parts: AsyncIterator[Part], node_id: NodeId = ONE) -> list[pb.ChallengeQuestion]:
        """Hold a call to its end and return what was asked in it."""
        answers = self.rounds.answer(node_id, CERTIFICATE, parts)
        async with asyncio.timeout(PATIENCE_S), aclosing(answers):  # type: ignore[type-var]  # It is a generator.
            return [answer.question async for answer in answers]

    async def prove(self, challenge_id: str, node_id: NodeId = ONE, *, spoil: bool = False) -> None:
        """Answer as an honest prover does; `spoil` changes a byte of each result."""
        session: ProverSession[Residues] = ProverSession(node_id, BOOT.hex(), CERTIFICATE, NumpyArithmetic())
        replies: asyncio.Queue[pb.ChallengeReply | None] = asyncio.Queue()
        replies.put_nowait(ready())

        async def parts() -> AsyncIterator[Part]:
            while (reply := await replies.get()) is not None:
                yield whole(challenge_id, reply)

        answers = self.rounds.answer(node_id, CERTIFICATE, parts())
        async with asyncio.timeout(PATIENCE_S):
            async for answer in answers:
                for reply in session.replies(answer.question):
                    if spoil and reply.HasField("compute_answer"):
                        content = bytearray(reply.compute_answer.result.content)
                        content[0] ^= 1
                        reply.compute_answer.result.content = bytes(content)
                    replies.put_nowait(reply)

    async def story(self, ended: int = 1) -> list[str | None]:
        """Return what came of so many challenges: a hard rule, why there was no figure, or None where it was passed."""
        async with asyncio.timeout(PATIENCE_S):
            said = [await self.verification.said.get() for _ in range(ended)]
            await asyncio.gather(*self.verification.stored)
        return said


def ready(memory_bytes: int = 0) -> pb.ChallengeReply:
    return pb.ChallengeReply(prover_ready=pb.ProverReady(arithmetic="numpy", memory_bytes=memory_bytes))


def whole(challenge_id: str, reply: pb.ChallengeReply) -> Part:
    return Part(challenge_id=challenge_id, reply_part=reply.SerializeToString(), last=True)


async def stream(*parts: Part) -> AsyncIterator[Part]:
    for part in parts:
        yield part


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions of milliseconds, and no waiting where nothing is to come."""
    monkeypatch.setitem(schedule._COMPUTE, DeviceClass.CPU, (ComputeSize(columns=32, rows=24, products=3, chains=4), 4))
    monkeypatch.setitem(
        schedule._WALKS, DeviceClass.CPU, schedule._WalkShape(8, 2, 3, steps_drawn=4, blocks_drawn=2, rows_drawn=4)
    )
    monkeypatch.setattr(challenge_targets, "PROCESSOR_MEMORY_BYTES_MAX", 1 << 18)
    monkeypatch.setattr(challenge_rounds, "LOOK_PERIOD_S", 0.001)
    monkeypatch.setattr(challenge_rounds, "FIRST_REPLY_S_MAX", 0.5)
    # A failure is followed by the next one at once; the clock of these tests stands.
    monkeypatch.setattr(challenge_agenda, "RETRY_MS", 0)
    # How long a few milliseconds of work took says nothing about whose card it was.
    monkeypatch.setattr(schedule, "SHARED_CARD_SLOWDOWN", 1e9)


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}")).running() as fleet:
        yield fleet


async def test_an_honest_node_shows_what_it_computes(fleet: Fleet) -> None:
    challenge_id = await fleet.join().challenge_id()
    assert fleet.rounds.asks(ONE)
    await fleet.prove(challenge_id)
    assert await fleet.story() == [None]
    assert fleet.shown()
    assert not fleet.rounds.asks(ONE)


async def test_a_false_result_shows_nothing_and_is_a_fault(fleet: Fleet) -> None:
    """Mutation seen to fail here: `checked` is told that nothing is wrong."""
    await fleet.prove(await fleet.join().challenge_id(), spoil=True)
    assert await fleet.story() == ["proof"]
    assert not fleet.shown()


def _garbage(challenge_id: str) -> list[Part]:
    return [Part(challenge_id=challenge_id, reply_part=b"\xff" * 40, last=True)]


def _too_long(challenge_id: str) -> list[Part]:
    mebibyte = Part(challenge_id=challenge_id, reply_part=bytes(1 << 20))
    return [mebibyte] * (REPLY_BYTES_MAX // (1 << 20) + 1)


def _too_many_parts(challenge_id: str) -> list[Part]:
    return [Part(challenge_id=challenge_id)] * (REPLY_PARTS_MAX + 1)


@pytest.mark.parametrize("reply", [_garbage, _too_long, _too_many_parts])
async def test_what_is_no_reply_ends_the_call_is_no_fault_and_the_node_is_asked_again(
    fleet: Fleet, reply: Callable[[str], list[Part]]
) -> None:
    """Mutation seen to fail here: the challenge is not ended where the stream of parts breaks the rules."""
    connection = fleet.join()
    challenge_id = await connection.challenge_id()
    with pytest.raises(SlackwaterError) as refused:
        await fleet.hear(stream(whole(challenge_id, ready()), *reply(challenge_id)))
    assert refused.value.reason is Reason.PROTOCOL_VIOLATION
    assert await fleet.story() == ["the call ended"]
    await fleet.prove(await connection.challenge_id())
    assert fleet.shown()


@pytest.mark.parametrize("reply", [_garbage, _too_long, _too_many_parts])
async def test_a_call_that_begins_with_no_reply_is_refused_and_the_challenge_waits_on(
    fleet: Fleet, reply: Callable[[str], list[Part]]
) -> None:
    challenge_id = await fleet.join().challenge_id()
    with pytest.raises(SlackwaterError) as refused:
        await fleet.hear(stream(*reply(challenge_id)))
    assert refused.value.reason is Reason.PROTOCOL_VIOLATION
    await fleet.prove(challenge_id)
    assert fleet.shown()


async def test_who_calls_and_says_nothing_is_hung_up_on(fleet: Fleet) -> None:
    """Mutation seen to fail here: no limit on the wait for the first reply."""

    async def silence() -> AsyncIterator[Part]:
        await asyncio.Event().wait()
        yield Part()

    challenge_id = await fleet.join().challenge_id()
    with pytest.raises(SlackwaterError, match="no first message"):
        await fleet.hear(silence())
    await fleet.prove(challenge_id)
    assert fleet.shown()


async def test_a_call_without_a_message_and_one_for_no_challenge_are_refused(fleet: Fleet) -> None:
    fleet.join()
    for parts in (stream(), stream(whole("no such challenge", ready()))):
        with pytest.raises(SlackwaterError) as refused:
            await fleet.hear(parts)
        assert refused.value.reason is Reason.INVALID_ARGUMENT


async def test_a_challenge_is_answered_by_its_node_and_once(fleet: Fleet) -> None:
    """Mutations seen to fail here: whose node it is, and that it is being answered, is not looked at."""
    challenge_id = await fleet.join(ONE).challenge_id()
    fleet.join(TWO)
    with pytest.raises(SlackwaterError, match="no such challenge"):
        await fleet.hear(stream(whole(challenge_id, ready())), TWO)

    async def begin_and_wait() -> AsyncIterator[Part]:
        yield whole(challenge_id, ready())
        await asyncio.Event().wait()

    answers = fleet.rounds.answer(ONE, CERTIFICATE, begin_and_wait())
    question = (await anext(answers)).question
    assert question.HasField("compute_challenge")
    with pytest.raises(SlackwaterError, match="no such challenge"):
        await fleet.hear(stream(whole(challenge_id, ready())))
    await answers.aclose()  # type: ignore[attr-defined]  # It is a generator.
    assert await fleet.story() == ["the call ended"]


async def test_a_reply_to_another_challenge_in_the_middle_is_a_replay(fleet: Fleet) -> None:
    """Mutation seen to fail here: only the reply itself is looked at, and not in whose name it comes."""
    challenge_id = await fleet.join().challenge_id()
    commitment = pb.ChallengeReply(compute_commitment=pb.ComputeCommitment(challenge_id=challenge_id, root=bytes(32)))
    await fleet.hear(stream(whole(challenge_id, ready()), whole("another", commitment)))
    assert await fleet.story() == ["replay"]


async def test_what_waits_ends_with_the_connection_and_after_its_time(fleet: Fleet) -> None:
    """Mutation seen to fail here: `left` ends nothing."""
    connection = fleet.join()
    await connection.challenge_id()
    fleet.rounds.left(connection)
    assert not fleet.rounds.asks(ONE)
    await fleet.join().challenge_id()
    fleet.clock.advance(READY_DEADLINE_MS / 1000)
    assert await fleet.story(2) == ["the connection ended", "late: no prover was ready"]


async def test_a_boot_before_this_one_answers_nothing(fleet: Fleet) -> None:
    """Mutation seen to fail here: the boot of the connection that counts is not compared."""
    connection = fleet.join()
    challenge_id = await connection.challenge_id()
    fleet.rounds.joined(connection, b"another boot", "ipv4:127.0.0.1:1")
    with pytest.raises(SlackwaterError, match="no such challenge"):
        await fleet.hear(stream(whole(challenge_id, ready())))


async def test_cards_of_one_owner_are_asked_at_one_moment_and_one_that_does_not_come_holds_nobody_up(
    fleet: Fleet,
) -> None:
    """Mutation seen to fail here: the gate is not told of a member that ended without a question."""
    connections = {ONE: fleet.join(ONE), TWO: fleet.join(TWO)}
    challenges = {node_id: asyncio.create_task(one.challenge_id()) for node_id, one in connections.items()}
    # Alone first, one after the other.
    for _ in range(2):
        done, _rest = await asyncio.wait(challenges.values(), return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        [node_id] = [node_id for node_id, task in challenges.items() if task in done]
        await fleet.prove(challenges[node_id].result(), node_id)
        challenges[node_id] = asyncio.create_task(connections[node_id].challenge_id())
    await asyncio.wait(challenges.values(), timeout=PATIENCE_S)
    refusal = pb.ChallengeReply(challenge_refusal=pb.ChallengeRefusal(reason="busy"))

    answering = asyncio.create_task(fleet.hear(stream(whole(challenges[ONE].result(), ready())), ONE))
    done, _rest = await asyncio.wait([answering], timeout=0.05)
    assert not done, "it was asked before the other one was there"
    assert await fleet.hear(stream(whole(challenges[TWO].result(), refusal)), TWO) == []
    [question] = await answering
    assert question.HasField("compute_challenge")


async def test_a_figure_that_was_taken_away_does_not_count_after_a_restart_of_the_coordinator(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Mutations seen to fail here: what takes a figure away is not read; whether a figure counted is not."""
    connections = {ONE: fleet.join(ONE), TWO: fleet.join(TWO)}
    refusal = pb.ChallengeReply(challenge_refusal=pb.ChallengeRefusal(reason="busy"))
    asked = {node_id: asyncio.create_task(one.challenge_id()) for node_id, one in connections.items()}
    shown: list[NodeId] = []
    while len(shown) < 2:
        done, _rest = await asyncio.wait(asked.values(), return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        [node_id] = [node_id for node_id, task in asked.items() if task in done]
        await fleet.prove(asked[node_id].result(), node_id)
        shown.append(node_id)
        asked[node_id] = asyncio.create_task(connections[node_id].challenge_id())
    assert (fleet.shown(shown[0]), fleet.shown(shown[1])) == (True, False), "the other one counts beside it alone"
    fleet.clock.advance(1)
    # The one that counts never comes when they are asked together.
    for _ in range(MISSES_MAX):
        await asyncio.wait(asked.values(), timeout=PATIENCE_S)
        await fleet.hear(stream(whole(asked[shown[0]].result(), refusal)), shown[0])
        await fleet.prove(asked[shown[1]].result(), shown[1])
        asked = {node_id: asyncio.create_task(one.challenge_id()) for node_id, one in connections.items()}
    for task in asked.values():
        task.cancel()
    assert not fleet.shown(shown[0])
    await asyncio.gather(*fleet.verification.stored)
    restarted = Fleet(SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}"))
    for node_id in (ONE, TWO):
        connection = Connection(node_id)
        restarted.registry.connected(node_id, connection, "1", 1)
        host = capability_pb2.Host(cpu_model="a processor", cpu_cores=4)
        restarted.registry.reported(node_id, wire.NodeState(host=host), 1)
    assert not restarted.shown(shown[0])
    assert not restarted.shown(shown[1]), "it has been shown beside nobody but in a barrier that nobody else came to"


async def test_a_figure_counts_after_a_restart_of_the_coordinator(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.prove(await fleet.join().challenge_id())
    await fleet.story()
    restarted = Fleet(SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}"))
    host = capability_pb2.Host(cpu_model="a processor", cpu_cores=4)
    restarted.registry.connected(ONE, object(), "1", 1)
    restarted.registry.reported(ONE, wire.NodeState(host=host), 1)
    assert restarted.shown()
