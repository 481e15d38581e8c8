"""The agent's driver: carries out what `agent.state` decides and tells it what came of it. Decides nothing itself."""

import asyncio
import hashlib
import os
import random
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import structlog

from agent import events as e
from agent.assignments import Audience, NonceCache
from agent.certificates import CertificateKeeper
from agent.clock import monotonic_s, until_next_s, wall_ms
from agent.config import AgentConfig, EngineSettings
from agent.config_watch import ConfigWatch
from agent.connection import Connector, Hello
from agent.endings import PROTOCOL_VERSION
from agent.energy.carbon import open_carbon_source
from agent.energy.day_counts import DayCounts
from agent.energy.day_file import keep_day, load_day
from agent.energy.meter import CarbonIntensity
from agent.energy.status import energy_status
from agent.energy.work_log import WorkLog
from agent.engines.engines import Engines, MakeSupervisor, Supervisor
from agent.engines.report import EngineReport
from agent.engines.settling import settle_engine
from agent.engines.supervisor import EngineSupervisor, sweep_leftovers
from agent.host import read_host
from agent.identity import Identity, one_line_for_the_disk
from agent.ledger.driver import LedgerKeeper
from agent.machine_watch import MachineWatch
from agent.model_supply import ModelSupply
from agent.nonce_file import NonceFile, NonceRecorder
from agent.owner.consent import Consent
from agent.owner.driver import OwnerDriver
from agent.owner.events import CPU_CARD
from agent.owner.giveback import GiveBackLadder
from agent.power.limits import PowerKeeper
from agent.prover import Prover
from agent.service.notify import Notifier
from agent.state import AgentState
from agent.statements import sign_statement
from agent.status import Status, StatusFile, engine_line
from inference.manifest import Manifest

# Heartbeats and deadlines are seconds long; while work runs ten wake-ups a second cost nothing that can be measured.
TICK_S = 0.1
# While nothing runs and nothing waits to be told. Shorter than what `agent.link` takes for a sleep.
IDLE_TICK_S = 1.0
NONCE_FILE = "nonces"

log = structlog.get_logger()


def marker_of(state_dir: Path) -> str:
    """Return the mark by which engine processes of this state directory are found again."""
    return "slackwater-" + hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]


