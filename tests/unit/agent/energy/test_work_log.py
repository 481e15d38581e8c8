"""Joules and counts of attempts, through the whole state of an agent."""

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import events as e
from agent.assignments import AttemptKey, Audience, NonceCache
from agent.energy.card import CardSample, EnergyMethod
from agent.energy.day_counts import DayCounts, DayRecord, ModelDay
from agent.energy.meter import NO_ENERGY, TaskEnergy
from agent.energy.work_log import WorkLog
from agent.owner.consent import Consent, ConsentSettings
from agent.owner.events import CPU_CARD, LocalTimeObserved
from agent.owner.lending import EngineUse
from agent.state import AgentState
from agent.testing import CLUSTER_ID, ENGINE_ID, MODEL, NODE_ID, make_header, ready_engine, seal_header
from inference.engine import TokenChunk
from inference.task import FinishReason, TaskId, pack_token_ids
from protos.slackwater.common.v1 import capability_pb2

KEY = Ed25519PrivateKey.generate()
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
EPOCH_MS = 1_000_000_000
ONE, TWO = AttemptKey(TaskId("task-1"), 1), AttemptKey(TaskId("task-2"), 1)
WATTS = 100.0


class Node:
    """An agent whose card draws WATTS all the time and counts them; a dark one tells nothing about it."""

    def __init__(self, *, dark: bool = False) -> None:
        self.dark = dark
        self.now = 0.0
        self.log = WorkLog({}, DayCounts(DayRecord()))
        self.state = AgentState(
            audience=Audience(CLUSTER_ID, NODE_ID, (PUBLIC_KEY,)),
            nonces=NonceCache(),
            attempts_max=8,
            consent=Consent(ConsentSettings()),
            work_log=self.log,
            engines={ENGINE_ID: EngineUse()},
            now=self.now,
        )
        self.play(e.CardsListed((CPU_CARD,)), e.CardLent(CPU_CARD))
        self.play(e.LocalTimeKnown(LocalTimeObserved(2, 600, "2026-12-02")))
        self.connect()
        self.play(e.ModelChecked(ENGINE_ID, MODEL), e.EngineChanged(ready_engine(slots=2)))
        self.sample()

    def connect(self) -> None:
        self.play(
            e.Connected(
                asked_at=self.now,
                cluster_id=CLUSTER_ID,
                coordinator_time_ms=EPOCH_MS,
                heartbeat_busy_s=1.0,
                heartbeat_idle_s=10.0,
                frame_delay_s=0.005,
                coordinator_keys=(PUBLIC_KEY,),
                protocol_version=1,
            )
        )

    def play(self, *events: e.Event) -> list[e.Command]:
        return [command for event in events for command in self.state.handle(event, self.now)]

    def sample(self) -> None:
        reading = CardSample(card=CPU_CARD, energy_mj=self.now * WATTS * 1000, power_w=WATTS)
        self.play(e.CardsSampled((CardSample(card=CPU_CARD) if self.dark else reading,)))

    def begin(self, key: AttemptKey) -> None:
        nonce = key.task_id.encode().ljust(16, b".")
        header = make_header(task_id=key.task_id, attempt=key.attempt, nonce=nonce)
        commands = self.play(e.AssignmentReceived(seal_header(header, KEY), 1))
        [record] = [command for command in commands if isinstance(command, e.RecordNonce)]
        self.play(e.ChunkReceived(key, 0, pack_token_ids([1, 2, 3])), e.NonceRecorded(key, record.use))

    def chunk(self, key: AttemptKey, *ids: int, finish: FinishReason | None = None) -> e.SignStatement | None:
        commands = self.play(e.EngineChunkArrived(key, TokenChunk(ids, finish_reason=finish)))
        return next((command for command in commands if isinstance(command, e.SignStatement)), None)


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_statement_carries_the_joules_of_its_attempt_and_their_method(node: Node) -> None:
    node.begin(ONE)
    node.chunk(ONE, 10, 11)
    node.now = 5.0
    node.sample()
    node.now = 6.0
    signed = node.chunk(ONE, 12, finish=FinishReason.LENGTH)
    assert signed is not None
    # Six seconds at 100 W, nobody else was there; the last one by the power of those before.
    # Mutation: metering from the statement on, or not at all, fails this.
    assert signed.energy == TaskEnergy(600_000, EnergyMethod.COUNTER)


