"""Benchmark `quotes`: how true are the times that the coordinator says beforehand?

In the simulated fleet each task is quoted in the moment in which it is
submitted, and the quote held against when its first token came. Where a task is
refused because too many wait, the time after which it may come back is held
against when half of those in front of it were gone, served or given up. Loads go
from half of the fleet's capacity to twice of it, where the classes above leave
nothing to batch work, and its waits end with the run alone.
"""

import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.ledger.asks import Asks
from coordinator.planning.simulation.run import simulation_of
from coordinator.planning.simulation.scenario import Fleet, Load, Owners, Scenario
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.queue import DUE_S
from coordinator.scheduler.records import wants_of
from coordinator.scheduler.state import Scheduler
from coordinator.scheduler.targets import BANDS
from inference.task import ServiceClass, TaskId, TaskSpec

MODEL: Final = "Meta-Llama-3-8B-Instruct"
SHARES: Final = {ServiceClass.INTERACTIVE: 0.4, ServiceClass.STANDARD: 0.3, ServiceClass.BATCH: 0.3}
LOADS: Final = (0.5, 0.85, 1.0, 1.2, 2.0)
SLOTS: Final = 16
SEED: Final = 20261203
# Of what is said, so much lies within a factor of two of what comes.
TRUE_MIN: Final = 0.9


@dataclass
class Said:
    """Pairs of what was said and what came, in seconds."""

    pairs: list[tuple[float, float]] = field(default_factory=list)

    def share_true(self) -> float | None:
        """Return which share was true within a factor of two; None where nothing was said."""
        if not self.pairs:
            return None
        return round(sum(came / 2 <= said <= came * 2 for said, came in self.pairs) / len(self.pairs), 4)


class Quoting(Scheduler):
    """A scheduler that quotes each task before it takes it, and holds what it says against what comes."""

    def __init__(self, limits: Limits, asks: Asks) -> None:
        super().__init__(limits, asks, first_lease_epoch=1)
        self.quotes: defaultdict[ServiceClass, Said] = defaultdict(Said)
        self.refusals = Said()
        self.counted_until_s = math.inf
        self.counted = set(SHARES)
        self._quoted: dict[TaskId, tuple[ServiceClass, float, float]] = {}
        # By the task in the middle of those in front: what those that were refused were told, and when.
        self._told: defaultdict[TaskId, list[tuple[float, float]]] = defaultdict(list)

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        if isinstance(event, e.TaskSubmitted):
            spec = event.spec
            quote = self.quote(spec, now)
            if quote is not None and now < self.counted_until_s and spec.service_class in self.counted:
                self._quoted[spec.task_id] = (spec.service_class, quote.first_token_s, now)
        commands = super().handle(event, now)
        for command in commands:
            match command:
                case c.Deliver(task_id=task_id) if task_id in self._quoted:
                    service_class, said_s, at = self._quoted.pop(task_id)
                    self.quotes[service_class].pairs.append((said_s, now - at))
                case c.Assign() if command.attempt == 1:
                    for retry_s, at in self._told.pop(command.spec.task_id, ()):
                        self.refusals.pairs.append((retry_s, now - at))
                case c.FailTask(failure=c.TaskFailure.QUEUE_FULL, retry_after_s=float(retry_s)):
                    self._quoted.pop(command.task_id, None)
                    assert isinstance(event, e.TaskSubmitted), "who waits already is not refused"
                    middle = self._middle_in_front(event.spec, now)
                    counted = now < self.counted_until_s and event.spec.service_class in self.counted
                    if middle is not None and counted:
                        self._told[middle].append((retry_s, now))
                case c.FailTask(task_id=task_id) if task_id in self._quoted or task_id in self._told:
                    self.refusals.pairs += [(retry_s, now - at) for retry_s, at in self._told.pop(task_id, ())]
                    if task_id not in self._quoted:
                        continue
                    # It waited for as long as a task may: whoever was told so was told the truth.
                    service_class, said_s, _ = self._quoted.pop(task_id)
                    came_s = said_s if said_s >= self.limits.queue_wait_s else math.inf
                    self.quotes[service_class].pairs.append((said_s, came_s))
        return commands

    def _middle_in_front(self, spec: TaskSpec, now: float) -> TaskId | None:
        """Return the task with half of those in front of it that go before one that comes now; of one tenant here."""
        wants, in_front = wants_of(spec), list[TaskId]()
        for band in BANDS[: BANDS.index(spec.service_class) + 1]:
            for task_id in self.queue.in_turn(band, wants):
                task = self.tasks[task_id]
                due_s = task.submitted_at + DUE_S[task.spec.service_class]
                if band is spec.service_class and due_s > now + DUE_S[band]:
                    break
                in_front.append(task_id)
        return in_front[len(in_front) // 2] if in_front else None


def scenario(load: float, hours: float) -> Scenario:
    return Scenario(
        hours=hours,
        fleet=(
            Fleet(model=MODEL, card="H100-PCIe", nodes=1, slots=SLOTS, usd_per_hour=2.0, idle_w=100.0, load_w=350.0),
            Fleet(
                model=MODEL,
                card="RTX-4090",
                nodes=8,
                slots=SLOTS,
                usd_per_hour=0.25,
                idle_w=60.0,
                load_w=450.0,
                owners=Owners(losses_per_hour=0.011),
            ),
        ),
        load=tuple(
            Load(model=MODEL, service_class=service_class, capacity_share=share * load)
            for service_class, share in SHARES.items()
        ),
        seed=SEED,
    )


async def run(*, quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    hours = 0.1 if quick else 0.3
    for load in LOADS[1::2] if quick else LOADS:
        simulation = simulation_of(scenario(load, hours), make_scheduler=Quoting)
        scheduler = simulation.scheduler
        assert isinstance(scheduler, Quoting)
        # Nothing comes after the end, so that queues are shorter than anybody could foresee.
        scheduler.counted_until_s = 3600.0 * hours / 2
        if load * (1 - SHARES[ServiceClass.BATCH]) > 1.0:
            scheduler.counted.remove(ServiceClass.BATCH)
        simulation.run()
        quotes = [pair for said in scheduler.quotes.values() for pair in said.pairs]
        figures[f"{load:g}"] = {
            "quotes": len(quotes),
            "true": Said(quotes).share_true(),
            "true_by_class": {kind.value: said.share_true() for kind, said in scheduler.quotes.items()},
            "refused": len(scheduler.refusals.pairs),
            "retry_after_true": scheduler.refusals.share_true(),
        }
        print(f"[quotes] load {load:g}: {figures[f'{load:g}']}", file=sys.stderr, flush=True)
    shares = [row[key] for row in figures.values() for key in ("true", "retry_after_true")]
    return {"loads": figures, "met": all(share is None or share >= TRUE_MIN for share in shares)}
