"""All engines of this node, and the work on them: carries out what `agent.state` orders. Decides nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Protocol

import msgspec
import structlog

from agent import events as e
from agent.assignments import AttemptKey, TaskOrder
from agent.clock import monotonic_s
from agent.config import EngineSettings
from agent.engines.choice import VLLM_FAILURES_MAX
from agent.engines.report import EngineReport, engine_message
from agent.errors import ExitStatus, ModelRefused, NoEngine
from agent.models import served_model
from inference.engine import Engine, EngineError, EngineUnreachable, GenerateRequest
from inference.manifest import Manifest
from inference.task import TaskKind
from protos.slackwater.common.v1 import capability_pb2

# A canary for a sequence that has already been silent for two seconds.
CANARY_TIMEOUT_S = 5.0
# An engine group is killed within two; longer, and a service manager loses patience with us.
ENGINE_STOP_S = 5.0
# No engine fits or is installed: somebody may install one, or a program may leave the memory it holds.
SETTLE_AGAIN_S = 60.0

log = structlog.get_logger()


class Supervisor(Protocol):
    """What is asked of `EngineSupervisor`."""

    report: EngineReport

    @property
    def engine(self) -> Engine | None: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def kill(self) -> None: ...
    async def gone(self) -> tuple[int, ...]: ...
    def note_tokens(self) -> None: ...


# Makes the supervisor of one engine, given whom to tell of reports and canaries.
MakeSupervisor = Callable[
    [EngineSettings, Manifest, Callable[[EngineReport], None], Callable[[str, float], None]], Supervisor
]


# Settles what an engine's settings leave open, given how often vLLM failed with its model in a row; or NoEngine.
Settle = Callable[[EngineSettings, Manifest, int], Awaitable[EngineSettings]]


@dataclass(slots=True)
class _Slot:
    """One configured engine. There is a supervisor once it was started."""

    settings: EngineSettings
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    supervisor: Supervisor | None = None
    # What the supervisor was made of.
    settled: EngineSettings | None = None
    vllm_failures: int = 0
    # Of an engine that is open to the fleet: what it runs next, and that it is to change to it.
    fetching: "asyncio.Task[None] | None" = None
    prepared: "_Prepared | None" = None
    change: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked model, which stays where it is until `hold` is closed."""

    hold: AsyncExitStack
    settings: EngineSettings
    manifest: Manifest


