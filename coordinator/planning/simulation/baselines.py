"""Routers as they are elsewhere, to hold ours against: the real scheduler, with nothing but the choice replaced.

Each takes one of the engines with a free slot that may have the task. None looks
at targets or asks, and none waits for a better engine than there is. Queue,
failover, hedging and limits are the scheduler's own. So is what is known of the
engines: the same answers running, the same rates learned.
"""

from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from coordinator.ledger.asks import Asks
from coordinator.planning.simulation.run import MakeScheduler
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.policy import Router
from coordinator.scheduler.records import Choice, Engine, EngineKey, Node, Task, Why
from coordinator.scheduler.state import Scheduler
from coordinator.scheduler.want import Want
from inference.task import NodeId, PrivacyClass

# Of the draws of power-of-two choices.
SEED: Final = 20261203


class Baseline(Router):
    """Takes the engine that `pick` says, of those that may have the task and have a slot free."""

    def choose(
        self,
        task: Task,
        now: float,
        *,
        only: Node | None = None,
        avoiding: bool = True,
        besides: NodeId | None = None,
    ) -> Choice | None:
        if task.spec.only_node is not None:
            return super().choose(task, now, only=only, avoiding=avoiding, besides=besides)
        want = Want.of(task, now, avoiding=avoiding, besides=besides)
        engines = self._able(want)
        if not engines:
            return None
        return self._choice(want, self.pick(engines, want), Why.BEST_EFFORT)

    @abstractmethod
    def pick(self, engines: Sequence[Engine], want: Want) -> Engine:
        """Return one of the engines, of which there is at least one; they are in order of their keys."""

    def _able(self, want: Want) -> list[Engine]:
        spec = want.task.spec
        pool = self._pools.get(spec.manifest_digest)
        if pool is None:
            return []
        public = spec.privacy_class is PrivacyClass.PUBLIC
        return [
            engine
            for _, engine in sorted(pool.ready.items())
            if engine.free and (public or engine.private) and want.accepts(engine.node_id)
        ]


class RoundRobin(Baseline):
    """One after the other; those that are full are passed over."""

    _last: EngineKey | None = None

    def pick(self, engines: Sequence[Engine], want: Want) -> Engine:
        last = self._last
        engine = next((one for one in engines if last is None or one.key > last), engines[0])
        self._last = engine.key
        return engine


class LeastRequests(Baseline):
    """The one with the fewest answers for its slots: a large engine is not full when a small one is."""

    def pick(self, engines: Sequence[Engine], want: Want) -> Engine:
        return min(engines, key=_fullness)


class PowerOfTwo(Baseline):
    """Two are drawn, the emptier one takes it (Mitzenmacher, 2001)."""

    def __init__(self, *known: Any) -> None:
        super().__init__(*known)
        self._random = Random(SEED)

    def pick(self, engines: Sequence[Engine], want: Want) -> Engine:
        return min(self._random.sample(engines, min(2, len(engines))), key=_fullness)


class LeastDrainTime(Baseline):
    """The one that would be done with the task first, by the same predictions as ours."""

    def pick(self, engines: Sequence[Engine], want: Want) -> Engine:
        return min(engines, key=want.done_s)


BASELINES: Final[dict[str, type[Baseline]]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo,
    "least_drain_time": LeastDrainTime,
}


def scheduler_with(router: type[Router]) -> MakeScheduler:
    """Return how a simulation makes its scheduler with such a router."""

    def make(limits: Limits, asks: Asks) -> Scheduler:
        return Scheduler(limits, asks, first_lease_epoch=1, make_router=router)

    return make


def _fullness(engine: Engine) -> float:
    return engine.running / engine.view.slots
