"""The supervisor over real engine processes that crash, wedge, hide and refuse to die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from agent.config import EngineSettings
from agent.engines.fence import Fence, FenceKind, probe_fence
from agent.engines.files import StartFiles
from agent.engines.processes import MARKER_VARIABLE, find_marked, kill_marked
from agent.engines.report import EngineReport
from agent.engines.state import EngineLimits
from agent.engines.supervisor import EngineSupervisor, Timings, sweep_leftovers
from inference.engine import GenerateRequest
from inference.engine_client import HttpEngine
from inference.launch import EngineLaunch, launch_fake
from inference.manifest import Manifest
from inference.task import ManifestDigest, Sampling, TaskKind
from protos.slackwater.common.v1.capability_pb2 import (
    ENGINE_STATUS_FAILED,
    ENGINE_STATUS_READY,
    ENGINE_STATUS_STARTING,
    ENGINE_STATUS_STOPPED,
)

# Several interpreters start one after another on a machine that does other things too.
PATIENCE_S = 30.0

MANIFEST = Manifest(
    digest=ManifestDigest("sha256:" + "0" * 64),
    name="tiny",
    revision="1",
    architecture="TinyForCausalLM",
    licence="MIT",
    dtype="float32",
    context_tokens=1024,
    vocabulary_size=64,
    stop_token_ids=(0,),
    files=(),
    origin="",
    kind=TaskKind.GENERATE,
)

TIMINGS = Timings(
    limits=EngineLimits(start_deadline_s=PATIENCE_S, backoff_s=0.05, stop_grace_s=1.0),
    canary_period_s=0.1,
    canary_timeout_s=1.0,
)

# Runs before the engine in the same process: a child in a session of its own that ignores SIGTERM and has no tie to
# its parent, as vLLM's engine core is.
STUBBORN_CHILD = """
import signal, subprocess, sys
program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
"""
# Runs before the engine too, which then is its child: ends half a second after it.
SLOW_TO_END = """
import os, time
serving = os.fork()
if serving:
    os.waitpid(serving, 0)
    time.sleep(0.5)
    os._exit(3)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import time; time.sleep(600)"


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    model = tmp_path / "model"
    model.mkdir()
    vocabulary = {f"t{number}": number for number in range(64)}
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return engine_settings(model)


def engine_settings(model: Path) -> EngineSettings:
    return EngineSettings(
        engine_id="main",
        kind="fake",
        model_directory=model,
        python=Path(sys.executable),
        fake_tokens_per_second=1000.0,
    )


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    # pytest numbers its directories, so no two runs share one.
    marker = f"test-{tmp_path.parent.name}-{tmp_path.name}"
    yield marker
    # What a failed test leaves would disturb the next ones.
    kill_marked(f"{marker}/", confirm_s=5.0)


class Watched:
    """A running supervisor, and all it has said."""

    def __init__(
        self, make: Callable[[Callable[[EngineReport], None], Callable[[str, float], None]], EngineSupervisor]
    ):
        self.reports: list[EngineReport] = []
        self.canaries: list[float] = []
        self._changed = asyncio.Event()
        self.supervisor = make(self._take, self._take_canary)

    def _take(self, report: EngineReport) -> None:
        self.reports.append(report)
        self._changed.set()

    def _take_canary(self, engine_id: str, started_at: float) -> None:
        self.canaries.append(started_at)
        self._changed.set()

    async def until(self, condition: Callable[[EngineReport], bool]) -> EngineReport:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.supervisor.report):
                self._changed.clear()
                await self._changed.wait()
        return self.supervisor.report

    async def until_ready(self, restarts: int = 0) -> EngineReport:
        return await self.until(lambda report: report.status == ENGINE_STATUS_READY and report.restarts == restarts)


