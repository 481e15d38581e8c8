"""Which engine takes a task: the cheapest that keeps what the task's class is promised. Pure.

For every engine that could take it, the router predicts when the first token
comes and how fast the others follow, from what it has measured of the engine
(rates.py) and what it has put on it, the prompts sent since the last report
included. Of the engines that meet the target with a margin the cheapest is
chosen, and of equally cheap ones the one that is done first. Where an engine
could meet the target and none does now, the task waits, for half of the time
that its target leaves; after that, or where none ever could, it goes to the
engine that is done first. So a slow card gets no work for asking little, a
cheap one all that it can do in time, and what is too much for the cheap ones
spills over to the dear ones.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Self

from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import Price
from coordinator.scheduler.engine_groups import Pool
from coordinator.scheduler.records import Attempt, Choice, Engine, Group, Node, Offer, Task, Why
from coordinator.scheduler.speeds import Speeds
from coordinator.scheduler.standing import Standings
from coordinator.scheduler.targets import TARGETS, Target, target_of
from coordinator.scheduler.waking import Capacity
from coordinator.verification.events import Use
from inference.task import ManifestDigest, NodeId, PrivacyClass, ServiceClass, TaskSpec

# Predictions are off by this much on the average, so a target counts as met where so much of it is left.
MARGIN: Final = 0.8
# The share of its first token's time that a task waits for an engine that meets its target.
PATIENCE: Final = 0.5
_Engines = Iterable[Engine]
Groups = Collection[Group]

# Of a group, engines that are looked at closely.
LOOKED_AT_MAX: Final = 4
# Answers too short to time.
PACE_TOKENS_MIN: Final = 8
# Nobody waits longer than that for an engine without readers on it, however patient its class.
PATIENCE_MAX_S: Final = 600.0


class Router:
    """Knows where every engine stands, and chooses. The scheduler tells it of each change.

    Args:
        standings, speeds, asks: shared with the scheduler, which changes them.
    """

    def __init__(self, asks: Asks, standings: Standings, speeds: Speeds) -> None:
        self._asks = asks
        self._standings = standings
        self._speeds = speeds
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
            pool.add(engine, ask)
        elif view.engine_id in node.wanted:
            pool.add_waking(engine)
        elif view.unloaded:
            pool.add_asleep(engine)

    def _remove(self, engine: Engine) -> None:
        pool = self._pools.get(engine.view.manifest_digest)
        if pool is not None:
            pool.remove(engine)

    def has_free_slot(self, spec: TaskSpec) -> bool:
        """Whether some engine has room for such a task, however late; for one node alone, that it has to see itself."""
        return spec.only_node is not None or any(group.levels for _, groups in self._offers(spec) for group in groups)

    # --- what would have to be loaded --------------------------------------------------------

    def capacity(self, task: Task, only: Node | None) -> Capacity:
        """Return the best that there is for a task that waits. Args: `only` as in `choose`."""
        if not task.refused_by and self._offers(task.spec):
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

    def began(self, node: Node, attempt: Attempt) -> None:
        """Note an attempt that was given to a node."""
        engine = node.placed[attempt.engine_id]
        attempt.prompt_tokens_ahead = engine.prompt_tokens_ahead + attempt.prompt_tokens
        attempt.sequences = engine.running + 1
        self._shift(engine, attempt, 1)

    def first_token(self, node: Node, attempt: Attempt, now: float) -> None:
        """Learn from the first token of an attempt, which has just come."""
        attempt.began_at, attempt.began_tokens = now, attempt.tokens
        engine = node.placed.get(attempt.engine_id)
        if engine is not None:
            attempt.began_sequences = engine.running
            engine.prompt_tokens_ahead -= attempt.prompt_tokens
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
        self._shift(engine, attempt, -1)

    def _shift(self, engine: Engine, attempt: Attempt, by: int) -> None:
        pool = None if engine.group is None else self._pools[engine.view.manifest_digest]
        if pool is not None:
            pool.take(engine)
        engine.running += by
        engine.interactive += by * attempt.interactive
        if not attempt.tokens:
            engine.prompt_tokens_ahead += by * attempt.prompt_tokens
        if pool is not None:
            pool.put(engine)

    # --- choosing --------------------------------------------------------------------------

    def choose(self, task: Task, now: float, *, only: Node | None = None, avoiding: bool = True) -> Choice | None:
        """Return an engine with a free slot, or None while the task should wait.

        Args:
            only: the node that a task is meant for, where it is meant for one.
            avoiding: whether to pass over the nodes that the task avoids at this time.
        """
        want = _Want.of(task, now, avoiding=avoiding)
        if task.spec.only_node is not None:
            return self._choose_on(only, want)
        offers = self._offers(task.spec)
        free = sorted(((want.cost_micro(offer.ask), groups) for offer, groups in offers), key=itemgetter(0))
        for cost_micro, groups in free:
            best = want.first_done(groups, want.is_met, MARGIN * want.target.token_s)
            if best is not None:
                return want.choice(best, Why.MEETS_TARGET, cost_micro)
        if not want.late and any(want.could_be_met(group) for _, groups in offers for group in groups):
            return None
        return self._first_done(want, free)

    def _first_done(self, want: "_Want", free: Sequence[tuple[int, Groups]]) -> Choice | None:
        """Return the engine that would be done first, whatever it costs."""
        best: tuple[float, Engine, int] | None = None
        for cost_micro, groups in free:
            engine = want.first_done(groups, want.always if want.late else want.spares)
            if engine is not None and (best is None or want.done_s(engine) < best[0]):
                best = (want.done_s(engine), engine, cost_micro)
        if best is None:
            return None
        return want.choice(best[1], Why.LATE if want.late else Why.BEST_EFFORT, best[2])

    def _choose_on(self, node: Node | None, want: "_Want") -> Choice | None:
        spec = want.task.spec
        if node is None or not self._may_have(node, spec) or not want.accepts(node.node_id):
            return None
        engines = [
            engine
            for engine in node.placed.values()
            if engine.view.ready and engine.free and engine.view.manifest_digest == spec.manifest_digest
        ]
        asked = [(ask, engine) for engine in engines if (ask := self._asks.in_force(engine.view)) is not None]
        if not asked:
            return None
        ask, engine = min(asked, key=lambda one: (one[1].running, one[1].engine_id))
        return want.choice(engine, Why.ONLY_NODE, want.cost_micro(ask))

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
    engine.prompt_tokens_ahead = sum(attempt.prompt_tokens for attempt in attempts if not attempt.tokens)


def _may_read(engine: Engine, task: Task) -> bool:
    """Whether an engine may be given the prompt of a task."""
    spec = task.spec
    trusted_enough = engine.private or spec.privacy_class is PrivacyClass.PUBLIC or spec.only_node is not None
    return trusted_enough and engine.node_id not in task.refused_by


@dataclass(slots=True)
class _Want:
    """What a task needs at the moment, once for all engines that are looked at.

    Args:
        prompt_tokens: to read, what it has of its answer included.
        left_s: until its first token is late.
        late: it has waited for as long as it may for an engine that meets its target.
    """

    task: Task
    now: float
    target: Target
    prompt_tokens: int
    tokens_left: int
    left_s: float
    late: bool
    avoiding: bool

    @classmethod
    def of(cls, task: Task, now: float, *, avoiding: bool) -> Self:
        spec, received, target = task.spec, len(task.received), target_of(task.spec)
        waited_s = now - task.queued_at
        patience_s = min(PATIENCE_MAX_S, PATIENCE * target.first_token_s)
        if spec.deadline_s is not None:
            patience_s = min(patience_s, PATIENCE * spec.deadline_s)
        return cls(
            task=task,
            now=now,
            target=target,
            prompt_tokens=len(spec.prompt_ids) + received,
            tokens_left=spec.max_tokens - received,
            left_s=target.first_token_s - waited_s,
            late=waited_s >= patience_s,
            avoiding=avoiding,
        )

    def cost_micro(self, ask: Price) -> int:
        return ask.earned_micro(self.prompt_tokens, self.tokens_left)

    def accepts(self, node_id: NodeId) -> bool:
        task = self.task
        return node_id not in task.refused_by and not (self.avoiding and task.avoids(node_id, self.now))

    def first_done(
        self, groups: Groups, good: "Callable[[Engine, float, float], bool]", pace_s: float = math.inf
    ) -> Engine | None:
        """Return the engine that is done first, of a few of the emptiest of each group that are good enough.

        Args:
            pace_s: the most that a token may take.
            good: told an engine, seconds to the first token there, and of each after it.
        """
        best, best_s = None, math.inf
        prompt_tokens, tokens_left = self.prompt_tokens, self.tokens_left
        choosy = bool(self.task.avoid_until or self.task.refused_by)
        for group in groups:
            looked_at = 0
            for engine in group.emptiest():
                if choosy and not self.accepts(engine.node_id):
                    continue
                rate, sequences = engine.rate, engine.running + 1
                first_token_s = rate.first_token_s(engine.prompt_tokens_ahead + prompt_tokens, sequences)
                token_s = rate.step_s(sequences)
                if token_s > pace_s:
                    # The others of the group have more to do, and are about as fast.
                    break
                done_s = first_token_s + token_s * tokens_left
                if done_s < best_s and good(engine, first_token_s, token_s):
                    best, best_s = engine, done_s
                looked_at += 1
                if looked_at == LOOKED_AT_MAX:
                    break
        return best

    def predict(self, engine: Engine) -> tuple[float, float]:
        """Return seconds to the first token, and of each after it, were the task given to an engine now."""
        rate, sequences = engine.rate, engine.running + 1
        first_token_s = rate.first_token_s(engine.prompt_tokens_ahead + self.prompt_tokens, sequences)
        return first_token_s, rate.step_s(sequences)

    def done_s(self, engine: Engine) -> float:
        first_token_s, token_s = self.predict(engine)
        return first_token_s + token_s * self.tokens_left

    def is_met(self, engine: Engine, first_token_s: float, token_s: float) -> bool:
        """Whether an engine keeps the target, also in its slower moments."""
        return (
            token_s <= MARGIN * self.target.token_s
            and first_token_s * engine.rate.tail <= self.left_s
            and self.spares(engine, first_token_s, token_s)
        )

    def always(self, engine: Engine, first_token_s: float, token_s: float) -> bool:
        return True

    def spares(self, engine: Engine, first_token_s: float, token_s: float) -> bool:
        """Whether one answer more leaves those that are read as they come at the pace that they have."""
        pace_s = MARGIN * TARGETS[ServiceClass.INTERACTIVE].token_s
        return not engine.interactive or token_s <= pace_s or engine.rate.step_s(engine.running) > pace_s

    def could_be_met(self, group: Group) -> bool:
        """Whether an engine of a group would meet the target if it had nothing else to do."""
        rate = group.rate
        first_token_s = rate.first_token_s(self.prompt_tokens, 1)
        return rate.step_s(1) <= MARGIN * self.target.token_s and first_token_s * rate.tail <= self.target.first_token_s

    def choice(self, engine: Engine, why: Why, cost_micro: int) -> Choice:
        first_token_s, token_s = self.predict(engine)
        return Choice(
            node_id=engine.node_id,
            engine_id=engine.engine_id,
            why=why,
            cost_micro=cost_micro,
            first_token_s=first_token_s,
            token_s=token_s,
            tail=engine.rate.tail,
        )
