"""The decisions of a fetch: what is asked of whom, and when nothing is."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.model_store import fetch_events as e
from agent.model_store.fetch_state import (
    BACKOFF_S_MAX,
    MISSING_RETRY_S,
    RETRY_AFTER_S_MAX,
    RUN_CHUNKS_MAX,
    SPACE_RETRY_S,
    STREAMS_MAX,
    FetchState,
)
from agent.model_store.plan import ChunkPlan
from agent.model_store.progress import FetchPhase
from inference.model_chunks import CHUNK_BYTES, ManifestFile, chunk_count


def plan_of(*chunks: int) -> ChunkPlan:
    return ChunkPlan([ManifestFile(f"f{i}", n * CHUNK_BYTES, b"", (b"",) * n) for i, n in enumerate(chunks)])


class Running:
    """A state and what it ordered that has not ended, as a driver would know it."""

    def __init__(self, *chunks: int, sources: int = 1, present: tuple[int, ...] = ()) -> None:
        self.plan = plan_of(*chunks)
        self.now = 1000.0
        self.state = FetchState("m", "d", self.plan, present, [f"s{i}" for i in range(sources)])
        self.stored = set(present)
        self.runs: dict[int, e.StartRun] = {}
        self.reports: list[e.Report] = []
        self.space_asked = 0
        self.over: e.Command | None = None

    def feed(self, *events: e.Event) -> None:
        for event in events:
            for command in self.state.handle(event, self.now):
                self.take(command)

    def take(self, command: e.Command) -> None:
        match command:
            case e.StartRun():
                self.runs[command.run_id] = command
            case e.StopRun():
                del self.runs[command.run_id]
            case e.CheckSpace():
                self.space_asked += 1
            case e.Report():
                self.reports.append(command)
            case e.Finish() | e.GiveUp():
                self.over = command

    def begin(self) -> "Running":
        self.feed(e.Tick(), e.SpaceFound())
        return self

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(e.Tick())

    def give(self, run: e.StartRun) -> None:
        """The source of a run gives all that was asked."""
        for chunk in range(run.chunk, run.chunk + run.count):
            self.feed(e.ChunkReceived(run.run_id, chunk), e.ChunkStored(chunk))
            self.stored.add(chunk)
        self.end(run, e.RunEnded(run.run_id))

    def fail(self, run: e.StartRun, kind: e.FailureKind, retry_after_s: float | None = None, jitter: float = 0) -> None:
        self.end(run, e.RunFailed(run.run_id, kind, "why", retry_after_s, jitter))

    def end(self, run: e.StartRun, event: e.Event) -> None:
        self.runs.pop(run.run_id, None)
        self.feed(event)

    @property
    def first(self) -> e.StartRun:
        return next(iter(self.runs.values()))

    @property
    def phase(self) -> FetchPhase:
        return self.state.progress(self.now).phase

    def chunks_asked(self) -> list[int]:
        return sorted(c for run in self.runs.values() for c in range(run.chunk, run.chunk + run.count))


def test_nothing_is_asked_before_space_was_found() -> None:
    # Mutation seen to fail: runs started at the first tick.
    running = Running(5)
    running.feed(e.Tick())
    assert (running.space_asked, running.runs, running.phase) == (1, {}, FetchPhase.CHECKING_SPACE)
    running.feed(e.Tick())
    assert running.space_asked == 1, "it was asked already"
    running.feed(e.SpaceFound())
    assert running.chunks_asked() == list(range(5))
    assert running.phase is FetchPhase.FETCHING


def test_streams_share_what_there_is_and_runs_have_a_limit() -> None:
    running = Running(1000).begin()
    assert len(running.runs) == STREAMS_MAX
    assert {run.count for run in running.runs.values()} == {RUN_CHUNKS_MAX}
    few = Running(5).begin()
    assert len(few.runs) == STREAMS_MAX
    assert few.chunks_asked() == list(range(5))


def test_what_is_present_is_not_asked_for() -> None:
    # Mutation seen to fail: `present` ignored.
    running = Running(4, 2, present=(0, 2, 5)).begin()
    assert running.chunks_asked() == [1, 3, 4]
    assert running.state.progress(0).bytes_done == 3 * CHUNK_BYTES


def test_all_there_ends_at_once() -> None:
    running = Running(2, present=(0, 1))
    running.feed(e.Tick())
    assert running.over == e.Finish()
    assert running.phase is FetchPhase.DONE


def test_no_source_gives_up_with_what_to_do() -> None:
    running = Running(1, sources=0)
    running.feed(e.Tick())
    assert isinstance(running.over, e.GiveUp)
    assert "mirror" in running.over.detail


def test_a_failing_source_is_replaced_and_rests_longer_each_time() -> None:
    """Mutation seen to fail: `ready_at` not looked at."""
    running = Running(1, sources=2).begin()
    assert running.first.source == 0
    running.fail(running.first, e.FailureKind.BROKEN)
    assert running.first.source == 1
    running.fail(running.first, e.FailureKind.BROKEN)
    assert not running.runs
    assert running.phase is FetchPhase.RETRYING
    assert "s0: why" in running.state.progress(running.now).detail
    running.wait(0.49)
    assert not running.runs
    running.wait(0.02)
    assert running.first.source == 0
    running.fail(running.first, e.FailureKind.BROKEN, jitter=0.999)
    running.fail(running.first, e.FailureKind.BROKEN, jitter=0.999)
    running.wait(1.9)
    assert not running.runs
    running.wait(0.2)
    assert running.first.source == 0
    assert [report.source for report in running.reports] == ["s0", "s1"], "one line for a row of failures"


def test_rest_has_an_end_and_success_forgets_it() -> None:
    running = Running(2).begin()
    for _ in range(30):
        for run in list(running.runs.values()):
            running.fail(run, e.FailureKind.BROKEN, jitter=0.999)
        running.wait(BACKOFF_S_MAX)
        assert len(running.runs) == 1, "one run is enough to see whether it is back"
    running.feed(e.ChunkReceived(running.first.run_id, 0), e.ChunkStored(0))
    running.fail(running.first, e.FailureKind.BROKEN)
    running.wait(0.51)
    assert running.runs


def test_a_wish_to_be_left_alone_is_granted_within_reason() -> None:
    # Mutation seen to fail: Retry-After ignored.
    running = Running(1).begin()
    running.fail(running.first, e.FailureKind.BUSY, retry_after_s=40)
    running.wait(39.9)
    assert not running.runs
    running.wait(0.2)
    running.fail(running.first, e.FailureKind.BUSY, retry_after_s=1e9)
    running.wait(RETRY_AFTER_S_MAX + 1)
    assert running.runs


def test_wrong_bytes_end_a_source_for_good() -> None:
    """Mutation seen to fail: the source only backed off."""
    running = Running(5, sources=2).begin()
    run = running.first
    running.feed(e.ChunkReceived(run.run_id, run.chunk), e.ChunkRefused(run.chunk))
    assert {one.source for one in running.runs.values()} == {1}, "all its runs stop"
    assert running.chunks_asked() == list(range(5)), "what it had in hand is asked again"
    assert "wrong bytes" in running.reports[-1].message
    running.wait(10**6)
    assert {one.source for one in running.runs.values()} == {1}
    running.fail(running.first, e.FailureKind.WRONG)
    assert isinstance(running.over, e.GiveUp)
    assert "s0: wrong bytes in chunk 0 of f0" in running.over.detail


def test_a_file_that_is_missing_comes_from_another_source() -> None:
    running = Running(1, 1, sources=2).begin()
    missing = next(run for run in running.runs.values() if run.chunk == 0)
    running.fail(missing, e.FailureKind.MISSING)
    assert {(run.chunk, run.source) for run in running.runs.values()} == {(0, 1), (1, 0)}
    alone = Running(1).begin()
    alone.fail(alone.first, e.FailureKind.MISSING)
    alone.wait(MISSING_RETRY_S - 1)
    assert not alone.runs
    alone.wait(2)
    assert alone.runs


def test_a_source_without_ranges_gives_whole_files_one_by_one() -> None:
    running = Running(100, present=(0, 1)).begin()
    running.fail(running.first, e.FailureKind.NO_RANGES)
    for run in list(running.runs.values()):
        running.fail(run, e.FailureKind.NO_RANGES)
    running.wait(10)
    (run,) = running.runs.values()
    assert (run.whole_file, run.chunk, run.count) == (True, 2, 98)


def test_a_veto_stops_everything_and_its_end_starts_it_again() -> None:
    # Mutation seen to fail: a new run started while vetoed.
    running = Running(5).begin()
    held = running.first
    running.feed(e.ChunkReceived(held.run_id, 0), e.PermissionChanged("metered"))
    assert (running.runs, running.phase) == ({}, FetchPhase.PAUSED)
    running.feed(e.ChunkStored(0), e.PermissionChanged("owner active"), e.Tick())
    assert not running.runs
    assert running.state.progress(running.now).detail == "owner active"
    running.feed(e.PermissionChanged(None))
    assert running.chunks_asked() == list(range(1, 5)), "what had arrived counts"
    assert [report.message for report in running.reports] == ["fetching pauses", "fetching goes on"]


def test_a_full_disk_is_one_line_and_looked_at_again_later() -> None:
    # Mutation seen to fail: SPACE_RETRY_S not waited for.
    running = Running(5).begin()
    for chunk in range(2):
        run = next(run for run in running.runs.values() if run.chunk <= chunk < run.chunk + run.count)
        running.feed(e.ChunkReceived(run.run_id, chunk))
    running.feed(e.ChunkNotWritten(0, "no space"), e.ChunkNotWritten(1, "no space"))
    assert (running.runs, running.phase) == ({}, FetchPhase.DISK_FULL)
    asked = running.space_asked
    running.wait(SPACE_RETRY_S - 1)
    assert running.space_asked == asked
    running.wait(2)
    assert running.space_asked == asked + 1
    running.feed(e.SpaceMissing("still none"))
    assert running.state.progress(running.now).detail == "still none"
    assert [report.message for report in running.reports] == ["disk full: fetching waits for space"]
    running.wait(SPACE_RETRY_S + 1)
    running.feed(e.SpaceFound())
    assert running.chunks_asked() == list(range(5))


def test_progress_tells_rate_and_what_is_left() -> None:
    running = Running(10).begin()
    for _ in range(20):
        running.now += 0.25
        running.feed(e.BytesArrived(CHUNK_BYTES // 4))
    progress = running.state.progress(running.now)
    assert abs(progress.rate_bytes_per_s / CHUNK_BYTES - 1) < 0.1
    assert progress.eta_s is not None
    assert abs(progress.eta_s - 10) < 1
    assert progress.sources == ("s0",)
    running.feed(e.PermissionChanged("owner active"))
    assert running.state.progress(running.now).eta_s is None


@settings(max_examples=150, deadline=None)
@given(
    files=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    sources=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    steps=st.integers(0, 120),
    data=st.data(),
)
def test_whatever_happens_each_chunk_is_asked_of_one_source_at_a_time_and_the_fetch_ends(
    files: list[int], sources: int, seed: int, steps: int, data: st.DataObject
) -> None:
    """Mutations seen to fail: chunks of a stopped run not pending again; a stored chunk pending again."""
    total = sum(files)
    present = data.draw(st.sets(st.integers(0, total - 1))) if total else set[int]()
    running = Running(*files, sources=sources, present=tuple(present))
    rng = random.Random(seed)
    received: dict[int, e.StartRun] = {}
    veto: str | None = None
    space = False
    # Source 0 never gives wrong bytes, so that there is an end.
    for _ in range(steps):
        if running.over is not None:
            break
        action = rng.randrange(10)
        run = rng.choice(list(running.runs.values())) if running.runs else None
        if action == 0:
            veto = rng.choice([None, "a", "b"])
            running.feed(e.PermissionChanged(veto))
        elif action == 1:
            space = rng.random() < 0.7
            running.feed(e.SpaceFound() if space else e.SpaceMissing("none"))
        elif action == 2 and run is not None:
            kinds = [kind for kind in e.FailureKind if run.source or kind is not e.FailureKind.WRONG]
            running.fail(run, rng.choice(kinds), rng.choice([None, 5.0]), rng.random())
        elif action == 3 and received:
            chunk = rng.choice(list(received))
            source = received.pop(chunk).source
            if source and rng.random() < 0.3:
                running.feed(e.ChunkRefused(chunk))
            elif rng.random() < 0.2:
                running.feed(e.ChunkNotWritten(chunk, "full"))
                space = False
            else:
                running.feed(e.ChunkStored(chunk))
                running.stored.add(chunk)
        elif run is not None and action < 8:
            mine = [c for c in range(run.chunk, run.chunk + run.count) if c not in running.stored and c not in received]
            if mine:
                received[mine[0]] = run
                running.feed(e.ChunkReceived(run.run_id, mine[0]))
            else:
                running.end(run, e.RunEnded(run.run_id))
        else:
            running.wait(rng.choice([0.1, 3.0, 700.0]))
        in_hand = [
            c
            for run in running.runs.values()
            for c in range(run.chunk, run.chunk + run.count)
            if c not in running.stored and received.get(c) is not run
        ]
        assert len(in_hand) == len(set(in_hand)), "two runs have one chunk"
        assert len(running.runs) <= STREAMS_MAX
        if veto is not None or not space:
            assert not running.runs
    for chunk in received:
        running.feed(e.ChunkStored(chunk))
        running.stored.add(chunk)
    running.feed(e.PermissionChanged(None), e.SpaceFound(), e.Tick())
    for _ in range(10 * total + 100):
        if running.over is not None:
            break
        for run in list(running.runs.values()):
            if run.run_id in running.runs:
                for chunk in range(run.chunk, run.chunk + run.count):
                    if chunk not in running.stored and running.state.expects(run.run_id):
                        running.feed(e.ChunkReceived(run.run_id, chunk), e.ChunkStored(chunk))
                        running.stored.add(chunk)
                running.end(run, e.RunEnded(run.run_id))
        running.wait(4000.0)
    assert running.over == e.Finish()
    assert running.stored == set(range(total))
    assert running.state.progress(running.now).bytes_done == total * CHUNK_BYTES
    assert chunk_count(running.plan.size_bytes) == total
