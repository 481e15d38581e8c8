"""The composition root: builds every part of a running coordinator and ties them together.

Start: state directory, ports (so that a port in use is known before anything
is promised), fleet, models, services. Stop: no new work, an error event for
every open answer, the agents are told to come back, then the ports close.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from coordinator.api.enrolment_service import EnrolmentServicer
from coordinator.api.fleet_service import FleetHooks, FleetServicer
from coordinator.api.node_service import NodeServicer
from coordinator.api.server import GrpcPorts, Listen, ServerTls, bind
from coordinator.api.task_service import TaskServicer
from coordinator.api.verdict_desk import VerdictDesk
from coordinator.api_keys import ApiKeys
from coordinator.clock import Clock
from coordinator.config import Config
from coordinator.enrolment.service import EnrolmentAuthority
from coordinator.fleet.churn_watch import ChurnWatch
from coordinator.fleet.placement_watch import PlacementWatch
from coordinator.fleet.registry import FleetRegistry
from coordinator.gateway.app import make_app, make_runner
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.keys import CoordinatorKeys
from coordinator.ledger.asks import Asks
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.prices import Terms
from coordinator.ledger.receipts import ReceiptDesk
from coordinator.ledger.service import Ledger, SettlingRecords
from coordinator.quotes import Quotes
from coordinator.recorder import Recorder
from coordinator.scheduler import events as e
from coordinator.scheduler.busy import busy_s
from coordinator.scheduler.cache_salts import CacheSalts
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.state import Scheduler
from coordinator.served_models import LoadedModel, ServedModels, load_release_keys
from coordinator.startup import ExitCode, StartupError
from coordinator.state_dir import Addresses, ensure_admin_key, exclusive, open_state, prepare_directory, write_addresses
from coordinator.store.port import ModelRow, Store
from coordinator.tasks import LocalTasks
from coordinator.verification.auditor import Auditor
from coordinator.verification.canary_rounds import CanaryRounds, ExaminedModel
from coordinator.verification.challenge_rounds import ChallengeRounds
from coordinator.verification.commands import RequestAudit
from coordinator.verification.events import BanAsked, Use, VerdictState
from coordinator.verification.outages import StallWatch
from coordinator.verification.rate_rounds import RateRounds, TimedModel
from coordinator.verification.service import Verification, VerificationHooks, log_verdict
from coordinator.verification.shown import tell_shown
from coordinator.verification.structure import WatchedRecords
from coordinator.verification.tasks import AuditTasks
from inference.calibration import CALIBRATION_FILE
from inference.task import ManifestDigest, NodeId, OwnerId
from protos.slackwater.fleet.v1.fleet_service_pb2_grpc import add_FleetServiceServicer_to_server
from protos.slackwater.node.v1.enrolment_service_pb2_grpc import add_EnrolmentServiceServicer_to_server
from protos.slackwater.node.v1.node_service_pb2_grpc import add_NodeServiceServicer_to_server
from protos.slackwater.task.v1.task_service_pb2_grpc import add_TaskServiceServicer_to_server

# From the stop signal on: agents and clients read the last message of their stream.
STOP_GRACE_S = 2.0
# Lease epochs of one start: more attempts than a coordinator makes in its life.
EPOCHS_PER_BOOT = 2**32

_log = structlog.get_logger(__name__)


async def serve(config: Config, clock: Clock, stop: asyncio.Event) -> None:
    """Run a coordinator until `stop` is set.

    Raises:
        StartupError: it cannot start; the message is one line.
    """
    prepare_directory(config.state_dir)
    # The lock first: nobody migrates a database that another process serves.
    with exclusive(config.state_dir), open_state(config, clock) as (store, keys):
        admin_key_file = ensure_admin_key(config.state_dir, store, clock.now_ms())
        if admin_key_file is not None:
            _log.info("first admin key written", path=str(admin_key_file))
        coordinator = Coordinator(config, clock, store, keys)
        await coordinator.run(stop)


class Coordinator:
    """All parts of one coordinator process."""

    def __init__(self, config: Config, clock: Clock, store: Store, keys: CoordinatorKeys) -> None:
        self._config = config
        self._clock = clock
        self._store = store
        self._keys = keys
        self._cluster_id = store.cluster_id()
        self._release_public_keys = load_release_keys(config.release_keys)
        self._models = ServedModels(store, config.models, self._release_public_keys, clock)
        boot = store.open_boot(clock.now_ms())
        self._api_keys = ApiKeys(store, clock)
        self._registry = FleetRegistry(store.owners(), store.nodes())
        self._churn = ChurnWatch(self._registry, store, clock, self._feed)
        lifetime = timedelta(hours=config.certificate_hours)
        self._authority = EnrolmentAuthority(
            store, keys, clock, cluster_id=self._cluster_id, certificate_lifetime=lifetime
        )
        self._log_of_ledger = TransparencyLog(self._cluster_id, keys.signing_key, store)
        self._recorder = Recorder(store)
        terms = _terms(config)
        self._asks = Asks(terms)
        self._ledger = Ledger(store, self._log_of_ledger, clock, terms, self._owner_of)
        hooks = VerificationHooks(
            on_standing=self._on_standing,
            on_audited=self._on_audited,
            on_request=self._on_request,
            on_notify=log_verdict,
            on_ban=self._ban,
        )
        self._verification = Verification(store, clock, hooks)
        self._challenges = ChallengeRounds(self._registry, store, self._verification, clock, self._owner_of)
        self._driver = SchedulerDriver(
            _scheduler(config, self._asks, boot),
            clock,
            WatchedRecords(SettlingRecords(self._recorder, self._ledger), self._verification, clock, self._owner_of),
            self._cluster_id,
            keys.signing_key,
            CacheSalts(keys.cache_key(), random.SystemRandom()),
        )
        busy = partial(busy_s, self._driver.scheduler)
        self._placement = PlacementWatch(self._registry, clock, self._expected_lent_s, busy, self._feed)
        quotes = Quotes(self._driver.scheduler, clock, terms, self._registry, config.grid_grams_per_kwh)
        self._tasks = LocalTasks(
            self._driver, store, keys, clock, boot, self._ledger.reserve, quotes, self._placement.asked
        )
        audit_tasks = AuditTasks(self._driver, self._ledger.reserve, boot)
        self._auditor = Auditor(
            self._verification,
            self._driver,
            audit_tasks,
            clock,
            keys.audit_key(),
            self._owner_of,
            self._challenges.network_of,
            config.audit_rate,
        )
        self._rate_rounds = self._make_rate_rounds(audit_tasks)
        self._canary_rounds = self._make_canary_rounds(audit_tasks)
        self._driver.tell_completed(self._auditor.completed)

    def _make_rate_rounds(self, audit_tasks: AuditTasks) -> RateRounds:
        return RateRounds(
            self._registry,
            self._store,
            self._verification,
            self._driver,
            audit_tasks,
            self._clock,
            self._challenges.asks,
            random.SystemRandom(),
        )

    def _make_canary_rounds(self, audit_tasks: AuditTasks) -> CanaryRounds:
        return CanaryRounds(
            self._verification,
            self._auditor,
            self._driver,
            audit_tasks,
            self._clock,
            self._owner_of,
            lambda node_id: self._challenges.asks(node_id) or self._rate_rounds.measuring(node_id),
            random.SystemRandom(),
        )

    async def run(self, stop: asyncio.Event) -> None:
        ports = bind(
            self._config.public_listen,
            self._config.node_listen,
            tls=ServerTls(self._keys, self._config.advertised_hosts, self._clock),
            api_keys=self._api_keys,
            store=self._store,
            clock=self._clock,
            certificate_lifetime_ms=self._config.certificate_hours * 3_600_000,
        )
        for model in await asyncio.to_thread(self._models.load):
            self._serve_model(model)
        async with self._gateway() as gateway_port:
            await self._start_grpc(ports)
            addresses = Addresses(self._config.advertised_hosts[0], ports.public_port, ports.node_port, gateway_port)
            await asyncio.to_thread(write_addresses, self._config.state_dir, addresses)
            _log.info(
                "coordinator ready",
                cluster_id=self._cluster_id,
                public_port=ports.public_port,
                node_port=ports.node_port,
                gateway_port=gateway_port,
            )
            async with asyncio.TaskGroup() as group:
                recorder = group.create_task(self._recorder.run())
                ledger = group.create_task(self._ledger.run())
                driver = group.create_task(self._driver.run())
                verification = group.create_task(self._verification.run())
                self._tell_bans()
                stalls = group.create_task(StallWatch(self._verification, self._clock, self._churn.outage).run())
                churn = group.create_task(self._churn.run())
                placement = group.create_task(self._placement.run())
                auditor = group.create_task(self._auditor.run())
                canaries = group.create_task(self._canary_rounds.run())
                tasks = group.create_task(self._tasks.run())
                showing = group.create_task(self._have_shown()) if self._config.challenges else None
                await stop.wait()
                _log.info("coordinator stopping")
                self._tasks.stop()
                # First: that the streams end now is no node's doing.
                churn.cancel()
                placement.cancel()
                await ports.stop(STOP_GRACE_S)
                if showing is not None:
                    showing.cancel()
                canaries.cancel()
                auditor.cancel()
                stalls.cancel()
                tasks.cancel()
                driver.cancel()
                verification.cancel()
                recorder.cancel()
                ledger.cancel()
        _log.info("coordinator stopped")

    def _tell_bans(self) -> None:
        """Have verdicts of bans that have none: of earlier releases, or from before a crash between the two."""
        known = self._verification.verdicts.pairs().items()
        told = {node_id for (node_id, _), tracks in known if tracks.active.state is VerdictState.BANNED}
        for row in (view.row for view in self._registry.views() if view.row.node_id not in told):
            if row.banned_at_ms is not None:
                self._verification.tell(BanAsked(row.node_id, row.owner_id, row.ban_reason or "", row.banned_at_ms))

    async def _have_shown(self) -> None:
        """Have nodes show what they can do, and the scheduler go by it, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._challenges.run())
            group.create_task(tell_shown(self._registry, self._driver))
            group.create_task(self._rate_rounds.run())

    async def _start_grpc(self, ports: GrpcPorts) -> None:
        config = self._config
        enrolment = EnrolmentServicer(
            self._authority,
            self._registry,
            self._store,
            self._keys,
            cluster_id=self._cluster_id,
            node_address=str(Listen(config.advertised_hosts[0], ports.node_port)),
            release_public_keys=self._release_public_keys,
            abuse_contact=config.abuse_contact,
            content_policy=config.content_policy,
        )
        verdicts = VerdictDesk(self._store, self._verification)
        fleet = FleetServicer(
            self._store,
            self._registry,
            self._authority,
            self._api_keys,
            self._clock,
            FleetHooks(on_ban=self._on_ban, on_drain=self._on_drain, on_model=self._on_model),
            self._ledger,
            verdicts,
            self._churn.outlook,
            public_address=(config.advertised_hosts[0], ports.public_port),
            release_public_keys=self._release_public_keys,
        )
        receipts = ReceiptDesk(self._store, self._log_of_ledger, self._ledger.flush)
        node = NodeServicer(
            self._driver,
            self._registry,
            self._store,
            self._authority,
            self._clock,
            self._cluster_id,
            self._keys.signing_public_key,
            config.model_sources,
            receipts,
            verdicts,
            self._ledger.credits,
            self._asks,
            self._challenges,
        )
        await ports.start(
            public=[
                partial(add_EnrolmentServiceServicer_to_server, enrolment),
                partial(add_TaskServiceServicer_to_server, TaskServicer(self._tasks, receipts)),
                partial(add_FleetServiceServicer_to_server, fleet),
            ],
            node=[partial(add_NodeServiceServicer_to_server, node)],
        )

    @asynccontextmanager
    async def _gateway(self) -> AsyncIterator[int]:
        """Serve HTTP; yields the port."""
        app = make_app(
            self._tasks,
            self._api_keys.authenticate_tenant,
            GatewayMetrics(CollectorRegistry()),
            lambda: self._clock.now_ms() / 1000,
        )
        runner = make_runner(app)
        await runner.setup()
        try:
            listen = self._config.gateway_listen
            try:
                await web.TCPSite(runner, listen.host, listen.port, shutdown_timeout=STOP_GRACE_S).start()
            except OSError as error:
                raise StartupError(
                    ExitCode.TRY_AGAIN,
                    f"cannot listen on {listen}: {error.strerror}; stop what uses it, or change gateway_listen",
                ) from error
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    def _serve_model(self, model: LoadedModel) -> None:
        manifest, calibration, bank = model.manifest, model.calibration, model.bank
        self._asks.add_model(manifest.digest, manifest.name)
        self._placement.add_model(manifest)
        self._tasks.add_model(manifest, model.tokenizer, model.created_at_ms)
        self._rate_rounds.add_model(TimedModel(manifest=manifest, prompts=model.prompts, examined=bank is not None))
        if calibration is None:
            _log.info("model is not audited", model=manifest.name, why=f"no {CALIBRATION_FILE} in its directory")
            return
        self._auditor.add_model(manifest, calibration)
        if bank is not None:
            self._canary_rounds.add_model(ExaminedModel(manifest=manifest, calibration=calibration, bank=bank))

    def _owner_of(self, node_id: NodeId) -> OwnerId:
        row = self._registry.row(node_id)
        assert row is not None, "a node that ran a task is enrolled"
        return row.owner_id

    def _expected_lent_s(self, node_id: NodeId) -> float:
        return self._churn.outlook(node_id).expected_lent_s

    def _on_ban(self, node_id: NodeId, reason: str) -> None:
        self._driver.feed(e.NodeBanned(node_id))

    def _on_drain(self, node_id: NodeId, draining: bool) -> None:
        self._driver.feed(e.DrainChanged(node_id, draining))

    def _feed(self, event: e.Event) -> None:
        self._driver.feed(event)

    def _on_standing(self, node_id: NodeId, manifest_digest: ManifestDigest, use: Use) -> None:
        self._driver.feed(e.StandingChanged(node_id, manifest_digest, use))
        record = self._verification.verdicts.record(node_id, manifest_digest)
        assert record is not None, "a pair that a verdict is about is never forgotten"
        self._ledger.standing_changed(node_id, manifest_digest, use, record.verdict_id)

    def _on_audited(self, node_id: NodeId, good_until_ms: int) -> None:
        self._ledger.audited(node_id, good_until_ms)

    def _on_request(self, request: RequestAudit) -> None:
        self._auditor.requested(request)

    async def _ban(self, node_id: NodeId, reason: str) -> None:
        await asyncio.to_thread(self._store.ban_node, node_id, reason, self._clock.now_ms())
        row = await asyncio.to_thread(self._store.find_node, node_id)
        if row is not None:
            self._registry.put_node(row)
            self._on_ban(node_id, reason)

    async def _on_model(self, row: ModelRow) -> None:
        self._serve_model(await asyncio.to_thread(self._models.read, row))


def _terms(config: Config) -> Terms:
    return Terms(
        list_prices=config.list_prices,
        fee_permille=config.platform_fee_permille,
        grant_micro=config.new_tenant_grant_micro,
    )


def _scheduler(config: Config, asks: Asks, boot: int) -> Scheduler:
    return Scheduler(
        Limits(),
        asks,
        boot * EPOCHS_PER_BOOT,
        verified_only=config.challenges,
        micro_per_joule=config.micro_per_joule,
    )
