"""Who calls: established once per RPC, read by handlers through `caller()`."""

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc.aio
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from coordinator.access import CallerKind
from coordinator.api_keys import ApiKeys
from coordinator.clock import Clock
from coordinator.enrolment.certificates import PresentedCertificate, read_presented
from coordinator.errors import Reason, SlackwaterError
from coordinator.store.port import NodeRow, Store
from inference.task import NodeId, TenantId

# The types of request and answer are the handlers' business.
Context = grpc.aio.ServicerContext[Any, Any]

_SCHEME = "bearer "

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """`tenant_id` is the key's id for tenants and administrators; `node` is set for nodes only."""

    kind: CallerKind
    address: str
    tenant_id: TenantId | None = None
    node: NodeRow | None = None
    certificate_serial: str | None = None

    @property
    def name(self) -> str:
        """For rate limits and logs; never a secret."""
        if self.node is not None:
            return f"node {self.node.node_id}"
        return f"key {self.tenant_id}" if self.tenant_id is not None else f"address {self.address}"

    @property
    def node_id(self) -> NodeId:
        """The id of a node; only behind an access row that admits nodes alone."""
        if self.node is None:
            raise LookupError("this caller is no node")
        return self.node.node_id


CALLER: ContextVar[CallerIdentity] = ContextVar("caller")


def caller() -> CallerIdentity:
    """Return who made the RPC that is being handled."""
    return CALLER.get()


def tenant() -> TenantId:
    """Return the tenant that made the RPC; only behind an access row that admits keys alone."""
    tenant_id = CALLER.get().tenant_id
    if tenant_id is None:
        raise LookupError("this caller has no API key")
    return tenant_id


async def identify_by_key(context: Context, api_keys: ApiKeys) -> CallerIdentity:
    """Return the caller of an RPC on the public port.

    Raises:
        SlackwaterError: UNAUTHENTICATED for a header that is no key in force; none at all is a stranger.
    """
    address = peer_address(context.peer())
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    if not values:
        return CallerIdentity(kind=CallerKind.ANYONE, address=address)
    header = values[0] if isinstance(values[0], str) else ""
    if len(values) != 1 or header[: len(_SCHEME)].lower() != _SCHEME:
        raise SlackwaterError(
            Reason.UNAUTHENTICATED, "send your API key as one metadata entry 'authorization: Bearer KEY'"
        )
    row = await api_keys.authenticate(header[len(_SCHEME) :].strip())
    kind = CallerKind.ADMIN if row.role == "admin" else CallerKind.TENANT
    return CallerIdentity(kind=kind, address=address, tenant_id=row.key_id)


async def identify_by_certificate(context: Context, store: Store, cluster_id: str, clock: Clock) -> CallerIdentity:
    """Return the node that made an RPC on the node port.

    TLS has shown that the fleet's CA signed the certificate; here it is mapped
    to a node that exists. Older certificates of a node serve
    until they expire, since the answer to a renewal may have been lost.

    Raises:
        SlackwaterError: CERTIFICATE_UNKNOWN.
    """
    address = peer_address(context.peer())
    presented = _presented(context, address)
    if presented.cluster_id != cluster_id:
        raise _unknown(address, f"the certificate is of cluster {presented.cluster_id[:64]}, this is {cluster_id}")
    if clock.now_ms() >= presented.not_after_ms:
        # The connection was opened before; TLS looks only then.
        raise _unknown(address, "the certificate has expired; renew it by StartRenewal")
    node = await asyncio.to_thread(store.find_node, presented.node_id)
    if node is None:
        raise _unknown(address, f"there is no node {presented.node_id[:64]}; enrol again")
    kind = CallerKind.NODE if node.banned_at_ms is None else CallerKind.BANNED_NODE
    return CallerIdentity(kind=kind, address=address, node=node, certificate_serial=presented.serial)


def presented_sha256(context: Context) -> bytes:
    """Return the SHA-256 of the DER certificate that the caller's connection shows; on the node port only."""
    [pem] = context.auth_context()["x509_pem_cert"]
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256())


def peer_address(peer: str) -> str:
    """Return the address of gRPC's "ipv4:1.2.3.4:567" or "ipv6:%5B::1%5D:567", without the port."""
    return unquote(peer).rpartition(":")[0] or peer


def _presented(context: Context, address: str) -> PresentedCertificate:
    pems = list(context.auth_context().get("x509_pem_cert", ()))
    if len(pems) != 1:
        raise _unknown(address, "no client certificate was shown; enrol first")
    try:
        return read_presented(pems[0])
    except ValueError as error:
        raise _unknown(address, f"{error}; enrol to get a node's certificate") from error


def _unknown(address: str, detail: str) -> SlackwaterError:
    _log.warning("certificate refused", address=address, detail=detail)
    return SlackwaterError(Reason.CERTIFICATE_UNKNOWN, detail)
