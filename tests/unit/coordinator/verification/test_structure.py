"""A node that contradicts itself is told to the verdicts, and all else of an attempt goes its way."""

from dataclasses import replace
from typing import cast

import pytest

from coordinator.api.testing import FakeClock
from coordinator.ledger.settlement import UNPAID_OUTCOMES
from coordinator.scheduler.testing_driver import FakeRecords
from coordinator.store.port import AttemptRow
from coordinator.verification.events import NODE_WIDE, AuditKind, AuditMeasured, Event
from coordinator.verification.service import Verification
from coordinator.verification.structure import WatchedRecords
from inference.task import NodeId, OwnerId, TaskId

ROW = AttemptRow(
    task_id=TaskId("task"),
    attempt=2,
    node_id=NodeId("liar"),
    lease_epoch=1,
    first_index=0,
    delivered_tokens=5,
    outcome="finished",
    statement=None,
    energy_mj=None,
    energy_method=None,
    started_at_ms=0,
    ended_at_ms=0,
)


class Told:
    """In place of the verdicts."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def tell(self, event: Event) -> None:
        self.events.append(event)


def watched() -> tuple[WatchedRecords, FakeRecords, Told]:
    records, told = FakeRecords(), Told()
    return WatchedRecords(records, cast(Verification, told), FakeClock(), lambda _: OwnerId("owner")), records, told


@pytest.mark.parametrize("outcome", sorted(UNPAID_OUTCOMES))
def test_every_contradiction_is_a_hard_failure_of_the_node_as_a_whole(outcome: str) -> None:
    """Mutation seen to fail here: `row.outcome in LIES`, which leaves out a statement that is not about its order."""
    watch, records, told = watched()
    row = replace(ROW, outcome=outcome)
    watch.add_attempt(row)
    [event] = told.events
    assert isinstance(event, AuditMeasured)
    assert (event.node_id, event.manifest_digest, event.kind) == ("liar", NODE_WIDE, AuditKind.STRUCTURE)
    assert (event.hard, event.audit_id, event.log_evidence) == (outcome, "task.2.structure", 0.0)
    assert records.attempts == [row]


@pytest.mark.parametrize("outcome", ["finished", "stopped", "stream_lost", "owner_returned", "node_silent"])
def test_whatever_an_honest_node_may_come_to_is_told_to_nobody(outcome: str) -> None:
    watch, records, told = watched()
    watch.add_attempt(replace(ROW, outcome=outcome))
    assert told.events == []
    assert len(records.attempts) == 1
