"""Tasks that wait for an engine, and who is next. Pure.

Bands come strictly one after the other: interactive, standard, batch. Within a
band, and among tasks that want the same engines, the tenant that was served
least comes first (the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024), and of a tenant the task that is due
first. A task without a deadline is due after its class's usual wait, so that no
deadline keeps it out for ever. One that has waited too long for its band moves
up by one.
"""

import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Final

from coordinator.scheduler.records import Task, Wants, wants_of
from coordinator.scheduler.targets import BANDS
from inference.task import ServiceClass, TaskId, TaskSpec, TenantId

# When a task without a deadline is due, after it was submitted.
DUE_S: Final = {ServiceClass.INTERACTIVE: 1.0, ServiceClass.STANDARD: 60.0, ServiceClass.BATCH: 86_400.0}
# How long a task waits in its band before it moves up; with a deadline, half of that at most.
AGE_S: Final = {ServiceClass.STANDARD: 30.0, ServiceClass.BATCH: 600.0}
UP: Final = {ServiceClass.STANDARD: ServiceClass.INTERACTIVE, ServiceClass.BATCH: ServiceClass.STANDARD}

# Whether it goes to the back (those whose answer was broken go first), when it is due, what comes first of what is due
# together.
_Place = tuple[bool, float, int, TaskId]


# The tasks of one band that want the same engines, by tenant, each in the order of their places.
_Line = dict[TenantId, list[_Place]]


class TaskQueue:
    """Holds the tasks that wait. Its length is theirs."""

    def __init__(self) -> None:
        self._lines: dict[ServiceClass, dict[Wants, _Line]] = {band: {} for band in BANDS}
        self._places: dict[TaskId, tuple[ServiceClass, Wants, TenantId, _Place]] = {}
        self._served: dict[TenantId, int] = {}
        self._of_band: Counter[ServiceClass] = Counter()
        # How many tasks of each tenant wait.
        self._waiting: Counter[TenantId] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[TaskId]:
        return iter(self._places)

    def add(self, task: Task, *, again: bool = False) -> None:
        """Have a task wait. Args: `again` for one whose answer was broken: its client has waited longest."""
        spec = task.spec
        self._count += 1
        band = UP.get(spec.service_class, spec.service_class) if task.aged else spec.service_class
        self._put(task, band, (not again, task.submitted_at + _due_s(spec), self._count, spec.task_id))

    def remove(self, task_id: TaskId) -> bool:
        """Have a task wait no longer; return whether it did."""
        found = self._places.pop(task_id, None)
        if found is None:
            return False
        band, wants, tenant_id, place = found
        self._of_band[band] -= 1
        line = self._lines[band][wants]
        places = line[tenant_id]
        del places[bisect.bisect_left(places, place)]
        if not places:
            del line[tenant_id]
            if not line:
                del self._lines[band][wants]
        self._waiting[tenant_id] -= 1
        if not self._waiting[tenant_id]:
            del self._waiting[tenant_id]
        if not self._places:
            # Nobody waits for anybody: what was served before is nobody's debt.
            self._served.clear()
        return True

    def move_up(self, task: Task) -> None:
        """Have a task that has waited too long wait in the band above."""
        band, _, _, place = self._places[task.spec.task_id]
        task.aged = True
        if band in UP:
            self.remove(task.spec.task_id)
            self._put(task, UP[band], place)

    def charge(self, tenant_id: TenantId, tokens: int) -> None:
        """Note what a tenant was given while others waited."""
        if self._places:
            self._served[tenant_id] = self._served.get(tenant_id, 0) + tokens

    def wants(self, band: ServiceClass) -> list[Wants]:
        """Return what tasks of a band wait for, what was wanted first in front."""
        return list(self._lines[band])

    def in_turn(self, band: ServiceClass, wants: Wants) -> Iterator[TaskId]:
        """Yield the tasks in their order: the first of each tenant, the least served first; then the second of each."""
        line = self._lines[band].get(wants)
        if line is None:
            return iter(())
        if len(line) == 1:
            (places,) = line.values()
            return (place[-1] for place in places)
        by_tenant = [line[tenant] for tenant in sorted(line, key=self._served.__getitem__)]
        return (place[-1] for place in chain.from_iterable(zip_longest(*by_tenant)) if place is not None)

    def waiting(self, wants: Wants) -> int:
        """Return how many tasks want the same."""
        return sum(self._length(band, wants) for band in BANDS)

    def count(self, band: ServiceClass) -> int:
        """Return how many tasks wait in this band and those above, whatever they want."""
        return sum(self._of_band[above] for above in BANDS[: BANDS.index(band) + 1])

    def ahead(self, spec: TaskSpec, now: float) -> int:
        """Return how many tasks go before one that comes now: all of the bands above, and of its own who is in front.

        In front are those of its tenant that are due before it, and, since tenants take turns, as many of each other.
        """
        band, wants = spec.service_class, wants_of(spec)
        above = sum(self._length(other, wants) for other in BANDS[: BANDS.index(band)])
        line = self._lines[band].get(wants, {})
        place: _Place = (True, now + _due_s(spec), self._count + 1, spec.task_id)
        own = bisect.bisect_left(line.get(spec.tenant_id, ()), place)
        others = (min(len(places), own + 1) for tenant, places in line.items() if tenant != spec.tenant_id)
        return above + own + sum(others)

    def middle_ahead(self, spec: TaskSpec, now: float) -> TaskId | None:
        """Return the task in the middle of those that go before one that comes now; None where none does."""
        ahead, wants = self.ahead(spec, now), wants_of(spec)
        in_turn = chain.from_iterable(self.in_turn(band, wants) for band in BANDS)
        return next(islice(in_turn, ahead // 2, None)) if ahead else None

    def _length(self, band: ServiceClass, wants: Wants) -> int:
        return sum(len(places) for places in self._lines[band].get(wants, {}).values())

    def _put(self, task: Task, band: ServiceClass, place: _Place) -> None:
        spec = task.spec
        wants, tenant_id = wants_of(spec), spec.tenant_id
        if tenant_id not in self._waiting:
            # Who comes, or comes back, has no claim for the time before.
            least = min((self._served[other] for other in self._waiting), default=0)
            self._served[tenant_id] = max(self._served.get(tenant_id, 0), least)
        self._waiting[tenant_id] += 1
        self._of_band[band] += 1
        bisect.insort(self._lines[band].setdefault(wants, {}).setdefault(tenant_id, []), place)
        self._places[spec.task_id] = (band, wants, tenant_id, place)


def _due_s(spec: TaskSpec) -> float:
    return DUE_S[spec.service_class] if spec.deadline_s is None else spec.deadline_s


def age_s(task: Task) -> float | None:
    """Return after which time in the queue a task moves up; None where it does not, or has."""
    limit_s = AGE_S.get(task.spec.service_class)
    if limit_s is None or task.aged:
        return None
    deadline_s = task.spec.deadline_s
    return limit_s if deadline_s is None else min(limit_s, deadline_s / 2)
