"""Certificates of nodes: what of a request is believed, and what is issued.

Of a certificate request only the public key counts. Subject, extensions and
everything else that the machine wrote is ignored: the name in the certificate
is the node id that the coordinator gave.
"""

from dataclasses import dataclass
from datetime import timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.errors import Reason, SlackwaterError
from coordinator.keys import CoordinatorKeys, leaf_builder
from inference.task import NodeId

# A P-256 request with a subject has 250 to 400 bytes.
CERTIFICATE_REQUEST_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """`chain` is PEM: the leaf, then the CA."""

    chain: str
    serial: str  # hex
    not_after_ms: int


@dataclass(frozen=True, slots=True)
class PresentedCertificate:
    """What a peer showed in the TLS handshake."""

    cluster_id: str
    node_id: NodeId
    serial: str  # hex
    not_after_ms: int


def parse_certificate_request(der: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate request.

    Raises:
        SlackwaterError: INVALID_ARGUMENT for what is no P-256 request,
            SIGNATURE_INVALID where its own signature does not hold.
    """
    if len(der) > CERTIFICATE_REQUEST_BYTES_MAX:
        raise _bad_request(f"has {len(der)} bytes, at most {CERTIFICATE_REQUEST_BYTES_MAX} are read")
    try:
        request = x509.load_der_x509_csr(der)
        public_key = request.public_key()
        signature_holds = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _bad_request("is no DER certificate request") from error
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(public_key.curve, ec.SECP256R1):
        raise _bad_request("must be for an ECDSA P-256 key")
    if not signature_holds:
        raise SlackwaterError(
            Reason.SIGNATURE_INVALID,
            "the certificate request is not signed by its own key",
            param="certificate_request",
        )
    return public_key


def issue_node_certificate(
    keys: CoordinatorKeys,
    cluster_id: str,
    node_id: NodeId,
    public_key: ec.EllipticCurvePublicKey,
    now_ms: int,
    lifetime: timedelta,
) -> NodeCertificate:
    """Return a client certificate that names the node as spiffe://<cluster>/node/<node id>."""
    name = x509.UniformResourceIdentifier(f"spiffe://{cluster_id}/node/{node_id}")
    certificate = (
        leaf_builder(keys.ca_certificate, public_key, "slackwater node", now_ms, lifetime)
        .add_extension(x509.SubjectAlternativeName([name]), critical=False)
        # Client only: a node cannot pass for the coordinator towards another.
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(keys.ca_key, hashes.SHA256())
    )
    return NodeCertificate(
        chain=(certificate.public_bytes(Encoding.PEM) + keys.ca_pem).decode(),
        serial=f"{certificate.serial_number:x}",
        not_after_ms=round(certificate.not_valid_after_utc.timestamp() * 1000),
    )


def read_presented(pem: bytes) -> PresentedCertificate:
    """Return whom a peer certificate names; that the CA signed it is TLS's finding.

    Raises:
        ValueError: it names no node.
    """
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound as error:
        raise ValueError("the certificate has no subject alternative name") from error
    names = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    if len(names) != 1:
        raise ValueError(f"the certificate has {len(names)} URI names, expected one")
    scheme, _, rest = names[0].partition("://")
    cluster_id, _, path = rest.partition("/")
    kind, _, node_id = path.partition("/")
    if scheme != "spiffe" or kind != "node" or not cluster_id or not node_id:
        raise ValueError("the certificate does not name a node")
    return PresentedCertificate(
        cluster_id=cluster_id,
        node_id=NodeId(node_id),
        serial=f"{certificate.serial_number:x}",
        not_after_ms=round(certificate.not_valid_after_utc.timestamp() * 1000),
    )


def _bad_request(what: str) -> SlackwaterError:
    return SlackwaterError(Reason.INVALID_ARGUMENT, f"the certificate request {what}", param="certificate_request")
