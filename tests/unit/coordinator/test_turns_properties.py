"""Over long overloads nobody is kept out for ever, classes keep their order, and hedges their budget."""

import random
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduler import commands as c
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.queue import AGE_S, UP
from coordinator.scheduler.records import Why
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import ServiceClass, TaskId, TaskSpec, TenantId

NODE = "node"
STEP_S = 0.5
ANSWER_S = 1.0
# A tenant that floods has so many waiting at any time.
FLOOD = 3
IDS = range(20, 28)
ORDER = (ServiceClass.INTERACTIVE, ServiceClass.STANDARD, ServiceClass.BATCH)

# In the test of second attempts, so many tasks come before the first is late.
LATE_AFTER_TASKS = 10

SLOTS = st.integers(1, 3)
FLOODING = st.integers(1, 4)


class BusyNode:
    """One node whose answers take a second each, and what became of every task."""

    def __init__(self, slots: int) -> None:
        self.harness = SchedulerHarness()
        self.harness.connect(NODE, engine_view(slots=slots))
        self.specs: dict[TaskId, TaskSpec] = {}
        self.waited_s: dict[TaskId, float] = {}
        self.failed: set[TaskId] = set()
        self._came_at: dict[TaskId, float] = {}
        self._ends: dict[TaskId, tuple[float, int]] = {}

    def submit(self, tenant: str, service_class: ServiceClass) -> TaskId:
        spec = task_spec(f"t{len(self.specs)}", service_class=service_class)
        spec = replace(spec, tenant_id=TenantId(tenant))
        self.specs[spec.task_id] = spec
        self._came_at[spec.task_id] = self.harness.now
        self._take(self.harness.submit(spec))
        return spec.task_id

    def waiting(self, tenant: str) -> int:
        return sum(self.specs[task_id].tenant_id == tenant for task_id in self.harness.scheduler.queue)

    def flood(self, tenants: Iterable[str], service_class: ServiceClass) -> None:
        for tenant in tenants:
            while self.waiting(tenant) < FLOOD:
                self.submit(tenant, service_class)

    def step(self) -> None:
        self._take(self.harness.pass_time(STEP_S, alive=[NODE]))
        for task_id, (ends_at, attempt) in list(self._ends.items()):
            if ends_at <= self.harness.now:
                del self._ends[task_id]
                self._take(self.harness.frames(NODE, attempt, 0, *IDS, task=task_id))
                self._take(self.harness.finish(NODE, attempt, IDS, task=task_id))

    def _take(self, commands: list[c.Command]) -> None:
        begun = list[TaskId]()
        for command in commands:
            match command:
                case c.Assign(spec=spec, attempt=attempt):
                    begun.append(spec.task_id)
                    self.waited_s[spec.task_id] = self.harness.now - self._came_at[spec.task_id]
                    self._ends[spec.task_id] = (self.harness.now + ANSWER_S, attempt)
                case c.FailTask(task_id=task_id):
                    self.failed.add(task_id)
        self._check_order(begun)

    def _check_order(self, begun: list[TaskId]) -> None:
        """Whoever began, nobody of a class above is left waiting; a task that has waited long is of the one above."""
        if not begun:
            return
        lowest = max(self._band(task_id) for task_id in begun)
        left = [task_id for task_id in self.harness.scheduler.queue if self._band(task_id) < lowest]
        assert not left, f"{begun} began before {left}"

    def _band(self, task_id: TaskId) -> int:
        service_class = self.specs[task_id].service_class
        aged = self.harness.now - self._came_at[task_id] > AGE_S.get(service_class, float("inf"))
        return ORDER.index(UP[service_class] if aged else service_class)


def turns_s(tenants: int, slots: int) -> float:
    """Return how long it takes at most until each tenant had a turn, and two steps for what is seen late."""
    return (tenants + 1) * ANSWER_S / slots + ANSWER_S + 2 * STEP_S


