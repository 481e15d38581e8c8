"""How the engines of a node are raised, and what takes the place of one that keeps failing."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from agent import events as e
from agent.config import EngineSettings
from agent.engines.engines import Engines
from agent.engines.report import EngineReport
from agent.errors import ModelRefused, NoEngine
from inference.engine import Engine
from inference.manifest import Manifest
from inference.task import ManifestDigest, TaskKind
from protos.slackwater.common.v1 import capability_pb2

MANIFEST = Manifest(
    digest=ManifestDigest("sha256:" + "0" * 64),
    name="small",
    revision="1",
    architecture="LlamaForCausalLM",
    licence="MIT",
    dtype="bfloat16",
    context_tokens=4096,
    vocabulary_size=100,
    stop_token_ids=(2,),
    files=(),
    origin="",
    kind=TaskKind.GENERATE,
)


class ScriptedSupervisor:
    """Reports what the test says; runs until it is stopped."""

    engine: Engine | None = None

    def __init__(self, settings: EngineSettings, on_report: Callable[[EngineReport], None]) -> None:
        self._on_report = on_report
        self._stopped = asyncio.Event()
        self.runs = 0
        self.over = False
        self.report = EngineReport(
            engine_id=settings.engine_id,
            kind=settings.kind,
            version="1",
            status=capability_pb2.ENGINE_STATUS_STOPPED,
            manifest_digest=MANIFEST.digest,
            model=MANIFEST.name,
            sampler_profile="",
            slots=1,
            tokens_per_second=0.0,
            gpu_uuids=settings.gpu_uuids,
            restarts=0,
            pid=0,
            fenced=True,
            note="",
        )

    def tell(self, status: "capability_pb2.EngineStatus.ValueType", restarts: int = 0) -> None:
        self.report = replace(self.report, status=status, restarts=restarts)
        self._on_report(self.report)

    async def run(self) -> None:
        self.runs += 1
        self.over = False
        self._stopped.clear()
        try:
            await self._stopped.wait()
        finally:
            self.over = True

    async def stop(self) -> None:
        self._stopped.set()

    def kill(self) -> None:
        self._stopped.set()

    async def gone(self) -> tuple[int, ...]:
        return ()

    def note_tokens(self) -> None:
        """Nothing here counts them."""


class Provided:
    """A model that is held until somebody lets go of it; being forgotten is not enough."""

    def __init__(self, node: "Node", settings: EngineSettings) -> None:
        self._node = node
        self._settings = settings

    async def __aenter__(self) -> tuple[EngineSettings, Manifest]:
        if self._node.unknown:
            raise ModelRefused("the coordinator has no such model")
        self._node.held.append(self._settings.model)
        return self._settings, replace(MANIFEST, digest=ManifestDigest(self._settings.model))

    async def __aexit__(self, *error: object) -> None:
        self._node.held.remove(self._settings.model)


class Node:
    """Engines of one node over scripted supervisors."""

    def __init__(self, settings: EngineSettings) -> None:
        self.told: list[e.Event] = []
        self.supervisors: list[ScriptedSupervisor] = []
        self.missing = ""
        self.unknown = False
        # Models that nobody may evict.
        self.held: list[str] = []
        self.engines = Engines(
            [settings],
            provide=self._provide,
            find=self._find,
            settle=self._settle,
            make_supervisor=self._make,
            feed=self.told.append,
            create_task=asyncio.create_task,
        )

    def _provide(self, settings: EngineSettings) -> "Provided":
        return Provided(self, settings)

    async def _find(self, settings: EngineSettings) -> Manifest:
        if self.unknown:
            raise ModelRefused("the coordinator has no such model")
        return replace(MANIFEST, digest=ManifestDigest(settings.model))

    async def _settle(self, settings: EngineSettings, manifest: Manifest, vllm_failures: int) -> EngineSettings:
        if self.missing:
            raise NoEngine(self.missing)
        return msgspec.structs.replace(settings, kind="torch" if vllm_failures else "vllm")

    def _make(
        self,
        settings: EngineSettings,
        manifest: Manifest,
        on_report: Callable[[EngineReport], None],
        on_canary: Callable[[str, float], None],
    ) -> ScriptedSupervisor:
        self.supervisors.append(ScriptedSupervisor(settings, on_report))
        return self.supervisors[-1]

    @property
    def reports(self) -> list[capability_pb2.Engine]:
        return [event.engine for event in self.told if isinstance(event, e.EngineChanged)]


async def turn() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def auto() -> EngineSettings:
    return EngineSettings(engine_id="main", kind="auto", model_directory=Path("/m"))


async def test_an_engine_is_known_before_it_is_wanted_and_chosen_when_it_is() -> None:
    node = Node(auto())
    running = asyncio.create_task(node.engines.run("main"))
    await turn()
    assert [(one.kind, one.status) for one in node.reports] == [("auto", capability_pb2.ENGINE_STATUS_STOPPED)]
    assert not node.supervisors
    node.engines.start("main")
    await turn()
    assert node.reports[-1].kind == "vllm"
    assert node.supervisors[0].runs == 1
    running.cancel()


async def test_vllm_that_keeps_failing_gives_way_to_torch() -> None:
    """Mutation seen to fail here: give way after the first failure."""
    node = Node(auto())
    running = asyncio.create_task(node.engines.run("main"))
    node.engines.start("main")
    await turn()
    node.supervisors[0].tell(capability_pb2.ENGINE_STATUS_FAILED, restarts=1)
    await turn()
    assert len(node.supervisors) == 1
    node.supervisors[0].tell(capability_pb2.ENGINE_STATUS_FAILED, restarts=3)
    await turn()
    assert [one.report.kind for one in node.supervisors] == ["vllm", "torch"]
    assert node.supervisors[1].runs == 1
    running.cancel()


async def test_an_engine_that_stays_what_it_is_keeps_its_supervisor_over_a_give_back() -> None:
    node = Node(auto())
    running = asyncio.create_task(node.engines.run("main"))
    node.engines.start("main")
    await turn()
    node.engines.kill("main")
    await turn()
    node.engines.start("main")
    await turn()
    assert [one.runs for one in node.supervisors] == [2]
    running.cancel()


async def test_without_an_engine_the_reason_is_told_and_it_is_tried_again() -> None:
    node = Node(auto())
    node.missing = "torch is not installed"
    running = asyncio.create_task(node.engines.run("main"))
    node.engines.start("main")
    await turn()
    last = node.reports[-1]
    assert (last.status, last.note) == (capability_pb2.ENGINE_STATUS_FAILED, "torch is not installed")
    assert not running.done()
    running.cancel()


async def test_a_model_of_the_fleet_is_prepared_beside_the_one_that_runs_and_takes_its_place() -> None:
    """Fails when the first engine still runs, or its model is held, after the change."""
    node = Node(EngineSettings(engine_id="main", kind="auto", model="fleet"))
    running = asyncio.create_task(node.engines.run("main"))
    node.engines.start("main")
    await turn()
    assert [one.note for one in node.reports] == ["the fleet has chosen no model for it yet"]
    for number, digest in enumerate(("first", "second")):
        node.engines.change_model(e.FindModel("main", digest))
        await turn()
        assert isinstance(node.told[-1], e.ModelFound)
        node.engines.change_model(e.FetchModel("main", digest))
        await turn()
        assert node.told[-1] == e.ModelFetched("main", digest)
        assert node.held[-1] == digest
        assert len(node.supervisors) == number, "what runs goes on"
        node.engines.change_model(e.SwitchModel("main", digest))
        await turn()
        assert node.held == [digest]
    assert [one.runs for one in node.supervisors] == [1, 1]
    assert node.supervisors[0].over
    running.cancel()


async def test_a_model_that_is_left_is_not_held_and_one_that_is_unknown_is_said_to_be() -> None:
    """Fails when what was prepared stays held."""
    node = Node(EngineSettings(engine_id="main", kind="auto", model="fleet"))
    running = asyncio.create_task(node.engines.run("main"))
    node.engines.change_model(e.FetchModel("main", "first"))
    await turn()
    node.engines.change_model(e.LeaveModel("main"))
    await turn()
    assert node.held == []
    node.unknown = True
    for command in (e.FindModel("main", "first"), e.FetchModel("main", "first")):
        node.engines.change_model(command)
        await turn()
        assert node.told[-1] == e.ModelNotHad("main", "first", "the coordinator has no such model")
    running.cancel()
