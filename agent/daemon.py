"""The agent's driver: carries out what `agent.state` decides and tells it what came of it. Decides nothing itself."""

import asyncio
import hashlib
import os
import random
import secrets
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import structlog

from agent import events as e
from agent.assignments import AttemptKey, Audience, NonceCache, TaskOrder
from agent.certificates import CertificateKeeper
from agent.clock import monotonic_s, wall_ms
from agent.config import AgentConfig, EngineSettings
from agent.connection import Connector, Hello
from agent.errors import EnrolmentRefused, ExitStatus, ModelRefused, NodeBanned
from agent.hardware import HardwareMonitor
from agent.host import read_host
from agent.identity import Identity, one_line_for_the_disk
from agent.inventory import engine_message
from agent.models import load_model, served_model
from agent.nonce_file import NonceFile, NonceRecorder
from agent.state import PROTOCOL_VERSION, AgentState
from agent.statements import sign_statement
from agent.status import Status, engine_line, write_status
from agent.supervisor import EngineReport, EngineSupervisor, sweep_leftovers
from inference.engine import Engine, EngineError, EngineUnreachable, GenerateRequest
from inference.manifest import Manifest
from inference.task import TaskKind
from protos.slackwater.common.v1 import capability_pb2

# Heartbeats and deadlines are seconds long; ten wake-ups a second cost nothing that can be measured.
TICK_S = 0.1
# Power and temperature for people who look at a fleet table.
HARDWARE_PERIOD_S = 5.0
STATUS_PERIOD_S = 1.0
# Certificates live for days.
CERTIFICATE_PERIOD_S = 30.0
# A canary for a sequence that has already been silent for two seconds.
CANARY_TIMEOUT_S = 5.0
# An engine group is killed within two; longer, and a service manager loses patience with us.
ENGINE_STOP_S = 5.0
NONCE_FILE = "nonces"

log = structlog.get_logger()


class Supervisor(Protocol):
    """What the daemon asks of `EngineSupervisor`."""

    @property
    def engine(self) -> Engine | None: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def note_tokens(self) -> None: ...


# Makes the supervisor of one engine, given whom to tell of reports and canaries.
MakeSupervisor = Callable[
    [EngineSettings, Manifest, Callable[[EngineReport], None], Callable[[str, float], None]], Supervisor
]


def marker_of(state_dir: Path) -> str:
    """Return the mark by which engine processes of this state directory are found again."""
    return "slackwater-" + hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]


