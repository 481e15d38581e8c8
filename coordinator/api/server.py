"""The two gRPC ports of the coordinator.

    public  server-side TLS   enrolment, tasks, fleet
    node    mutual TLS        the agents' streams

Binding comes before serving, so that addresses are known (port 0 picks a free
one) when the services that hand them out are built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from coordinator.access import Port
from coordinator.api.gate import Gate, check_access, check_identity, check_rate
from coordinator.api.identity import CallerIdentity, Context, identify_by_certificate, identify_by_key
from coordinator.api.rate_limit import RateLimits
from coordinator.api_keys import ApiKeys
from coordinator.clock import Clock
from coordinator.keys import CoordinatorKeys, ServerIdentity
from coordinator.startup import ExitCode, StartupError
from coordinator.store.port import Store

# A prompt or an answer of a million token ids with logprobs; longer ones travel in chunks.
MESSAGE_BYTES_MAX = 8 * 1024 * 1024
# Tasks of one client over one connection; a second connection is the cure for more.
PUBLIC_STREAMS_MAX = 1024
# One Connect, its successor while certificates change, and renewals.
NODE_STREAMS_MAX = 8
# A peer that vanished is noticed within 30 s, although its stream may be silent for minutes.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 20_000
# Peers ping as often as we do; gRPC's own default calls that an attack.
PING_INTERVAL_MIN_MS = 5_000
# TLS looks at a certificate only when a connection opens. Agents reconnect at two thirds of a
# certificate's life; whoever does not is cut off at its end, plus an hour for clocks.
NODE_CONNECTION_GRACE_MS = 3_600_000

AddService = Callable[[grpc.aio.Server], None]
Option = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen; port 0 picks a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ServerTls:
    """TLS credentials from the fleet's CA; a fresh leaf before the old one ends, without a restart."""

    def __init__(self, keys: CoordinatorKeys, host_names: Sequence[str], clock: Clock) -> None:
        self._keys = keys
        self._host_names = tuple(host_names)
        self._clock = clock

    def credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        identity = self._keys.issue_server_identity(self._host_names, self._clock.now_ms())

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # Called by gRPC for every new connection, in a thread of its own; None keeps what is.
            nonlocal identity
            now_ms = self._clock.now_ms()
            if now_ms < identity.renew_at_ms:
                return None
            identity = self._keys.issue_server_identity(self._host_names, now_ms)
            return self._configuration(identity, mutual=mutual)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(identity, mutual=mutual),
            fetch,  # type: ignore[arg-type]  # None is documented, but not in the stub
            require_client_authentication=mutual,
        )

    def _configuration(self, identity: ServerIdentity, *, mutual: bool) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(identity.private_key, identity.certificate_chain)],
            root_certificates=self._keys.ca_pem if mutual else None,
        )


@dataclass(frozen=True, slots=True)
class GrpcPorts:
    """Two bound servers that do not serve yet."""

    public: grpc.aio.Server
    node: grpc.aio.Server
    public_port: int
    node_port: int

    async def start(self, public: Sequence[AddService], node: Sequence[AddService]) -> None:
        """Add the services, for example `partial(add_TaskServiceServicer_to_server, servicer)`, and serve."""
        for add in public:
            add(self.public)
        for add in node:
            add(self.node)
        await self.public.start()
        await self.node.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; end those that still run after the grace."""
        await self.public.stop(grace_s)
        await self.node.stop(grace_s)


def bind(
    public_listen: Listen,
    node_listen: Listen,
    *,
    tls: ServerTls,
    api_keys: ApiKeys,
    store: Store,
    clock: Clock,
    certificate_lifetime_ms: int,
) -> GrpcPorts:
    """Open both ports.

    Raises:
        StartupError: a port cannot be opened.
    """
    cluster_id = store.cluster_id()
    limits = RateLimits()

    async def by_key(context: Context) -> CallerIdentity:
        return await identify_by_key(context, api_keys)

    async def by_certificate(context: Context) -> CallerIdentity:
        return await identify_by_certificate(context, store, cluster_id, clock)

    # Every call passes these, in this order.
    public_checks = [check_identity(by_key), check_access, check_rate(limits, clock)]
    node_checks = [check_identity(by_certificate), check_access, check_rate(limits, clock)]
    public = grpc.aio.server(interceptors=[Gate(Port.PUBLIC, public_checks)], options=_options(PUBLIC_STREAMS_MAX))
    node = grpc.aio.server(
        interceptors=[Gate(Port.NODE, node_checks)],
        options=[
            *_options(NODE_STREAMS_MAX),
            ("grpc.max_connection_age_ms", certificate_lifetime_ms),
            ("grpc.max_connection_age_grace_ms", NODE_CONNECTION_GRACE_MS),
        ],
    )
    return GrpcPorts(
        public,
        node,
        public_port=_open(public, public_listen, tls.credentials(mutual=False), "public_listen"),
        node_port=_open(node, node_listen, tls.credentials(mutual=True), "node_listen"),
    )


def _options(streams_max: int) -> list[Option]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_concurrent_streams", streams_max),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
        # Otherwise a second coordinator on the same port would silently take half of the calls.
        ("grpc.so_reuseport", 0),
    ]


def _open(server: grpc.aio.Server, listen: Listen, credentials: grpc.ServerCredentials, setting: str) -> int:
    try:
        port = server.add_secure_port(str(listen), credentials)
    except RuntimeError as error:
        raise _port_error(listen, setting) from error
    if port == 0:
        raise _port_error(listen, setting)
    return port


def _port_error(listen: Listen, setting: str) -> StartupError:
    return StartupError(
        ExitCode.TRY_AGAIN,
        f"cannot listen on {listen}: the port is in use or the address is not this machine's; "
        f"stop what uses it, or change {setting}",
    )