@asynccontextmanager
async def supervised(
    settings: EngineSettings,
    state_dir: Path,
    marker: str,
    launch: Callable[[StartFiles], EngineLaunch] | None = None,
    timings: Timings = TIMINGS,
    fence: Fence | None = None,
) -> AsyncIterator[Watched]:
    watched = Watched(
        lambda on_change, on_canary: EngineSupervisor(
            settings,
            MANIFEST,
            state_dir,
            marker,
            on_change,
            on_canary=on_canary,
            launch=launch,
            timings=timings,
            probe=probe_fence if fence is None else lambda: fence,
        )
    )
    running = asyncio.create_task(watched.supervisor.run())
    try:
        yield watched
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # The promise behind every test here.
        assert find_marked(f"{marker}/") == set()


def before_engine(settings: EngineSettings, program: str) -> Callable[[StartFiles], EngineLaunch]:
    """Return a launch of the fake engine that runs `program` first, in the same process."""

    def launch(files: StartFiles) -> EngineLaunch:
        fake = launch_fake(
            settings.python,
            files.socket_path,
            settings.model_directory,
            tokens_per_second=1000.0,
            ttft_ms=1.0,
            context_tokens=1024,
            slots=4,
        )
        place = fake.argv.index("-c") + 1
        return replace(fake, argv=[*fake.argv[:place], program + fake.argv[place], *fake.argv[place + 1 :]])

    return launch