class Daemon:
    """One run of the agent. The caller holds the lock of the state directory."""

    def __init__(self, config: AgentConfig, identity: Identity, make_supervisor: MakeSupervisor | None = None) -> None:
        self._config = config
        self._marker = marker_of(config.state_dir)
        self._make_supervisor = make_supervisor or self._supervise
        self._nonce_file = NonceFile(config.state_dir / NONCE_FILE)
        nonces = NonceCache(self._nonce_file.load())
        self._recorder = NonceRecorder(self._nonce_file, nonces.in_force, self.feed)
        self._state = AgentState(
            audience=Audience(identity.cluster_id, identity.node_id, identity.coordinator_keys),
            nonces=nonces,
            attempts_max=config.limits.attempts,
            context_tokens_max=config.limits.context_tokens,
            now=monotonic_s(),
        )
        self._certificates = CertificateKeeper(identity, config.state_dir)
        self._signer = identity.signer()
        self._connector = Connector(
            Hello(PROTOCOL_VERSION, version("slackwater-network"), secrets.token_bytes(16), wall_ms()),
            identity=lambda: self._certificates.identity,
            on_event=self.feed,
            recover=self._recover,
            jitter=random.Random(),
        )
        self._hardware = HardwareMonitor()
        self._supervisors: dict[str, Supervisor] = {}
        self._refused_models = 0
        self._work: dict[AttemptKey, asyncio.Task[None]] = {}
        # Filled from one loop iteration to the next; attempts are bounded, so these are.
        self._events: deque[e.Event] = deque()
        self._feeding = False
        self._exit: e.Exit | None = None
        self._exit_wanted = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    def feed(self, event: e.Event) -> None:
        """Have the state handle an event, and the events that follow from it, in order. Never blocks."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                for command in self._state.handle(self._events.popleft(), monotonic_s()):
                    self._execute(command)
        finally:
            self._feeding = False

    async def run(self) -> e.Exit:
        """Run until the state says Exit; no engine process is left when this returns.

        Raises:
            DiskFailed: the state directory takes no file, so that no nonce could be kept either.
        """
        await asyncio.to_thread(sweep_leftovers, self._marker, self._config.state_dir)
        tasks: list[asyncio.Task[None]] = []
        try:
            with one_line_for_the_disk(self._config.state_dir):
                await asyncio.to_thread(write_status, self._status(), self._config.state_dir)
            async with asyncio.TaskGroup() as self._group:
                for work in (
                    self._connector.run(),
                    self._tick(),
                    self._recorder.run(),
                    self._watch_hardware(),
                    self._keep_certificate(),
                    self._tell_status(),
                    *(self._run_engine(settings) for settings in self._config.engines),
                ):
                    tasks.append(self._group.create_task(work))
                await self._exit_wanted.wait()
                await self._wind_down()
                for task in (*tasks, *self._work.values()):
                    task.cancel()
        finally:
            await self._hardware.aclose()
            self._nonce_file.close()
        assert self._exit is not None, "set before exit is wanted"
        return self._exit

    async def _wind_down(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._connector.stop())
            for engine_id, supervisor in self._supervisors.items():
                group.create_task(self._stop_engine(engine_id, supervisor))

    async def _stop_engine(self, engine_id: str, supervisor: Supervisor) -> None:
        try:
            async with asyncio.timeout(ENGINE_STOP_S):
                await supervisor.stop()
        except TimeoutError:
            log.error("the engine does not end; the next start of the agent sweeps it", engine_id=engine_id)

    # ---- commands

    def _execute(self, command: e.Command) -> None:
        match command:
            case e.SendFrames() | e.SendState() | e.SendHeartbeat() | e.SendFinished() | e.SendFailed():
                self._connector.send(command)
            case e.SendRefused():
                log.warning("assignment refused", task_id=command.key.task_id, detail=command.detail)
                self._connector.send(command)
            case e.ScheduleFlush():
                self._schedule_flush(command.at)
            case e.CloseConnection():
                self._connector.close(command.detail, command.pause_s)
            case e.RecordNonce():
                self._recorder.record(command)
            case e.StartWork():
                self._start_work(command)
            case e.AbortWork():
                work = self._work.pop(command.key, None)
                if work is not None:
                    work.cancel()
            case e.CheckEngine():
                self._create_task(self._check_engine(command.engine_id))
            case e.SignStatement():
                statement = sign_statement(command, self._certificates.identity.node_id, self._signer)
                self.feed(e.StatementSigned(command.order.key, statement))
            case e.Exit():
                self._exit = self._exit or command
                self._exit_wanted.set()

    def _schedule_flush(self, at: float) -> None:
        loop = asyncio.get_running_loop()
        delay_s = at - monotonic_s()
        if delay_s <= 0:
            # Behind the chunks of other attempts that this iteration of the loop has already woken.
            loop.call_soon(self.feed, e.FlushDue())
        else:
            loop.call_later(delay_s, self.feed, e.FlushDue())

    def _create_task(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        assert self._group is not None, "commands come while run() runs"
        return self._group.create_task(work)

    # ---- work

    def _start_work(self, command: e.StartWork) -> None:
        key = command.order.key
        supervisor = self._supervisors[command.engine_id]
        engine = supervisor.engine
        if engine is None:
            reason = e.FailureReason.FAILURE_REASON_ENGINE_CRASHED
            self.feed(e.EngineFailed(key, reason, "the engine went down before it began"))
            return
        task = self._create_task(self._do_work(command, engine, supervisor))
        self._work[key] = task
        task.add_done_callback(partial(self._forget_work, key))

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
                    self.feed(e.ScoresComputed(order.key, tuple(scores)))
                case TaskKind.EMBED:
                    vector = await engine.embed(command.prompt_ids)
                    self.feed(e.EmbeddingComputed(order.key, tuple(vector)))
        except EngineUnreachable as error:
            self.feed(e.EngineFailed(order.key, e.FailureReason.FAILURE_REASON_ENGINE_CRASHED, str(error)))
        except EngineError as error:
            self.feed(e.EngineFailed(order.key, e.FailureReason.FAILURE_REASON_ENGINE_ERROR, str(error)))

    async def _generate(
        self, order: TaskOrder, prompt_ids: Sequence[int], engine: Engine, supervisor: Supervisor
    ) -> None:
        request = GenerateRequest(
            request_id=f"{order.key.task_id}-{order.key.attempt}",
            prompt_ids=prompt_ids,
            sampling=order.sampling,
            max_tokens=order.max_tokens,
            stop_token_ids=order.stop_token_ids,
        )
        # The port promises an iterator that can be closed, which AsyncIterator does not say.
        async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                supervisor.note_tokens()
                self.feed(e.EngineChunkArrived(order.key, chunk))
                if chunk.finish_reason is not None:
                    return
        raise EngineError("the engine ended the sequence without a finish reason")

    async def _check_engine(self, engine_id: str) -> None:
        engine = self._supervisors[engine_id].engine
        started_at = monotonic_s()
        try:
            if engine is None:
                raise EngineUnreachable("the engine is down")
            await engine.check_health(CANARY_TIMEOUT_S)
        except EngineError as error:
            log.warning("engine gave no canary token", engine_id=engine_id, error=str(error))
            self.feed(e.CanaryFailed(engine_id))
        else:
            self.feed(e.CanaryPassed(engine_id, started_at))

    # ---- engines and models

    async def _run_engine(self, settings: EngineSettings) -> None:
        try:
            manifest = await asyncio.to_thread(
                load_model, settings, self._certificates.identity.release_keys, self._check_wanted
            )
        except ModelRefused as error:
            self._refuse_model(settings, str(error))
            return
        self.feed(e.ModelChecked(settings.engine_id, served_model(manifest)))
        supervisor = self._make_supervisor(settings, manifest, self._on_report, self._on_canary)
        self._supervisors[settings.engine_id] = supervisor
        await supervisor.run()

    def _check_wanted(self, bytes_done: int, bytes_total: int) -> None:
        # Runs in the thread that hashes: without this, a stop would wait for the last of many gigabytes.
        if self._exit_wanted.is_set():
            raise ModelRefused(f"stopped after {bytes_done} of {bytes_total} bytes")

    def _refuse_model(self, settings: EngineSettings, detail: str) -> None:
        log.error("model refused", engine_id=settings.engine_id, detail=detail)
        engine = capability_pb2.Engine(
            engine_id=settings.engine_id,
            kind=settings.kind,
            status=capability_pb2.ENGINE_STATUS_FAILED,
            gpu_uuids=settings.gpu_uuids,
            note=detail,
        )
        self.feed(e.EngineChanged(engine))
        self._refused_models += 1
        if self._refused_models == len(self._config.engines):
            self._execute(e.Exit(ExitStatus.NO_ENGINE, detail))

    def _supervise(
        self,
        settings: EngineSettings,
        manifest: Manifest,
        on_report: Callable[[EngineReport], None],
        on_canary: Callable[[str, float], None],
    ) -> Supervisor:
        return EngineSupervisor(
            settings, manifest, self._config.state_dir, self._marker, on_report, on_canary=on_canary
        )

    def _on_report(self, report: EngineReport) -> None:
        self.feed(e.EngineChanged(engine_message(report)))

    def _on_canary(self, engine_id: str, started_at: float) -> None:
        self.feed(e.CanaryPassed(engine_id, started_at))

    # ---- what goes on all the time

    async def _tick(self) -> None:
        while True:
            self.feed(e.Tick())
            await asyncio.sleep(TICK_S)

    async def _watch_hardware(self) -> None:
        while True:
            gpus = await self._hardware.snapshot()
            host = await asyncio.to_thread(read_host, self._hardware.gpu_note)
            self.feed(e.HardwareChanged(host, tuple(gpus)))
            await asyncio.sleep(HARDWARE_PERIOD_S)

    async def _keep_certificate(self) -> None:
        while True:
            await asyncio.sleep(CERTIFICATE_PERIOD_S)
            now_ms = self._now_ms()
            channel = self._connector.channel
            if channel is None:
                continue
            try:
                if self._certificates.renewal_due(now_ms):
                    await self._certificates.renew(channel)
                if self._certificates.roll_over_due(now_ms, busy=bool(self._state.attempts)):
                    await self._connector.roll_over()
                    self._certificates.rolled_over()
            except NodeBanned as error:
                self.feed(e.ClosingReceived(e.ClosingReason.CLOSING_REASON_BANNED, str(error)))
            except (EnrolmentRefused, TimeoutError, OSError) as error:
                log.warning("certificate was not renewed", reason=str(error))

    async def _recover(self, failures: int) -> None:
        try:
            await self._certificates.recover(failures, self._now_ms())
        except NodeBanned as error:
            self.feed(e.ClosingReceived(e.ClosingReason.CLOSING_REASON_BANNED, str(error)))

    def _now_ms(self) -> int:
        coordinator_ms = self._state.coordinator_time_ms(monotonic_s())
        return wall_ms() if coordinator_ms is None else coordinator_ms

    async def _tell_status(self) -> None:
        told: Status | None = None
        while True:
            status = self._status()
            if status != told:
                try:
                    await asyncio.to_thread(write_status, status, self._config.state_dir)
                except OSError as error:
                    # For people only: a disk that filled up meanwhile ends no answer that runs.
                    log.error("cannot write the status file", error=str(error))
                told = status
            await asyncio.sleep(STATUS_PERIOD_S)

    def _status(self) -> Status:
        running = Counter(attempt.engine_id for attempt in self._state.attempts.values())
        return Status(
            node_id=self._certificates.identity.node_id,
            pid=os.getpid(),
            connected=self._state.connected,
            draining=self._state.draining,
            engines=tuple(engine_line(one, running[one.engine_id]) for one in self._state.engines.values()),
        )
