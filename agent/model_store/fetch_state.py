"""What to fetch next, from whom, and when not to: the decisions of a fetch, and nothing else.

Chunks are asked for in runs, so that a large model needs hundreds of requests
and not thousands, and each chunk counts by itself as soon as it is checked and
stored. Sources are in order of preference: the first that is neither in
back-off nor busy with as many runs as it may have gets the next run, so that
what one source fails to give comes from the next one.

Pure: the driver (`agent.model_store.fetch`) carries commands out and tells
what came of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from agent.model_store import fetch_events as e
from agent.model_store.plan import ChunkPlan
from agent.model_store.progress import FetchPhase, FetchProgress, RateMeter

# Connections at once. One loses half its time to hashing and syncing; more than four gain nothing on a loopback.
STREAMS_MAX = 4
# Chunks of one request: 256 MiB, so that 40 GB are 150 requests.
RUN_CHUNKS_MAX = 32
BACKOFF_S_MIN = 1.0
# A source that was away for hours is found again within minutes.
BACKOFF_S_MAX = 300.0
BACKOFF_DOUBLINGS_MAX = 10
# A file that a mirror does not have yet may be uploaded; asking more often is impolite.
MISSING_RETRY_S = 600.0
# A Retry-After of more is not believed.
RETRY_AFTER_S_MAX = 3600.0
# Looking for free space costs a few system calls.
SPACE_RETRY_S = 15.0

_PENDING, _RUNNING, _STORING, _STORED = b"\0\1\2\3"


@dataclass(slots=True)
class _Source:
    name: str
    runs: int = 0
    failures: int = 0
    ready_at: float = 0.0
    # Gave bytes that are not the model's: not asked again.
    dropped: bool = False
    whole_files: bool = False
    file_ready_at: dict[int, float] = field(default_factory=dict)
    detail: str = ""

    @property
    def streams_max(self) -> int:
        # One that failed shows with one run that it is back; whole files come one after the other.
        return 1 if self.failures or self.whole_files else STREAMS_MAX


@dataclass(slots=True)
class _Run:
    source: int
    # Asked for and not received yet.
    chunks: list[int]


class FetchState:
    """One fetch of one model.

    Args:
        present: the chunks that are on the disk already.
        sources: names, in order of preference.
    """

    def __init__(self, name: str, digest: str, plan: ChunkPlan, present: Iterable[int], sources: Sequence[str]) -> None:
        self._name = name
        self._digest = digest
        self._plan = plan
        self._chunks = bytearray(plan.count)
        self._bytes_done = 0
        self._left = plan.count
        for chunk in present:
            self._mark_stored(chunk)
        self._sources = [_Source(source) for source in sources]
        self._runs: dict[int, _Run] = {}
        # By chunk, the source that gave it.
        self._storing: dict[int, int] = {}
        self._next_run_id = 1
        self._veto: str | None = None
        self._has_space = False
        self._disk_full: str | None = None
        self._space_asked_at: float | None = None
        self._over: e.Finish | e.GiveUp | None = None
        self._meter = RateMeter()

    # ---- what others read

    def progress(self, now: float) -> FetchProgress:
        rate = self._meter.rate(now) if self._runs else 0.0
        left = self._plan.size_bytes - self._bytes_done
        return FetchProgress(
            name=self._name,
            digest=self._digest,
            phase=self._phase(),
            bytes_done=self._bytes_done,
            bytes_total=self._plan.size_bytes,
            rate_bytes_per_s=rate,
            eta_s=left / rate if rate > 0 else None,
            sources=tuple(source.name for source in self._sources if source.runs),
            detail=self._detail(),
        )

    def _phase(self) -> FetchPhase:
        if self._over is not None:
            return FetchPhase.DONE if isinstance(self._over, e.Finish) else FetchPhase.FAILED
        if self._disk_full is not None:
            return FetchPhase.DISK_FULL
        if self._veto is not None:
            return FetchPhase.PAUSED
        if not self._has_space:
            return FetchPhase.CHECKING_SPACE
        return FetchPhase.FETCHING if self._runs or self._storing else FetchPhase.RETRYING

    def _detail(self) -> str:
        if isinstance(self._over, e.GiveUp):
            return self._over.detail
        if self._disk_full is not None:
            return self._disk_full
        if self._veto is not None:
            return self._veto
        if self._runs or self._storing:
            return ""
        return "; ".join(f"{source.name}: {source.detail}" for source in self._sources if source.detail)

    # ---- events

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        """Take one event; return what is to be done, in order."""
        if self._over is not None:
            return []
        commands = self._take(event, now)
        if self._left == 0:
            self._over = e.Finish()
            return [*commands, *self._stop_runs(range(len(self._sources))), self._over]
        if all(source.dropped for source in self._sources):
            self._over = e.GiveUp(self._why_none())
            return [*commands, *self._stop_runs(range(len(self._sources))), self._over]
        return [*commands, *self._ask_for_space(now), *self._assign(now)]

    def _take(self, event: e.Event, now: float) -> list[e.Command]:
        match event:
            case e.Tick():
                return []
            case e.PermissionChanged(veto):
                return self._permit(veto)
            case e.SpaceFound():
                return self._find_space()
            case e.SpaceMissing(detail):
                return self._fill_disk(detail)
            case e.BytesArrived(count_bytes):
                self._meter.add(count_bytes, now)
                return []
            case e.ChunkReceived(run_id, chunk):
                self._receive(run_id, chunk)
                return []
            case e.ChunkStored(chunk):
                source = self._sources[self._storing.pop(chunk)]
                source.failures, source.detail = 0, ""
                self._mark_stored(chunk)
                return []
            case e.ChunkRefused(chunk):
                self._chunks[chunk] = _PENDING
                one = self._plan.chunk_range(chunk)
                return self._drop(self._storing.pop(chunk), f"wrong bytes in chunk {one.first} of {one.file.path}")
            case e.ChunkNotWritten(chunk, detail):
                del self._storing[chunk]
                self._chunks[chunk] = _PENDING
                return self._fill_disk(detail)
            case e.RunEnded(run_id):
                self._end_run(run_id)
                return []
            case e.RunFailed():
                return self._fail_run(event, now)
            case _:
                assert_never(event)

    def _mark_stored(self, chunk: int) -> None:
        if self._chunks[chunk] != _STORED:
            self._chunks[chunk] = _STORED
            self._left -= 1
            self._bytes_done += self._plan.chunk_bytes(chunk)

    def _permit(self, veto: str | None) -> list[e.Command]:
        if veto == self._veto:
            return []
        before, self._veto = self._veto, veto
        if veto is None:
            return [e.Report("fetching goes on", None, "")]
        stops = self._stop_runs(range(len(self._sources)))
        # A second reason on top of the first is for the status, not for the log.
        return [*stops, e.Report("fetching pauses", None, veto)] if before is None else stops

    def _find_space(self) -> list[e.Command]:
        self._has_space = True
        before, self._disk_full = self._disk_full, None
        return [] if before is None else [e.Report("there is space again: fetching goes on", None, "")]

    def _fill_disk(self, detail: str) -> list[e.Command]:
        self._has_space = False
        before, self._disk_full = self._disk_full, detail
        stops = self._stop_runs(range(len(self._sources)))
        return [*stops, e.Report("disk full: fetching waits for space", None, detail)] if before is None else stops

    def _ask_for_space(self, now: float) -> list[e.Command]:
        if self._has_space:
            return []
        if self._space_asked_at is not None and now - self._space_asked_at < SPACE_RETRY_S:
            return []
        self._space_asked_at = now
        return [e.CheckSpace()]

    # ---- runs

    def _receive(self, run_id: int, chunk: int) -> None:
        run = self._runs.get(run_id)
        # A run that was stopped a moment ago: its chunk is pending again, or with another run by now.
        if run is None or chunk not in run.chunks:
            raise LookupError(f"chunk {chunk} is not of run {run_id}: the driver asks `expects` before it tells")
        run.chunks.remove(chunk)
        self._chunks[chunk] = _STORING
        self._storing[chunk] = run.source

    def expects(self, run_id: int) -> bool:
        """Whether a run is still wanted."""
        return run_id in self._runs

    def _end_run(self, run_id: int) -> int | None:
        """Forget a run; what it did not give is pending again. Return its source."""
        run = self._runs.pop(run_id, None)
        if run is None:
            return None
        for chunk in run.chunks:
            self._chunks[chunk] = _PENDING
        self._sources[run.source].runs -= 1
        return run.source

    def _stop_runs(self, sources: Iterable[int]) -> list[e.Command]:
        wanted = set(sources)
        ids = [run_id for run_id, run in self._runs.items() if run.source in wanted]
        for run_id in ids:
            self._end_run(run_id)
        return [e.StopRun(run_id) for run_id in ids]

    def _fail_run(self, event: e.RunFailed, now: float) -> list[e.Command]:
        run = self._runs.get(event.run_id)
        if run is None:
            return []
        file_index = self._plan.file_index(run.chunks[0]) if run.chunks else None
        self._end_run(event.run_id)
        source = self._sources[run.source]
        source.detail = event.detail
        match event.kind:
            case e.FailureKind.WRONG:
                return self._drop(run.source, event.detail)
            case e.FailureKind.NO_RANGES:
                if source.whole_files:
                    return self._back_off(source, event, now)
                source.whole_files = True
                return [e.Report("source ignores ranges: taking whole files from it", source.name, event.detail)]
            case e.FailureKind.MISSING if file_index is not None:
                known = bool(source.file_ready_at)
                source.file_ready_at[file_index] = now + MISSING_RETRY_S
                # A mirror without the model would be a line for each of its files.
                return [] if known else [e.Report("source lacks a file", source.name, event.detail)]
            case e.FailureKind.MISSING | e.FailureKind.BUSY | e.FailureKind.BROKEN:
                return self._back_off(source, event, now)
            case _:
                assert_never(event.kind)

    def _back_off(self, source: _Source, event: e.RunFailed, now: float) -> list[e.Command]:
        source.failures += 1
        if event.retry_after_s is not None:
            wait_s = min(max(event.retry_after_s, BACKOFF_S_MIN), RETRY_AFTER_S_MAX)
        else:
            doublings = min(source.failures - 1, BACKOFF_DOUBLINGS_MAX)
            # At least half of it: a source in trouble needs some rest from everybody.
            wait_s = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2**doublings) * (0.5 + event.jitter / 2)
        source.ready_at = max(source.ready_at, now + wait_s)
        # The first of a row only: a source that is down for a night is one line.
        return [e.Report("source fails", source.name, event.detail)] if source.failures == 1 else []

    def _drop(self, index: int, detail: str) -> list[e.Command]:
        source = self._sources[index]
        source.detail = detail
        if source.dropped:
            return []
        source.dropped = True
        report = e.Report("source gives wrong bytes: not asked for this model again", source.name, detail)
        return [*self._stop_runs([index]), report]

    def _assign(self, now: float) -> list[e.Command]:
        """Start as many runs as are useful and allowed."""
        commands: list[e.Command] = []
        if self._veto is not None or not self._has_space:
            return commands
        while len(self._runs) < STREAMS_MAX:
            start = self._next_run(now)
            if start is None:
                return commands
            commands.append(start)
        return commands

    def _next_run(self, now: float) -> e.StartRun | None:
        for index, source in enumerate(self._sources):
            if source.dropped or now < source.ready_at or source.runs >= source.streams_max:
                continue
            span = self._pending_span(source, now)
            if span is None:
                continue
            run_id, self._next_run_id = self._next_run_id, self._next_run_id + 1
            self._runs[run_id] = _Run(index, list(span))
            for chunk in span:
                self._chunks[chunk] = _RUNNING
            source.runs += 1
            return e.StartRun(run_id, index, span.start, len(span), source.whole_files)
        return None

    def _pending_span(self, source: _Source, now: float) -> range | None:
        """Return the first chunks, one after the other in one file, that this source may be asked for."""
        for file_index in range(len(self._plan.files)):
            if now < source.file_ready_at.get(file_index, now):
                continue
            chunks = self._plan.chunks_of(file_index)
            first = self._chunks.find(_PENDING, chunks.start, chunks.stop)
            if first < 0:
                continue
            most = chunks.stop - first
            if not source.whole_files:
                # A fair share of what is left, so that the last streams end together.
                pending = self._chunks.count(_PENDING, chunks.start, chunks.stop)
                most = min(most, RUN_CHUNKS_MAX, max(1, -(-pending // STREAMS_MAX)))
            end = first + 1
            while end < first + most and self._chunks[end] == _PENDING:
                end += 1
            return range(first, end)
        return None

    def _why_none(self) -> str:
        if not self._sources:
            return (
                f"no source is known for {self._name}: name a mirror in [models], or ask the operator to name "
                "one in the coordinator's model_sources"
            )
        reasons = "; ".join(f"{source.name}: {source.detail}" for source in self._sources)
        return f"every source of {self._name} gave wrong bytes: {reasons}"
