"""Which engine takes a task, and how long anything may take. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coordinator.ledger.asks import Asks
from coordinator.scheduler.events import EngineView
from coordinator.scheduler.records import Node, Task
from coordinator.scheduler.speeds import Speeds
from inference.task import NodeId, ServiceClass

# Precedence of the queue's bands; within a band first come, first served.
BANDS = (ServiceClass.INTERACTIVE, ServiceClass.STANDARD, ServiceClass.BATCH)
# The least ask wins among the engines that are at most this much more crowded than the best. So a cheap node gets up to
# twice the work that its speed would bring it, and no client waits for an answer more than twice as long for its sake.
CROWDING_RATIO_MAX = 2.0

# The owner of the node does not accept such tasks.
NOT_CONSENTED = "refused_consent"
# The node did nothing wrong and may well finish the next attempt.
BLAMELESS = frozenset(
    {
        "drained",
        "stopping",
        "owner_returned",
        "refused_busy",
        "refused_draining",
        NOT_CONSENTED,
        # Its owner came back while the order was on its way.
        "refused_engine_not_ready",
        # Its owner asks for more since then.
        "refused_ask",
    }
)

# The engine does not take another attempt now.
ENGINE_DOWN = frozenset({"owner_returned", "refused_engine_not_ready", "refused_ask"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every wait and every count of the scheduler, in seconds where a unit is missing."""

    # A node that runs attempts speaks at least every second (heartbeat_busy_ms);
    # two lost heartbeats and a little are no accident any more, and leave time to
    # resume elsewhere within 3 s of the last word.
    silence_busy_s: float = 2.4
    # One attempt silent past its first token while others of the node advance.
    stall_s: float = 5.0
    # The same where no other attempt can tell; the agent's own canary is faster.
    stall_alone_s: float = 60.0
    # A first token may take this, plus the prompt at the slowest prefill we accept.
    first_token_s: float = 30.0
    prefill_tokens_per_second_min: float = 20.0
    # An assignment that the node's reports do not show by then was lost.
    assignment_seen_s: float = 10.0
    # A node that failed a task is left alone by this task for so long
    # (the figure Dynamo uses for the same purpose). Not one whose owner came back
    # once: its report says when it is ready again.
    avoid_s: float = 5.0
    # Attempts in a row without a new id, and attempts in all: a task that kills
    # engines must not wander through the whole fleet.
    fruitless_attempts_max: int = 5
    attempts_max: int = 100
    # Waiting for a slot, and waiting while no connected node has the model at all.
    queue_wait_s: float = 60.0
    no_capacity_wait_s: float = 10.0
    # Waiting for an engine that was unloaded: vLLM takes up to four minutes to load and compile a large model.
    wake_wait_s: float = 300.0
    queue_tasks_max: int = 4096
    # Ticks come every 0.1 s; a gap this long means that this process was stopped
    # or starved, and the missed time is nobody's fault.
    sleep_gap_s: float = 0.3


@dataclass(frozen=True, slots=True)
class Candidate:
    node_id: NodeId
    engine: EngineView
    running: int
    # What its owner asks for all of the task that is left, in micro-credits.
    cost_micro: int
    # Tokens a second of one sequence, as far as it is believed.
    speed: float


def candidates(nodes: Iterable[Node], task: Task, asks: Asks, speeds: Speeds) -> Iterator[Candidate]:
    """Yield the engines of these nodes that are up with the task's model, save those that ask more than may be paid."""
    spec, received = task.spec, len(task.received)
    for node in nodes:
        for engine in node.engines.values():
            if engine.ready and engine.manifest_digest == spec.manifest_digest:
                ask = asks.in_force(engine)
                if ask is not None:
                    cost_micro = ask.earned_micro(len(spec.prompt_ids) + received, spec.max_tokens - received)
                    running, speed = node.running(engine.engine_id), speeds.of(node.node_id, engine)
                    yield Candidate(node.node_id, engine, running, cost_micro, speed)


def choose(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the engine with a free slot that asks least, of those whose sequences would each run nearly fastest.

    The measure is sequences over the speed of one, so a card twice as fast takes twice the work for the same ask. What
    asks alike is told apart by it, and ties fall to the smaller node id, so that a replay decides alike.
    """
    free = [candidate for candidate in candidates if candidate.running < candidate.engine.slots]
    least_crowded = min((_crowding(candidate)[0] for candidate in free), default=0.0)
    near = [candidate for candidate in free if _crowding(candidate)[0] <= CROWDING_RATIO_MAX * least_crowded]
    return min(near, key=lambda candidate: (candidate.cost_micro, *_crowding(candidate)), default=None)


def _crowding(candidate: Candidate) -> tuple[float, int, NodeId, str]:
    crowding = (candidate.running + 1) / candidate.speed
    return (crowding, candidate.running, candidate.node_id, candidate.engine.engine_id)
