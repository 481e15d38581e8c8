"""Which engine takes a task: the cheapest that keeps what the task's class is promised. Pure.

For every engine that could take it, the router predicts when the first token
comes and how fast the others follow, from what it has measured of the engine
(rates.py) and what it has put on it, the prompts sent since the last report
included. Of the engines that meet the target with a margin the cheapest is
chosen, and of equally cheap ones the one that is done first; cost is the ask, the
energy as the operator weighs it, and what is lost with engines that will not
stay until the answer is complete. Where an engine
could meet the target and none does now, the task waits, for half of the time
that its target leaves; after that, or where none ever could, it goes to the
engine that is done first. So a slow card gets no work for asking little, a
cheap one all that it can do in time, and what is too much for the cheap ones
spills over to the dear ones.
"""

import math
from collections.abc import Iterable
from itertools import chain
from typing import Final

from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import TOKENS_PER_PRICE
from coordinator.scheduler.affinity import Affinity
from coordinator.scheduler.engine_groups import Pool
from coordinator.scheduler.records import Attempt, Choice, Engine, Group, Node, Offer, Quote, Task, Why
from coordinator.scheduler.reserve import reserve_slots, room
from coordinator.scheduler.speeds import Speeds
from coordinator.scheduler.standing import Standings
from coordinator.scheduler.stays import Stays
from coordinator.scheduler.waking import Capacity
from coordinator.scheduler.want import MARGIN, READERS_TOKEN_S, Groups, Want
from coordinator.verification.events import Use
from inference.task import ManifestDigest, NodeId, PrivacyClass, ServiceClass, TaskSpec

_Engines = Iterable[Engine]

# An engine that knows half of a prompt or more saves its time, which is worth a little.
WARM_COST_RATIO_MAX: Final = 1.1
# Answers too short to time.
PACE_TOKENS_MIN: Final = 8
# vLLM starts a small model in about a minute; nobody has measured how long this one takes.
WAKE_S: Final = 60.0
# Until a reserve is looked at again, in a tenth of a second, so many other answers begin at most.
ROOM_MAX: Final = 1000


