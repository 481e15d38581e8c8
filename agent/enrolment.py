"""How this machine becomes a node, and how its certificate is renewed.

Joining, in this order:
  1  the join string is read
  2  the CA certificate is taken from the public port's TLS handshake; nothing
     else is said to the other side before its key equals the pin
  3  with that CA as the only root, the fleet's terms are asked for, and shown to
     the owner; without a yes it ends here, and the join string stays good
  4  a server nonce is asked for
  5  keys are made here, and the proof of enrolment is signed
  6  the token is handed in; node id, certificate and trusted keys come back
  7  all of it is stored in one file

The signing key is stored before step 6: where the answer is lost, joining
again with the same string completes for the same node.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from agent.errors import AgentError, ConfigInvalid, EnrolmentRefused, NodeBanned
from agent.identity import (
    IDENTITY_FILE,
    Identity,
    certificate_request,
    generate_tls_key,
    one_line_for_the_disk,
    open_state_dir,
    private_pem,
    store_identity,
    write_private,
)
from protos import signing
from protos.join import JoinString, decode, spki_sha256
from protos.slackwater.common.v1 import error_pb2
from protos.slackwater.node.v1 import (
    enrolment_service_pb2,
    enrolment_service_pb2_grpc,
    node_service_pb2,
    node_service_pb2_grpc,
)

# A handshake takes four packets; a minute of patience would only hide a wrong address.
HANDSHAKE_TIMEOUT_S = 10
# The coordinator signs and writes to its store; a loaded one takes a second.
CALL_TIMEOUT_S = 20.0
PENDING_KEY_FILE = "signing.pending"
# Trailing metadata of a failed call.
ERROR_METADATA = "slackwater-error-bin"
# Of what the fleet says about itself: an address, and a page of rules. More would hide the rest of the terminal.
ABUSE_CONTACT_CHARACTERS_MAX = 256
CONTENT_POLICY_CHARACTERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """What a fleet says of itself to whoever is about to join; empty where it says nothing."""

    cluster_id: str
    abuse_contact: str
    content_policy: str

    def describe(self) -> list[str]:
        """Return it in lines that are safe to print, whatever the fleet sent."""
        contact = _shown(self.abuse_contact, ABUSE_CONTACT_CHARACTERS_MAX)
        policy = _shown(self.content_policy, CONTENT_POLICY_CHARACTERS_MAX)
        return [
            f"Fleet {_shown(self.cluster_id, ABUSE_CONTACT_CHARACTERS_MAX)}",
            f"  abuse contact   {contact or 'this fleet names no abuse contact'}",
            f"  content policy  {policy or 'this fleet names no content policy'}",
        ]


def join(join_string: str, state_dir: Path, label: str, agree: Callable[[FleetTerms], None]) -> Identity:
    """Make this machine a node and store its identity in `state_dir`. Blocks for some seconds.

    Args:
        agree: shows the terms to the owner; raises EnrolmentRefused or ConfigInvalid where there is no yes.

    Raises:
        EnrolmentRefused: malformed, used or expired join string, or a coordinator that is not the pinned one.
        ConfigInvalid: the state directory cannot be used, or holds an identity already.
        DiskFailed: the identity cannot be stored; with the same join string it can be tried again.
    """
    try:
        ticket = decode(join_string)
    except ValueError as error:
        raise EnrolmentRefused(str(error)) from error
    open_state_dir(state_dir)
    if (state_dir / IDENTITY_FILE).exists():
        raise ConfigInvalid(f"{state_dir / IDENTITY_FILE} exists: this machine has joined; remove it to join anew")
    ca_certificate = fetch_ca_certificate(ticket)
    agree(asyncio.run(_fetch_terms(ticket, ca_certificate)))
    with one_line_for_the_disk(state_dir):
        signing_key = _pending_signing_key(state_dir)
    identity = asyncio.run(_enrol(ticket, ca_certificate, signing_key, label))
    with one_line_for_the_disk(state_dir):
        store_identity(identity, state_dir)
        (state_dir / PENDING_KEY_FILE).unlink()
    return identity


def fetch_ca_certificate(ticket: JoinString) -> bytes:
    """Return the CA certificate (PEM) that the public port shows, once it fits the pin of the join string.

    Raises:
        EnrolmentRefused: nobody answers, or no certificate of the chain has the pinned key.
    """
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    # No root is known yet. The pin below is the check, and nothing but the handshake happens before it.
    context.set_verify(SSL.VERIFY_NONE)
    context.set_alpn_protos([b"h2"])
    try:
        with socket.create_connection((ticket.host, ticket.port), timeout=HANDSHAKE_TIMEOUT_S) as plain:
            chain = _handshake(context, plain, ticket.host)
    except (OSError, SSL.Error) as error:
        reason = str(error) or type(error).__name__
        raise EnrolmentRefused(f"no TLS connection to the coordinator at {ticket.address}: {reason}") from error
    for certificate in chain:
        if spki_sha256(certificate) == ticket.ca_pin:
            return certificate.public_bytes(Encoding.PEM)
    raise EnrolmentRefused(
        f"{ticket.address} is not the coordinator of this join string: none of its {len(chain)} certificates has the "
        "pinned key; check the address, and whether somebody intercepts the connection"
    )


def _handshake(context: SSL.Context, plain: socket.socket, host: str) -> list[x509.Certificate]:
    # OpenSSL works on the descriptor itself: it must block, and the kernel must end the wait.
    plain.setblocking(True)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_TIMEOUT_S, 0))
    connection = SSL.Connection(context, plain)
    connection.set_tlsext_host_name(host.encode())
    connection.set_connect_state()
    try:
        connection.do_handshake()
    except SSL.WantReadError as error:
        raise TimeoutError(f"no handshake within {HANDSHAKE_TIMEOUT_S} s") from error
    return connection.get_peer_cert_chain(as_cryptography=True) or []


def _pending_signing_key(state_dir: Path) -> Ed25519PrivateKey:
    path = state_dir / PENDING_KEY_FILE
    if path.exists():
        return Ed25519PrivateKey.from_private_bytes(path.read_bytes())
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes_raw())
    return key


def _shown(text: str, most: int) -> str:
    """Text of a stranger, for a terminal."""
    return "".join(character if character.isprintable() else " " for character in text[:most])


def node_channel(identity: Identity, options: Sequence[tuple[str, int]] = ()) -> grpc.aio.Channel:
    """Return a channel to the port for nodes, under the node's own certificate."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=identity.ca_certificate,
        private_key=identity.tls_key,
        certificate_chain=identity.certificate_chain,
    )
    return grpc.aio.secure_channel(identity.node_address, credentials, options=options)


