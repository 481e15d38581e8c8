"""Tells the churn model what nodes do, and the scheduler what is to be expected; keeps histories in the store."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from coordinator.clock import Clock
from coordinator.fleet.churn import RELOAD_S, Churn, NodeHistory, Outlook
from coordinator.fleet.departures import NEVER_SEEN, OwnOutages, SeenNode, changes, see
from coordinator.fleet.registry import OFFLINE, FleetRegistry, NodeView
from coordinator.scheduler.events import LossesExpected, StayExpected
from coordinator.store.churn_port import ChurnRow, ChurnStore
from coordinator.store.port import StoreError
from inference.task import NodeId
from protos.slackwater.node.v1.node_service_pb2 import NodeState

# A crash of the coordinator forgets so much of what nodes were lent; 700 bytes a node are written each time.
WRITE_INTERVAL_S = 900.0
# Nodes whose hour is new take 0.1 ms each; after so many others have their turn.
NODES_AT_ONCE = 20

Expected = StayExpected | LossesExpected

log = structlog.get_logger()


class ChurnWatch:
    """The churn model of one coordinator, kept up to date. Constructing it blocks: it reads what was kept.

    A start of the coordinator is no event for any node: whoever connects is lent from then on.

    Args:
        on_expected: told what the scheduler should know.
    """

    def __init__(
        self, registry: FleetRegistry, store: ChurnStore, clock: Clock, on_expected: Callable[[Expected], None]
    ) -> None:
        self._registry = registry
        self._store = store
        self._clock = clock
        self._on_expected = on_expected
        self._seen: dict[NodeId, SeenNode] = {}
        self._connected = 0
        # What a node said before its stream ended is not how it is when it comes back.
        self._outdated: dict[NodeId, NodeState | None] = {}
        self._outages = OwnOutages()
        self.churn = Churn(self._now_s(), map(_history, store.churn_histories()))

    def outlook(self, node_id: NodeId) -> Outlook:
        """Return what the fleet list shows of a node."""
        return self.churn.outlook(node_id, self._now_s())

    def outage(self, began_ms: int, ended_ms: int) -> None:
        """Take note that this process stood still meanwhile: streams that ended for it count against nobody."""
        for event in self._outages.outage(began_ms / 1000, ended_ms / 1000):
            self.churn.handle(event)

    async def run(self) -> NoReturn:
        """Follow the fleet for ever; on cancellation write what is known."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look_regularly())
                with self._registry.watch() as watch:
                    while True:
                        for node_id in await watch.changed():
                            view = self._registry.find(node_id)
                            if view is not None:
                                self._take(view)
        finally:
            # The loop is still running while this task is being cancelled.
            await self._write()

    def _take(self, view: NodeView) -> None:
        node_id = view.row.node_id
        before = self._seen.get(node_id, NEVER_SEEN)
        if view.status == OFFLINE:
            self._outdated[node_id] = view.report
        elif self._outdated.get(node_id, view) is view.report:
            return
        after = self._seen[node_id] = see(view, before)
        self._connected += (after.status != OFFLINE) - (before.status != OFFLINE)
        for event in changes(node_id, before, after, self._now_s()):
            for judged in self._outages.judged(event, self._connected):
                self.churn.handle(judged)
        if after.status != OFFLINE:
            self._tell(node_id)

    def _tell(self, node_id: NodeId) -> None:
        self._on_expected(StayExpected(node_id, self.churn.losses_per_h(node_id, self._now_s())))

    async def _look_regularly(self) -> NoReturn:
        """Say what the hour has changed, and write what is known."""
        while True:
            self._on_expected(LossesExpected(self.churn.lost_share(RELOAD_S, self._now_s())))
            connected = [node_id for node_id, seen in self._seen.items() if seen.status != OFFLINE]
            for number, node_id in enumerate(connected):
                self._tell(node_id)
                if number % NODES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(WRITE_INTERVAL_S)
            await self._write()

    async def _write(self) -> None:
        """Write what has changed. What the database refuses is lost unless the node changes again: 15 minutes of it."""
        rows = [_row(history) for history in self.churn.changed_histories(self._now_s())]
        if not rows:
            return
        try:
            await asyncio.to_thread(self._store.put_churn_histories, rows)
        except StoreError as error:
            log.error("churn_write_failed", error=str(error), nodes=len(rows))

    def _now_s(self) -> float:
        return self._clock.now_ms() / 1000


def _history(row: ChurnRow) -> NodeHistory:
    return NodeHistory(row.node_id, row.lent_h, row.lost, row.as_of_ms / 1000)


def _row(history: NodeHistory) -> ChurnRow:
    as_of_ms = round(history.as_of_s * 1000)
    return ChurnRow(node_id=history.node_id, lent_h=history.lent_h, lost=history.lost, as_of_ms=as_of_ms)