class Router:
    """Knows where every engine stands, and chooses. The scheduler tells it of each change.

    Args:
        standings, speeds, stays, asks: shared with the scheduler, which changes them.
        micro_per_joule: what the operator adds to the ask for energy and carbon.
    """

    def __init__(
        self, asks: Asks, standings: Standings, speeds: Speeds, stays: Stays, micro_per_joule: float = 0.0
    ) -> None:
        self._asks = asks
        self._standings = standings
        self._speeds = speeds
        self._stays = stays
        self._micro_per_joule = micro_per_joule
        self._affinity = Affinity()
        self._pools: dict[ManifestDigest, Pool] = {}

    # --- what there is ---------------------------------------------------------------------

    def refresh(self, node: Node) -> None:
        """Look again at what a node may be given, after anything about it has changed."""
        for engine_id in [engine_id for engine_id in node.placed if engine_id not in node.engines]:
            self._remove(node.placed.pop(engine_id))
        for engine_id, view in node.engines.items():
            rate = self._speeds.rate(node.node_id, view)
            engine = node.placed.get(engine_id)
            if engine is None:
                engine = node.placed[engine_id] = Engine(node.node_id, view, rate)
                _count(engine, node)
            else:
                self._remove(engine)
                engine.view, engine.rate = view, rate
            self._place(node, engine)

    def forget(self, node: Node) -> None:
        """Forget a node that is not connected any more."""
        for engine in node.placed.values():
            self._remove(engine)
        node.placed.clear()

    def count(self, digest: ManifestDigest) -> int:
        """Return how many engines could take a public task for a model, now or once they are loaded."""
        pool = self._pools.get(digest)
        return pool.count() if pool else 0

    def _place(self, node: Node, engine: Engine) -> None:
        view = engine.view
        ask = self._asks.in_force(view)
        use = self._standings.use(node.node_id, view.manifest_digest)
        if not node.takes_work or ask is None or use > Use.PUBLIC_ONLY:
            return
        pool = self._pools.setdefault(view.manifest_digest, Pool())
        engine.private = node.trusted and use is Use.EVERYTHING
        if view.ready:
            joules = self._speeds.joules_per_token(node.node_id, view.manifest_digest)
            energy_micro = round(self._micro_per_joule * joules * TOKENS_PER_PRICE)
            pool.add(engine, ask, energy_micro, self._stays.losses_per_h(node.node_id))
        elif view.engine_id in node.wanted:
            pool.add_waking(engine)
        elif view.unloaded:
            pool.add_asleep(engine)

    def _remove(self, engine: Engine) -> None:
        pool = self._pools.get(engine.view.manifest_digest)
        if pool is not None:
            pool.remove(engine)

    def pool(self, digest: ManifestDigest) -> Pool | None:
        """Return the engines with a model, if there ever were any."""
        return self._pools.get(digest)

    def has_free_slot(self, spec: TaskSpec) -> bool:
        """Whether some engine has room for such a task, however late; for one node alone, that it has to see itself."""
        return spec.only_node is not None or any(group.levels for _, groups in self._offers(spec) for group in groups)

    # --- what would have to be loaded --------------------------------------------------------

    def capacity(self, task: Task, only: Node | None) -> Capacity:
        """Return the best that there is for a task that waits. Args: `only` as in `choose`."""
        if task.spec.only_node is None and not task.refused_by and self._offers(task.spec):
            return Capacity.READY
        ready, waking, _ = self._what_there_is(task, only)
        if any(_may_read(engine, task) for engine in ready):
            return Capacity.READY
        return Capacity.WAKING if any(_may_read(engine, task) for engine in waking) else Capacity.NONE

    def engine_to_wake(self, task: Task, only: Node | None, waiting: int) -> Engine | None:
        """Return one more engine to ask for, where the slots of those that are coming up do not do for the tasks.

        Args:
            waiting: tasks like this one for which no slot is free.
        """
        _, waking, asleep = self._what_there_is(task, only)
        if sum(engine.view.slots for engine in waking if _may_read(engine, task)) >= waiting:
            return None
        return next((engine for engine in asleep if _may_read(engine, task)), None)

    def _what_there_is(
        self, task: Task, only: Node | None
    ) -> tuple[Iterable[Engine], Iterable[Engine], Iterable[Engine]]:
        """Return the engines that are ready, coming up, and asleep."""
        spec = task.spec
        pool = self._pools.get(spec.manifest_digest)
        if spec.only_node is None:
            return (pool.ready.values(), pool.waking.values(), pool.asleep()) if pool else ((), (), ())
        if only is None or not self._may_have(only, spec):
            return (), (), ()
        engines = [
            engine
            for engine in only.placed.values()
            if engine.view.manifest_digest == spec.manifest_digest and self._asks.in_force(engine.view) is not None
        ]
        return (
            [engine for engine in engines if engine.view.ready],
            [engine for engine in engines if engine.engine_id in only.wanted],
            [engine for engine in engines if engine.view.unloaded and engine.engine_id not in only.wanted],
        )

    # --- what runs -------------------------------------------------------------------------

    def began(self, node: Node, task: Task, attempt: Attempt, now: float) -> None:
        """Note an attempt that was given to a node."""
        engine = node.placed[attempt.engine_id]
        self._affinity.sent(task.spec, engine.key, now)
        attempt.prompt_tokens_ahead = engine.prompt_tokens_ahead + attempt.uncached_tokens
        attempt.sequences = engine.running + 1
        self._shift(engine, attempt, 1)
        if engine.group is not None and not attempt.interactive:
            pool = self._pools[engine.view.manifest_digest]
            if pool.room is not None:
                pool.room = max(0, pool.room - 1)

    def first_token(self, node: Node, attempt: Attempt, now: float) -> None:
        """Learn from the first token of an attempt, which has just come."""
        attempt.began_at, attempt.began_tokens = now, attempt.tokens
        engine = node.placed.get(attempt.engine_id)
        if engine is not None:
            attempt.began_sequences = engine.running
            engine.prompt_tokens_ahead -= attempt.uncached_tokens
            took_s = now - attempt.started_at
            engine.rate.saw_first_token(attempt.prompt_tokens_ahead, attempt.sequences, took_s)

    def ended(self, node: Node, attempt: Attempt) -> None:
        """Note the end of an attempt, whatever it was, and learn from it."""
        engine = node.placed.get(attempt.engine_id)
        if engine is None:
            return
        tokens = attempt.tokens - attempt.began_tokens
        if tokens >= PACE_TOKENS_MIN:
            token_s = (attempt.progressed_at - attempt.began_at) / tokens
            engine.rate.saw_steps((attempt.began_sequences + engine.running) / 2, token_s)
            if engine.group is not None:
                self._pools[engine.view.manifest_digest].regroup(engine)
        self._shift(engine, attempt, -1)

    def _shift(self, engine: Engine, attempt: Attempt, by: int) -> None:
        pool = None if engine.group is None else self._pools[engine.view.manifest_digest]
        if pool is not None:
            pool.take(engine)
        engine.running += by
        engine.interactive += by * attempt.interactive
        if not attempt.tokens:
            engine.prompt_tokens_ahead += by * attempt.uncached_tokens
        if pool is not None:
            pool.count_read(engine, by * attempt.interactive)
            pool.put(engine)

    def look_at_reserves(self) -> None:
        """Find out anew how many answers may begin that nobody reads, so that readers find room if engines are lost."""
        lost_share = self._stays.lost_share
        for pool in self._pools.values():
            kept = reserve_slots(pool.answers_read, pool.engines_read, lost_share)
            groups = (group for groups in pool.groups.values() for group in groups.values())
            pool.room = room(groups, READERS_TOKEN_S, kept + ROOM_MAX) - kept if kept else None

    def keeps_out(self, task: Task) -> bool:
        """Whether the slots in which readers would keep their pace are reserved, so that this task has to wait."""
        pool = self._pools.get(task.spec.manifest_digest)
        reserved = pool is not None and pool.room is not None and pool.room <= 0
        return reserved and task.spec.service_class is not ServiceClass.INTERACTIVE

    # --- choosing --------------------------------------------------------------------------

    def choose(
        self,
        task: Task,
        now: float,
        *,
        only: Node | None = None,
        avoiding: bool = True,
        besides: NodeId | None = None,
    ) -> Choice | None:
        """Return an engine with a free slot, or None while the task should wait.

        Args:
            only: the node that a task is meant for, where it is meant for one.
            avoiding: whether to pass over the nodes that the task avoids at this time.
            besides: a node that has the task already.
        """
        want = Want.of(task, now, avoiding=avoiding, besides=besides)
        if task.spec.only_node is not None:
            return self._choose_on(only, want)
        want.kept_out = self.keeps_out(task)
        offers = self._offers(task.spec)
        free = self._by_cost(want, offers)
        for cost_micro in sorted(free):
            best = want.first_done(free[cost_micro], want.is_met, MARGIN * want.target.token_s)
            if best is not None:
                return self._warm(want, WARM_COST_RATIO_MAX * cost_micro) or self._choice(want, best, Why.MEETS_TARGET)
        warm = self._warm(want, math.inf)
        if warm is not None:
            return warm
        if not want.late and any(want.could_be_met(group) for _, groups in offers for group in groups):
            return None
        best = want.first_done(chain.from_iterable(free.values()), want.always if want.late else want.spares)
        return None if best is None else self._choice(want, best, Why.LATE if want.late else Why.BEST_EFFORT)

    def _by_cost(self, want: Want, offers: Iterable[tuple[Offer, Groups]]) -> dict[int, list[Group]]:
        """Return the groups with free slots by what they cost the fleet; those of one offer cost the same."""
        by_cost: dict[int, list[Group]] = {}
        for offer, groups in offers:
            alike: list[Group] | None = None
            for group in groups:
                if group.levels:
                    if alike is None:
                        alike = by_cost.setdefault(want.weighed_micro(offer, group.rate.step_s(1)), [])
                    alike.append(group)
        return by_cost

    def _warm(self, want: Want, most_micro: float) -> Choice | None:
        """Return the engine that knows the beginning of the prompt, if it keeps the target and costs no more."""
        found = self._affinity.warm(want.task.spec, want.now)
        if found is None:
            return None
        key, cached_tokens = found
        pool = self._pools.get(want.task.spec.manifest_digest)
        engine = None if pool is None else pool.ready.get(key)
        if engine is None or engine.group is None or not engine.free or not want.accepts(engine.node_id):
            return None
        offer = engine.group.offer
        private = want.task.spec.privacy_class is not PrivacyClass.PUBLIC
        if (private and not offer.private) or want.weighed_micro(offer, engine.rate.step_s(1)) > most_micro:
            return None
        warm = want.knowing(cached_tokens)
        return self._choice(warm, engine, Why.WARM) if warm.is_met(engine, *warm.predict(engine)) else None

    def quote_waiting(self, task: Task, now: float, slot_s: float) -> Quote:
        """Say what becomes of a task that has to wait. Args: `slot_s` is the time until a slot is its own."""
        want = Want.of(task, now, avoiding=False)
        groups = [group for _, groups in self._offers(task.spec) for group in groups]
        if not groups:
            # An engine comes up first; how long that takes, nobody has measured.
            return Quote(False, WAKE_S, WAKE_S, 0.0)
        if self.has_free_slot(task.spec) and not self.keeps_out(task):
            slot_s = want.patience_s
        # Which engine will be free first, nobody knows: the mean of them, as busy as they are now.
        engines = sum(len(group.engines) for group in groups)
        first_token_s = token_s = tail = 0.0
        for group in groups:
            share, rate, slots = len(group.engines) / engines, group.rate, group.slots
            first_token_s += share * rate.first_token_s(want.prompt_tokens, slots)
            token_s += share * rate.step_s(slots)
            tail += share * rate.tail
        met = slot_s + first_token_s * tail <= want.target.first_token_s and token_s <= MARGIN * want.target.token_s
        return Quote(met, slot_s, slot_s + first_token_s, token_s)

    def _choose_on(self, node: Node | None, want: Want) -> Choice | None:
        spec = want.task.spec
        if node is None or not self._may_have(node, spec) or not want.accepts(node.node_id):
            return None
        engines = [
            engine
            for engine in node.placed.values()
            if engine.view.ready and engine.free and engine.view.manifest_digest == spec.manifest_digest
        ]
        paid = [engine for engine in engines if self._asks.in_force(engine.view) is not None]
        best = min(paid, key=lambda engine: (engine.running, engine.engine_id), default=None)
        return None if best is None else self._choice(want, best, Why.ONLY_NODE)

    def _choice(self, want: Want, engine: Engine, why: Why) -> Choice:
        ask = self._asks.in_force(engine.view)
        assert ask is not None, "who asks for too much is not chosen"
        return want.choice(engine, why, ask)

    def _may_have(self, node: Node, spec: TaskSpec) -> bool:
        return node.takes(spec.privacy_class) and self._standings.allows(node.node_id, spec)

    def _offers(self, spec: TaskSpec) -> list[tuple[Offer, Groups]]:
        """Return who may read a task's prompt, by what they ask."""
        pool = self._pools.get(spec.manifest_digest)
        if pool is None:
            return []
        private = spec.privacy_class is not PrivacyClass.PUBLIC
        return [(offer, groups.values()) for offer, groups in pool.groups.items() if offer.private or not private]


def _count(engine: Engine, node: Node) -> None:
    """Count what runs on an engine that a node has named anew."""
    attempts = [attempt for attempt in node.tasks.values() if attempt.engine_id == engine.engine_id]
    engine.running = len(attempts)
    engine.interactive = sum(attempt.interactive for attempt in attempts)
    engine.prompt_tokens_ahead = sum(attempt.uncached_tokens for attempt in attempts if not attempt.tokens)


def _may_read(engine: Engine, task: Task) -> bool:
    """Whether an engine may be given the prompt of a task."""
    spec = task.spec
    trusted_enough = engine.private or spec.privacy_class is PrivacyClass.PUBLIC or spec.only_node is not None
    return trusted_enough and engine.node_id not in task.refused_by