@asynccontextmanager
async def _enrolment(
    ticket: JoinString, ca_certificate: bytes
) -> AsyncIterator["enrolment_service_pb2_grpc.EnrolmentServiceAsyncStub"]:
    credentials = grpc.ssl_channel_credentials(root_certificates=ca_certificate)
    async with grpc.aio.secure_channel(ticket.address, credentials) as channel:
        with _refusals(ticket.address):
            yield enrolment_service_pb2_grpc.EnrolmentServiceStub(channel)


async def _fetch_terms(ticket: JoinString, ca_certificate: bytes) -> FleetTerms:
    request = enrolment_service_pb2.StartEnrolmentRequest(token_id=ticket.token_id)
    async with _enrolment(ticket, ca_certificate) as stub:
        # Its nonce is left to expire: nobody knows how long the owner reads.
        started = await stub.StartEnrolment(request, timeout=CALL_TIMEOUT_S)
    return FleetTerms(started.cluster_id, started.abuse_contact, started.content_policy)


async def _enrol(ticket: JoinString, ca_certificate: bytes, signing_key: Ed25519PrivateKey, label: str) -> Identity:
    tls_key = generate_tls_key()
    request = certificate_request(tls_key)
    async with _enrolment(ticket, ca_certificate) as stub:
        started = await stub.StartEnrolment(
            enrolment_service_pb2.StartEnrolmentRequest(token_id=ticket.token_id), timeout=CALL_TIMEOUT_S
        )
        proof = signing.enrolment_proof(ticket.token_id, request, ticket.ca_pin, started.server_nonce)
        completed = await stub.CompleteEnrolment(
            enrolment_service_pb2.CompleteEnrolmentRequest(
                token_id=ticket.token_id,
                token_secret=ticket.token_secret,
                certificate_request=request,
                signing_public_key=signing_key.public_key().public_bytes_raw(),
                server_nonce=started.server_nonce,
                proof=signing_key.sign(proof),
                label=label,
            ),
            timeout=CALL_TIMEOUT_S,
        )
    _check_chain(completed.certificate_chain.encode(), tls_key, ca_certificate)
    return Identity(
        node_id=completed.node_id,
        cluster_id=completed.cluster_id,
        public_address=ticket.address,
        node_address=completed.node_address,
        ca_certificate=ca_certificate,
        certificate_chain=completed.certificate_chain.encode(),
        tls_key=private_pem(tls_key),
        signing_key=signing_key.private_bytes_raw(),
        coordinator_keys=tuple(completed.coordinator_public_keys),
        release_keys=tuple(completed.release_public_keys),
    )