async def test_an_engine_becomes_ready_by_real_tokens_and_is_gone_after_stop(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    async with supervised(settings, tmp_path / "state", marker) as watched:
        report = await watched.until_ready()
        assert watched.reports[0].status == ENGINE_STATUS_STARTING
        assert report.tokens_per_second > 100
        assert (report.kind, report.model, report.slots, report.version) == ("fake", "tiny", 8, "slackwater-fake-1")
        engine = watched.supervisor.engine
        assert engine is not None
        request = GenerateRequest(
            request_id="r", prompt_ids=[1], sampling=Sampling(temperature=0), max_tokens=3, stop_token_ids=()
        )
        assert sum([len(chunk.token_ids) async for chunk in engine.generate(request)]) == 3
        await watched.until(lambda _: len(watched.canaries) >= 2)
        await watched.supervisor.stop()
        assert watched.supervisor.report.status == ENGINE_STATUS_STOPPED
        assert not psutil.pid_exists(report.pid)


async def test_a_killed_engine_is_reported_at_once_and_comes_back(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    # Long before any canary could tell.
    timings = replace(TIMINGS, canary_period_s=PATIENCE_S)
    async with supervised(settings, tmp_path / "state", marker, timings=timings) as watched:
        pid = (await watched.until_ready()).pid
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(1.0):
            report = await watched.until(lambda report: report.status != ENGINE_STATUS_READY)
        assert watched.supervisor.engine is None
        assert "killed by SIGKILL" in report.note
        assert (await watched.until_ready(restarts=1)).pid != pid


async def read_forever(engine: HttpEngine, begun: asyncio.Event) -> None:
    request = GenerateRequest(
        request_id="r", prompt_ids=[1], sampling=Sampling(temperature=0), max_tokens=1000, stop_token_ids=()
    )
    async with aclosing(engine.generate(request)) as chunks:
        async for _ in chunks:
            begun.set()


@pytest.mark.parametrize("on_purpose", [True, False])
async def test_an_answer_that_is_cut_off_is_a_warning_unless_its_engine_ends_on_purpose(
    settings: EngineSettings, tmp_path: Path, marker: str, on_purpose: bool
) -> None:
    """At a give-back the owner's log would else have a warning for each answer.

    Mutations seen to fail here: abort on an engine that is being killed; never warn.
    """
    async with supervised(settings, tmp_path / "state", marker) as watched:
        report = await watched.until_ready()
        engine = watched.supervisor.engine
        assert engine is not None
        begun = asyncio.Event()
        reader = asyncio.create_task(read_forever(engine, begun))
        await begun.wait()
        with capture_logs() as logs:
            if on_purpose:
                # As at a give-back: the answer is handed back, then the engine killed, in one go.
                reader.cancel()
                watched.supervisor.kill()
                assert await watched.supervisor.gone() == ()
            else:
                os.kill(report.pid, signal.SIGKILL)
            await asyncio.gather(reader, return_exceptions=True)
        warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
        assert any("did not take the abort" in event for event in warnings) is not on_purpose


async def test_children_that_left_the_group_die_with_their_engine(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    """Mutation tried: with the group alone in `find_members`, the child outlives the engine and holds the card."""
    launch = before_engine(settings, STUBBORN_CHILD)
    async with supervised(settings, tmp_path / "state", marker, launch) as watched:
        report = await watched.until_ready()
        family = find_marked(f"{marker}/")
        assert len(family) == 2
        os.kill(report.pid, signal.SIGKILL)
        await watched.until_ready(restarts=1)
        assert not family & find_marked(f"{marker}/")


async def test_a_frozen_engine_is_killed_and_started_again(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    async with supervised(settings, tmp_path / "state", marker) as watched:
        os.kill((await watched.until_ready()).pid, signal.SIGSTOP)
        report = await watched.until_ready(restarts=1)
        assert "wedged" in report.note


async def test_an_engine_that_refuses_because_it_ends_is_no_wedged_one(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    """It has as long as the patience for a token, however fast it refuses.

    Mutation seen to fail here: ask again at once, and call it wedged before its exit is seen.
    """
    launch = before_engine(settings, SLOW_TO_END)
    async with supervised(settings, tmp_path / "state", marker, launch) as watched:
        report = await watched.until_ready()
        # The one that serves is the last of the family, whatever fences it in.
        *_, serving = psutil.Process(report.pid).children(recursive=True)
        serving.kill()
        report = await watched.until_ready(restarts=1)
        assert "exit status 3" in report.note


async def test_an_engine_that_makes_tokens_is_not_asked_for_more(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    async with supervised(settings, tmp_path / "state", marker) as watched:
        await watched.until_ready()
        await watched.until(lambda _: bool(watched.canaries))
        for _ in range(30):
            watched.supervisor.note_tokens()
            await asyncio.sleep(0.02)
        assert len(watched.canaries) <= 3


async def test_an_engine_that_always_fails_is_given_up_after_three_restarts(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    state_dir = tmp_path / "state"

    def launch(files: StartFiles) -> EngineLaunch:
        return EngineLaunch([sys.executable, "-c", "print('why', flush=True); raise SystemExit(3)"], {})

    async with supervised(settings, state_dir, marker, launch) as watched:
        report = await watched.until(lambda report: report.status == ENGINE_STATUS_FAILED)
        assert report.restarts == 3
        assert "exit status 3" in report.note
        logs = sorted((state_dir / "engines/main/logs").iterdir())
        assert [log.read_text() for log in logs] == ["why\n"] * 4
        assert logs[-1].name in report.note


async def test_an_engine_that_never_answers_is_killed_at_its_deadline(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    timings = replace(TIMINGS, limits=replace(TIMINGS.limits, start_deadline_s=1.0, restart_budget=0))

    def launch(files: StartFiles) -> EngineLaunch:
        return EngineLaunch([sys.executable, "-c", DEAF], {})

    async with supervised(settings, tmp_path / "state", marker, launch, timings) as watched:
        report = await watched.until(lambda report: report.status == ENGINE_STATUS_FAILED and report.pid == 0)
        assert report.note.startswith("not ready after 1 s; ")


async def test_an_engine_that_ignores_sigterm_is_gone_after_its_grace(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STUBBORN_CHILD
    async with supervised(settings, tmp_path / "state", marker, before_engine(settings, deaf)) as watched:
        await watched.until_ready()
        async with asyncio.timeout(TIMINGS.limits.stop_grace_s + 3.0):
            await watched.supervisor.stop()
        assert find_marked(f"{marker}/") == set()
        assert watched.supervisor.report.note == ""


async def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    for delay_s in (0.0, 0.02, 0.1, 0.3, 0.6):
        async with supervised(settings, tmp_path / "state", marker):
            await asyncio.sleep(delay_s)
        assert not (tmp_path / "state/engines/main/runtime-directory").exists()


async def test_two_engines_of_one_agent_do_not_touch_each_other(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    """The second's id begins with the first's. Mutation tried: matching the marker as a prefix kills both."""
    other = msgspec.structs.replace(settings, engine_id="main2")
    async with supervised(other, tmp_path / "state", marker) as second:
        pid = (await second.until_ready()).pid
        first = EngineSupervisor(settings, MANIFEST, tmp_path / "state", marker, lambda report: None, timings=TIMINGS)
        running = asyncio.create_task(first.run())
        await second.until(lambda _: len(second.canaries) > 3)
        await first.stop()
        await running
        assert second.supervisor.report.pid == pid
        assert psutil.pid_exists(pid)


@pytest.mark.parametrize("kind", [FenceKind.NONE, probe_fence().kind])
async def test_the_report_says_whether_the_engine_sees_network_and_keys(
    settings: EngineSettings, tmp_path: Path, marker: str, kind: FenceKind
) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    (state_dir / "identity.json").write_text("a key")
    look = f"""
import json, os, socket
print(json.dumps([os.path.exists({str(state_dir / "identity.json")!r}), len(socket.if_nameindex()) > 1,
                  os.listdir(os.environ["HOME"]), sorted(os.environ)]), flush=True)
"""
    fence = Fence(kind) if kind is FenceKind.NONE else probe_fence()
    async with supervised(settings, state_dir, marker, before_engine(settings, look), fence=fence) as watched:
        report = await watched.until_ready()
        (log,) = (state_dir / "engines/main/logs").iterdir()
        sees_key, sees_network, home, variables = json.loads(log.read_text().splitlines()[0])
    assert report.fenced is (kind is not FenceKind.NONE)
    assert sees_key is not report.fenced
    # A build machine may itself have no network.
    assert not (report.fenced and sees_network)
    assert home == []
    assert set(variables) <= {
        "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "SPT_NOENV", "TMPDIR", "TZ", MARKER_VARIABLE
    }  # fmt: skip


def start_agent(settings: EngineSettings, state_dir: Path, marker: str) -> "subprocess.Popen[str]":
    """Start a process of its own that supervises a fake engine with a stubborn child, and prints the engine's pid."""
    program = f"""
import asyncio, importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("faults", {__file__!r})
faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faults)
settings = faults.engine_settings(Path({str(settings.model_directory)!r}))
async def main():
    launch = faults.before_engine(settings, faults.STUBBORN_CHILD)
    async with faults.supervised(settings, Path({str(state_dir)!r}), {marker!r}, launch) as watched:
        print("ENGINE", (await watched.until_ready()).pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_an_engine_dies_with_its_agent_and_a_sweep_ends_what_it_left(
    settings: EngineSettings, tmp_path: Path, marker: str
) -> None:
    """Mutation tried: without PR_SET_PDEATHSIG the engine goes on, unseen, until the next start of the agent."""
    state_dir = tmp_path / "state"
    with start_agent(settings, state_dir, marker) as agent:
        assert agent.stdout is not None
        engine_pid = next(int(line.split()[1]) for line in agent.stdout if line.startswith("ENGINE "))
        engine = psutil.Process(engine_pid)
        family = find_marked(f"{marker}/")
        assert engine_pid in family
        assert len(family) == 2
        runtime_directory = Path((state_dir / "engines/main/runtime-directory").read_text())
        agent.kill()
    gone, _ = psutil.wait_procs([engine], timeout=5.0)
    assert gone == [engine]
    # The child has no tie to the agent. Another agent's sweep leaves it alone, this one's does not.
    assert len(find_marked(f"{marker}/")) == 1
    assert sweep_leftovers(f"{marker}-other", tmp_path / "other") == set()
    assert sweep_leftovers(marker, state_dir) == family - {engine_pid}
    assert find_marked(f"{marker}/") == set()
    assert not runtime_directory.exists()
    assert sweep_leftovers(marker, state_dir) == set()
