"""How long engines take for what they work on. Pure."""

from collections import defaultdict
from collections.abc import Mapping

from coordinator.scheduler.state import Scheduler
from inference.task import EngineId, NodeId


def busy_s(scheduler: Scheduler, node_id: NodeId) -> Mapping[EngineId, float]:
    """Return after how many seconds each engine of a node has answered what it works on, at the latest.

    Nobody knows when an answer ends by itself, so each counts as long as it may become; what counts of the engine's
    pace is what was measured, with as many answers beside each other as now. Engines without work are left out.
    """
    node = scheduler.nodes.get(node_id)
    if node is None:
        return {}
    tokens: defaultdict[EngineId, int] = defaultdict(int)
    for task_id, attempt in node.tasks.items():
        task = scheduler.tasks[task_id]
        tokens[attempt.engine_id] = max(tokens[attempt.engine_id], task.spec.max_tokens - len(task.received))
    engines = {engine_id: node.placed[engine_id] for engine_id in tokens if engine_id in node.placed}
    return {key: tokens[key] * engine.rate.step_s(engine.running) for key, engine in engines.items()}
