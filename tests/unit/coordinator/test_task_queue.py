"""Who is next: bands strictly, tenants by what they were given, and of a tenant what is due first."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduler.queue import DUE_S, TaskQueue, age_s
from coordinator.scheduler.records import Task, wants_of
from coordinator.scheduler.targets import BANDS
from coordinator.scheduler.testing import task_spec
from inference.task import ServiceClass, TaskId, TenantId

WANTS = wants_of(task_spec())


def waiting(
    name: str,
    *,
    tenant: str = "tenant",
    service_class: ServiceClass = ServiceClass.STANDARD,
    deadline_s: float | None = None,
    submitted_at: float = 0.0,
) -> Task:
    spec = task_spec(name, service_class=service_class, deadline_s=deadline_s)
    return Task(replace(spec, tenant_id=TenantId(tenant)), submitted_at, submitted_at)


def in_turn(queue: TaskQueue, band: ServiceClass = ServiceClass.STANDARD) -> list[TaskId]:
    return list(queue.in_turn(band, WANTS))


def test_what_is_due_first_goes_first_and_no_deadline_is_a_late_one() -> None:
    """Mutation seen to fail here: a task without a deadline is never due."""
    queue = TaskQueue()
    late = DUE_S[ServiceClass.STANDARD] + 10.0
    queue.add(waiting("patient", deadline_s=late))
    queue.add(waiting("undated"))
    queue.add(waiting("urgent", deadline_s=5.0))
    assert in_turn(queue) == ["urgent", "undated", "patient"]


def test_one_whose_answer_was_broken_goes_before_all_of_its_tenant() -> None:
    queue = TaskQueue()
    queue.add(waiting("urgent", deadline_s=1.0))
    queue.add(waiting("broken", submitted_at=100.0), again=True)
    assert in_turn(queue) == ["broken", "urgent"]


def test_a_tenant_that_was_served_less_comes_first_however_many_tasks_the_other_has() -> None:
    """Mutation seen to fail here: nobody is charged."""
    queue = TaskQueue()
    for number in range(5):
        queue.add(waiting(f"greedy-{number}", tenant="greedy"))
    queue.charge(TenantId("greedy"), 1000)
    queue.add(waiting("modest-0", tenant="modest"))
    # Who comes late has no claim for the time before: both stand at a thousand, and take turns.
    queue.charge(TenantId("greedy"), 1)
    assert in_turn(queue)[:2] == ["modest-0", "greedy-0"]
    queue.charge(TenantId("modest"), 500)
    assert in_turn(queue)[:2] == ["greedy-0", "modest-0"]


def test_a_tenant_that_was_away_has_no_claim_for_that_time() -> None:
    """Mutation seen to fail here: only one that was never served stands where the others do."""
    queue = TaskQueue()
    queue.add(waiting("first", tenant="away"))
    for number in range(3):
        queue.add(waiting(f"steady-{number}", tenant="steady"))
    queue.remove(TaskId("first"))
    queue.charge(TenantId("steady"), 1000)
    queue.add(waiting("again", tenant="away"))
    queue.charge(TenantId("away"), 1)
    assert in_turn(queue)[:2] == ["steady-0", "again"]


def test_what_has_waited_too_long_moves_up_by_one_band_and_once() -> None:
    queue = TaskQueue()
    task = waiting("old", service_class=ServiceClass.BATCH)
    queue.add(task)
    assert age_s(task) is not None
    queue.move_up(task)
    assert (in_turn(queue), in_turn(queue, ServiceClass.BATCH)) == (["old"], [])
    assert age_s(task) is None
    queue.remove(TaskId("old"))
    queue.add(task, again=True)
    assert in_turn(queue) == ["old"], "it keeps its band after a failure"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(BANDS),
            st.sampled_from(["a", "b", "c"]),
            st.none() | st.floats(1.0, 1000.0),
            st.booleans(),
            st.integers(0, 500),
        ),
        max_size=40,
    )
)
def test_each_task_waits_in_one_place_until_it_is_removed(
    entries: list[tuple[ServiceClass, str, float | None, bool, int]],
) -> None:
    queue, kept = TaskQueue(), set[TaskId]()
    for number, (band, tenant, deadline_s, removed, tokens) in enumerate(entries):
        task = waiting(f"t{number}", tenant=tenant, service_class=band, deadline_s=deadline_s)
        queue.add(task)
        queue.charge(TenantId(tenant), tokens)
        if removed:
            assert queue.remove(task.spec.task_id)
            assert not queue.remove(task.spec.task_id)
        else:
            kept.add(task.spec.task_id)
    found = [task_id for band in BANDS for task_id in queue.in_turn(band, WANTS)]
    assert sorted(found) == sorted(kept)
    assert (len(queue), queue.waiting(WANTS), set(queue)) == (len(kept), len(kept), kept)
    for task_id in kept:
        queue.remove(task_id)
    assert [queue.wants(band) for band in BANDS] == [[], [], []]
