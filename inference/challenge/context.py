"""What a challenge is bound to, and the keys that everything random in it is derived from.

An answer fits one nonce, node, boot and certificate: all four go into every
key, so that an answer computed before, on another node, before a restart or
under another certificate is an answer to another question.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

# Below 128 bits a prover could prepare answers for a share of all nonces.
NONCE_BYTES_MIN: Final = 16
NONCE_BYTES_MAX: Final = 64
SHA256_BYTES: Final = 32
_DOMAIN: Final = b"slackwater challenge v1"


class ProofRejected(Exception):
    """An answer does not show what it should; the message says which check it failed."""


@dataclass(frozen=True, slots=True)
class Key:
    """What one matrix is expanded from: counter * increment + start, mixed, is its words (64 bits each)."""

    start: int
    increment: int


@dataclass(frozen=True, slots=True)
class ChallengeContext:
    """Whom a challenge is for.

    Args:
        nonce: fresh for every challenge, drawn by the coordinator; 16 to 64 bytes.
        certificate_sha256: of the DER certificate that the node's connection uses, as the coordinator sees it.

    Raises:
        ValueError: the nonce or the fingerprint has not the length it must have.
    """

    nonce: bytes
    node_id: str
    boot_id: str
    certificate_sha256: bytes

    def __post_init__(self) -> None:
        if not NONCE_BYTES_MIN <= len(self.nonce) <= NONCE_BYTES_MAX:
            raise ValueError(
                f"a challenge's nonce has {len(self.nonce)} bytes; "
                f"it must have {NONCE_BYTES_MIN} to {NONCE_BYTES_MAX}, drawn at random"
            )
        if len(self.certificate_sha256) != SHA256_BYTES:
            raise ValueError(f"a certificate's SHA-256 has {len(self.certificate_sha256)} bytes, not {SHA256_BYTES}")

    def seed(self, purpose: str, *parts: bytes) -> bytes:
        """Return 32 bytes for one purpose: SHA-256 over the context and the parts, each behind its length."""
        digest = hashlib.sha256(_DOMAIN)
        fields = (self.nonce, self.node_id.encode(), self.boot_id.encode(), self.certificate_sha256)
        for field in (*fields, purpose.encode(), *parts):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        return digest.digest()


def key_from(seed: bytes, label: str) -> Key:
    """Return the key of one of the matrices that a seed stands for."""
    digest = hashlib.sha256(seed + label.encode()).digest()
    # An odd increment visits every counter once.
    return Key(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little") | 1)
