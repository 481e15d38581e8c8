"""Signed envelopes: DSSE over the bytes as sent, with Ed25519.

Protobuf serialisation is not canonical, so nothing here ever serialises a
message again: what is signed is the pre-authentication encoding (PAE) of the
payload bytes that travel, and what is verified is the bytes that arrived
(DSSE v1.0.2, https://github.com/secure-systems-lab/dsse). A payload type of
its own for every kind of message keeps a signed task from passing as a signed
result.

The order for every receiver is verify, then parse, then act; `open_envelope`
returns bytes only after a signature held.
"""

import hashlib
from collections.abc import Iterable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from slackwater._protos.slackwater.common.v1 import envelope_pb2

TASK_TYPE = "application/vnd.slackwater.task.v1+protobuf"
RESULT_TYPE = "application/vnd.slackwater.result.v1+protobuf"
MANIFEST_TYPE = "application/vnd.slackwater.manifest.v1+protobuf"

# A header, a result of a long answer (4 bytes an id) and a manifest of a large
# model all fit; anything longer is an attack or a mistake.
PAYLOAD_BYTES_MAX = 4 * 1024 * 1024
# One signature now, two while keys rotate; four leaves room.
SIGNATURES_MAX = 4


class SignatureInvalid(Exception):
    """No signature of the envelope holds under a key that is trusted for it."""


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the DSSE pre-authentication encoding, the exact bytes that are signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def key_id(public_key: bytes) -> str:
    """Return the hint that names a raw Ed25519 public key in an envelope."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def seal(payload_type: str, payload: bytes, key: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
    """Sign payload bytes as they will travel."""
    signature = envelope_pb2.Signature(
        key_id=key_id(key.public_key().public_bytes_raw()), signature=key.sign(pae(payload_type, payload))
    )
    return envelope_pb2.SignedEnvelope(payload=payload, payload_type=payload_type, signatures=[signature])


def open_envelope(envelope: envelope_pb2.SignedEnvelope, payload_type: str, public_keys: Iterable[bytes]) -> bytes:
    """Return the payload of an envelope that one of the raw public keys signed.

    A key id proves nothing, but it must fit the key all the same, so that no
    byte of an envelope can change unseen.

    Raises:
        SignatureInvalid: wrong type, oversize, no key given, or no signature holds.
    """
    if envelope.payload_type != payload_type:
        raise SignatureInvalid(f"payload type is {envelope.payload_type!r}, expected {payload_type!r}")
    if len(envelope.payload) > PAYLOAD_BYTES_MAX:
        raise SignatureInvalid(f"payload has {len(envelope.payload)} bytes, at most {PAYLOAD_BYTES_MAX} are read")
    if not 1 <= len(envelope.signatures) <= SIGNATURES_MAX:
        raise SignatureInvalid(f"{len(envelope.signatures)} signatures, expected 1 to {SIGNATURES_MAX}")
    message = pae(payload_type, envelope.payload)
    for raw in public_keys:
        public_key = Ed25519PublicKey.from_public_bytes(raw)
        hint = key_id(raw)
        for signature in envelope.signatures:
            if signature.key_id != hint:
                continue
            try:
                public_key.verify(signature.signature, message)
            except InvalidSignature:
                continue
            return envelope.payload
    raise SignatureInvalid("no signature holds under a trusted key")


def enrolment_proof(token_id: str, certificate_request: bytes, ca_pin: bytes, server_nonce: bytes) -> bytes:
    """Return the bytes that a joining node signs with the signing key it lists.

    `ca_pin` is SHA-256 of the CA's SubjectPublicKeyInfo (32 bytes), so that the
    proof is void towards any other coordinator.
    """
    return _proof(b"slackwater-enrolment-v1", token_id.encode(), certificate_request, ca_pin, server_nonce)


def renewal_proof(node_id: str, certificate_request: bytes, ca_pin: bytes, server_nonce: bytes) -> bytes:
    """Return the bytes that a node signs to have an expired certificate renewed."""
    return _proof(b"slackwater-renewal-v1", node_id.encode(), certificate_request, ca_pin, server_nonce)


def _proof(label: bytes, subject: bytes, certificate_request: bytes, ca_pin: bytes, server_nonce: bytes) -> bytes:
    # Every part is hashed to a fixed length, so that no two tuples share bytes.
    parts = (label, subject, certificate_request, ca_pin, server_nonce)
    return b"".join(hashlib.sha256(part).digest() for part in parts)
