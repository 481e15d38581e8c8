"""What an owner may see of the verdicts on its node, and what only an administrator may."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.api.testing import FakeClock
from coordinator.api.verdict_desk import VerdictDesk
from coordinator.errors import Reason, SlackwaterError
from coordinator.store.sql import SqlStore
from coordinator.verification.events import Mode
from coordinator.verification.service import Verification
from coordinator.verification.testing import NODE, audit, quiet_hooks
from inference.task import NodeId


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[VerdictDesk]:
    """A desk where `NODE` is quarantined, and a rule in shadow has found more."""
    store = SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}")
    verification = Verification(store, FakeClock(), quiet_hooks())
    running = asyncio.create_task(verification.run())
    desk = VerdictDesk(store, verification)
    assert await desk.set_mode("rescore.length", Mode.SHADOW) == ["rescore.length"]
    verification.tell(audit(0, 0.0, hard="length"))
    verification.tell(audit(1, 3.0, hard="rank", detail={"mean_margin": 0.2}))
    await verification.tell(audit(2, hard="rank", verifier="peer-1", confirms="audit-1"))
    yield desk
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    store.close()


async def test_an_owner_sees_what_counts_and_not_who_accused(desk: VerdictDesk) -> None:
    # Mutation seen to fail: `verifier` shown to everybody; verdicts in shadow shown to everybody.
    newest, older = await desk.of_node(NODE)
    assert (newest.state, older.state, newest.shadow) == ("quarantined", "watch", False)
    (evidence,) = newest.evidence
    assert (evidence.audit_id, evidence.hard, evidence.verifier) == ("audit-1", "rank", "")
    assert evidence.detail == '{"mean_margin": 0.2}'
    assert await desk.of_node(NodeId("other")) == []


async def test_an_appeal_is_the_nodes_or_an_administrators(desk: VerdictDesk) -> None:
    newest = (await desk.of_node(NODE))[0]
    with pytest.raises(SlackwaterError) as refused:
        await desk.appeal_of_node(NodeId("other"), newest.verdict_id)
    assert refused.value.reason is Reason.VERDICT_NOT_FOUND
    assert await desk.appeal_of_node(NODE, newest.verdict_id) == newest
    with pytest.raises(SlackwaterError, match="being measured"):
        await desk.appeal(newest.verdict_id)
    with pytest.raises(SlackwaterError, match="no verdict"):
        await desk.appeal("verdict-0")


async def test_only_a_known_node_has_verdicts_for_an_administrator(desk: VerdictDesk) -> None:
    with pytest.raises(SlackwaterError) as refused:
        await desk.in_full(NODE)
    assert refused.value.reason is Reason.NODE_NOT_FOUND
