"""The engines of one model in an order that finds one for a task without looking at all of them. Pure.

Engines that cost the same, run about as fast and may read the same prompts form
a *group*; within it the emptiest is the best. A fleet of any size has as many
groups as it has kinds of cards times asks, some dozens, so a decision looks at
groups, and at a few engines of those that will do. An engine that takes or ends
an answer moves from one level of its group to another, which costs the same
however many there are.
"""

import bisect
import math
from collections.abc import Iterator
from typing import Final

from coordinator.ledger.prices import Price
from coordinator.scheduler.records import Engine, EngineKey, Group, Offer, SleepKey

# Engines of one group differ by so much in speed at most. Which of them is chosen goes by their exact figures.
SPEED_STEP: Final = 1.25
# Asks are told apart by two digits, so that no fleet has as many groups as engines.
ASK_DIGITS: Final = 2


class Pool:
    """The engines with one model that may be given work, now or once they are loaded.

    Attributes:
        groups: of those that are ready, by what they ask and may read; in each, by speed.
        ready: the same, the full ones too.
        waking: those that were asked to load.
        answers_read, engines_read: that somebody reads as they come, and ready engines with such.
        room: how many other answers may begin until the reserve for those that are read is looked at again; None
            where none is needed.
    """

    def __init__(self) -> None:
        self.groups: dict[Offer, dict[int, Group]] = {}
        self.ready: dict[EngineKey, Engine] = {}
        self.waking: dict[EngineKey, Engine] = {}
        self.answers_read = 0
        self.engines_read = 0
        self.room: int | None = None
        # The largest first.
        self._asleep: list[SleepKey] = []
        self._asleep_engines: dict[SleepKey, Engine] = {}

    def add(self, engine: Engine, ask: Price, energy_micro: int = 0, losses_per_h: float = 0.0) -> None:
        """Take in an engine that is ready. Args: as of an `Offer`, not yet rounded but for the losses."""
        rounded = Price(_digits(ask.prompt_micro), _digits(ask.completion_micro))
        self.ready[engine.key] = engine
        self._join(engine, Offer(rounded, engine.private, _digits(energy_micro), losses_per_h))
        self.count_read(engine, engine.interactive)

    def count_read(self, engine: Engine, change: int) -> None:
        """Note that so many more answers of a ready engine are read; `engine` has them already."""
        if change:
            self.answers_read += change
            self.engines_read += (engine.interactive > 0) - (engine.interactive - change > 0)

    def regroup(self, engine: Engine) -> None:
        """Have an engine whose rate has changed among those that are as fast."""
        group = engine.group
        if group is not None and group.speed != _speed(engine):
            self._leave(engine, group)
            self._join(engine, group.offer)

    def put(self, engine: Engine) -> None:
        """Have a ready engine found among those with as many answers, if it has a free slot."""
        assert engine.group is not None, "only what was added has a place"
        if engine.free:
            engine.group.levels.setdefault(engine.running, {})[engine.key] = engine

    def take(self, engine: Engine) -> None:
        """Have it not found, until it is put back."""
        assert engine.group is not None, "only what was added has a place"
        levels = engine.group.levels
        level = levels.get(engine.running)
        if level is not None and level.pop(engine.key, None) is not None and not level:
            del levels[engine.running]

    def add_asleep(self, engine: Engine) -> None:
        """Take in an engine that would have to be loaded."""
        engine.asleep = (-engine.view.slots, engine.node_id, engine.engine_id)
        bisect.insort(self._asleep, engine.asleep)
        self._asleep_engines[engine.asleep] = engine

    def add_waking(self, engine: Engine) -> None:
        """Take in an engine that was asked to load."""
        self.waking[engine.key] = engine

    def remove(self, engine: Engine) -> None:
        """Forget an engine, wherever it is, or is not."""
        self.waking.pop(engine.key, None)
        if engine.group is not None:
            self._leave(engine, engine.group)
            del self.ready[engine.key]
            engine.group = None
            self.answers_read -= engine.interactive
            self.engines_read -= engine.interactive > 0
        if engine.asleep is not None:
            del self._asleep[bisect.bisect_left(self._asleep, engine.asleep)]
            del self._asleep_engines[engine.asleep]
            engine.asleep = None

    def _join(self, engine: Engine, offer: Offer) -> None:
        speed = _speed(engine)
        groups = self.groups.setdefault(offer, {})
        engine.group = groups.setdefault(speed, Group(offer, speed))
        engine.group.engines[engine.key] = engine
        self.put(engine)

    def _leave(self, engine: Engine, group: Group) -> None:
        self.take(engine)
        del group.engines[engine.key]
        if not group.engines:
            groups = self.groups[group.offer]
            del groups[group.speed]
            if not groups:
                del self.groups[group.offer]

    def asleep(self) -> Iterator[Engine]:
        """Yield the engines that would have to be loaded, the largest first; ties fall to the smaller id."""
        return (self._asleep_engines[key] for key in self._asleep)

    def count(self) -> int:
        """Return how many engines there are, whatever they do."""
        return len(self.ready) + len(self.waking) + len(self._asleep)


def _speed(engine: Engine) -> int:
    return round(math.log(engine.rate.step_s(1), SPEED_STEP))


def _digits(amount: int) -> int:
    """Return an amount to two digits; exact where it has no more."""
    magnitude: int = 10 ** max(0, len(str(amount)) - ASK_DIGITS)
    return amount // magnitude * magnitude
