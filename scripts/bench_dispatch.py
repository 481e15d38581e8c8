"""What one routing decision costs, by the number of nodes, and what a node costs in memory.

A fleet of six kinds of cards and eight asks runs at about 70 % of its slots; each
decision is one task handed to the scheduler (`TaskSubmitted`: queue, choice,
order), while others end at random, which is not timed. One process, one core, no
network: the real scheduler object.
"""

import gc
import random
import time
import tracemalloc
from typing import Any, Final

from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import Price, Terms
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import Limits
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

SEED: Final = 20261202
DIGEST: Final = ManifestDigest("sha256:" + "0" * 64)
# Slots and tokens a second of one answer, from an old card to a data-centre one.
KINDS: Final = ((4, 25.0), (8, 45.0), (8, 55.0), (16, 60.0), (16, 90.0), (64, 95.0))
ASKS: Final = tuple(Price(micro // 4, micro) for micro in range(400_000, 800_000, 50_000))
CLASSES: Final = (ServiceClass.INTERACTIVE, ServiceClass.INTERACTIVE, ServiceClass.STANDARD, ServiceClass.BATCH)
PROMPT: Final = token_array(range(3, 211))
ANSWER: Final = token_array([7])
LOAD: Final = 0.7
US_MAX: Final = {1_000: 50.0, 100_000: 100.0}
BYTES_MAX: Final = 4096


class Fleet:
    """A scheduler with nodes, and tasks that begin and end on it."""

    def __init__(self, nodes: int) -> None:
        self.random = random.Random(SEED)
        limits = Limits(queue_tasks_max=100_000)
        self.scheduler = Scheduler(limits, Asks(Terms()), first_lease_epoch=1, verified_only=True)
        self.slots = 0
        self.running: list[tuple[TaskId, NodeId, e.ConnectionId]] = []
        self.now = 0.0
        self._tasks = 0
        for number in range(nodes):
            self._connect(number)

    def _connect(self, number: int) -> None:
        slots, tokens_per_second = self.random.choice(KINDS)
        node_id, connection_id = NodeId(f"node-{number:012x}"), e.ConnectionId(number + 1)
        feed = self.scheduler.handle
        feed(
            e.NodeConnected(
                node_id=node_id,
                connection_id=connection_id,
                owner_id=OwnerId(f"owner-{number:012x}"),
                trusted=number % 4 == 0,
                draining=False,
                boot_started_at_ms=0,
                stream_number=0,
            ),
            self.now,
        )
        rate = tokens_per_second * self.random.uniform(0.85, 1.15)
        feed(e.RateMeasured(node_id, DIGEST, rate), self.now)
        feed(e.CapabilityShown(node_id, True), self.now)
        view = e.EngineView(
            engine_id=EngineId(f"engine-{number:x}"),
            manifest_digest=DIGEST,
            sampler_profile="position-hash-v1",
            ready=True,
            slots=slots,
            tokens_per_second=rate,
            ask=self.random.choice(ASKS),
        )
        feed(
            e.NodeReported(
                node_id=node_id,
                connection_id=connection_id,
                engines=(view,),
                accepting=True,
                running=frozenset(),
            ),
            self.now,
        )
        self.slots += slots

    def submit(self) -> float:
        """Hand one task to the scheduler; return the seconds that it took over it."""
        self._tasks += 1
        event = e.TaskSubmitted(self._spec())
        began = time.thread_time()
        commands = self.scheduler.handle(event, self.now)
        took_s = time.thread_time() - began
        for command in commands:
            if isinstance(command, c.Assign):
                self._begin(command)
        return took_s

    def _begin(self, order: c.Assign) -> None:
        """Have an answer begin at once, so that no engine is taken for a late one."""
        self.running.append((order.spec.task_id, order.node_id, order.connection_id))
        first = e.Frame(order.spec.task_id, 1, 0, ANSWER)
        self.scheduler.handle(e.FramesReceived(order.node_id, order.connection_id, (first,)), self.now)

    def end_one(self) -> None:
        """Have one answer end, of two tokens, as its node would say it."""
        place = self.random.randrange(len(self.running))
        self.running[place], self.running[-1] = self.running[-1], self.running[place]
        task_id, node_id, connection_id = self.running.pop()
        feed = self.scheduler.handle
        feed(e.FramesReceived(node_id, connection_id, (e.Frame(task_id, 1, 1, ANSWER),)), self.now)
        feed(
            e.AttemptFinished(
                node_id=node_id,
                connection_id=connection_id,
                task_id=task_id,
                attempt=1,
                token_ids=ANSWER * 2,
                finish_reason=FinishReason.LENGTH,
                statement=None,
            ),
            self.now,
        )

    def _spec(self) -> TaskSpec:
        return TaskSpec(
            task_id=TaskId(f"task-{self._tasks:016x}"),
            tenant_id=TenantId(f"tenant-{self.random.randrange(50)}"),
            kind=TaskKind.GENERATE,
            model="model",
            manifest_digest=DIGEST,
            prompt_ids=PROMPT,
            sampling=Sampling(temperature=0.0),
            max_tokens=2,
            stop_token_ids=(2,),
            vocabulary_size=1000,
            service_class=self.random.choice(CLASSES),
            privacy_class=PrivacyClass.TRUSTED_OWNERS if self.random.random() < 0.1 else PrivacyClass.PUBLIC,
            streaming=True,
        )


def bytes_per_node(nodes: int) -> float:
    """Return what a connected, idle node holds of memory, every Python object counted."""
    gc.collect()
    tracemalloc.start()
    fleet = Fleet(nodes)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(fleet.scheduler.nodes) == nodes, "a node is missing"
    return held / nodes


def us_per_decision(nodes: int, decisions: int) -> dict[str, float]:
    """Return the mean and the 99th percentile of a decision's time, in microseconds, at 70 % load."""
    fleet = Fleet(nodes)
    fill = round(LOAD * fleet.slots)
    # A large fleet is filled by a sample of its slots' work: the index is the same, the levels too.
    for _ in range(min(fill, 200_000)):
        fleet.submit()
    took_s: list[float] = []
    gc.collect()
    gc.freeze()
    for _ in range(decisions):
        fleet.now += 0.001
        took_s.append(fleet.submit())
        fleet.end_one()
    gc.unfreeze()
    took_s.sort()
    return {
        "mean": round(1e6 * sum(took_s) / len(took_s), 1),
        "p99": round(1e6 * took_s[len(took_s) * 99 // 100], 1),
    }


async def run(*, quick: bool) -> dict[str, Any]:
    """Measure; the object has one entry for each node count."""
    counts = (100, 1_000, 10_000) if quick else (100, 1_000, 10_000, 100_000)
    decisions = 2_000 if quick else 20_000
    times = {nodes: us_per_decision(nodes, decisions) for nodes in counts}
    held = bytes_per_node(1_000 if quick else 10_000)
    return {
        "us_per_decision": {str(nodes): time["mean"] for nodes, time in times.items()},
        "us_per_decision_p99": {str(nodes): time["p99"] for nodes, time in times.items()},
        "bytes_per_node": round(held),
        "decisions": decisions,
        "load": LOAD,
        "seed": SEED,
        "met": all(times[nodes]["mean"] <= most for nodes, most in US_MAX.items() if nodes in times)
        and held <= BYTES_MAX,
    }