class Engines:
    """Every engine of the configuration, up while it is wanted.

    Args:
        provide: yields an engine's settings with its checked model, which stays where it is until the block ends;
            raises ModelRefused.
        find: returns the manifest of a model of the fleet by its digest; raises ModelRefused.
        settle: settles what the settings leave open; raises NoEngine.
        feed: takes what happens, from the event loop.
        create_task: for work that ends with the daemon.
    """

    def __init__(
        self,
        settings: Sequence[EngineSettings],
        *,
        provide: Callable[[EngineSettings], AbstractAsyncContextManager[tuple[EngineSettings, Manifest]]],
        find: Callable[[EngineSettings], Awaitable[Manifest]],
        settle: Settle,
        make_supervisor: MakeSupervisor,
        feed: Callable[[e.Event], None],
        create_task: Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"],
    ) -> None:
        self._slots = {one.engine_id: _Slot(one) for one in settings}
        self._provide = provide
        self._find = find
        self._settle = settle
        self._make_supervisor = make_supervisor
        self._feed = feed
        self._create_task = create_task
        self._refused = 0
        self._work: dict[AttemptKey, asyncio.Task[None]] = {}

    # ---- life

    async def run(self, engine_id: str) -> e.Exit | None:
        """Check the model, then keep the engine up whenever it is wanted, until cancellation.

        Returns only where no engine of this node has a model that may be loaded.
        """
        slot = self._slots[engine_id]
        async with AsyncExitStack() as stack:
            if slot.settings.open:
                await self._run_open(slot)
            try:
                settings, manifest = await stack.enter_async_context(self._provide(slot.settings))
            except ModelRefused as error:
                return self._refuse_model(slot.settings, str(error))
            await self._keep_up(slot, settings, manifest)
        raise AssertionError("an engine is kept up until cancellation")

    async def _run_open(self, slot: _Slot) -> NoReturn:
        """Run whatever model the fleet chose last."""
        self._tell_nothing_chosen(slot.settings)
        while True:
            await slot.change.wait()
            slot.change.clear()
            chosen, slot.prepared = slot.prepared, None
            if chosen is None:
                continue
            async with chosen.hold, asyncio.TaskGroup() as group:
                # Cancelled, it stops the engine in good order.
                keeping = group.create_task(self._keep_up(slot, chosen.settings, chosen.manifest))
                await slot.change.wait()
                keeping.cancel()
            slot.supervisor, slot.vllm_failures = None, 0

    async def _keep_up(self, slot: _Slot, settings: EngineSettings, manifest: Manifest) -> NoReturn:
        engine_id = settings.engine_id
        self._feed(e.ModelChecked(engine_id, served_model(manifest)))
        self._tell(settings, manifest, capability_pb2.ENGINE_STATUS_STOPPED, "")
        while True:
            await slot.wanted.wait()
            try:
                supervisor = await self._supervisor(slot, settings, manifest)
            except NoEngine as error:
                log.error("no engine for the model", engine_id=engine_id, detail=str(error))
                self._tell(settings, manifest, capability_pb2.ENGINE_STATUS_FAILED, str(error))
                await asyncio.sleep(SETTLE_AGAIN_S)
                continue
            # Between the call that set it and now it may have been taken back.
            if slot.wanted.is_set():
                await supervisor.run()

    # ---- models that the fleet chooses

    def change_model(self, command: e.FindModel | e.FetchModel | e.LeaveModel | e.SwitchModel) -> None:
        slot = self._slots[command.engine_id]
        match command:
            case e.FindModel():
                slot.fetching = self._create_task(self._find_model(command))
            case e.FetchModel():
                slot.fetching = self._create_task(self._fetch_model(command))
            case e.SwitchModel():
                slot.change.set()
            case e.LeaveModel():
                # What was fetched stays on the disk.
                if slot.fetching is not None:
                    slot.fetching.cancel()
                if slot.prepared is not None:
                    self._create_task(slot.prepared.hold.aclose())
                    slot.prepared = None

    async def _find_model(self, command: e.FindModel) -> None:
        settings = msgspec.structs.replace(self._slots[command.engine_id].settings, model=command.digest)
        try:
            manifest = await self._find(settings)
        except ModelRefused as error:
            self._feed(e.ModelNotHad(command.engine_id, command.digest, str(error)))
        else:
            self._feed(e.ModelFound(command.engine_id, served_model(manifest), manifest.size_bytes))

    async def _fetch_model(self, command: e.FetchModel) -> None:
        slot = self._slots[command.engine_id]
        log.info("fetching a model that the fleet chose", engine_id=command.engine_id, model=command.digest)
        async with AsyncExitStack() as stack:
            try:
                wanted = msgspec.structs.replace(slot.settings, model=command.digest)
                settings, manifest = await stack.enter_async_context(self._provide(wanted))
            except ModelRefused as error:
                log.warning("a model that the fleet chose is refused", engine_id=command.engine_id, detail=str(error))
                self._feed(e.ModelNotHad(command.engine_id, command.digest, str(error)))
                return
            slot.prepared = _Prepared(stack.pop_all(), settings, manifest)
        self._feed(e.ModelFetched(command.engine_id, command.digest))

    async def _supervisor(self, slot: _Slot, settings: EngineSettings, manifest: Manifest) -> Supervisor:
        """Return the supervisor of the engine as it is to start now: with free memory the choice may change.

        Raises:
            NoEngine: none can run the model here and now.
        """
        settled = await self._settle(settings, manifest, slot.vllm_failures)
        if slot.supervisor is None or settled != slot.settled:
            slot.settled = settled
            slot.supervisor = self._make_supervisor(settled, manifest, self._on_report, self._on_canary)
            self._on_report(slot.supervisor.report)
        return slot.supervisor

    def _tell(
        self,
        settings: EngineSettings,
        manifest: Manifest,
        status: "capability_pb2.EngineStatus.ValueType",
        note: str,
    ) -> None:
        """Report an engine that has no supervisor."""
        engine = capability_pb2.Engine(
            engine_id=settings.engine_id,
            kind=settings.kind,
            status=status,
            manifest_digest=manifest.digest,
            model=manifest.name,
            slots=settings.slots,
            gpu_uuids=settings.gpu_uuids,
            note=note,
        )
        self._feed(e.EngineChanged(engine))

    def _tell_nothing_chosen(self, settings: EngineSettings) -> None:
        engine = capability_pb2.Engine(
            engine_id=settings.engine_id,
            kind=settings.kind,
            status=capability_pb2.ENGINE_STATUS_STOPPED,
            slots=settings.slots,
            gpu_uuids=settings.gpu_uuids,
            note="the fleet has chosen no model for it yet",
        )
        self._feed(e.EngineChanged(engine))

    def start(self, engine_id: str) -> None:
        self._slots[engine_id].wanted.set()

    def kill(self, engine_id: str) -> None:
        """Begin to kill the engine, at once; `gone` tells when it is done."""
        slot = self._slots[engine_id]
        slot.wanted.clear()
        if slot.supervisor is not None:
            slot.supervisor.kill()

    async def gone(self, engine_id: str) -> tuple[int, ...]:
        """Wait until no process of an engine that was killed is left; return those that survived their kill."""
        supervisor = self._slots[engine_id].supervisor
        return () if supervisor is None else await supervisor.gone()

    async def stop(self) -> None:
        """Stop all of them in good order."""
        async with asyncio.TaskGroup() as group:
            for engine_id, slot in self._slots.items():
                slot.wanted.clear()
                if slot.supervisor is not None:
                    group.create_task(self._stop_one(engine_id, slot.supervisor))

    async def _stop_one(self, engine_id: str, supervisor: Supervisor) -> None:
        try:
            async with asyncio.timeout(ENGINE_STOP_S):
                await supervisor.stop()
        except TimeoutError:
            log.error("the engine does not end; the next start of the agent sweeps it", engine_id=engine_id)

    def _refuse_model(self, settings: EngineSettings, detail: str) -> e.Exit | None:
        log.error("model refused", engine_id=settings.engine_id, detail=detail)
        engine = capability_pb2.Engine(
            engine_id=settings.engine_id,
            kind=settings.kind,
            status=capability_pb2.ENGINE_STATUS_FAILED,
            gpu_uuids=settings.gpu_uuids,
            note=detail,
        )
        self._feed(e.EngineChanged(engine))
        self._refused += 1
        return e.Exit(ExitStatus.NO_ENGINE, detail) if self._refused == len(self._slots) else None

    def _on_report(self, report: EngineReport) -> None:
        slot = self._slots[report.engine_id]
        gave_up = report.status == capability_pb2.ENGINE_STATUS_FAILED and report.restarts >= VLLM_FAILURES_MAX
        if slot.settings.kind == "auto" and report.kind == "vllm" and gave_up and slot.supervisor is not None:
            # Stopped, it is settled anew, and then without vLLM.
            slot.vllm_failures = report.restarts
            self._create_task(self._stop_one(report.engine_id, slot.supervisor))
        self._feed(e.EngineChanged(engine_message(report)))

    def _on_canary(self, engine_id: str, started_at: float) -> None:
        self._feed(e.CanaryPassed(engine_id, started_at))

    # ---- work

    @property
    def work(self) -> Sequence["asyncio.Task[None]"]:
        """What runs on the engines now."""
        return list(self._work.values())

    def start_work(self, command: e.StartWork) -> None:
        key = command.order.key
        supervisor = self._slots[command.engine_id].supervisor
        engine = None if supervisor is None else supervisor.engine
        if supervisor is None or engine is None:
            reason = e.FailureReason.FAILURE_REASON_ENGINE_CRASHED
            self._feed(e.EngineFailed(key, reason, "the engine went down before it began"))
            return
        task = self._create_task(self._do_work(command, engine, supervisor))
        self._work[key] = task
        task.add_done_callback(partial(self._forget_work, key))

    def abort_work(self, key: AttemptKey) -> None:
        work = self._work.pop(key, None)
        if work is not None:
            work.cancel()

    def _forget_work(self, key: AttemptKey, task: "asyncio.Task[None]") -> None:
        if self._work.get(key) is task:
            del self._work[key]

    async def _do_work(self, command: e.StartWork, engine: Engine, supervisor: Supervisor) -> None:
        order = command.order
        try:
            match order.kind:
                case TaskKind.GENERATE:
                    await self._generate(order, command.prompt_ids, engine, supervisor)
                case TaskKind.SCORE:
                    scores = await engine.score(command.prompt_ids, order.sampling.logprobs or 0)
                    self._feed(e.ScoresComputed(order.key, tuple(scores)))
                case TaskKind.EMBED:
                    vector = await engine.embed(command.prompt_ids)
                    self._feed(e.EmbeddingComputed(order.key, tuple(vector)))
        except EngineUnreachable as error:
            self._feed(e.EngineFailed(order.key, e.FailureReason.FAILURE_REASON_ENGINE_CRASHED, str(error)))
        except EngineError as error:
            self._feed(e.EngineFailed(order.key, e.FailureReason.FAILURE_REASON_ENGINE_ERROR, str(error)))

    async def _generate(
        self, order: TaskOrder, prompt_ids: Sequence[int], engine: Engine, supervisor: Supervisor
    ) -> None:
        request = GenerateRequest(
            request_id=f"{order.key.task_id}-{order.key.attempt}",
            prompt_ids=prompt_ids,
            sampling=order.sampling,
            max_tokens=order.max_tokens,
            stop_token_ids=order.stop_token_ids,
            cache_salt=order.cache_salt.hex() or None,
        )
        # The port promises an iterator that can be closed, which AsyncIterator does not say.
        async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                supervisor.note_tokens()
                self._feed(e.EngineChunkArrived(order.key, chunk))
                if chunk.finish_reason is not None:
                    return
        raise EngineError("the engine ended the sequence without a finish reason")

    async def check(self, engine_id: str) -> None:
        """Make one real token on an engine."""
        supervisor = self._slots[engine_id].supervisor
        engine = None if supervisor is None else supervisor.engine
        started_at = monotonic_s()
        try:
            if engine is None:
                raise EngineUnreachable("the engine is down")
            await engine.check_health(CANARY_TIMEOUT_S)
        except EngineError as error:
            log.warning("engine gave no canary token", engine_id=engine_id, error=str(error))
            self._feed(e.CanaryFailed(engine_id))
        else:
            self._feed(e.CanaryPassed(engine_id, started_at))
