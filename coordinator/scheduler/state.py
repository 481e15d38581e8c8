"""Which attempt runs where, and what happens when it ends. Pure.

Theory of operation. A *task* is admitted to a queue and leaves it as an
*attempt*: a lease, numbered within the task and fenced by a lease epoch, on one
engine of one connected node. Ids come back in frames, each with its index in
the whole answer, and are delivered in order, once. An attempt ends when its
node says so (finished, failed), is lost (disconnected), is silent, stalls, is
drained, or says something that cannot be true. Whatever the reason, one
function (`_end_attempt`) takes the lease away, keeps a record, and asks
`inference.failover.plan` how the task goes on: back to the head of the queue
with the received ids as part of the prompt, complete, or failed out loud.

Late words of an old attempt do no harm: every message is checked against the
connection, the attempt number and the index, and dropped if it is stale.

Time enters only as the argument `now` (seconds, monotonic); deadlines are
looked at in `Ticked` alone. If ticks themselves were late, this process was
asleep: all clocks are moved forward by the gap, so nobody is blamed for it.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Final, assert_never

from coordinator.ledger.asks import Asks
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler import timeouts, waking
from coordinator.scheduler.claims import contradiction, take_frame
from coordinator.scheduler.coming import Coming
from coordinator.scheduler.limits import BLAMELESS, ENGINE_DOWN, HEDGED, NOT_CONSENTED, Limits
from coordinator.scheduler.policy import Router
from coordinator.scheduler.queue import TaskQueue, age_s
from coordinator.scheduler.records import Attempt, Choice, Node, Quote, Task, Waiting, Wants, Why, wants_of
from coordinator.scheduler.speeds import Speeds
from coordinator.scheduler.standing import Standings
from coordinator.scheduler.stays import Stays
from coordinator.scheduler.targets import BANDS, target_of
from coordinator.scheduler.turnover import Turnover
from coordinator.scheduler.waiting import waiting_for
from coordinator.scheduler.want import PATIENCE
from inference import failover
from inference.task import (
    EngineId,
    FinishReason,
    ManifestDigest,
    NodeId,
    ServiceClass,
    TaskId,
    TaskKind,
    TaskSpec,
)
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope

# Of tasks that want the same engines, so many are tried where the first ones must wait: one that avoids what is free,
# or has little time left, need not keep it from those behind.
TRIED_MAX: Final = 16


class Scheduler:
    """Feed it events in order; carry out the commands in order."""

    def __init__(
        self,
        limits: Limits,
        asks: Asks,
        first_lease_epoch: int,
        *,
        verified_only: bool = False,
        micro_per_joule: float = 0.0,
        make_router: Callable[..., Router] = Router,
    ) -> None:
        self.limits = limits
        self.asks = asks
        self.tasks: dict[TaskId, Task] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.standings = Standings(verified_only)
        self.speeds = Speeds(verified_only)
        self.stays = Stays()
        self.router = make_router(asks, self.standings, self.speeds, self.stays, micro_per_joule)
        self.coming = Coming()
        # Kept while a node is away.
        self._models_wanted: dict[NodeId, tuple[tuple[EngineId, ManifestDigest], ...]] = {}
        self.queue = TaskQueue()
        self._turnover: dict[ManifestDigest, Turnover] = {}
        self._hedges_saved = 0.0
        # Nodes that run something, and so owe a word.
        self._busy: dict[NodeId, Node] = {}
        self._next_lease_epoch = first_lease_epoch
        self._ticked_at: float | None = None
        self._commands: list[c.Command] = []
        self._dispatch_due = False

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        """Take one event; return what is to be done about it, in order."""
        self._commands = []
        match event:
            case e.FramesReceived():
                self._take_frames(event, now)
            case e.NodeHeard():
                self._hear(event.node_id, event.connection_id, now)
            case e.Ticked():
                self._tick(now)
            case e.TaskSubmitted():
                self._submit(event, now)
            case e.TaskCancelled():
                self._cancel(event.task_id, now)
            case e.TaskStopped():
                self._stop(event, now)
            case e.AttemptFinished():
                self._finish_attempt(event, now)
            case e.AttemptFailed():
                self._fail_attempt(event, now)
            case e.NodeConnected():
                self._connect(event, now)
            case e.NodeReported():
                self._take_report(event, now)
            case e.NodeDisconnected():
                self._disconnect(event, now)
            case e.NodeBanned():
                self._ban(event.node_id, now)
            case e.DrainChanged():
                self._drain(event, now)
            case e.StandingChanged():
                self.standings.set(event.node_id, event.manifest_digest, event.use)
                self._end_what_is_not_allowed(event.node_id, now)
            case e.CapabilityShown():
                self.standings.set_shown(event.node_id, event.shown)
                self._end_what_is_not_allowed(event.node_id, now)
            case e.RateMeasured():
                rates = (event.tokens_per_second, event.joules_per_token)
                self.speeds.set(event.node_id, event.manifest_digest, *rates)
                self._refresh(self.nodes.get(event.node_id))
            case e.StayExpected():
                if self.stays.set(event.node_id, event.losses_per_h):
                    self._refresh(self.nodes.get(event.node_id))
            case e.LossesExpected():
                self.stays.lost_share = event.lost_share
            case e.ModelsWanted():
                self._want_models(event)
            case e.ModelsComing():
                self.coming.set(event.waits_s, now)
            case e.AuditedModelsChanged():
                self.standings.audit(event.manifests)
                for node in self.nodes.values():
                    self._refresh(node)
            case e.CoordinatorStopping():
                self._end_all(event.message, now)
            case _:
                assert_never(event)
        if self._dispatch_due:
            self._dispatch(now)
        return self._commands

    def engines_ready(self, digest: ManifestDigest) -> int:
        """Count the engines that could take a task for this model now, when a slot is free, or when they are loaded."""
        return self.router.count(digest)

    # --- tasks -----------------------------------------------------------------------------

    def _submit(self, event: e.TaskSubmitted, now: float) -> None:
        spec = event.spec
        assert spec.task_id not in self.tasks, "task ids are made once"
        task = self.tasks[spec.task_id] = Task(spec=spec, submitted_at=now, queued_at=now)
        if not self.queue:
            # Nobody goes before it.
            choice = self.router.choose(task, now, only=self._only(task))
            if choice is not None:
                self._assign(task, choice, now)
                return
        wait_s = self._wait_s(spec, now)
        batch, most_s = spec.service_class is ServiceClass.BATCH, self.limits.queue_wait_s
        # What waits behind it keeps nobody out.
        if self.queue.count(spec.service_class) >= self.limits.queue_tasks_max:
            retry_after_s = self._retry_after_s(spec, wait_s, now)
            self._fail(spec.task_id, c.TaskFailure.QUEUE_FULL, "the queue is full", retry_after_s)
            return
        coming_s = self._coming_s(task, now)
        if coming_s is not None and coming_s > self.limits.wake_wait_s and not batch:
            message = f"no node has the model {spec.model!r} ready; it is expected on one in {coming_s:.0f} s"
            self._fail(spec.task_id, c.TaskFailure.NO_CAPACITY, message, coming_s)
            return
        if wait_s > most_s and not batch:
            message = f"{wait_s:.0f} s of work wait already, and nothing waits for over {most_s:g} s"
            self._fail(spec.task_id, c.TaskFailure.QUEUE_FULL, message, self._retry_after_s(spec, wait_s, now))
            return
        self.queue.add(task)
        # Nothing has changed for the others.
        self._dispatch_for(spec, now)

    def _wait_s(self, spec: TaskSpec, now: float) -> float:
        """Return how long a task that comes now waits for those that go before it, by how fast slots become free."""
        ahead = self.queue.ahead(spec, now)
        return (ahead + 1) * self._slot_s(spec, now) if ahead else 0.0

    def _retry_after_s(self, spec: TaskSpec, wait_s: float, now: float) -> float:
        """Return when half of those in front are gone: have begun, or have waited for as long as a task may."""
        half_s = wait_s / 2
        middle = self.queue.middle_ahead(spec, now)
        if middle is not None and spec.service_class is not ServiceClass.BATCH:
            half_s = min(half_s, self.tasks[middle].queued_at + self.limits.queue_wait_s - now)
        return max(1.0, half_s)

    def _capacity(self, task: Task, now: float) -> waking.Capacity:
        """Return the best that there is, or is to come, for a task that waits."""
        capacity = self.router.capacity(task, self._only(task))
        if capacity is waking.Capacity.NONE and self.coming.wait_s(task.spec, now) is not None:
            return waking.Capacity.COMING
        return capacity

    def _coming_s(self, task: Task, now: float) -> float | None:
        """Return how long a task waits for its model to come to an engine; None where one has it, or none will."""
        coming_s = self.coming.wait_s(task.spec, now)
        return coming_s if coming_s is not None and self._capacity(task, now) is waking.Capacity.COMING else None

    def _slot_s(self, spec: TaskSpec, now: float) -> float:
        turnover = self._turnover.get(spec.manifest_digest)
        return 0.0 if turnover is None else turnover.slot_s(spec.service_class, now)

    def quote(self, spec: TaskSpec, now: float) -> Quote | None:
        """Say what would become of a task that was submitted now, or None if nobody can serve it. Changes nothing."""
        task = Task(spec=spec, submitted_at=now, queued_at=now)
        only = self._only(task)
        coming_s = self._coming_s(task, now)
        if coming_s is not None:
            # How fast it will be, nobody knows yet.
            return Quote(False, coming_s, coming_s, 0.0)
        if self.router.capacity(task, only) is waking.Capacity.NONE:
            return None
        wait_s = self._wait_s(spec, now)
        choice = self.router.choose(task, now, only=only) if not wait_s else None
        if choice is not None:
            met = choice.why in (Why.MEETS_TARGET, Why.WARM)
            return Quote(met, 0.0, choice.first_token_s, choice.token_s, choice.node_id)
        slot_s = wait_s or self._slot_s(spec, now)
        return self.router.quote_waiting(task, now, slot_s)

    def waiting_for(self, task_id: TaskId, now: float) -> Waiting | None:
        """Say why a task is in the queue; None where it is not. Changes nothing."""
        task = self.tasks.get(task_id)
        if task is None or task.attempt is not None:
            return None
        reason = waiting_for(task, self._capacity(task, now), self._only(task), self.router, now)
        return Waiting(reason, now - task.queued_at)

    def _cancel(self, task_id: TaskId, now: float) -> None:
        task = self.tasks.get(task_id)
        if task is not None:
            self._close_attempts(task, "cancelled", now)
            self._fail(task_id, c.TaskFailure.TASK_CANCELLED, "the task was cancelled")

    def _stop(self, event: e.TaskStopped, now: float) -> None:
        task = self.tasks.get(event.task_id)
        if task is None:
            return  # It ended in the same moment; the follower has cut the text already.
        attempt = task.attempt
        self._close_attempts(task, "stopped", now)
        self._complete(task, FinishReason.STOP, event.token_count, attempt)

    def _end_all(self, message: str, now: float) -> None:
        for task in list(self.tasks.values()):
            self._close_attempts(task, "coordinator_stopping", now)
            self._fail(task.spec.task_id, c.TaskFailure.COORDINATOR_STOPPING, message)

    def _fail(self, task_id: TaskId, failure: c.TaskFailure, message: str, retry_after_s: float | None = None) -> None:
        task = self.tasks.pop(task_id)
        assert task.attempt is None, "an attempt outlived its task"
        self.queue.remove(task.spec.task_id)
        self._commands.append(
            c.FailTask(
                task_id=task_id,
                failure=failure,
                message=message,
                completion_tokens=len(task.received),
                retry_after_s=retry_after_s,
            )
        )

    def _complete(
        self,
        task: Task,
        reason: FinishReason,
        tokens: int,
        attempt: Attempt | None,
        finished: e.AttemptFinished | None = None,
    ) -> None:
        del self.tasks[task.spec.task_id]
        self.queue.remove(task.spec.task_id)
        self._commands.append(
            c.CompleteTask(
                task_id=task.spec.task_id,
                finish_reason=reason,
                completion_tokens=tokens,
                output_ids=task.received,
                attempt=attempt.number if attempt else None,
                node_id=attempt.node_id if attempt else None,
                statement=finished.statement if finished else None,
                embedding=finished.embedding if finished else b"",
                scores=finished.scores if finished else (),
            )
        )

    # --- attempts --------------------------------------------------------------------------

    def _take_frames(self, event: e.FramesReceived, now: float) -> None:
        if not self._hear(event.node_id, event.connection_id, now):
            return
        connection_id = event.connection_id
        for frame in event.frames:
            task = self.tasks.get(frame.task_id)
            if task is None:
                continue
            attempt = task.attempt
            # As Task.running, without a call for each frame.
            if attempt is None or attempt.number != frame.attempt or attempt.connection_id != connection_id:
                attempt = task.hedge and task.running(frame.attempt, connection_id)
                if attempt is None:
                    continue
            taken = take_frame(task, attempt, frame, now)
            if isinstance(taken, c.Deliver):
                self._commands.append(taken)
                if not attempt.began_tokens:
                    self.router.first_token(self.nodes[attempt.node_id], attempt, now)
                    self._settle_hedge(task, attempt, now)
            elif taken:
                self._end_attempt(task, attempt, taken, now)

    def _settle_hedge(self, task: Task, winner: Attempt, now: float) -> None:
        """Have the attempt that answered first go on alone."""
        if task.hedge is not None:
            loser = task.attempt if winner is task.hedge else task.hedge
            assert loser is not None, "a hedge stands beside another attempt"
            self._close_attempt(task, loser, HEDGED, now)

    def _finish_attempt(self, event: e.AttemptFinished, now: float) -> None:
        self._hear(event.node_id, event.connection_id, now)
        task = self.tasks.get(event.task_id)
        attempt = task.running(event.attempt, event.connection_id) if task else None
        if task is None or attempt is None:
            return
        lie = contradiction(task, attempt, event)
        if lie:
            self._end_attempt(task, attempt, lie, now, over_at_node=True)
            return
        self._close_attempt(task, attempt, "finished", now, statement=event.statement, over_at_node=True)
        self._complete(task, event.finish_reason, len(task.received), attempt, event)

    def _fail_attempt(self, event: e.AttemptFailed, now: float) -> None:
        self._hear(event.node_id, event.connection_id, now)
        task = self.tasks.get(event.task_id)
        attempt = task.running(event.attempt, event.connection_id) if task else None
        if task is not None and attempt is not None:
            if event.reason in ENGINE_DOWN:
                # Its report says so in a moment; until then nobody else is sent there.
                node = self.nodes[event.node_id]
                node.engine_down(attempt.engine_id)
                self._refresh(node)
            self._end_attempt(task, attempt, event.reason, now, over_at_node=True)

    def _end_attempt(
        self, task: Task, attempt: Attempt, outcome: str, now: float, *, over_at_node: bool = False
    ) -> None:
        """Take the lease away and let the task go on as failover says."""
        self._close_attempt(task, attempt, outcome, now, over_at_node=over_at_node)
        task.first_failure = task.first_failure or outcome
        if outcome not in BLAMELESS:
            task.fruitless = 0 if attempt.tokens else task.fruitless + 1
        task.struck(attempt.node_id, now, self.limits.avoid_s, engine_down=outcome in ENGINE_DOWN)
        if outcome == NOT_CONSENTED:
            task.refused_by.add(attempt.node_id)
        if task.attempt is not None:
            return  # The one beside it goes on.
        next_step = failover.plan(task.spec, task.received)
        match next_step:
            case failover.Complete():
                self._complete(task, next_step.finish_reason, len(task.received), attempt)
            case failover.MigrationImpossible():
                self._fail(task.spec.task_id, c.TaskFailure.MIGRATION_IMPOSSIBLE, next_step.reason)
            case failover.Begin():
                self._requeue(task, next_step, now)
            case _:
                assert_never(next_step)

    def _requeue(self, task: Task, next_step: failover.Begin, now: float) -> None:
        limits = self.limits
        if task.fruitless >= limits.fruitless_attempts_max or task.attempts_made >= limits.attempts_max:
            message = f"{task.attempts_made} attempts failed, the first with {task.first_failure}"
            self._fail(task.spec.task_id, c.TaskFailure.ATTEMPTS_EXHAUSTED, message)
            return
        if next_step.first_index == 0 and task.received:
            del task.received[:]
            self._commands.append(c.Discard(task.spec.task_id))
        task.queued_at = now
        self.queue.add(task, again=True)
        self._dispatch_due = True

    def _close_attempts(self, task: Task, outcome: str, now: float) -> None:
        for attempt in (task.hedge, task.attempt):
            if attempt is not None:
                self._close_attempt(task, attempt, outcome, now)

    def _close_attempt(
        self,
        task: Task,
        attempt: Attempt,
        outcome: str,
        now: float,
        *,
        statement: SignedEnvelope | None = None,
        over_at_node: bool = False,
    ) -> None:
        """Free the slot, keep the record, and tell a node that is still there."""
        if attempt is task.attempt:
            task.attempt = task.hedge
        task.hedge = None
        node = self.nodes.get(attempt.node_id)
        if node is not None and node.connection_id == attempt.connection_id:
            self.router.ended(node, attempt)
            del node.tasks[task.spec.task_id]
            if not node.tasks:
                del self._busy[node.node_id]
            if not over_at_node:
                self._commands.append(c.CancelAttempt(attempt.connection_id, task.spec.task_id, attempt.number))
        self.queue.charge(task.spec.tenant_id, attempt.tokens)
        whole = outcome in ("finished", "stopped")
        self._turnover[task.spec.manifest_digest].ended(now - attempt.started_at, whole=whole)
        self._commands.append(
            c.RecordAttempt(
                task_id=task.spec.task_id,
                attempt=attempt.number,
                node_id=attempt.node_id,
                lease_epoch=attempt.lease_epoch,
                first_index=attempt.first_index,
                delivered_tokens=attempt.tokens,
                outcome=outcome,
                statement=statement,
                duration_s=now - attempt.started_at,
                ask=attempt.ask,
                choice=attempt.choice,
                first_token_s=attempt.first_token_s,
            )
        )
        self._dispatch_due = True

    # --- nodes -----------------------------------------------------------------------------

    def _hear(self, node_id: NodeId, connection_id: e.ConnectionId, now: float) -> bool:
        """Note a sign of life; return whether it came over the node's current connection."""
        node = self.nodes.get(node_id)
        if node is None or node.connection_id != connection_id:
            return False
        node.heard_at = now
        if node.silent:
            node.silent = False
            self._refresh(node)
            # It may still run what was taken from it in the meantime.
            self._send_desired(node)
        return True

    def _connect(self, event: e.NodeConnected, now: float) -> None:
        old = self.nodes.get(event.node_id)
        if old is not None:
            same_start = event.boot_started_at_ms == old.boot_started_at_ms
            reason = c.CloseReason.REPLACED if same_start else c.CloseReason.SUPERSEDED
            # A stream that was given up may reach us after the one that took its place.
            if (event.boot_started_at_ms, event.stream_number) < (old.boot_started_at_ms, old.stream_number):
                self._commands.append(c.CloseConnection(event.connection_id, reason))
                return
            self._commands.append(c.CloseConnection(old.connection_id, reason))
            self._forget(old, reason.value, now)
        self.nodes[event.node_id] = node = Node(
            node_id=event.node_id,
            owner_id=event.owner_id,
            trusted=event.trusted,
            connection_id=event.connection_id,
            boot_started_at_ms=event.boot_started_at_ms,
            stream_number=event.stream_number,
            draining=event.draining,
            heard_at=now,
        )
        self._send_desired(node)

    def _take_report(self, event: e.NodeReported, now: float) -> None:
        if not self._hear(event.node_id, event.connection_id, now):
            return
        node = self.nodes[event.node_id]
        node.engines = {engine.engine_id: engine for engine in event.engines}
        node.accepting = event.accepting
        for task_id, attempt in list(node.tasks.items()):
            if (task_id, attempt.number) in event.running:
                attempt.seen = True
            elif attempt.seen or now - attempt.started_at > self.limits.assignment_seen_s:
                # Its end would have come before this report, had the node sent one.
                self._end_attempt(self.tasks[task_id], attempt, "lost_by_node", now)
        wanted = {(task_id, attempt.number) for task_id, attempt in node.tasks.items()}
        # Said again until the report agrees: a message may have been lost. An agent
        # that stops by itself hears it in vain, a few times.
        unheard = waking.settle_wanted(node)
        self._refresh(node)
        unheard |= any(
            (engine := node.engines.get(engine_id)) and engine.heard is not None and digest not in engine.heard
            for engine_id, digest in self._models_wanted.get(node.node_id, ())
        )
        if event.running - wanted or event.accepting == node.draining or unheard:
            self._send_desired(node)

    def _disconnect(self, event: e.NodeDisconnected, now: float) -> None:
        node = self.nodes.get(event.node_id)
        if node is not None and node.connection_id == event.connection_id:
            self._forget(node, "stream_lost", now)

    def _ban(self, node_id: NodeId, now: float) -> None:
        node = self.nodes.get(node_id)
        if node is not None:
            self._commands.append(c.CloseConnection(node.connection_id, c.CloseReason.BANNED))
            self._forget(node, "banned", now)

    def _forget(self, node: Node, outcome: str, now: float) -> None:
        # Removed first, so that no task of this node is placed on it again.
        del self.nodes[node.node_id]
        self._busy.pop(node.node_id, None)
        self.router.forget(node)
        for task_id, attempt in list(node.tasks.items()):
            self._end_attempt(self.tasks[task_id], attempt, outcome, now)

    def _drain(self, event: e.DrainChanged, now: float) -> None:
        node = self.nodes.get(event.node_id)
        if node is None or node.draining == event.draining:
            return
        node.draining = event.draining
        self._refresh(node)
        for task_id, attempt in list(node.tasks.items()) if event.draining else ():
            self._end_attempt(self.tasks[task_id], attempt, "drained", now)
        self._send_desired(node)

    def _want_models(self, event: e.ModelsWanted) -> None:
        self._models_wanted[event.node_id] = event.models
        node = self.nodes.get(event.node_id)
        if node is not None:
            self._send_desired(node)

    def _refresh(self, node: Node | None) -> None:
        """Look again at what a node may be given, and for tasks that wait for it."""
        if node is not None:
            self.router.refresh(node)
            self._dispatch_due = True

    def _end_what_is_not_allowed(self, node_id: NodeId, now: float) -> None:
        node = self.nodes.get(node_id)
        self._refresh(node)
        for task_id, attempt in list(node.tasks.items()) if node else ():
            task = self.tasks[task_id]
            if not self.standings.allows(node_id, task.spec):
                self._end_attempt(task, attempt, "standing_lost", now)

    def _send_desired(self, node: Node) -> None:
        wanted = tuple((task_id, attempt.number) for task_id, attempt in node.tasks.items())
        models = self._models_wanted.get(node.node_id, ())
        engines = tuple(sorted(node.wanted))
        self._commands.append(c.SendDesired(node.connection_id, node.draining, wanted, engines, models))

    # --- time ------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        gap = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        if gap > self.limits.sleep_gap_s:
            timeouts.forgive(self.nodes.values(), self.tasks.values(), gap, now)
        for node in list(self._busy.values()):
            if timeouts.is_silent(node, now, self.limits):
                node.silent = True
                self._refresh(node)
                for task_id, attempt in list(node.tasks.items()):
                    self._end_attempt(self.tasks[task_id], attempt, "node_silent", now)
            for task_id in timeouts.stalled(node, now, self.limits):
                self._end_attempt(self.tasks[task_id], node.tasks[task_id], "stalled", now)
        self._look_for_deadlines(now)
        self.router.look_at_reserves()
        self._dispatch_due = self._dispatch_due or len(self.queue) > 0

    def _look_for_deadlines(self, now: float) -> None:
        # The fleet is looked at once for all queued tasks that want the same: there may be thousands.
        capacities: dict[tuple[Wants, frozenset[NodeId]], waking.Capacity] = {}
        retries_s: dict[tuple[Wants, ServiceClass], float] = {}
        for task in list(self.tasks.values()):
            deadline_s = task.spec.deadline_s
            if deadline_s is not None and now - task.submitted_at > deadline_s:
                self._close_attempts(task, "deadline_exceeded", now)
                message = f"the answer was not complete after {deadline_s:g} s"
                self._fail(task.spec.task_id, c.TaskFailure.DEADLINE_EXCEEDED, message)
            elif task.attempt is None:
                wants = (wants_of(task.spec), frozenset(task.refused_by))
                if wants not in capacities:
                    capacities[wants] = self._capacity(task, now)
                self._look_at_waiting(task, capacities[wants], retries_s, now)
            elif task.hedge is None and task.attempt.interactive and not task.attempt.tokens:
                self._look_at_late(task, task.attempt, now)

    def _look_at_waiting(
        self, task: Task, capacity: waking.Capacity, retries_s: dict[tuple[Wants, ServiceClass], float], now: float
    ) -> None:
        spec = task.spec
        failure = timeouts.queue_timeout(task, capacity, now, self.limits)
        if failure is not None:
            retry_after_s = timeouts.RETRY_AFTER_S
            if capacity is waking.Capacity.READY:
                alike = (wants_of(spec), spec.service_class)
                if alike not in retries_s:
                    retries_s[alike] = self._retry_after_s(spec, self._wait_s(spec, now), now)
                retry_after_s = retries_s[alike]
            self._fail(spec.task_id, *failure, retry_after_s)
            return
        limit_s = age_s(task)
        if limit_s is not None and now - task.queued_at > limit_s:
            self.queue.move_up(task)

    def _look_at_late(self, task: Task, attempt: Attempt, now: float) -> None:
        """Have another engine answer too, where the first token is later than 19 of 20 would be."""
        choice, spec = attempt.choice, task.spec
        late_s = max(choice.tail * choice.first_token_s, PATIENCE * target_of(spec).first_token_s)
        if now - attempt.started_at <= late_s or self._hedges_saved < 1.0 or spec.kind is not TaskKind.GENERATE:
            return
        other = self.router.choose(task, now, besides=attempt.node_id)
        if other is not None:
            self._hedges_saved -= 1.0
            task.hedge = self._begin(task, replace(other, why=Why.HEDGE), now)

    # --- placement -------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        """Place every queued task that fits: by band, then who was served least, then what is due first."""
        self._dispatch_due = False
        if not self.queue:
            return
        waiting: dict[Wants, Task] = {}
        for band in BANDS:
            for wants in self.queue.wants(band):
                self._dispatch_alike(band, wants, waiting, now)
        for wants, task in waiting.items():
            self._wake(task, self.queue.waiting(wants))

    def _dispatch_for(self, spec: TaskSpec, now: float) -> None:
        """Place a task that has just come, if its turn comes and it fits."""
        wants, waiting = wants_of(spec), dict[Wants, Task]()
        self._dispatch_alike(spec.service_class, wants, waiting, now)
        if wants in waiting:
            self._wake(waiting[wants], self.queue.waiting(wants))

    def _dispatch_alike(self, band: ServiceClass, wants: Wants, waiting: dict[Wants, Task], now: float) -> None:
        """Place what fits of the tasks of a band that want the same; note one of those that wait."""
        placed = True
        while placed:
            placed = False
            for task_id in islice(self.queue.in_turn(band, wants), TRIED_MAX):
                task = self.tasks[task_id]
                chosen = self.router.choose(task, now, only=self._only(task))
                if chosen is not None:
                    self.queue.remove(task_id)
                    self._assign(task, chosen, now)
                    # Whose turn it is may have changed.
                    placed = True
                    break
                # A task that only avoids what is free leaves it to others, and needs no other engine loaded.
                if not task.avoid_until or self.router.choose(task, now, only=self._only(task), avoiding=False) is None:
                    waiting.setdefault(wants, task)
                if not self.router.has_free_slot(task.spec):
                    break

    def _only(self, task: Task) -> Node | None:
        only = task.spec.only_node
        return None if only is None else self.nodes.get(only)

    def _wake(self, task: Task, count: int) -> None:
        """Ask for unloaded engines, where tasks like this one wait and those coming up do not do."""
        while (engine := self.router.engine_to_wake(task, self._only(task), count)) is not None:
            node = self.nodes[engine.node_id]
            node.wanted.add(engine.engine_id)
            self.router.refresh(node)
            self._send_desired(node)

    def _assign(self, task: Task, choice: Choice, now: float) -> None:
        task.attempt = self._begin(task, choice, now)
        if task.attempt.interactive:
            limits = self.limits
            self._hedges_saved = min(limits.hedges_saved_max, self._hedges_saved + limits.hedge_share)

    def _begin(self, task: Task, choice: Choice, now: float) -> Attempt:
        """Give a task to an engine; return the attempt."""
        node = self.nodes[choice.node_id]
        view = node.engines[choice.engine_id]
        spec = task.spec
        begin = failover.plan(spec, task.received)
        assert isinstance(begin, failover.Begin), "only a task with something left to run is queued"
        task.attempts_made += 1
        attempt = Attempt(
            number=task.attempts_made,
            lease_epoch=self._next_lease_epoch,
            node_id=node.node_id,
            connection_id=node.connection_id,
            engine_id=choice.engine_id,
            first_index=begin.first_index,
            started_at=now,
            progressed_at=now,
            prompt_tokens=len(begin.prompt_ids),
            ask=view.ask,
            choice=choice,
            interactive=spec.service_class is ServiceClass.INTERACTIVE,
        )
        self._next_lease_epoch += 1
        self.router.began(node, task, attempt, now)
        self._turnover.setdefault(spec.manifest_digest, Turnover()).began(spec.service_class, now)
        self.queue.charge(spec.tenant_id, attempt.prompt_tokens)
        node.tasks[spec.task_id] = attempt
        self._busy[node.node_id] = node
        self._commands.append(
            c.Assign(
                node_id=node.node_id,
                connection_id=node.connection_id,
                engine_id=attempt.engine_id,
                sampler_profile=view.sampler_profile,
                spec=spec,
                attempt=attempt.number,
                lease_epoch=attempt.lease_epoch,
                prompt_ids=begin.prompt_ids,
                max_tokens=begin.max_tokens,
                first_index=begin.first_index,
                ask=attempt.ask,
                choice=choice,
            )
        )
        return attempt
