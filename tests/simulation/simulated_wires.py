"""The simulated world below the decisions: time, randomness, faulty wires."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How hard a run is; drawn from its seed."""

    nodes: int
    slots: int
    tasks: int
    tokens_per_second: float
    delay_s: float
    duplicate: float  # chance per message
    lose: float
    fault_interval_s: float
    faults_until_s: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Options":
        return cls(
            nodes=rng.randint(2, 5),
            slots=rng.randint(1, 4),
            tasks=rng.randint(20, 40),
            tokens_per_second=rng.choice([5.0, 20.0, 50.0]),
            delay_s=rng.choice([0.001, 0.02, 0.2]),
            duplicate=rng.choice([0.02, 0.05, 0.1]),
            lose=rng.choice([0.0, 0.0, 0.01]),
            fault_interval_s=rng.uniform(0.5, 4.0),
            faults_until_s=rng.uniform(20.0, 40.0),
        )


class World:
    """A clock that jumps from event to event. Also the coordinator's clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.options = Options.draw(self.rng)
        self.now = 1000.0
        self.events = 0
        self.messages = 0
        # (fault, state of what it struck) -> times.
        self.coverage: Counter[tuple[str, str]] = Counter()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def monotonic(self) -> float:
        return self.now

    def now_ms(self) -> int:
        return round(self.now * 1000)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (max(time, self.now), self._sequence, action))

    def step(self) -> None:
        time, _, action = heapq.heappop(self._queue)
        self.now = time
        self.events += 1
        action()


class Wire:
    """One direction of a stream: ordered, late, and as long as faults last, lossy and repeating."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_at = 0.0
        self.up = True
        # A half-open wire swallows everything and tells nobody.
        self.swallows = False

    def send(self, deliver: Callable[[], None], *, faithful: bool = False) -> None:
        world, options = self._world, self._world.options
        world.messages += 1
        if self.swallows or (not faithful and self._strikes(options.lose, "loss")):
            return
        copies = 2 if not faithful and self._strikes(options.duplicate, "duplicate") else 1
        delay_s = world.rng.uniform(0.1, 1.0) * options.delay_s
        if self._strikes(0.02, "delay"):
            delay_s += world.rng.uniform(0.0, 2.0)
        for _ in range(copies):
            self._last_at = max(self._last_at, world.now + delay_s)
            world.at(self._last_at, lambda: deliver() if self.up and not self.swallows else None)

    def _strikes(self, chance: float, fault: str) -> bool:
        strikes = chance > 0 and self._world.now < 1000.0 + self._world.options.faults_until_s
        # In every history some message is late for certain, and some comes twice.
        certain = fault != "loss" and self._world.messages >= 40 and not self._world.coverage[fault, "message"]
        if strikes and (certain or self._world.rng.random() < chance):
            self._world.coverage[fault, "message"] += 1
            return True
        return False
