"""The driver of verdicts: what is stored before it is acted on, and what a failing database does to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.testing import FakeClock
from coordinator.errors import Reason, SlackwaterError
from coordinator.store.port import StoreError
from coordinator.store.sql import SqlStore
from coordinator.store.verification_port import VerificationBatch
from coordinator.verification.commands import RequestAudit, Verdict
from coordinator.verification.events import NODE_WIDE, AuditKind, Mode, Use, VerdictState
from coordinator.verification.occasions import OCCASION_MS
from coordinator.verification.service import Verification, VerificationHooks
from coordinator.verification.testing import DIGEST, NODE, audit
from inference.task import ManifestDigest, NodeId


class FailingStore(SqlStore):
    """Its next `failures` writes of verification fail."""

    failures = 0
    written = 0

    def record_verification(self, batch: VerificationBatch) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("the disk is full")
        super().record_verification(batch)
        self.written += 1


@dataclass(slots=True)
class Seen:
    """What the hooks were told, and how much was stored at that time."""

    store: FailingStore
    standings: list[tuple[NodeId, ManifestDigest, Use]] = field(default_factory=list)
    audited: list[tuple[NodeId, int]] = field(default_factory=list)
    requests: list[RequestAudit] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    bans: list[NodeId] = field(default_factory=list)

    def notified(self, verdict: Verdict) -> None:
        assert self.store.find_verdict(verdict.verdict_id) is not None, "acted on before it was stored"
        self.verdicts.append(verdict)

    async def banned(self, node_id: NodeId, reason: str) -> None:
        assert "of this owner" in reason
        self.bans.append(node_id)

    def hooks(self) -> VerificationHooks:
        return VerificationHooks(
            on_standing=lambda node_id, digest, use: self.standings.append((node_id, digest, use)),
            on_audited=lambda node_id, good_until_ms: self.audited.append((node_id, good_until_ms)),
            on_request=self.requests.append,
            on_notify=self.notified,
            on_ban=self.banned,
        )


@asynccontextmanager
async def running(store: FailingStore) -> AsyncIterator[tuple[Verification, Seen]]:
    seen = Seen(store)
    service = Verification(store, FakeClock(), seen.hooks())
    task = asyncio.create_task(service.run())
    # So that it has begun, and its end is an end of something.
    await asyncio.sleep(0)
    try:
        yield service, seen
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def store(tmp_path: Path) -> FailingStore:
    return FailingStore(f"sqlite:///{tmp_path / 'coordinator.db'}")


async def quarantined(service: Verification) -> None:
    service.tell(audit(0, hard="rank"))
    await service.tell(audit(1, hard="rank", verifier="peer-1", confirms="audit-0"))
    record = service.verdicts.record(NODE, DIGEST)
    assert record is not None
    assert record.state is VerdictState.QUARANTINED


async def test_a_verdict_is_stored_before_anybody_acts_on_it(store: FailingStore) -> None:
    # Mutation seen to fail: `_act` before `_write`.
    async with running(store) as (service, seen):
        await asyncio.gather(*(service.tell(audit(number)) for number in range(10)))
    assert seen.standings == [(NODE, DIGEST, Use.EVERYTHING)]
    assert [verdict.state for verdict in seen.verdicts] == [VerdictState.OK]
    assert store.written == 1, "ten events, one transaction"


async def test_while_the_database_fails_nothing_is_acted_on_and_nothing_lost(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Mutation seen to fail: `_write` returning True after a StoreError.
    monkeypatch.setattr("coordinator.verification.service.RETRY_S", 0)
    store.failures = 3
    async with running(store) as (service, seen):
        await quarantined(service)
        assert store.failures == 0
        assert [verdict.state for verdict in seen.verdicts] == [VerdictState.WATCH, VerdictState.QUARANTINED]
    assert len(store.audits_of(["audit-0", "audit-1"])) == 2


async def test_a_new_process_tells_the_scheduler_and_asks_again(store: FailingStore) -> None:
    async with running(store) as (service, _):
        await service.tell(audit(0, hard="rank"))
    async with running(store) as (service, seen):
        await service.tell(audit(1))
        assert seen.standings == [(NODE, DIGEST, Use.PUBLIC_ONLY)]
        assert [request.answers for request in seen.requests] == ["audit-0"]


async def test_the_ledger_is_told_until_when_a_node_was_found_good(store: FailingStore) -> None:
    """Mutations seen to fail here: told of challenges too; a hard failure told as good; nothing told at the start."""
    async with running(store) as (service, seen):
        await service.tell(audit(0))
        await service.tell(audit(1, kind=AuditKind.CHALLENGE, manifest_digest=NODE_WIDE))
        await service.tell(audit(2, kind=AuditKind.SCORE))
        await service.tell(audit(3, hard="rank"))
    first_ms = audit(0).at_ms
    assert seen.audited == [(NODE, first_ms), (NODE, 0)]
    async with running(store) as (service, seen):
        assert seen.audited == [(NODE, 0)]
        await service.tell(audit(4))
    assert seen.audited == [(NODE, 0), (NODE, audit(4).at_ms)]


async def test_an_appeal_is_taken_up_once_and_only_of_the_nodes_own_verdict(store: FailingStore) -> None:
    async with running(store) as (service, seen):
        await quarantined(service)
        verdict_id = seen.verdicts[-1].verdict_id
        for node_id, wrong in ((NodeId("other"), verdict_id), (NODE, "verdict-0"), (NODE, "verdict\0")):
            with pytest.raises(SlackwaterError) as unknown:
                await service.appeal(node_id, wrong)
            assert unknown.value.reason is Reason.VERDICT_NOT_FOUND
        row = await service.appeal(NODE, verdict_id)
        assert row.verdict_id == verdict_id
        assert seen.requests[-1].answers == verdict_id
        with pytest.raises(SlackwaterError, match="being measured"):
            await service.appeal(NODE, verdict_id)
        with pytest.raises(SlackwaterError, match="not the one in force"):
            await service.appeal(NODE, seen.verdicts[0].verdict_id)


async def test_a_quarantine_from_before_a_restart_can_be_taken_back(store: FailingStore) -> None:
    """Its evidence is gone, so that an appeal cannot be measured.

    Mutations seen to fail here: the release is not stored; whatever the state.
    """
    async with running(store) as (service, seen):
        await quarantined(service)
        verdict_id = seen.verdicts[-1].verdict_id
    async with running(store) as (service, seen):
        for wrong, reason in (("verdict-0", "wrong"), (verdict_id, ""), (verdict_id, "x" * 201), (verdict_id, "a\nb")):
            with pytest.raises(SlackwaterError):
                await service.release(wrong, reason)
        row = await service.release(verdict_id, "the driver was broken")
        assert (row.state, row.previous) == ("probation", "quarantined")
        assert row.reason == "released by an administrator: the driver was broken"
        assert seen.standings[-1] == (NODE, DIGEST, Use.PUBLIC_ONLY)
        with pytest.raises(SlackwaterError, match="not the one in force"):
            await service.release(verdict_id, "again")
        with pytest.raises(SlackwaterError, match="only a quarantine or a watch"):
            await service.release(row.verdict_id, "again")
    async with running(store) as (service, seen):
        assert seen.standings[-1] == (NODE, DIGEST, Use.PUBLIC_ONLY)


async def test_a_mode_outlives_a_restart_and_a_rule_has_the_name_of_a_kind(store: FailingStore) -> None:
    async with running(store) as (service, _):
        assert await service.set_mode("rescore.rank", Mode.SHADOW) == {"rescore.rank"}
        for rule in ("", "rank", "rescore.", "rescore.x\n", "rescore." + "x" * 60):
            with pytest.raises(SlackwaterError, match="a rule is one of"):
                await service.set_mode(rule, Mode.SHADOW)
    async with running(store) as (service, _):
        assert service.verdicts.shadow_rules() == {"rescore.rank"}
        assert await service.set_mode("rescore.rank", Mode.ACTIVE) == frozenset()


async def test_what_was_told_before_the_end_is_written(store: FailingStore) -> None:
    async with running(store) as (service, _):
        for number in range(250):
            service.tell(audit(number))
    assert len(store.audits_of([f"audit-{number}" for number in range(250)])) == 250


async def test_quarantines_that_repeat_end_in_a_ban(store: FailingStore) -> None:
    async with running(store) as (service, seen):
        for day in range(3):
            at: dict[str, Any] = {"node_id": NodeId(f"node-{day}"), "at_ms": 1 + day * OCCASION_MS, "hard": "rank"}
            service.tell(audit(10 * day, **at))
            await service.tell(audit(10 * day + 1, verifier="peer-1", confirms=f"audit-{10 * day}", **at))
    assert seen.bans == ["node-0", "node-1", "node-2"]
