"""The fleet as it is now, and who is told of it."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet import registry as module
from coordinator.fleet.registry import FleetRegistry, NodeView, ShownCapability
from coordinator.store.port import OwnerRow
from coordinator.store.testing import node_row
from coordinator.store.verification_port import RateRow
from inference.task import ManifestDigest, NodeId, OwnerId
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.node.v1.node_service_pb2 import NodeState

OWNER = OwnerRow(owner_id=OwnerId("o"), name="alice", trusted=False, created_at_ms=1)
ROW = node_row("n", OWNER.owner_id, "attic")


def fleet() -> FleetRegistry:
    return FleetRegistry([OWNER], [ROW])


def only(registry: FleetRegistry) -> NodeView:
    (view,) = registry.views()
    return view


def test_a_node_is_offline_until_it_connects_and_after_it_left() -> None:
    registry, connection = fleet(), object()
    assert only(registry).status == "offline"
    registry.connected(ROW.node_id, connection, "0.1.0", 5)
    assert (only(registry).status, only(registry).agent_version, only(registry).last_seen_at_ms) == (
        "online",
        "0.1.0",
        5,
    )
    registry.disconnected(ROW.node_id, connection)
    assert only(registry).status == "offline"


def test_the_end_of_an_older_connection_does_not_take_the_node_offline() -> None:
    """The agent renewed its certificate: the new stream opens before the old one closes."""
    # Mutation seen to fail: `disconnected` without the comparison.
    registry, old, new = fleet(), object(), object()
    registry.connected(ROW.node_id, old, "0.1.0", 5)
    registry.connected(ROW.node_id, new, "0.1.0", 6)
    registry.disconnected(ROW.node_id, old)
    assert only(registry).status == "online"


def test_the_rates_of_a_model_are_those_of_connected_nodes_with_it() -> None:
    """Mutations seen to fail here: rates of other models; rates of nodes that are gone."""
    registry, connection = fleet(), object()
    wanted, other = ManifestDigest("sha256:wanted"), ManifestDigest("sha256:other")
    rate = RateRow(
        node_id=ROW.node_id,
        manifest_digest=wanted,
        streams=1,
        engine_build="fake 1",
        tokens_per_second=50.0,
        first_token_ms=100,
        joules_per_token=1.0,
        energy_method="counter",
        measured_at_ms=0,
    )
    for one in (rate, replace(rate, streams=8), replace(rate, manifest_digest=other)):
        registry.measured(one)
    assert registry.rates_of(wanted) == []
    registry.connected(ROW.node_id, connection, "0.1.0", 5)
    assert registry.rates_of(wanted) == registry.rates_on(ROW.node_id, wanted) == [rate, replace(rate, streams=8)]
    assert registry.rates_on(NodeId("nobody"), wanted) == []
    registry.disconnected(ROW.node_id, connection)
    assert registry.rates_of(wanted) == []


def test_draining_is_said_by_the_operator_or_by_the_agent() -> None:
    registry = fleet()
    registry.connected(ROW.node_id, object(), "0.1.0", 5)
    registry.put_node(replace(ROW, draining=True))
    assert only(registry).status == "draining"
    registry.put_node(ROW)
    assert only(registry).status == "online"
    registry.reported(ROW.node_id, NodeState(sequence=1, draining=True), 6)
    assert only(registry).status == "draining"


def test_a_ban_outweighs_all() -> None:
    registry = fleet()
    registry.connected(ROW.node_id, object(), "0.1.0", 5)
    registry.put_node(replace(ROW, draining=True, banned_at_ms=9))
    assert only(registry).status == "banned"


async def test_a_watch_begins_with_every_node_and_merges_changes() -> None:
    # Mutation seen to fail: `watch` without the marks at its start.
    registry = fleet()
    registry.put_node(replace(ROW, node_id=NodeId("m")))
    with registry.watch() as watch:
        assert await watch.changed() == ["n", "m"]
        for sequence in range(1000):
            registry.reported(ROW.node_id, NodeState(sequence=sequence), 7)
        assert await watch.changed() == ["n"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await watch.changed()
        registry.heard(ROW.node_id, 8)
        registry.set_running(ROW.node_id, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await watch.changed()
        registry.set_running(ROW.node_id, 3)
        assert await watch.changed() == ["n"]
    assert [view.running_attempts for view in registry.views()] == [3, 0]


def test_watches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation seen to fail: `discard` left out.
    monkeypatch.setattr(module, "WATCHERS_MAX", 1)
    registry = fleet()
    for _ in range(3):
        with registry.watch():
            with pytest.raises(SlackwaterError) as refused, registry.watch():
                pass
            assert refused.value.reason is Reason.RATE_LIMITED


def gpu(uuid: str) -> capability_pb2.Gpu:
    return capability_pb2.Gpu(uuid=capability_pb2.TextReading(value=uuid))


@pytest.mark.parametrize(
    ("cards", "shown", "verified"),
    [
        ([], [], False),
        ([], [""], True),
        (["a"], [""], False),
        (["a"], ["a"], True),
        (["a", "b"], ["a"], False),
        (["a", "b"], ["b", "a", ""], True),
        (["a", ""], ["a", ""], False),
    ],
)
def test_a_node_is_verified_once_each_of_its_cards_has_shown_something(
    cards: list[str], shown: list[str], verified: bool
) -> None:
    # Mutations seen to fail: `any` for `all` of the cards; no look at whether a card has an id.
    registry = fleet()
    for card in shown:
        registry.shown(ROW.node_id, ShownCapability(card, "cpu", 10**9, 5))
    assert not only(registry).verified, "nothing is known of a node that has not reported"
    registry.reported(ROW.node_id, NodeState(gpus=[gpu(card) for card in cards]), 6)
    assert only(registry).verified is verified


@pytest.mark.parametrize(
    "state",
    [
        NodeState(gpus=[capability_pb2.Gpu()] * 65),
        NodeState(engines=[capability_pb2.Engine()] * 65),
        NodeState(engines=[capability_pb2.Engine(note="x" * 2_000_000)]),
    ],
)
def test_a_report_that_no_machine_could_mean_is_refused(state: NodeState) -> None:
    # Mutation seen to fail: `check_report` not called.
    registry = fleet()
    with pytest.raises(SlackwaterError) as refused:
        registry.reported(ROW.node_id, state, 1)
    assert refused.value.reason is Reason.PROTOCOL_VIOLATION
    assert only(registry).report is None