class Daemon:
    """One run of the agent. The caller holds the lock of the state directory.

    Args:
        config_file: what `config` was read from; its changes are followed. None follows nothing.
    """

    def __init__(
        self,
        config: AgentConfig,
        identity: Identity,
        make_supervisor: MakeSupervisor | None = None,
        *,
        config_file: Path | None = None,
    ) -> None:
        self._config = config
        self._config_file = config_file
        self._marker = marker_of(config.state_dir)
        self._nonce_file = NonceFile(config.state_dir / NONCE_FILE)
        nonces = NonceCache(self._nonce_file.load())
        self._recorder = NonceRecorder(self._nonce_file, nonces.in_force, self.feed)
        today = load_day(config.state_dir)
        self._log = WorkLog(config.energy.tdp_w, DayCounts(today))
        self._state = AgentState(
            audience=Audience(identity.cluster_id, identity.node_id, identity.coordinator_keys),
            nonces=nonces,
            attempts_max=config.limits.attempts,
            consent=Consent(config.consent),
            work_log=self._log,
            engines={one.engine_id: one.use() for one in config.engines},
            now=monotonic_s(),
            asks=config.asks,
        )
        self._certificates = CertificateKeeper(identity, config.state_dir, now_ms=self._now_ms, feed=self.feed)
        self._signer = identity.signer()
        self._connector = Connector(
            Hello(PROTOCOL_VERSION, version("slackwater-network"), secrets.token_bytes(16), wall_ms()),
            identity=lambda: self._certificates.identity,
            on_event=self.feed,
            recover=self._certificates.recover,
            jitter=random.Random(),
        )
        self._machine = MachineWatch(
            marker=self._marker,
            signals=config.signals,
            owner=lambda: self._owner,
            feed=self.feed,
            on_readings=lambda readings: self._power.see(readings),
        )
        self._power = PowerKeeper(
            config.power, config.state_dir, self._machine.hardware.set_power_limit, on_change=self._power_changed
        )
        self._models = ModelSupply(
            config,
            identity=lambda: self._certificates.identity,
            channel=lambda: self._connector.channel,
            downloads=lambda: self._owner.policy.downloads,
            stopping=lambda: self._exit_wanted.is_set(),
        )
        self._engines = Engines(
            config.engines,
            provide=self._models.provided,
            find=self._models.find,
            settle=self._settle,
            make_supervisor=make_supervisor or self._supervise,
            feed=self.feed,
            create_task=self._create_task,
        )
        self._owner = OwnerDriver(
            config.owner,
            state_dir=config.state_dir,
            lending=self._state.lending,
            ladder=GiveBackLadder(self._engines, lambda card: self._prover.gone(card), self._machine.read_card),
            caps=self._power,
            feed=self.feed,
            create_task=self._create_task,
            on_change=self._owner_changed,
        )
        self._ledger = LedgerKeeper(
            identity.cluster_id,
            config.state_dir,
            channel=lambda: self._connector.channel,
            coordinator_keys=lambda: self._state.coordinator_keys,
            on_judged=lambda rewritten: self.feed(e.LedgerJudged(rewritten)),
        )
        self._prover = Prover(
            self._connector,
            identity.node_id,
            self._marker,
            config.state_dir,
            config.engines,
            memory_bytes=self._memory_to_fill,
            feed=self.feed,
            create_task=self._create_task,
        )
        self._carbon = open_carbon_source(config.energy)
        self._notifier = Notifier()
        # Filled from one loop iteration to the next; attempts are bounded, so these are.
        self._events: deque[e.Event] = deque()
        self._feeding = False
        self._exit: e.Exit | None = None
        self._exit_wanted = asyncio.Event()
        self._status_file = StatusFile(self._status, config.state_dir)
        # Whether ticks are seldom now, and what ends that.
        self._dozing = False
        self._woken = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        # Work on engines, bounded by the attempts, and give-backs, by the cards.
        self._spawned: set[asyncio.Task[None]] = set()

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
        if self._dozing and self._state.busy:
            self._woken.set()

    async def run(self) -> e.Exit:
        """Run until the state says Exit; no engine process is left when this returns.

        Raises:
            DiskFailed: the state directory takes no file, so that no nonce could be kept either.
        """
        await asyncio.to_thread(sweep_leftovers, self._marker, self._config.state_dir)
        tasks: list[asyncio.Task[None]] = []
        try:
            with one_line_for_the_disk(self._config.state_dir):
                await asyncio.to_thread(self._status_file.write)
            async with asyncio.TaskGroup() as self._group:
                for work in (
                    self._connector.run(),
                    self._tick(),
                    self._recorder.run(),
                    self._owner.run(),
                    self._machine.run(),
                    self._power.run(),
                    self._watch_config(),
                    self._notifier.keep_alive(),
                    keep_day(self._log.counts.snapshot, self._config.state_dir),
                    self._certificates.run(self._connector, lambda: bool(self._state.attempts)),
                    self._ledger.run(),
                    self._status_file.run(),
                    self._models.watch(self.feed),
                    *(self._run_engine(settings) for settings in self._config.engines),
                ):
                    tasks.append(self._group.create_task(work))
                self._notifier.ready(f"node {self._certificates.identity.node_id}")
                await self._exit_wanted.wait()
                await self._wind_down()
                for task in (*tasks, *self._spawned):
                    task.cancel()
        finally:
            self._nonce_file.close()
            self._status_file.remove()
        assert self._exit is not None, "set before exit is wanted"
        return self._exit

    async def _wind_down(self) -> None:
        self._notifier.stopping()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._connector.stop())
            group.create_task(self._engines.stop())
            group.create_task(self._power.restore_all())

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
                self._engines.start_work(command)
            case e.AbortWork():
                self._engines.abort_work(command.key)
            case e.CheckEngine():
                self._create_task(self._engines.check(command.engine_id))
            case e.StartEngine():
                self._engines.start(command.engine_id)
            case e.FindModel() | e.FetchModel() | e.LeaveModel() | e.SwitchModel():
                self._engines.change_model(command)
            case e.AnswerChallenge():
                self._prover.begin(command)
            case e.StopChallenge():
                self._prover.stop()
            case e.StopEngine():
                log.info("engine is taken down", engine_id=command.engine_id, reason=command.reason)
                self._engines.kill(command.engine_id)
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
        task = self._group.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    # ---- engines and models

    async def _run_engine(self, settings: EngineSettings) -> None:
        no_engine = await self._engines.run(settings.engine_id)
        if no_engine is not None:
            self._execute(no_engine)

    async def _settle(self, settings: EngineSettings, manifest: Manifest, vllm_failures: int) -> EngineSettings:
        state_dir, hardware = self._config.state_dir, self._machine.hardware
        host = await asyncio.to_thread(read_host, hardware.gpu_note)
        return await asyncio.to_thread(
            settle_engine, settings, manifest, state_dir, hardware.readings, host, vllm_failures
        )

    def _supervise(
        self,
        settings: EngineSettings,
        manifest: Manifest,
        on_report: Callable[[EngineReport], None],
        on_canary: Callable[[str, float], None],
    ) -> Supervisor:
        return EngineSupervisor(
            settings,
            manifest,
            self._config.state_dir,
            self._marker,
            on_report,
            on_canary=on_canary,
            cards=lambda: self._machine.hardware.readings,
        )

    # ---- what goes on all the time

    async def _tick(self) -> None:
        while True:
            self.feed(e.Tick())
            if self._state.busy:
                await asyncio.sleep(TICK_S)
                continue
            self._dozing = True
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(until_next_s(IDLE_TICK_S)):
                    await self._woken.wait()
            self._dozing = False

    async def _watch_config(self) -> None:
        if self._config_file is not None:
            await ConfigWatch(self._config_file, self._config, self._follow_config).run()

    def _follow_config(self, config: AgentConfig, tables: frozenset[str]) -> None:
        self._config = config
        if "owner" in tables:
            self._owner.change_settings(config.owner)
        if "consent" in tables:
            self.feed(e.ConsentChanged(Consent(config.consent)))
        if "asks" in tables:
            self.feed(e.AsksChanged(config.asks))
        if "power" in tables:
            self._power.change_settings(config.power)
        if "energy" in tables:
            self._carbon = open_carbon_source(config.energy)
            self._log.meter.follow(config.energy.tdp_w)
        self._status_file.refresh()

    async def _memory_to_fill(self, card: str) -> int:
        if not card:
            return self._config.challenges.memory_mib << 20
        memory = await self._machine.read_card(card)
        return 0 if memory is None else memory.free_bytes or 0

    def _now_ms(self) -> int:
        coordinator_ms = self._state.coordinator_time_ms(monotonic_s())
        return wall_ms() if coordinator_ms is None else coordinator_ms

    def _owner_changed(self) -> None:
        self._machine.follow_lending()
        self._status_file.refresh()

    def _power_changed(self) -> None:
        shares = {card: self._power.status(card).sequences_share for card in self._machine.cards}
        self.feed(e.SlotsShared(shares))
        self._status_file.refresh()

    def _carbon_now(self) -> CarbonIntensity | None:
        return None if self._carbon is None else self._carbon.grams_per_kwh(wall_ms())

    def _status(self) -> Status:
        return Status(
            node_id=self._certificates.identity.node_id,
            pid=os.getpid(),
            connected=self._state.connected,
            results_waiting=self._state.results_waiting,
            draining=self._state.draining,
            ledger=self._ledger.standing(),
            credits=self._state.link.credits,
            pause=self._owner.pause,
            cards=self._owner.standings(),
            power={card: self._power.status(card) for card in self._machine.cards if card != CPU_CARD},
            fetches=self._models.fetches,
            energy=energy_status(
                self._log.meter.figures(), self._log.counts.snapshot(), self._config.energy, self._carbon_now()
            ),
            engines=tuple(engine_line(one, self._state.link.terms) for one in self._state.engines(monotonic_s())),
        )
