"""What a task needs at a moment, and which engines would give it that. Pure."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

from coordinator.ledger.prices import TOKENS_PER_PRICE, Price
from coordinator.scheduler.records import Choice, Engine, Group, Offer, Task, Why
from coordinator.scheduler.targets import TARGETS, Target, target_of
from inference.task import NodeId, ServiceClass

Groups = Collection[Group]

# Predictions are off by this much on the average, so a target counts as met where so much of it is left.
MARGIN: Final = 0.8
# The share of its first token's time that a task waits for an engine that meets its target.
PATIENCE: Final = 0.5
# Nobody waits longer than that for an engine without readers on it, however patient its class.
PATIENCE_MAX_S: Final = 600.0
# Of a group, engines that are looked at closely.
LOOKED_AT_MAX: Final = 4
# Each token of an answer that somebody reads, at most; what other answers must leave it.
READERS_TOKEN_S: Final = MARGIN * TARGETS[ServiceClass.INTERACTIVE].token_s
# Predicted losses count by hundredths; below one they are none.
LOSSES_PER_COST: Final = 100
LOSSES_MIN: Final = 1.0 / LOSSES_PER_COST
SECONDS_PER_HOUR: Final = 3600.0


@dataclass(slots=True)
class Want:
    """What a task needs at the moment, once for all engines that are looked at.

    Args:
        prompt_tokens: to read, what it has of its answer included.
        cached_tokens: of those, that the engine in question knows.
        left_s: until its first token is late.
        patience_s: how long it may wait for an engine that meets its target.
        late: it has waited for so long.
        avoiding: whether nodes are passed over that the task avoids now.
        besides: a node that has the task already.
        kept_out: of slots where readers keep their pace: what there is of them is reserved.
    """

    task: Task
    now: float
    target: Target
    prompt_tokens: int
    tokens_left: int
    left_s: float
    patience_s: float
    late: bool
    avoiding: bool
    besides: NodeId | None = None
    cached_tokens: int = 0
    kept_out: bool = False

    @classmethod
    def of(cls, task: Task, now: float, *, avoiding: bool, besides: NodeId | None = None) -> Self:
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
            patience_s=patience_s,
            late=waited_s >= patience_s,
            avoiding=avoiding,
            besides=besides,
        )

    def weighed_micro(self, offer: Offer, token_s: float) -> int:
        """Return what engines cost the fleet: the ask and the energy, once more for each time they will be lost.

        Whoever is lost in the middle is paid, and what it has read and written is read again elsewhere, while the
        client waits: about a whole cost, for as many times as an engine is lost during the answer.

        Args:
            token_s: of the answer.
        """
        tokens_left = self.tokens_left
        micro = offer.ask.earned_micro(self.prompt_tokens, tokens_left)
        if offer.energy_micro:
            micro += offer.energy_micro * tokens_left // TOKENS_PER_PRICE
        losses = offer.losses_per_h * tokens_left * token_s / SECONDS_PER_HOUR
        return micro + micro * int(LOSSES_PER_COST * losses) // LOSSES_PER_COST if losses >= LOSSES_MIN else micro

    def knowing(self, cached_tokens: int) -> Self:
        """Return the same for an engine that knows so much of the prompt; one token of it is always computed."""
        return replace(self, cached_tokens=min(cached_tokens, self.prompt_tokens - 1))

    def accepts(self, node_id: NodeId) -> bool:
        task = self.task
        if node_id == self.besides or node_id in task.refused_by:
            return False
        return not (self.avoiding and task.avoids(node_id, self.now))

    def first_done(
        self, groups: Iterable[Group], good: Callable[[Engine, float, float], bool], pace_s: float = math.inf
    ) -> Engine | None:
        """Return the engine that is done first, of a few of the emptiest of each group that are good enough.

        Args:
            pace_s: the most that a token may take.
            good: told an engine, seconds to the first token there, and of each after it.
        """
        best, best_s = None, math.inf
        prompt_tokens, tokens_left = self.prompt_tokens, self.tokens_left
        choosy = bool(self.besides or self.task.avoid_until or self.task.refused_by)
        for group in groups:
            looked_at = 0
            for engine in group.emptiest():
                if choosy and not self.accepts(engine.node_id):
                    continue
                # As `predict`, without a call for each engine; none of these is known to know the prompt.
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
        to_compute = engine.prompt_tokens_ahead + self.prompt_tokens - self.cached_tokens
        first_token_s = rate.first_token_s(to_compute, sequences)
        return first_token_s, rate.step_s(sequences)

    def done_s(self, engine: Engine) -> float:
        first_token_s, token_s = self.predict(engine)
        return first_token_s + token_s * self.tokens_left

    def is_met(self, engine: Engine, first_token_s: float, token_s: float) -> bool:
        """Whether an engine keeps the target, also in its slower moments, and has a slot for the task."""
        return (
            token_s <= MARGIN * self.target.token_s
            and first_token_s * engine.rate.tail <= self.left_s
            and self.spares(engine, first_token_s, token_s)
        )

    def always(self, engine: Engine, first_token_s: float, token_s: float) -> bool:
        return True

    def spares(self, engine: Engine, first_token_s: float, token_s: float) -> bool:
        """Whether one answer more leaves its slot to whom it is reserved, and those that are read their pace."""
        if token_s <= READERS_TOKEN_S:
            return not self.kept_out
        return not engine.interactive or engine.rate.step_s(engine.running) > READERS_TOKEN_S

    def could_be_met(self, group: Group) -> bool:
        """Whether an engine of a group would meet the target if it had nothing else to do."""
        rate = group.rate
        first_token_s = rate.first_token_s(self.prompt_tokens, 1)
        return rate.step_s(1) <= MARGIN * self.target.token_s and first_token_s * rate.tail <= self.target.first_token_s

    def choice(self, engine: Engine, why: Why, ask: Price) -> Choice:
        first_token_s, token_s = self.predict(engine)
        return Choice(
            node_id=engine.node_id,
            engine_id=engine.engine_id,
            why=why,
            cost_micro=ask.earned_micro(self.prompt_tokens, self.tokens_left),
            first_token_s=first_token_s,
            token_s=token_s,
            tail=engine.rate.tail,
            cached_tokens=self.cached_tokens,
        )