@settings(max_examples=20, deadline=None)
@given(SLOTS, FLOODING, st.sampled_from(ServiceClass), st.integers(0, 40))
def test_whoever_comes_beside_tenants_that_flood_its_class_waits_for_one_turn_of_each(
    slots: int, flooding: int, service_class: ServiceClass, steps_before: int
) -> None:
    """Mutation seen to fail here: who comes first, whoever sent it."""
    node, tenants = BusyNode(slots), [f"flood-{number}" for number in range(flooding)]
    for _ in range(steps_before):
        node.flood(tenants, service_class)
        node.step()
    node.flood(tenants, service_class)
    meek = node.submit("meek", service_class)
    while meek not in node.waited_s:
        assert meek not in node.failed
        node.flood(tenants, service_class)
        node.step()
    assert node.waited_s[meek] <= turns_s(flooding, slots)


@settings(max_examples=20, deadline=None)
@given(SLOTS, FLOODING)
def test_a_class_above_that_leaves_nothing_keeps_nobody_out_for_ever(slots: int, flooding: int) -> None:
    """A standard task moves up after half a minute, where its tenant has its turn.

    Mutation seen to fail here: nothing moves up.
    """
    node, tenants = BusyNode(slots), [f"flood-{number}" for number in range(flooding)]
    node.flood(tenants, ServiceClass.INTERACTIVE)
    meek = node.submit("meek", ServiceClass.STANDARD)
    while meek not in node.waited_s:
        assert meek not in node.failed
        node.flood(tenants, ServiceClass.INTERACTIVE)
        node.step()
    age_s = AGE_S[ServiceClass.STANDARD]
    assert age_s <= node.waited_s[meek] <= age_s + turns_s(flooding, slots)


def test_batch_work_comes_to_its_turn_beside_endless_standard_work() -> None:
    """Mutation seen to fail here: nothing moves up."""
    node, tenants = BusyNode(2), ["flood"]
    meek = node.submit("meek", ServiceClass.BATCH), node.submit("meek", ServiceClass.BATCH)
    held_up = node.submit("meek", ServiceClass.BATCH)
    assert all(node.waited_s[task_id] == 0.0 for task_id in meek)
    while held_up not in node.waited_s:
        node.flood(tenants, ServiceClass.STANDARD)
        node.step()
    age_s = AGE_S[ServiceClass.BATCH]
    assert age_s <= node.waited_s[held_up] <= age_s + turns_s(1, 2)


@settings(max_examples=15, deadline=None)
@given(SLOTS, st.floats(0.3, 2.5), st.integers(0, 1 << 32))
def test_in_any_mix_classes_keep_their_order_and_every_task_begins_or_is_told(
    slots: int, load: float, seed: int
) -> None:
    """The order is checked at each step (`BusyNode._check_order`).

    Mutations seen to fail here: batch before standard; a task that waited too long is not told.
    """
    node, limits, random_ = BusyNode(slots), Limits(), random.Random(seed)
    due = 0.0
    for _ in range(240):
        due += 2.0 * random_.random() * load * slots * STEP_S / ANSWER_S
        while due >= 1.0:
            due -= 1.0
            node.submit(random_.choice("abc"), random_.choice(list(ServiceClass)))
        node.step()
    came = list(node.specs)
    while len(node.harness.scheduler.tasks):
        node.step()
    assert set(came) == node.waited_s.keys() | node.failed
    for task_id, waited_s in node.waited_s.items():
        assert waited_s <= limits.queue_wait_s + STEP_S or node.specs[task_id].service_class is ServiceClass.BATCH


@settings(max_examples=15, deadline=None)
# Within the half minute after which an attempt without a token has failed.
@given(st.integers(1, 80), st.floats(0.0, 0.2))
def test_second_attempts_stay_within_their_share_however_many_answers_are_late(tasks: int, share: float) -> None:
    """Nobody ever sends a first token here. Mutation seen to fail here: a second attempt costs nothing."""
    limits = Limits(hedge_share=share)
    harness = SchedulerHarness(limits)
    for name in ("a", "b"):
        harness.connect(name, engine_view(slots=200))
    hedges = 0
    for number in range(tasks):
        harness.submit(task_spec(f"t{number}"))
        commands = harness.pass_time(0.3, alive=["a", "b"])
        hedges += sum(isinstance(command, c.Assign) and command.choice.why is Why.HEDGE for command in commands)
    assert hedges <= share * tasks
    # Whole ones alone count, and the first ones earn before they are late.
    assert hedges >= int(share * (tasks - LATE_AFTER_TASKS))
