"""The churn model hears what the fleet list hears, and is kept over a restart."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.api.testing import FakeClock
from coordinator.fleet.churn_watch import ChurnWatch, Expected
from coordinator.fleet.registry import FleetRegistry
from coordinator.scheduler.events import LossesExpected, StayExpected
from coordinator.store.churn_port import ChurnRow
from coordinator.store.port import OwnerRow, StoreError
from coordinator.store.sql import SqlStore
from coordinator.store.testing import node_row
from inference.task import OwnerId
from protos.slackwater.common.v1 import capability_pb2 as capability
from protos.slackwater.node.v1.node_service_pb2 import NodeState

HOUR_S = 3600.0
OWNER = OwnerRow(owner_id=OwnerId("o"), name="alice", trusted=False, created_at_ms=1)
ROW = node_row("n", OWNER.owner_id, "attic")


class Fleet:
    """A registry with one node, a clock that is moved by hand, and the watch on them."""

    def __init__(self, store: SqlStore, clock: FakeClock) -> None:
        self.clock = clock
        self.registry = FleetRegistry([OWNER], [ROW])
        self.expected: list[Expected] = []
        self.watch = ChurnWatch(self.registry, store, clock, self.expected.append)
        self.connection = object()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def connect(self) -> None:
        self.connection = object()
        self.registry.connected(ROW.node_id, self.connection, "0.1.0", self.clock.now_ms())
        await self.settle()

    async def report(self, status: "capability.EngineStatus.ValueType") -> None:
        state = NodeState(engines=[capability.Engine(engine_id="e", status=status)])
        self.registry.reported(ROW.node_id, state, self.clock.now_ms())
        await self.settle()

    async def disconnect(self) -> None:
        self.registry.disconnected(ROW.node_id, self.connection)
        await self.settle()

    def observed_h(self) -> float:
        return self.watch.outlook(ROW.node_id).observed_lent_h

    def rate_per_h(self) -> float:
        return self.watch.outlook(ROW.node_id).losses_per_h


@asynccontextmanager
async def running(store: SqlStore, clock: FakeClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(store, clock)
    job = asyncio.create_task(fleet.watch.run())
    await fleet.settle()
    try:
        yield fleet
    finally:
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)


@pytest.fixture
def store(tmp_path: Path) -> SqlStore:
    return SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}")


async def lend(fleet: Fleet, hours: float, then: Callable[[], object]) -> float:
    """Have the node lent for so long, until something happens; return by how much its rate of losses grows."""
    await fleet.connect()
    await fleet.report(capability.ENGINE_STATUS_READY)
    before = fleet.rate_per_h()
    fleet.clock.advance(hours * HOUR_S)
    happened = then()
    if asyncio.iscoroutine(happened):
        await happened
    await fleet.settle()
    return fleet.rate_per_h() - before


async def test_an_owner_who_comes_back_is_a_loss(store: SqlStore) -> None:
    async with running(store, FakeClock()) as fleet:
        assert await lend(fleet, 2.0, lambda: fleet.report(capability.ENGINE_STATUS_GIVEN_BACK)) > 0.001
        fleet.clock.advance(HOUR_S)
        assert fleet.observed_h() == pytest.approx(2.0)


async def test_a_stream_that_ends_is_a_loss_and_an_old_report_is_no_lending(store: SqlStore) -> None:
    """Mutation seen to fail: the report from before the stream's end believed after it."""
    async with running(store, FakeClock()) as fleet:
        assert await lend(fleet, 2.0, fleet.disconnect) > 0.001
        await fleet.connect()
        fleet.clock.advance(5 * HOUR_S)
        await fleet.report(capability.ENGINE_STATUS_GIVEN_BACK)
        assert fleet.observed_h() == pytest.approx(2.0)


async def test_a_drain_by_the_operator_is_none(store: SqlStore) -> None:
    async with running(store, FakeClock()) as fleet:
        drained = replace(ROW, draining=True)
        assert await lend(fleet, 2.0, lambda: fleet.registry.put_node(drained)) < 0.0
        fleet.clock.advance(HOUR_S)
        assert fleet.observed_h() == pytest.approx(2.0)


async def test_a_stream_that_ends_while_we_stood_still_is_none(store: SqlStore) -> None:
    """Mutation seen to fail: the watch is not told."""
    clock = FakeClock()
    async with running(store, clock) as fleet:

        async def stall() -> None:
            await fleet.disconnect()
            fleet.watch.outage(clock.now_ms() - 10_000, clock.now_ms())

        assert await lend(fleet, 2.0, stall) < 0.0


async def test_a_restart_counts_as_nothing_and_forgets_nothing(store: SqlStore) -> None:
    """Mutations seen to fail: nothing written at the end; nothing read at the start."""
    clock = FakeClock()
    async with running(store, clock) as fleet:
        await lend(fleet, 2.0, lambda: None)
        before = fleet.rate_per_h()
    clock.advance(10 * HOUR_S)
    async with running(store, clock) as fleet:
        assert fleet.observed_h() == pytest.approx(2.0)
        assert fleet.rate_per_h() == pytest.approx(before, rel=1e-3)
        await fleet.connect()
        await fleet.report(capability.ENGINE_STATUS_READY)
        clock.advance(HOUR_S)
        assert fleet.observed_h() == pytest.approx(3.0)


async def test_a_database_that_fails_ends_nothing(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rows: list[ChurnRow]) -> None:
        raise StoreError("the disk is full; free some space")

    with capture_logs() as logs:
        async with running(store, FakeClock()) as fleet:
            await lend(fleet, 2.0, lambda: None)
            monkeypatch.setattr(store, "put_churn_histories", refuse)
    assert [entry["nodes"] for entry in logs if entry["event"] == "churn_write_failed"] == [1]


async def test_the_scheduler_is_told_what_to_expect(store: SqlStore) -> None:
    """Mutations seen to fail: a node that comes is not told of; the fleet's share never."""
    clock = FakeClock()
    async with running(store, clock) as fleet:
        assert [one for one in fleet.expected if isinstance(one, LossesExpected)]
        await fleet.connect()
        await fleet.report(capability.ENGINE_STATUS_READY)
        told = [one for one in fleet.expected if isinstance(one, StayExpected)]
        assert told[-1].node_id == ROW.node_id
        calm_per_h = told[-1].losses_per_h
        for _ in range(20):
            clock.advance(1800)
            await fleet.disconnect()
            await fleet.connect()
            await fleet.report(capability.ENGINE_STATUS_READY)
        told = [one for one in fleet.expected if isinstance(one, StayExpected)]
        assert told[-1].losses_per_h > 10 * calm_per_h
