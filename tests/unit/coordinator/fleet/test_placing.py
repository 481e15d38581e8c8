"""What reports become for the planner, and what its plan becomes for nodes."""

from dataclasses import replace

import pytest

from coordinator.fleet.placing import (
    CHANGE_PATIENCE_S,
    GIVEN_UP_S,
    LATE_S_MIN,
    LOAD_S,
    SWITCH_S,
    Looked,
    OpenNode,
    Placing,
)
from coordinator.fleet.registry import OFFLINE, ONLINE, NodeView
from coordinator.store.testing import node_row
from coordinator.store.verification_port import RateRow
from inference.task import EngineId, ManifestDigest, NodeId
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.node.v1.node_service_pb2 import NodeState

GIB = 2**30
NOW_S = 5_000.0
FIRST, SECOND = (ManifestDigest("sha256:" + digit * 64) for digit in "12")
SIZE_BYTES = 600_000_000
LINE = 10_000_000
FETCH_S = SIZE_BYTES / LINE
READY = capability_pb2.ENGINE_STATUS_READY
MAIN = EngineId("main")


def engine(
    has: str = "", *, status: "capability_pb2.EngineStatus.ValueType" = READY, is_open: bool = True, rate: float = 100.0
) -> capability_pb2.Engine:
    told = capability_pb2.OpenEngine(memory_bytes=8 * GIB) if is_open else None
    stands = status if has or status != READY else capability_pb2.ENGINE_STATUS_STOPPED
    speed = rate if has else 0.0
    return capability_pb2.Engine(
        engine_id=MAIN, kind="vllm", status=stands, manifest_digest=has, tokens_per_second=speed, open=told
    )


def node(name: str, one: capability_pb2.Engine, *stored: str, paused: str = "", room: int = 10**12) -> NodeView:
    store = capability_pb2.ModelStore(manifest_digests=stored, room_bytes=room, line_bytes_per_s=LINE, paused=paused)
    return NodeView(
        row=node_row(name, "owner"),
        owner_name="",
        status=ONLINE,
        agent_version="",
        report=NodeState(engines=[one], models=store),
        last_seen_at_ms=0,
        running_attempts=0,
    )


class Fleet:
    def __init__(self) -> None:
        self.now_s = NOW_S
        self.stays_s = 100 * 3600.0
        self.busy_s: dict[EngineId, float] = {}
        self.placing = Placing()
        for digest in (FIRST, SECOND):
            self.placing.add_model(digest, SIZE_BYTES)

    def look(self, *views: NodeView) -> Looked:
        open_nodes = {view.row.node_id: OpenNode(self.stays_s, self.busy_s) for view in views}
        return self.placing.look(views, open_nodes, self.now_s)

    def ask(self, digest: ManifestDigest, tokens: int = 4) -> None:
        self.placing.demand.asked(digest, tokens, self.now_s)


def named(looked: Looked, name: str = "a") -> str | None:
    return dict(looked.wanted[NodeId(name)]).get(MAIN)


def test_what_is_asked_for_and_nowhere_is_put_on_an_open_engine_and_the_wait_is_told() -> None:
    """One short question is enough. Fails when it is not, or when the wait leaves out the download."""
    fleet, fixed = Fleet(), node("b", engine(FIRST, is_open=False))
    idle = fleet.look(node("a", engine()), fixed)
    assert named(idle) is None
    assert idle.waits_s == {SECOND: pytest.approx(FETCH_S + SWITCH_S + LOAD_S)}
    fleet.ask(SECOND)
    asked = fleet.look(node("a", engine()), fixed)
    assert named(asked) == SECOND
    assert NodeId("b") not in asked.wanted
    assert asked.waits_s == idle.waits_s