async def renew_by_certificate(identity: Identity, channel: grpc.aio.Channel) -> Identity:
    """Return the identity with a fresh key and certificate, over a channel of mutual TLS. The caller stores it.

    Raises:
        EnrolmentRefused: the coordinator refuses or cannot be reached.
        NodeBanned: it has banned this node.
    """
    tls_key = generate_tls_key()
    stub = node_service_pb2_grpc.NodeServiceStub(channel)
    with _refusals(identity.node_address):
        renewed = await stub.RenewCertificate(
            node_service_pb2.RenewCertificateRequest(certificate_request=certificate_request(tls_key)),
            timeout=CALL_TIMEOUT_S,
        )
    return _with_certificate(identity, tls_key, renewed.certificate_chain.encode())


async def renew_by_key(identity: Identity) -> Identity:
    """As `renew_by_certificate`, by a challenge to the signing key on the public port; for expired certificates."""
    tls_key = generate_tls_key()
    request = certificate_request(tls_key)
    credentials = grpc.ssl_channel_credentials(root_certificates=identity.ca_certificate)
    async with grpc.aio.secure_channel(identity.public_address, credentials) as channel:
        stub = enrolment_service_pb2_grpc.EnrolmentServiceStub(channel)
        with _refusals(identity.public_address):
            started = await stub.StartRenewal(
                enrolment_service_pb2.StartRenewalRequest(node_id=identity.node_id), timeout=CALL_TIMEOUT_S
            )
            ca_pin = spki_sha256(x509.load_pem_x509_certificate(identity.ca_certificate))
            proof = signing.renewal_proof(identity.node_id, request, ca_pin, started.server_nonce)
            renewed = await stub.CompleteRenewal(
                enrolment_service_pb2.CompleteRenewalRequest(
                    node_id=identity.node_id,
                    certificate_request=request,
                    server_nonce=started.server_nonce,
                    proof=identity.signer().sign(proof),
                ),
                timeout=CALL_TIMEOUT_S,
            )
    return _with_certificate(identity, tls_key, renewed.certificate_chain.encode())


def _with_certificate(identity: Identity, tls_key: ec.EllipticCurvePrivateKey, chain: bytes) -> Identity:
    _check_chain(chain, tls_key, identity.ca_certificate)
    return replace(identity, tls_key=private_pem(tls_key), certificate_chain=chain)


def _check_chain(chain: bytes, tls_key: ec.EllipticCurvePrivateKey, ca_certificate: bytes) -> None:
    """Refuse a certificate that TLS would refuse later, while somebody still reads the message."""
    try:
        leaf = x509.load_pem_x509_certificate(chain)
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_certificate))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise EnrolmentRefused(f"the coordinator issued a certificate that its CA did not sign: {error}") from error
    if leaf.public_key() != tls_key.public_key():
        raise EnrolmentRefused("the coordinator issued a certificate for a key that is not ours")


@contextmanager
def _refusals(address: str) -> Iterator[None]:
    """Turn a failed call into the coordinator's own reason in one line."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise call_failure(error, address) from error


def call_failure(error: grpc.aio.AioRpcError, address: str) -> AgentError:
    """Return what a failed call to the coordinator means for the operator."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA and isinstance(value, bytes):
            detail = error_pb2.ErrorDetail.FromString(value)
            if detail.reason == error_pb2.ERROR_REASON_NODE_BANNED:
                return NodeBanned(f"the coordinator has banned this node: {detail.message}")
            return EnrolmentRefused(f"the coordinator refuses: {detail.message}")
    return EnrolmentRefused(f"call to the coordinator at {address} failed: {error.code().name}: {error.details()}")
