"""What a machine did today, and that a restart does not forget it."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.energy.card import EnergyMethod
from agent.energy.day_counts import DayCounts, DayRecord, ModelDay
from agent.energy.day_file import FILE, FILE_BYTES_MAX, keep_day, load_day, save_day
from agent.energy.meter import EnergyTotals, TaskEnergy
from agent.owner.consent import TOKENS_NOT_KNOWN

DAY = "2026-12-02"
JOULE = TaskEnergy(1000, EnergyMethod.COUNTER)


def counts(record: DayRecord | None = None) -> DayCounts:
    return DayCounts(record or DayRecord(day=DAY))


def test_attempts_are_counted_by_model_also_those_that_broke() -> None:
    day = counts()
    day.ended("a", 10, 5, JOULE, whole=True)
    day.ended("a", 20, 7, JOULE, whole=False)
    day.ended("b", 1, 0, JOULE, whole=True)
    record = day.snapshot()
    assert record.models["a"] == ModelDay(tasks=1, prompt_tokens=30, completion_tokens=12, energy_mj=2000)
    assert (record.tasks, record.prompt_tokens, record.completion_tokens) == (2, 31, 12)
    # Mutation: counting whole attempts only would let an owner's limit be passed by broken ones.
    assert day.tokens == 43


def test_a_new_day_starts_the_counts_again() -> None:
    day = counts()
    day.ended("a", 10, 5, JOULE, whole=True)
    day.day_is(DAY)
    assert day.tokens == 15
    day.day_is("2026-12-03")
    assert day.snapshot() == DayRecord(day="2026-12-03")


def test_a_clock_that_is_set_back_over_midnight_does_not_give_the_limit_twice() -> None:
    day = counts()
    day.ended("a", 10, 5, JOULE, whole=True)
    day.day_is("2026-12-01")
    # Mutation: starting again whenever the day differs fails this.
    assert day.tokens == 15


def test_a_clock_that_was_years_ahead_does_not_stop_the_days_for_years() -> None:
    day = counts(DayRecord(day="2099-01-01", models={"a": ModelDay(tasks=1)}))
    day.day_is(DAY)
    assert day.snapshot() == DayRecord(day=DAY)


def test_what_the_cards_drew_is_added_once() -> None:
    day = counts()
    totals = EnergyTotals()
    totals.work_mj[EnergyMethod.COUNTER] = 500
    totals.idle_mj = 70
    day.drew(totals)
    day.drew(totals)
    totals.work_mj[EnergyMethod.COUNTER] += 100
    totals.work_mj[EnergyMethod.ESTIMATE] += 9
    totals.unmeasured_s = 2.5
    day.drew(totals)
    record = day.snapshot()
    # Mutation: keeping a reference to the totals instead of a copy misses what came after.
    assert record.work_mj == {"counter": 600, "estimate": 9}
    assert (record.idle_mj, record.unmeasured_s) == (70, 2.5)


def test_what_was_drawn_before_midnight_belongs_to_the_day_before() -> None:
    day = counts()
    totals = EnergyTotals(idle_mj=70)
    day.drew(totals)
    day.day_is("2026-12-03")
    totals.idle_mj = 100
    day.drew(totals)
    assert day.snapshot().idle_mj == 30


def test_a_snapshot_does_not_change_with_the_counts() -> None:
    day = counts()
    day.ended("a", 10, 5, JOULE, whole=True)
    before = day.snapshot()
    day.ended("a", 10, 5, JOULE, whole=True)
    # Mutation: a shallow copy fails this, and nothing would ever look changed to the file.
    assert before != day.snapshot()


records = st.builds(
    DayRecord,
    day=st.just(DAY),
    models=st.dictionaries(
        st.text(max_size=20),
        st.builds(
            ModelDay,
            tasks=st.integers(0, 2**53),
            prompt_tokens=st.integers(0, 2**53),
            completion_tokens=st.integers(0, 2**53),
            energy_mj=st.integers(0, 2**53),
        ),
        max_size=4,
    ),
    work_mj=st.dictionaries(st.sampled_from([method.value for method in EnergyMethod]), st.integers(0, 2**53)),
    idle_mj=st.integers(0, 2**53),
    unmeasured_s=st.floats(0, 86400),
    lost=st.booleans(),
)


@given(record=records)
def test_what_is_saved_is_loaded(record: DayRecord, tmp_path_factory: pytest.TempPathFactory) -> None:
    state_dir = tmp_path_factory.mktemp("state")
    save_day(record, state_dir)
    assert load_day(state_dir) == record


def test_the_file_is_the_owners_alone_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    save_day(DayRecord(day=DAY), tmp_path)
    [file] = tmp_path.iterdir()
    assert file.name == FILE
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"day": "today"}',
        b'{"day": "2026-12-02", "tokens": 1}',
        b"\xff",
        b" " * FILE_BYTES_MAX + b"1",
    ],
)
def test_a_file_that_cannot_be_read_counts_as_a_limit_that_is_used_up(tmp_path: Path, content: bytes) -> None:
    """Mutation seen to fail here: let the counts begin again."""
    (tmp_path / FILE).write_bytes(content)
    with capture_logs() as logs:
        record = load_day(tmp_path)
    [line] = logs
    assert line["log_level"] == "error"
    assert DayCounts(record).tokens == TOKENS_NOT_KNOWN


def test_no_file_is_a_first_start(tmp_path: Path) -> None:
    assert load_day(tmp_path) == DayRecord()
    assert load_day(tmp_path / "missing") == DayRecord()


def test_what_is_lost_stays_lost_for_a_day_over_restarts_too(tmp_path: Path) -> None:
    """Mutations seen to fail here: begin anew with the first day that is told; do not save what was lost."""
    (tmp_path / FILE).write_bytes(b"{")
    day = DayCounts(load_day(tmp_path))
    day.day_is(DAY)
    assert day.tokens == TOKENS_NOT_KNOWN
    save_day(day.snapshot(), tmp_path)
    again = DayCounts(load_day(tmp_path))
    again.day_is(DAY)
    again.ended("a", 10, 5, JOULE, whole=True)
    assert again.tokens == TOKENS_NOT_KNOWN
    assert again.snapshot().completion_tokens == 5
    again.day_is("2026-12-03")
    assert again.tokens == 0


async def until_saved(state_dir: Path, record: DayRecord) -> None:
    while load_day(state_dir) != record:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_counts_are_saved_while_they_change_and_when_the_agent_ends(tmp_path: Path) -> None:
    day = counts()
    day.ended("a", 10, 5, JOULE, whole=True)
    keeper = asyncio.create_task(keep_day(day.snapshot, tmp_path, period_s=3600.0))
    await until_saved(tmp_path, day.snapshot())
    day.ended("a", 10, 5, JOULE, whole=True)
    keeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeper
    # Mutation: without the last save a restart gives the owner's limit back.
    assert load_day(tmp_path) == day.snapshot()


async def test_a_disk_that_takes_no_file_ends_nothing(tmp_path: Path) -> None:
    day = counts()
    keeper = asyncio.create_task(keep_day(day.snapshot, tmp_path / "gone", period_s=0.0))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not keeper.done()
    (tmp_path / "gone").mkdir()
    await until_saved(tmp_path / "gone", day.snapshot())
    keeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeper
