"""One engine process: started, watched, measured, restarted and ended. The decisions are in `agent.engines.state`.

An engine lives in a session of its own, behind the fence that this machine
allows, with a marker in its environment by which every process of it is found
again, after a crash of this agent too. It is ready when it has generated real
tokens and ends when no process of it is left.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from agent.cards.use import CardReading
from agent.clock import monotonic_s, until_next_s
from agent.config import EngineSettings
from agent.engines.crash import LOG_TAIL_CHARACTERS, classify_crash
from agent.engines.fence import Fence, probe_fence
from agent.engines.files import EngineFiles, StartFiles, engines_directory, remove_runtime_directory
from agent.engines.launch import launch_engine, sampler_profile
from agent.engines.processes import MARKER_VARIABLE, kill_marked, terminate
from agent.engines.report import EngineReport
from agent.engines.speed import measure_tokens_per_second
from agent.engines.state import (
    BecameReady,
    Cleared,
    Command,
    EngineLimits,
    EngineState,
    Event,
    Exited,
    Kill,
    KillFailed,
    Spawn,
    Spawned,
    SpawnFailed,
    StartRequested,
    State,
    StopRequested,
    Tick,
    Unhealthy,
)
from inference.engine import EngineError
from inference.engine_client import HttpEngine
from inference.launch import EngineLaunch
from inference.manifest import Manifest
from protos.slackwater.common.v1 import capability_pb2

logger = structlog.get_logger()

# The fake opens its socket at once; torch imports for ten seconds and reads weights at disk speed; vLLM compiles and
# captures graphs for up to four minutes at a first start with a large model, and reads 40 GB besides.
START_DEADLINE_S = {"fake": 30.0, "torch": 300.0, "vllm": 900.0}
# A first token under load takes seconds; a whole prefill of a full context on a CPU, which no canary overtakes, takes
# longer. Wedged engines were seen to stay so for hours (syv-ai/qwen38-27b-rtx3090#48), so patience costs little.
CANARY_TIMEOUT_S = 30.0
CANARY_PERIOD_S = 5.0
# A second miss in a row: the first may be this process having been stopped or suspended while it waited.
CANARY_MISSES_MAX = 2
READINESS_POLL_S = 0.1
# From SIGKILL until a process without a stuck driver call is gone: freeing 80 GB of VRAM takes about a second.
KILL_CONFIRM_S = 10.0

_STATUS = {
    State.STARTING: capability_pb2.ENGINE_STATUS_STARTING,
    State.READY: capability_pb2.ENGINE_STATUS_READY,
    State.BACKING_OFF: capability_pb2.ENGINE_STATUS_STARTING,
    State.FAILED: capability_pb2.ENGINE_STATUS_FAILED,
    State.STOPPING: capability_pb2.ENGINE_STATUS_STOPPED,
    State.STOPPED: capability_pb2.ENGINE_STATUS_STOPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long the supervisor waits; tests set shorter ones."""

    limits: EngineLimits
    canary_period_s: float = CANARY_PERIOD_S
    canary_timeout_s: float = CANARY_TIMEOUT_S
    kill_confirm_s: float = KILL_CONFIRM_S


@dataclass(slots=True)
class _Running:
    """The driver's side of one start."""

    start: int
    process: asyncio.subprocess.Process
    engine: HttpEngine
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class EngineSupervisor:
    """Keeps one engine running for as long as `run` runs, which may be called again after its end.

    Args:
        marker: names this agent's state directory among all of this machine; as given to `sweep_leftovers`.
        on_change: called with every new report, from the event loop.
        on_canary: called with the engine id and the time (`agent.clock.monotonic_s`) at which a canary was started
            that then got its token: the engine generated something after that time.
        cards: returns the newest readings of this machine's cards (`HardwareMonitor.readings`).
        launch: returns the command line of the engine for one start.
    """

    def __init__(
        self,
        settings: EngineSettings,
        manifest: Manifest,
        state_dir: Path,
        marker: str,
        on_change: Callable[[EngineReport], None],
        *,
        on_canary: Callable[[str, float], None] | None = None,
        cards: Callable[[], Sequence[CardReading]] = tuple,
        launch: Callable[[StartFiles], EngineLaunch] | None = None,
        timings: Timings | None = None,
        probe: Callable[[], Fence] = probe_fence,
    ) -> None:
        self.engine: HttpEngine | None = None
        self._settings = settings
        self._manifest = manifest
        self._state_dir = state_dir.resolve()
        self._marker = f"{marker}/{settings.engine_id}"
        self._on_change = on_change
        self._on_canary = on_canary
        self._launch = launch or (lambda files: launch_engine(settings, manifest, files, cards()))
        self._timings = timings or Timings(limits=EngineLimits(start_deadline_s=START_DEADLINE_S[settings.kind]))
        self._probe = probe
        self._fence: Fence | None = None
        self._files = EngineFiles(self._state_dir, settings.engine_id)
        self._state = EngineState(self._timings.limits)
        self._running: _Running | None = None
        self._version = ""
        # Events come from this object's own few tasks and from start and stop calls, so the queue stays short.
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tokens_at = float("-inf")
        # Of the newest kill.
        self._survivors: tuple[int, ...] = ()
        self.report = self._make_report()

    async def run(self) -> None:
        """Start the engine and keep it up until `stop` or cancellation; no process is left when this returns."""
        self._idle.clear()
        self._events.put_nowait(StartRequested())
        # A task of its own, so that a cancellation stops the engine in good order instead of leaving a step half done.
        driver = asyncio.create_task(self._drive(), name=f"engine-driver-{self._settings.engine_id}")
        try:
            await asyncio.shield(driver)
        finally:
            if not driver.done():
                self._events.put_nowait(StopRequested())
            try:
                await driver
            finally:
                if self._running is not None:
                    await self._kill(0.0)
                await asyncio.to_thread(self._files.remove_runtime_directory)
                self._idle.set()

    async def stop(self) -> None:
        """Stop the engine and return when no process of it is left, or the report's note says which survived."""
        if not self._idle.is_set():
            self._events.put_nowait(StopRequested())
            await self._idle.wait()

    def kill(self) -> None:
        """Stop the engine at once and without grace; `gone` tells what became of it."""
        if not self._idle.is_set():
            # While it dies nothing may be offered to it.
            self.engine = None
            if self._running is not None:
                self._running.engine.expect_end()
            self._events.put_nowait(StopRequested(grace_s=0.0))

    async def gone(self) -> tuple[int, ...]:
        """Wait until `run` has returned; return the processes that survived their kill, if any."""
        await self._idle.wait()
        return self._survivors

    def note_tokens(self) -> None:
        """Say that tokens have just come from this engine; a canary is not needed for a while."""
        self._tokens_at = monotonic_s()

    async def _drive(self) -> None:
        """Feed events to the state until the engine is stopped and nothing is left to do."""
        while True:
            event = await self._next_event()
            before = self._state.state
            for command in self._state.handle(event, monotonic_s()):
                await self._execute(command)
            self._log_change(before)
            ready = self._state.state is State.READY
            self.engine = self._running.engine if ready and self._running is not None else None
            self._publish()
            if self._state.state is State.STOPPED and self._events.empty():
                return

    async def _next_event(self) -> Event:
        wake_at = self._state.wake_at
        if wake_at is None:
            return await self._events.get()
        try:
            async with asyncio.timeout(max(0.0, wake_at - monotonic_s())):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _execute(self, command: Command) -> None:
        match command:
            case Spawn(start):
                try:
                    pid = await self._spawn(start)
                except OSError as error:
                    self._events.put_nowait(SpawnFailed(start, f"cannot start the engine: {error}"))
                else:
                    self._events.put_nowait(Spawned(start, pid))
            case Kill(start, grace_s):
                # While it dies nothing may be offered to it.
                self.engine = None
                self._publish()
                self._survivors = survivors = await self._kill(grace_s)
                self._events.put_nowait(KillFailed(start, survivors) if survivors else Cleared(start))

    async def _spawn(self, start: int) -> int:
        self._survivors = ()
        fence = self._fence = self._fence or await self._probe_fence()
        files = await asyncio.to_thread(self._files.prepare, start)
        launch = self._launch(files)
        argv = fence.wrap(
            launch.argv,
            hide=self._state_dir,
            keep=(self._settings.model_directory, self._settings.python.parent.parent),
            writable=(files.home, files.cache, files.runtime_directory),
        )
        environment = {
            "HOME": str(files.home),
            **launch.env,
            MARKER_VARIABLE: self._marker,
            # Short, since engines make sockets there; removed with all its contents when the engine ends.
            "TMPDIR": str(files.runtime_directory),
            # setproctitle would write over the environment that the marker is read from.
            "SPT_NOENV": "1",
        }
        with files.log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=files.home,
                start_new_session=True,
            )
        engine = HttpEngine(files.socket_path, kind=self._manifest.kind)
        self._running = running = _Running(start, process, engine)
        for work, name in ((self._watch_exit(running), "exit"), (self._attend(running), "attend")):
            task = asyncio.create_task(work, name=f"engine-{name}-{self._settings.engine_id}")
            task.add_done_callback(lambda task: self._report_bug(start, task))
            running.tasks.append(task)
        return process.pid

    async def _probe_fence(self) -> Fence:
        fence = await asyncio.to_thread(self._probe)
        if not fence.closed:
            logger.warning(
                "engine runs unfenced, with network and keys in reach: install bubblewrap or allow user namespaces",
                engine_id=self._settings.engine_id,
            )
        return fence

    def _report_bug(self, start: int, task: asyncio.Task[None]) -> None:
        """Restart an engine that nobody watches any more: one of its two tasks raised what it should not."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("engine's task failed", task=task.get_name(), exc_info=error)
            self._events.put_nowait(Unhealthy(start, f"the supervisor failed: {error!r}"))

    async def _kill(self, grace_s: float) -> tuple[int, ...]:
        running, self._running = self._running, None
        group_id = 0
        if running is not None:
            group_id = running.process.pid
            running.engine.expect_end()
            for task in running.tasks:
                task.cancel()
            await asyncio.gather(*running.tasks, return_exceptions=True)
            await running.engine.aclose()
        survivors = await asyncio.to_thread(terminate, self._marker, group_id, grace_s, self._timings.kill_confirm_s)
        if running is not None and running.process.pid not in survivors:
            await running.process.wait()
        return survivors

    async def _watch_exit(self, running: _Running) -> None:
        status = await running.process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        cause = classify_crash(await asyncio.to_thread(self._files.log_tail, LOG_TAIL_CHARACTERS), status)
        reason = f"engine process ended: {how} ({cause.value}); see {self._files.log_name}"
        self._events.put_nowait(Exited(running.start, reason, cause))

    async def _attend(self, running: _Running) -> None:
        """Wait for the first real token, measure, and then check for life where no tokens show it."""
        try:
            await self._wait_until_ready(running.engine)
            self._version = await running.engine.version()
            tokens_per_second = await measure_tokens_per_second(running.engine, self._manifest)
        except EngineError as error:
            self._events.put_nowait(Unhealthy(running.start, f"engine failed its first generation: {error}"))
            return
        self._events.put_nowait(BecameReady(running.start, tokens_per_second))
        misses = 0
        while misses < CANARY_MISSES_MAX:
            if misses == 0:
                await asyncio.sleep(until_next_s(self._timings.canary_period_s))
            await asyncio.to_thread(self._files.bound_log)
            misses = 0 if await self._is_alive(running.engine) else misses + 1
        reason = f"engine is wedged: no token within {self._timings.canary_timeout_s:g} s, twice"
        self._events.put_nowait(Unhealthy(running.start, reason))

    async def _wait_until_ready(self, engine: HttpEngine) -> None:
        # The start deadline of EngineState ends this where the engine never answers.
        while True:
            try:
                await engine.check_health(self._timings.limits.start_deadline_s)
            except EngineError:
                await asyncio.sleep(READINESS_POLL_S)
            else:
                return

    async def _is_alive(self, engine: HttpEngine) -> bool:
        started_at = monotonic_s()
        if started_at - self._tokens_at < self._timings.canary_period_s:
            return True
        try:
            await engine.check_health(self._timings.canary_timeout_s)
        except EngineError as error:
            logger.warning("engine gave no canary token", engine_id=self._settings.engine_id, error=str(error))
            # One whose process ends refuses at once, and its exit, which says more, is about to be seen.
            await asyncio.sleep(started_at + self._timings.canary_timeout_s - monotonic_s())
            # Other sequences may have gone on while the canary waited its turn.
            return self._tokens_at > started_at
        if self._on_canary is not None:
            self._on_canary(self._settings.engine_id, started_at)
        return True

    def _log_change(self, before: State) -> None:
        state = self._state.state
        if state is before:
            return
        log = logger.bind(engine_id=self._settings.engine_id, start=self._state.start, pid=self._state.pid)
        if state in (State.BACKING_OFF, State.FAILED):
            log.error("engine is down", state=state.value, reason=self._state.note)
        else:
            log.info("engine changed", state=state.value, tokens_per_second=round(self._state.tokens_per_second, 1))

    def _publish(self) -> None:
        report = self._make_report()
        if report != self.report:
            self.report = report
            self._on_change(report)

    def _make_report(self) -> EngineReport:
        return EngineReport(
            engine_id=self._settings.engine_id,
            kind=self._settings.kind,
            version=self._version,
            status=_STATUS[self._state.state],
            manifest_digest=self._manifest.digest,
            model=self._manifest.name,
            sampler_profile=sampler_profile(self._settings),
            slots=self._settings.slots,
            tokens_per_second=self._state.tokens_per_second,
            gpu_uuids=self._settings.gpu_uuids,
            restarts=self._state.restarts,
            pid=self._state.pid,
            fenced=self._fence is not None and self._fence.closed,
            note=self._state.note,
        )


def sweep_leftovers(marker: str, state_dir: Path) -> set[int]:
    """End every engine process that an earlier agent of this state directory left; remove its temporary files.

    Blocks until they are gone, at most 10 s: call it in a thread, before any engine is started and only while no other
    agent uses the directory. Returns the processes that were ended.
    """
    ended, survivors = kill_marked(f"{marker}/", KILL_CONFIRM_S)
    if ended:
        logger.warning("ended engine processes that an earlier agent left", pids=sorted(ended))
    if survivors:
        logger.error("engine processes survive SIGKILL: reboot this machine", pids=sorted(survivors))
    if engines_directory(state_dir).is_dir():
        for engine_directory in engines_directory(state_dir).iterdir():
            remove_runtime_directory(engine_directory)
    return ended
