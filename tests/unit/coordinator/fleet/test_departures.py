"""What counts as a loss: the owner, a crash, a stream that ends. Not the operator, and not our own line."""

from dataclasses import replace

import pytest

from coordinator.fleet.churn import CameBack, Departure, Event, LossRetracted, WentAway
from coordinator.fleet.departures import (
    MASS_NODES_MIN,
    NEVER_SEEN,
    NOTICED_WITHIN_S,
    OwnOutages,
    SeenNode,
    changes,
    see,
)
from coordinator.fleet.registry import NodeView
from coordinator.store.testing import node_row
from inference.task import NodeId
from protos.slackwater.common.v1 import capability_pb2 as capability
from protos.slackwater.node.v1.node_service_pb2 import NodeState

NODE = NodeId("n")
ROW = node_row(NODE, "o", "attic")
STARTING, READY, FAILED = (
    capability.ENGINE_STATUS_STARTING,
    capability.ENGINE_STATUS_READY,
    capability.ENGINE_STATUS_FAILED,
)
GIVEN_BACK, UNLOADED = capability.ENGINE_STATUS_GIVEN_BACK, capability.ENGINE_STATUS_UNLOADED


def view(*engines: tuple[int, int], status: str = "online", draining: bool = False) -> NodeView:
    """A node whose engines have these statuses and restarts."""
    report = NodeState(
        engines=[
            capability.Engine(engine_id=f"e{at}", status=status, restarts=restarts)  # type: ignore[arg-type]
            for at, (status, restarts) in enumerate(engines)
        ]
    )
    return NodeView(
        row=replace(ROW, draining=draining),
        owner_name="alice",
        status=status,
        agent_version="0.1.0",
        report=report,
        last_seen_at_ms=0,
        running_attempts=0,
    )


def story(*views: NodeView) -> list[Event]:
    before, events = NEVER_SEEN, list[Event]()
    for at, one in enumerate(views):
        after = see(one, before)
        events += changes(NODE, before, after, float(at))
        before = after
    return events


def reasons(*views: NodeView) -> list[Departure]:
    return [event.reason for event in story(*views) if isinstance(event, WentAway)]


class TestReasons:
    """Mutations seen to fail: an operator's drain counted; a starting engine that is lent; restarts not looked at."""

    def test_an_engine_is_lent_while_it_is_ready_or_waits_for_work(self) -> None:
        assert story(view((READY, 0)), view((UNLOADED, 0)), view((STARTING, 0)), view((READY, 0))) == [
            CameBack(NODE, 0.0)
        ]

    def test_a_first_start_is_no_lending_yet(self) -> None:
        assert story(view((STARTING, 0)), view((FAILED, 0)), view((STARTING, 1)), view((READY, 1))) == [
            CameBack(NODE, 3.0)
        ]

    def test_the_owner_takes_one_card_of_two(self) -> None:
        assert story(view((READY, 0), (READY, 0)), view((READY, 0), (GIVEN_BACK, 0))) == [
            CameBack(NODE, 0.0, 2),
            WentAway(NODE, 1.0, Departure.OWNER_RETURNED),
        ]

    def test_the_owner_drains_the_machine(self) -> None:
        assert reasons(view((READY, 0)), view((READY, 0), status="draining")) == [Departure.OWNER_RETURNED]

    def test_the_operator_drains_the_machine(self) -> None:
        assert reasons(view((READY, 0)), view((READY, 0), status="draining", draining=True)) == [Departure.DRAINED]
        assert reasons(view((READY, 0)), view((GIVEN_BACK, 0), status="draining", draining=True)) == [Departure.DRAINED]

    def test_a_ban_is_none_of_its_owners_habits(self) -> None:
        assert reasons(view((READY, 0)), view((READY, 0), status="banned")) == [Departure.BANNED]

    def test_a_stream_ends(self) -> None:
        assert reasons(view((READY, 0)), view((READY, 0), status="offline")) == [Departure.DISCONNECTED]

    def test_a_crash_is_one_loss_however_the_restart_ends(self) -> None:
        assert reasons(view((READY, 0)), view((STARTING, 1)), view((READY, 1))) == [Departure.CRASHED]
        assert reasons(view((READY, 0)), view((READY, 1))) == [Departure.CRASHED]
        assert reasons(view((READY, 0)), view((FAILED, 0))) == [Departure.CRASHED]
        assert reasons(view((READY, 0)), view((STARTING, 1)), view((FAILED, 3))) == [
            Departure.CRASHED,
            Departure.NEVER_READY,
        ]

    def test_after_a_restart_of_the_coordinator_nodes_have_come_and_nothing_was_lost(self) -> None:
        assert see(view((READY, 0), status="offline"), NEVER_SEEN) == SeenNode(
            status="offline", engines=see(view((READY, 0)), NEVER_SEEN).engines
        )
        assert story(view((READY, 0), status="offline"), view((READY, 0))) == [CameBack(NODE, 1.0)]


def gone(node: int, at_s: float) -> WentAway:
    return WentAway(NodeId(f"n{node}"), at_s, Departure.DISCONNECTED)


class TestOwnOutages:
    """Mutations seen to fail: no share; retracted twice; what is noticed after the outage counted."""

    def told(self, *steps: tuple[WentAway, int]) -> list[Event]:
        outages = OwnOutages()
        return [told for event, connected in steps for told in outages.judged(event, connected)]

    def test_one_node_of_many_is_its_own_matter(self) -> None:
        steps = [(gone(node, 1000.0 + node), 100 - node) for node in range(10)]
        assert self.told(*steps) == [event for event, _ in steps]

    def test_a_small_fleet_may_go_home_together(self) -> None:
        steps = [(gone(node, 1000.0), MASS_NODES_MIN - 2 - node) for node in range(MASS_NODES_MIN - 1)]
        assert self.told(*steps) == [event for event, _ in steps]

    def test_half_of_a_fleet_at_once_was_our_line(self) -> None:
        told = self.told(*((gone(node, 1000.0 + node), 9 - node) for node in range(10)))
        losses = [one for one in told if isinstance(one, WentAway) and one.reason is Departure.DISCONNECTED]
        taken_back = [one for one in told if isinstance(one, LossRetracted)]
        assert [(one.node_id, one.at_s) for one in taken_back] == [(one.node_id, one.at_s) for one in losses]
        assert len(losses) == MASS_NODES_MIN
        # Those that were noticed later.
        assert [one.reason for one in told if isinstance(one, WentAway)][-1] is Departure.OUR_OUTAGE

    def test_streams_that_end_one_after_the_other_are_no_outage(self) -> None:
        steps = [(gone(node, 1000.0 + node * (NOTICED_WITHIN_S + 1)), 9 - node) for node in range(10)]
        assert self.told(*steps) == [event for event, _ in steps]

    @pytest.mark.parametrize("late_s", [0.0, NOTICED_WITHIN_S])
    def test_a_stall_of_ours_is_held_against_nobody(self, late_s: float) -> None:
        outages = OwnOutages()
        before, during = gone(1, 1000.0), gone(2, 1012.0)
        assert [*outages.judged(before, 9), *outages.judged(during, 8)] == [before, during]
        assert list(outages.outage(1005.0, 1015.0)) == [LossRetracted(during.node_id, during.at_s)]
        assert list(outages.outage(1005.0, 1015.0)) == []
        late = gone(3, 1015.0 + late_s)
        assert list(outages.judged(late, 7)) == [WentAway(late.node_id, late.at_s, Departure.OUR_OUTAGE)]
        later = gone(4, 1015.0 + NOTICED_WITHIN_S + 1)
        assert list(outages.judged(later, 6)) == [later]