def test_it_is_named_again_until_it_is_there_and_the_wait_shrinks() -> None:
    """Fails when progress is not counted, when the plan is made anew each time, or when a night away is late."""
    fleet = Fleet()
    fleet.ask(SECOND)
    fleet.look(node("a", engine()))
    fetching = engine()
    told = fetching.open
    told.wanted_digest, told.fetched_bytes, told.total_bytes = SECOND, SIZE_BYTES // 2, SIZE_BYTES
    half = fleet.look(node("a", fetching), node("b", engine()))
    assert (named(half), named(half, "b")) == (SECOND, None)
    assert half.waits_s[SECOND] == pytest.approx(FETCH_S / 2 + SWITCH_S + LOAD_S)
    stored = fleet.look(node("a", fetching, SECOND))
    assert stored.waits_s[SECOND] == pytest.approx(SWITCH_S + LOAD_S)
    there = fleet.look(node("a", engine(SECOND), SECOND))
    assert named(there) == SECOND
    assert SECOND not in there.waits_s
    fleet.now_s += 10 * 3600
    fleet.look()
    assert named(fleet.look(node("a", engine(), SECOND))) == SECOND, "the agent was started anew"


def test_an_engine_that_changes_first_answers_what_it_works_on_for_as_long_as_an_agent_waits() -> None:
    """It does so while files come. Mutations seen to fail here: answers left out, added to the fetch, unlimited."""
    fleet, fixed = Fleet(), node("b", engine(FIRST, is_open=False))
    fleet.ask(FIRST)
    stored = node("a", engine(FIRST), SECOND)
    for busy_s, expected_s in ((12.0, 12.0), (1000.0, CHANGE_PATIENCE_S)):
        fleet.busy_s = {MAIN: busy_s}
        assert fleet.look(stored, fixed).waits_s == {SECOND: pytest.approx(expected_s + SWITCH_S + LOAD_S)}
    fetching = node("a", engine(FIRST))
    assert fleet.look(fetching, fixed).waits_s == {SECOND: pytest.approx(FETCH_S + SWITCH_S + LOAD_S)}
    fleet.ask(SECOND)
    assert named(fleet.look(stored, fixed)) == SECOND
    assert fleet.look(stored, fixed).waits_s == {SECOND: pytest.approx(CHANGE_PATIENCE_S + SWITCH_S + LOAD_S)}
    assert fleet.look(fetching, fixed).waits_s == {SECOND: pytest.approx(FETCH_S + SWITCH_S + LOAD_S)}


def test_what_a_node_refuses_goes_to_another_or_comes_nowhere() -> None:
    """Fails when a refusal is not heeded: its word is final."""
    fleet = Fleet()
    fleet.ask(SECOND)
    fleet.look(node("a", engine()))
    unwilling = engine()
    unwilling.open.refusals.add(manifest_digest=SECOND, reason="consent")
    alone = fleet.look(node("a", unwilling))
    assert named(alone) is None
    assert SECOND not in alone.waits_s
    assert named(fleet.look(node("a", unwilling), node("b", engine())), "b") == SECOND


def test_demand_that_moves_is_followed_only_by_what_is_not_missed() -> None:
    """Fails when an engine is taken from a model that only it has and somebody asks for."""
    fleet, open_one = Fleet(), node("a", engine(FIRST))
    fleet.ask(FIRST)
    fleet.ask(SECOND)
    alone = fleet.look(open_one)
    assert named(alone) is None
    assert SECOND not in alone.waits_s, "nobody is told a wait that would not end"
    beside = fleet.look(open_one, node("b", engine(FIRST, is_open=False)))
    assert named(beside) == SECOND


def test_a_card_that_its_owner_has_gets_nothing_but_is_asked_again_later() -> None:
    """Fails when a given-back engine counts as one that could have a model."""
    fleet = Fleet()
    fleet.ask(SECOND)
    away = engine(FIRST, status=capability_pb2.ENGINE_STATUS_GIVEN_BACK)
    looked = fleet.look(node("a", away))
    assert (named(looked), SECOND in looked.waits_s) == (None, False)
    assert named(fleet.look(node("a", engine(FIRST)))) == SECOND, "it is lent again"


