"""Has nodes hold the models that are asked for: feeds the planner and tells the scheduler what it decides."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

import structlog

from coordinator.clock import Clock
from coordinator.fleet.placing import OpenNode, Placing, Wanted
from coordinator.fleet.registry import FleetRegistry
from coordinator.scheduler.events import ModelsComing, ModelsWanted
from inference.manifest import Manifest
from inference.task import EngineId, ManifestDigest, NodeId

# Models take minutes to come; whoever waits for one sees it that much later at most.
LOOK_INTERVAL_S = 5.0
# Planning is work of Python's, which slows all else down: so many times as long as it took it rests.
RESTS = 9.0
# A node whose hour is new takes the churn model 0.1 ms; after so many others have their turn.
NODES_AT_ONCE = 20

log = structlog.get_logger()


class PlacementWatch:
    """The placement of one coordinator.

    Args:
        expected_lent_s: how long a node is expected to stay.
        busy_s: how long engines of a node take at most for what they work on.
        on_decided: told what the scheduler is to know.
    """

    def __init__(
        self,
        registry: FleetRegistry,
        clock: Clock,
        expected_lent_s: Callable[[NodeId], float],
        busy_s: Callable[[NodeId], Mapping[EngineId, float]],
        on_decided: Callable[[ModelsWanted | ModelsComing], None],
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._expected_lent_s = expected_lent_s
        self._busy_s = busy_s
        self._on_decided = on_decided
        self._placing = Placing()
        self._wanted: Wanted = {}
        self._names: dict[ManifestDigest, str] = {}
        # Models that no engine has ready.
        self._coming: frozenset[ManifestDigest] = frozenset()
        self._asked_cold = asyncio.Event()

    def add_model(self, manifest: Manifest) -> None:
        self._names[manifest.digest] = manifest.name
        self._placing.add_model(manifest.digest, manifest.size_bytes)

    def asked(self, digest: ManifestDigest, tokens: int) -> None:
        """Note that a tenant asks for so many tokens of a model, whatever becomes of it."""
        self._placing.demand.asked(digest, tokens, self._clock.monotonic())
        if digest in self._coming:
            self._asked_cold.set()

    async def run(self) -> NoReturn:
        """Look at the fleet every few seconds, and at once where somebody asks for what is ready nowhere."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            while True:
                began_s = self._clock.monotonic()
                await self._look()
                await asyncio.sleep(RESTS * (self._clock.monotonic() - began_s))
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_INTERVAL_S):
                        await self._asked_cold.wait()
                self._asked_cold.clear()

    async def _follow(self) -> NoReturn:
        with self._registry.watch() as watch:
            while True:
                for node_id in await watch.changed():
                    view = self._registry.find(node_id)
                    if view is not None and view.report is not None:
                        self._placing.saw(node_id, view.report, self._clock.monotonic())

    async def _look(self) -> None:
        views = self._registry.views()
        open_nodes = {}
        for view in views:
            if view.report is not None and any(engine.HasField("open") for engine in view.report.engines):
                node_id = view.row.node_id
                open_nodes[node_id] = OpenNode(self._expected_lent_s(node_id), self._busy_s(node_id))
                if len(open_nodes) % NODES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        if not open_nodes and not self._coming:
            # No engine is open to the fleet: nothing can be placed.
            return
        looked = await asyncio.to_thread(self._placing.look, views, open_nodes, self._clock.monotonic())
        for node_id, models in looked.wanted.items():
            before = dict(self._wanted.get(node_id, ()))
            for engine_id, digest in models:
                if before.get(engine_id) != digest:
                    log.info("model placed", node=node_id, engine=engine_id, model=self._names[digest])
        for event in looked.news(self._wanted):
            self._on_decided(event)
        self._wanted = {**self._wanted, **looked.wanted}
        self._coming = frozenset(looked.waits_s)