def test_attempts_at_once_share_the_joules(node: Node) -> None:
    node.begin(ONE)
    node.begin(TWO)
    node.chunk(ONE, 10, 11, 12)
    node.chunk(TWO, 10)
    node.now = 5.0
    node.sample()
    one, two = (node.chunk(key, finish=FinishReason.STOP) for key in (ONE, TWO))
    assert one is not None
    assert two is not None
    # Three and one generated tokens, and three of a prompt for each: 33 and 13 of 46.
    assert (one.energy.energy_mj, two.energy.energy_mj) == (358_696, 141_304)


def test_a_node_whose_card_tells_nothing_states_nothing() -> None:
    node = Node(dark=True)
    node.begin(ONE)
    node.now = 5.0
    node.sample()
    signed = node.chunk(ONE, 10, finish=FinishReason.STOP)
    assert signed is not None
    assert signed.energy == NO_ENERGY


def break_by_crash(node: Node) -> None:
    node.play(e.EngineFailed(ONE, e.FailureReason.FAILURE_REASON_ENGINE_CRASHED, "gone"))


def break_by_owner(node: Node) -> None:
    node.play(e.CardWithdrawn(CPU_CARD, "somebody is back"))


def break_by_network(node: Node) -> None:
    node.play(e.Disconnected("gone"))


def break_by_cancel(node: Node) -> None:
    node.play(e.CancelReceived(ONE))


def break_by_stop(node: Node) -> None:
    node.play(e.StopRequested())


@pytest.mark.parametrize("breaking", [break_by_crash, break_by_owner, break_by_network, break_by_cancel, break_by_stop])
def test_an_attempt_that_breaks_is_metered_no_more_and_its_tokens_count(
    node: Node, breaking: Callable[[Node], None]
) -> None:
    node.begin(ONE)
    node.chunk(ONE, 10, 11)
    node.now = 5.0
    node.sample()
    node.now = 6.0
    breaking(node)
    assert node.state.attempts == {}
    # Mutation: leaving `ended` out of any of the ways out makes the card work for ever.
    assert node.log.meter.attempts == frozenset()
    counted = node.log.counts.snapshot().models[MODEL.name]
    assert counted == ModelDay(tasks=0, prompt_tokens=3, completion_tokens=2, energy_mj=600_000)


def test_an_attempt_counts_once_though_its_end_is_told_twice(node: Node) -> None:
    node.begin(ONE)
    node.chunk(ONE, 10, finish=FinishReason.STOP)
    # The connection breaks while the statement is being signed.
    break_by_network(node)
    assert node.log.counts.snapshot().models[MODEL.name].tasks == 1
    assert node.log.counts.tokens == 4


def test_the_day_knows_what_the_card_drew_at_work_and_waiting(node: Node) -> None:
    node.now = 5.0
    node.sample()
    node.begin(ONE)
    node.now = 10.0
    node.chunk(ONE, 10, finish=FinishReason.STOP)
    node.sample()
    record = node.log.counts.snapshot()
    assert (record.day, record.work_mj, record.idle_mj) == ("2026-12-02", {"counter": 500_000}, 500_000)


def test_a_card_without_an_engine_is_the_owners_own_affair(node: Node) -> None:
    break_by_owner(node)
    node.play(e.EngineChanged(given_back()))
    node.sample()
    node.now = 10.0
    node.sample()
    # Mutation: counting every idle joule charges the owner's games to lending.
    assert node.log.counts.snapshot().idle_mj == 0


def given_back() -> capability_pb2.Engine:
    engine = ready_engine(slots=2)
    engine.status = capability_pb2.ENGINE_STATUS_STOPPED
    return engine