def test_a_model_that_consent_has_taken_off_an_engine_makes_room_for_another() -> None:
    """It is given back for its model, and not for its card. Fails when both are taken for the same."""
    fleet = Fleet()
    fleet.ask(SECOND)
    barred = engine(FIRST, status=capability_pb2.ENGINE_STATUS_GIVEN_BACK)
    barred.open.refusals.add(manifest_digest=FIRST, reason="consent")
    assert named(fleet.look(node("a", barred))) == SECOND


def test_no_download_where_there_is_no_room_no_line_or_too_little_time() -> None:
    """Fails when the disk's room, a paused network or the time that a node stays is not looked at."""
    for view in (node("a", engine(), room=SIZE_BYTES - 1), node("a", engine(), paused="the network is metered")):
        fleet = Fleet()
        fleet.ask(SECOND)
        assert named(fleet.look(view)) is None
    hasty = Fleet()
    hasty.ask(SECOND)
    hasty.stays_s = 300.0
    assert named(hasty.look(node("a", engine()))) is None
    stored = Fleet()
    stored.ask(SECOND)
    assert named(stored.look(node("a", engine(), SECOND, paused="metered", room=0))) == SECOND


def test_what_takes_far_too_long_is_given_up_for_an_hour() -> None:
    """Fails when a node that never gets there keeps the fleet waiting."""
    fleet = Fleet()
    fleet.ask(SECOND, tokens=10**6)
    view = node("a", engine())
    assert named(fleet.look(view)) == SECOND
    fleet.now_s += LATE_S_MIN + 1
    assert named(fleet.look(view)) is None
    fleet.now_s += GIVEN_UP_S
    assert named(fleet.look(view)) == SECOND


def test_a_coordinator_that_has_just_started_takes_over_what_is_under_way() -> None:
    """Fails when a fetch that an earlier start ordered is planned anew elsewhere."""
    fleet = Fleet()
    fleet.ask(SECOND)
    fetching = engine(FIRST)
    fetching.open.wanted_digest = SECOND
    looked = fleet.look(node("a", fetching), node("b", engine()))
    assert (named(looked), named(looked, "b")) == (SECOND, None)


def test_how_long_an_engine_takes_to_start_is_learnt_and_taken_for_its_kind() -> None:
    """Fails when the constant stays in force."""
    fleet = Fleet()
    starting = node("a", engine(FIRST, status=capability_pb2.ENGINE_STATUS_STARTING))
    ready = node("a", engine(FIRST))
    assert starting.report is not None
    assert ready.report is not None
    fleet.placing.saw(NodeId("a"), starting.report, NOW_S)
    fleet.placing.saw(NodeId("a"), starting.report, NOW_S + 10)
    fleet.placing.saw(NodeId("a"), ready.report, NOW_S + 30)
    assert fleet.look(node("b", engine())).waits_s[SECOND] == pytest.approx(FETCH_S + SWITCH_S + 30)


def test_a_node_that_is_away_neither_supplies_nor_is_told() -> None:
    fleet = Fleet()
    fleet.ask(FIRST)
    gone = replace(node("a", engine(FIRST)), status=OFFLINE)
    looked = fleet.look(gone, node("b", engine()))
    assert named(looked, "b") == FIRST
    assert NodeId("a") not in looked.wanted


def test_the_engine_that_was_measured_fastest_is_taken() -> None:
    """Fails when rates that the coordinator measured are not used."""
    fleet = Fleet()
    fleet.ask(SECOND, tokens=400_000)
    rate = RateRow(
        node_id=NodeId("b"),
        manifest_digest=SECOND,
        engine_build="vllm",
        streams=8,
        tokens_per_second=900.0,
        first_token_ms=1,
        joules_per_token=0.0,
        energy_method="none",
        measured_at_ms=1,
    )
    slow = replace(rate, node_id=NodeId("a"), tokens_per_second=50.0)
    views = [replace(node("a", engine()), rates=(slow,)), replace(node("b", engine()), rates=(rate,))]
    looked = fleet.look(*views)
    assert (named(looked), named(looked, "b")) == (None, SECOND)
