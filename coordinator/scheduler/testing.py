"""Builders for the scheduler's tests: one line of set-up per fact."""

from collections.abc import Iterable, Sequence

from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import Price, Terms
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.records import Attempt, Engine, Node
from coordinator.scheduler.state import Scheduler
from inference.task import (
    EngineId,
    FinishReason,
    ManifestDigest,
    NodeId,
    OwnerId,
    PrivacyClass,
    Sampling,
    ServiceClass,
    TaskId,
    TaskKind,
    TaskSpec,
    TenantId,
    token_array,
)

DIGEST = ManifestDigest("sha256:" + "0" * 64)
STOP_ID = 2
GREEDY = Sampling(temperature=0.0)
VOCABULARY_SIZE = 1000


def task_spec(
    name: str = "task",
    *,
    prompt: Sequence[int] = (10, 11, 12),
    max_tokens: int = 8,
    sampling: Sampling = GREEDY,
    kind: TaskKind = TaskKind.GENERATE,
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
    privacy_class: PrivacyClass = PrivacyClass.PUBLIC,
    streaming: bool = True,
    deadline_s: float | None = None,
    digest: ManifestDigest = DIGEST,
) -> TaskSpec:
    return TaskSpec(
        task_id=TaskId(name),
        tenant_id=TenantId("tenant"),
        kind=kind,
        model="model",
        manifest_digest=digest,
        prompt_ids=token_array(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=(STOP_ID,),
        vocabulary_size=VOCABULARY_SIZE,
        service_class=service_class,
        privacy_class=privacy_class,
        streaming=streaming,
        deadline_s=deadline_s,
    )


def engine_view(
    *,
    slots: int = 4,
    tokens_per_second: float = 100.0,
    ready: bool = True,
    unloaded: bool = False,
    starting: bool = False,
    digest: ManifestDigest = DIGEST,
    ask: Price | None = None,
) -> e.EngineView:
    return e.EngineView(
        engine_id=EngineId("engine"),
        manifest_digest=digest,
        sampler_profile="position-hash-v1",
        ready=ready,
        slots=slots,
        tokens_per_second=tokens_per_second,
        unloaded=unloaded,
        starting=starting,
        ask=ask,
    )


class SchedulerHarness:
    """A scheduler, a clock and connected nodes, driven by hand.

    Connection ids are those of the nodes: the first connection of node "a" is
    found as `connections["a"]`.
    """

    def __init__(
        self, limits: Limits | None = None, *, verified_only: bool = False, micro_per_joule: float = 0.0
    ) -> None:
        self.asks = Asks(Terms())
        self.scheduler = Scheduler(
            limits or Limits(),
            self.asks,
            first_lease_epoch=1,
            verified_only=verified_only,
            micro_per_joule=micro_per_joule,
        )
        self.now = 1000.0
        self.connections: dict[str, e.ConnectionId] = {}
        self._connection_count = 0

    def feed(self, event: e.Event) -> list[c.Command]:
        commands = self.scheduler.handle(event, self.now)
        check_invariants(self.scheduler)
        return commands

    def connect(
        self,
        name: str,
        engine: e.EngineView | None = None,
        *,
        boot_started_at_ms: int = 0,
        stream_number: int = 0,
        trusted: bool = False,
        draining: bool = False,
    ) -> list[c.Command]:
        self._connection_count += 1
        connection_id = self.connections[name] = e.ConnectionId(self._connection_count)
        commands = self.feed(
            e.NodeConnected(
                node_id=NodeId(name),
                connection_id=connection_id,
                owner_id=OwnerId(f"owner of {name}"),
                trusted=trusted,
                draining=draining,
                boot_started_at_ms=boot_started_at_ms,
                stream_number=stream_number,
            )
        )
        return commands + self.report(name, engine or engine_view())

    def report(
        self, name: str, engine: e.EngineView, running: Iterable[tuple[str, int]] = (), *, accepting: bool = True
    ) -> list[c.Command]:
        return self.feed(
            e.NodeReported(
                node_id=NodeId(name),
                connection_id=self.connections[name],
                engines=(engine,),
                accepting=accepting,
                running=frozenset((TaskId(task), attempt) for task, attempt in running),
            )
        )

    def submit(self, spec: TaskSpec) -> list[c.Command]:
        return self.feed(e.TaskSubmitted(spec))

    def frames(self, name: str, attempt: int, first_index: int, *ids: int, task: str = "task") -> list[c.Command]:
        frame = e.Frame(TaskId(task), attempt, first_index, ids)
        return self.feed(e.FramesReceived(NodeId(name), self.connections[name], [frame]))

    def fail(self, name: str, attempt: int, reason: str, task: str = "task") -> list[c.Command]:
        return self.feed(
            e.AttemptFailed(
                node_id=NodeId(name),
                connection_id=self.connections[name],
                task_id=TaskId(task),
                attempt=attempt,
                reason=reason,
            )
        )

    def finish(
        self,
        name: str,
        attempt: int,
        ids: Sequence[int],
        reason: FinishReason = FinishReason.LENGTH,
        task: str = "task",
    ) -> list[c.Command]:
        return self.feed(
            e.AttemptFinished(
                node_id=NodeId(name),
                connection_id=self.connections[name],
                task_id=TaskId(task),
                attempt=attempt,
                token_ids=ids,
                finish_reason=reason,
                statement=None,
            )
        )

    def disconnect(self, name: str) -> list[c.Command]:
        return self.feed(e.NodeDisconnected(NodeId(name), self.connections[name]))

    def pass_time(self, seconds: float, *, alive: Iterable[str] = ()) -> list[c.Command]:
        """Tick ten times a second; nodes in `alive` send a heartbeat before every tick."""
        commands: list[c.Command] = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for name in alive:
                commands += self.feed(e.NodeHeard(NodeId(name), self.connections[name]))
            commands += self.feed(e.Ticked())
        return commands


def check_invariants(scheduler: Scheduler) -> None:
    """Hold the scheduler's collections against each other; an AssertionError names the first that disagree."""
    queued = set(scheduler.queue)
    for task_id, task in scheduler.tasks.items():
        assert (task.attempt is None) == (task_id in queued), f"{task_id} is neither queued nor running, or both"
        assert len(task.received) <= task.spec.max_tokens, f"{task_id} received more than it may"
        assert task.hedge is None or task.attempt is not None, f"{task_id} has a second attempt and no first"
        for attempt in (task.attempt, task.hedge):
            if attempt is not None:
                _check_attempt(scheduler, task_id, attempt)
    for node in scheduler.nodes.values():
        for task_id in node.tasks:
            task = scheduler.tasks[task_id]
            assert node.tasks[task_id] in (task.attempt, task.hedge), f"{node.node_id} holds a stale {task_id}"
        assert node.placed.keys() == node.engines.keys(), f"{node.node_id} has engines that the router does not know"
        for engine in node.placed.values():
            _check_engine(node, engine)
    assert queued <= set(scheduler.tasks), "an ended task is queued"


def _check_attempt(scheduler: Scheduler, task_id: TaskId, attempt: Attempt) -> None:
    node = scheduler.nodes.get(attempt.node_id)
    assert node is not None, f"{task_id} runs on a node that is not connected"
    assert node.connection_id == attempt.connection_id, f"{task_id} runs on an old connection"
    assert node.tasks.get(task_id) is attempt, f"{task_id} is unknown to its node"


def _check_engine(node: Node, engine: Engine) -> None:
    attempts = [attempt for attempt in node.tasks.values() if attempt.engine_id == engine.engine_id]
    assert engine.running == len(attempts), f"{node.node_id} runs another number of answers"
    assert engine.interactive == sum(attempt.interactive for attempt in attempts), "interactive ones are miscounted"
    ahead = sum(attempt.uncached_tokens for attempt in attempts if not attempt.tokens)
    assert engine.prompt_tokens_ahead == ahead, f"{node.node_id} has other prompts ahead"
    assert engine.running <= max(engine.view.slots, 0) or not engine.view.ready, "more than its slots"
    assert not (engine.group and engine.asleep), "an engine is ready and asleep"
