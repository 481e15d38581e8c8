"""Measures what models do on nodes: so many answers at once, while nothing else runs there.

A user's task goes first: as soon as one waits for the model, or comes to the node,
what is being measured is broken off and measured another time. So is what was
disturbed in any other way, our own slowness included: that it could not be
measured says nothing about a node.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import structlog

from coordinator.clock import Clock
from coordinator.fleet.registry import FleetRegistry
from coordinator.ledger.entries import VERIFICATION_TENANT
from coordinator.scheduler import events as e
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.scheduler.records import Node
from coordinator.stated_energy import StatedEnergy, stated_energy
from coordinator.store.port import StoreError
from coordinator.store.verification_port import RateRow, VerificationStore
from coordinator.tasks_port import Finished
from coordinator.verification.events import Use
from coordinator.verification.rates import ANSWER_IDS, KEPT_MS, RatePlan, Subject, TimedAnswer, rate_of
from coordinator.verification.service import Verification
from coordinator.verification.tasks import AuditTasks, ClockedAnswer, NotMeasured
from inference.manifest import Manifest
from inference.task import ManifestDigest, NodeId, PrivacyClass, TaskId, TaskKind, TaskSpec

# Nodes that are measured at once: each sends up to 32 answers, and our own clock must keep up with all of them.
MEASUREMENTS_MAX = 4
LOOK_INTERVAL_S = 1.0
# How long a user's task waits for a slot that a measurement holds.
WATCH_INTERVAL_S = 0.05
# A look that comes this much late means that this process was busy, and so was the clock that it reads.
LATE_S_MAX = 0.25
# Of a build's name, which is the node's to choose.
BUILD_CHARACTERS_MAX = 80

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """A model whose nodes are measured.

    Args:
        prompts: what they are asked; at least one.
        examined: whether canaries are asked of the model: a node answers one before it is measured.
    """

    manifest: Manifest
    prompts: Sequence[Sequence[int]]
    examined: bool


class RateRounds:
    """The measurements of one coordinator. Constructing it blocks: it reads what was measured before, and tells it.

    Args:
        occupied: whether a node does something else that a measurement would disturb, or be disturbed by.
        rng: spreads measurements over time; from the operating system, so that nobody foresees them.
    """

    def __init__(
        self,
        registry: FleetRegistry,
        store: VerificationStore,
        verification: Verification,
        driver: SchedulerDriver,
        tasks: AuditTasks,
        clock: Clock,
        occupied: Callable[[NodeId], bool],
        rng: random.Random,
    ) -> None:
        self._registry = registry
        self._store = store
        self._verification = verification
        self._driver = driver
        self._tasks = tasks
        self._clock = clock
        self._occupied = occupied
        self._rng = rng
        self._models: dict[ManifestDigest, TimedModel] = {}
        self._measuring: set[NodeId] = set()
        since_ms = clock.now_ms() - KEPT_MS
        self._rows: dict[tuple[NodeId, ManifestDigest, int], RateRow] = {}
        rows = [row for row in store.rates() if row.measured_at_ms >= since_ms]
        self._plan = RatePlan(rows)
        for row in rows:
            self._show(row)

    def add_model(self, model: TimedModel) -> None:
        """Have the nodes of a model be measured, unless it makes no ids that could be counted."""
        if model.manifest.kind is TaskKind.GENERATE:
            self._models[model.manifest.digest] = model

    def measuring(self, node_id: NodeId) -> bool:
        """Whether a node is being measured, so that whoever can wait leaves it alone."""
        return node_id in self._measuring

    async def run(self) -> None:
        """Measure for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._forget()
                for subject, streams in self._due():
                    self._measuring.add(subject.node_id)
                    group.create_task(self._take(subject, streams), name="rate")
                await asyncio.sleep(LOOK_INTERVAL_S)

    # --- whom to measure ---------------------------------------------------------------------

    def _due(self) -> list[tuple[Subject, int]]:
        now_ms = self._clock.now_ms()
        due: list[tuple[Subject, int]] = []
        for node in self._driver.scheduler.nodes.values():
            if len(self._measuring) + len(due) >= MEASUREMENTS_MAX:
                break
            if node.tasks or self.measuring(node.node_id) or self._occupied(node.node_id):
                continue
            for subject in self._subjects(node):
                streams = self._plan.streams_due(subject, now_ms)
                if streams is not None and not self._wanted_by_users(node, subject.manifest_digest, frozenset()):
                    due.append((subject, streams))
                    break
        return due

    def _subjects(self, node: Node) -> list[Subject]:
        """Return what a node can be measured with: engines that are up with a model, where it may be used for it."""
        view = self._registry.find(node.node_id)
        if view is None or view.report is None or not node.takes(PrivacyClass.PUBLIC):
            return []
        builds = {one.engine_id: f"{one.kind} {one.version}" for one in view.report.engines}
        subjects = []
        for digest in {engine.manifest_digest for engine in node.engines.values() if engine.ready}:
            if not self._may_be_measured(node.node_id, digest):
                continue
            engines = [one for one in node.engines.values() if one.ready and one.manifest_digest == digest]
            names = sorted({builds.get(engine.engine_id, "") for engine in engines})
            subjects.append(
                Subject(
                    node_id=node.node_id,
                    manifest_digest=digest,
                    engine_build=_short(", ".join(names)),
                    slots=sum(engine.slots for engine in engines),
                )
            )
        return subjects

    def _may_be_measured(self, node_id: NodeId, digest: ManifestDigest) -> bool:
        model = self._models.get(digest)
        if model is None or self._driver.scheduler.standings.use(node_id, digest) > Use.PUBLIC_ONLY:
            return False
        record = self._verification.verdicts.record(node_id, digest)
        return not model.examined or (record is not None and record.audits > 0)

    def _wanted_by_users(self, node: Node, digest: ManifestDigest, ours: AbstractSet[TaskId]) -> bool:
        """Whether a user waits for the model, or the node runs anything but ours."""
        scheduler = self._driver.scheduler
        if any(task_id not in ours for task_id in node.tasks):
            return True
        queued = (scheduler.tasks[task_id].spec for task_id in scheduler.queue)
        return any(spec.manifest_digest == digest and spec.tenant_id != VERIFICATION_TENANT for spec in queued)

    # --- one measurement ---------------------------------------------------------------------

    async def _take(self, subject: Subject, streams: int) -> None:
        try:
            await self._measure(subject, streams)
        except NotMeasured as failure:
            log.info("rate_not_measured", node=subject.node_id, streams=streams, why=str(failure))
            self._plan.failed(subject, streams, self._clock.now_ms())
        except Exception:
            # One measurement must not end the others, nor the coordinator.
            log.exception("rate_failed", node=subject.node_id)
            self._plan.failed(subject, streams, self._clock.now_ms())
        finally:
            self._measuring.discard(subject.node_id)

    async def _measure(self, subject: Subject, streams: int) -> None:
        model = self._models[subject.manifest_digest]
        prompts = [self._rng.choice(model.prompts) for _ in range(streams)]
        specs = self._tasks.to_time(subject.node_id, model.manifest, prompts, ANSWER_IDS)
        answers = await self._undisturbed(subject, specs)
        if answers is None:
            self._plan.disturbed(subject, streams, self._clock.now_ms())
            return
        row = rate_of(subject, [_timed(answer, finished) for answer, finished in answers], self._clock.now_ms())
        try:
            await asyncio.to_thread(self._store.put_rate, row)
        except StoreError as error:
            raise NotMeasured(str(error)) from error
        self._plan.measured(row, self._rng.uniform(1.0, 1.5))
        self._show(row)
        log.info("rate measured", node=row.node_id, streams=streams, tokens_per_second=round(row.tokens_per_second, 1))

    async def _undisturbed(
        self, subject: Subject, specs: Sequence[TaskSpec]
    ) -> list[tuple[ClockedAnswer, Finished]] | None:
        """Return the answers, or None where anything came in between.

        Raises:
            NotMeasured: the node did not give them.
        """
        ours = frozenset(spec.task_id for spec in specs)
        answering = asyncio.create_task(self._tasks.timed(specs, self._clock))
        try:
            looked_at = self._clock.monotonic()
            while not answering.done():
                await asyncio.wait({answering}, timeout=WATCH_INTERVAL_S)
                late_s = self._clock.monotonic() - looked_at - WATCH_INTERVAL_S
                looked_at = self._clock.monotonic()
                node = self._driver.scheduler.nodes.get(subject.node_id)
                wanted = node is not None and self._wanted_by_users(node, subject.manifest_digest, ours)
                if late_s > LATE_S_MAX or wanted:
                    log.info("rate_disturbed", node=subject.node_id, late_s=round(late_s, 3), wanted=wanted)
                    return None
            return answering.result()
        finally:
            # What is done is not disturbed by it.
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    # --- what came of it ---------------------------------------------------------------------

    def _show(self, row: RateRow) -> None:
        self._rows[row.node_id, row.manifest_digest, row.streams] = row
        self._registry.measured(row)
        if row.streams == 1:
            joules = row.joules_per_token if row.energy_method != "none" and row.joules_per_token > 0.0 else None
            self._driver.feed(e.RateMeasured(row.node_id, row.manifest_digest, row.tokens_per_second, joules))

    def _forget(self) -> None:
        """Let go of what was measured too long ago."""
        since_ms = self._clock.now_ms() - KEPT_MS
        for key, row in list(self._rows.items()):
            if row.measured_at_ms < since_ms:
                del self._rows[key]
                self._registry.outdated(row)
                if row.streams == 1:
                    self._driver.feed(e.RateMeasured(row.node_id, row.manifest_digest, None))


def _timed(answer: ClockedAnswer, finished: Finished) -> TimedAnswer:
    assert answer.first_id_at is not None, "an answer that ends for its length has ids"
    energy = stated_energy(finished.statement) if finished.statement else StatedEnergy(0, "none")
    return TimedAnswer(
        ordered_at=answer.ordered_at,
        first_id_at=answer.first_id_at,
        last_id_at=answer.last_id_at,
        ids=len(answer.ids),
        energy=energy,
    )


def _short(text: str) -> str:
    printable = "".join(one if one.isprintable() else " " for one in text)
    return printable[:BUILD_CHARACTERS_MAX]
