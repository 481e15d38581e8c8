"""What tests of the gRPC edge share: a clock that is moved by hand, and a machine that enrols. For tests only."""

import asyncio
import socket
from dataclasses import dataclass, field

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from OpenSSL import SSL

from coordinator.api.gate import ERROR_METADATA
from coordinator.enrolment.service import EnrolmentApplication
from protos.join import JoinString, spki_sha256
from protos.signing import enrolment_proof, renewal_proof
from protos.slackwater.common.v1 import error_pb2

START_MS = 1_800_000_000_000


@dataclass(slots=True)
class FakeClock:
    """Moves only by `advance`."""

    unix_ms: int = START_MS
    seconds: float = 100.0

    def now_ms(self) -> int:
        return self.unix_ms

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.unix_ms += round(seconds * 1000)
        self.seconds += seconds


@dataclass(slots=True)
class Machine:
    """The keys of a machine that wants to be a node, and what it makes of them."""

    signing_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    tls_key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def tls_key_pem(self) -> bytes:
        return self.tls_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def certificate_request(self) -> bytes:
        subject = x509.Name([])
        return (
            x509.CertificateSigningRequestBuilder()
            .subject_name(subject)
            .sign(self.tls_key, hashes.SHA256())
            .public_bytes(Encoding.DER)
        )

    def apply(self, join: JoinString, server_nonce: bytes, label: str = "attic") -> EnrolmentApplication:
        """Return a valid application for a join string."""
        request = self.certificate_request()
        message = enrolment_proof(join.token_id, request, join.ca_pin, server_nonce)
        return EnrolmentApplication(
            token_id=join.token_id,
            token_secret=join.token_secret,
            certificate_request=request,
            signing_public_key=self.signing_key.public_key().public_bytes_raw(),
            server_nonce=server_nonce,
            proof=self.signing_key.sign(message),
            label=label,
        )

    def prove_renewal(self, node_id: str, request: bytes, ca_pin: bytes, server_nonce: bytes) -> bytes:
        return self.signing_key.sign(renewal_proof(node_id, request, ca_pin, server_nonce))


async def fetch_ca(host: str, port: int, ca_pin: bytes) -> bytes:
    """Return the CA certificate (PEM) that a server shows in its handshake and that fits the pin.

    Raises:
        LookupError: no certificate of the chain fits.
    """
    for certificate in await asyncio.to_thread(_read_chain, host, port):
        if spki_sha256(certificate) == ca_pin:
            return certificate.public_bytes(Encoding.PEM)
    raise LookupError("no certificate of the server's chain fits the pin")


def _read_chain(host: str, port: int) -> list[x509.Certificate]:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    # The pin is checked by the caller, which trusts nothing else of this connection.
    context.set_verify(SSL.VERIFY_NONE)
    with socket.create_connection((host, port), timeout=10) as raw:
        raw.settimeout(None)
        connection = SSL.Connection(context, raw)
        connection.set_alpn_protos([b"h2"])
        connection.set_connect_state()
        connection.do_handshake()
        chain = connection.get_peer_cert_chain(as_cryptography=True)
        connection.close()
        return list(chain or ())


def error_detail(error: grpc.aio.AioRpcError) -> error_pb2.ErrorDetail:
    """Return the details that a refused call carries."""
    values = [value for key, value in error.trailing_metadata() or () if key == ERROR_METADATA]
    assert len(values) == 1, error
    assert isinstance(values[0], bytes)
    return error_pb2.ErrorDetail.FromString(values[0])
