"""The join string: all that a machine needs to become a node.

    slackwater://coordinator.example:7443/<token id>.<secret>?ca=sha256:<64 hex digits>

It names the coordinator's public port, carries a one-use token, and pins the
fleet's CA by the SHA-256 of its SubjectPublicKeyInfo, so that the very first
contact cannot be intercepted. The secret is a password for as long as the
token lives: it belongs in a file or on standard input, never in argv.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SCHEME = "slackwater"
# 256 bits; the least that a decoder accepts is 128 (Kubernetes' bootstrap tokens: "at least 128 bits of entropy").
TOKEN_SECRET_BYTES = 32
TOKEN_SECRET_BYTES_MIN = 16
# A host name has at most 253 characters, the rest less than 200; anything longer is not a join string.
JOIN_STRING_CHARACTERS_MAX = 1024

_TOKEN_ID = re.compile(r"[A-Za-z0-9]{8,64}")
_PIN = re.compile(r"ca=sha256:([0-9a-f]{64})")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinString:
    """A decoded join string. `ca_pin` is 32 bytes; `host` is a name or an address without brackets."""

    host: str
    port: int
    token_id: str
    token_secret: str = field(repr=False)
    ca_pin: bytes

    @property
    def address(self) -> str:
        """The coordinator's public port as "host:port", IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def encode(self) -> str:
        """Return the string that `decode` reads."""
        return f"{SCHEME}://{self.address}/{self.token_id}.{self.token_secret}?ca=sha256:{self.ca_pin.hex()}"


def decode(text: str) -> JoinString:
    """Return what a join string says; surrounding white space is ignored.

    Raises:
        ValueError: the text is no join string; the message says which part is wrong, without the secret.
    """
    text = text.strip()
    if len(text) > JOIN_STRING_CHARACTERS_MAX:
        raise ValueError(f"join string has {len(text)} characters, at most {JOIN_STRING_CHARACTERS_MAX} are read")
    if not text.startswith(f"{SCHEME}://"):
        raise ValueError(f"join string must begin with {SCHEME}://; was it copied whole?")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError("join string has no valid host:port after slackwater://") from error
    if not host or not port or parts.username is not None or not _HOST.fullmatch(host):
        raise ValueError("join string has no valid host:port after slackwater://")
    token_id, dot, secret = parts.path.removeprefix("/").partition(".")
    if not dot or not _TOKEN_ID.fullmatch(token_id):
        raise ValueError("join string has no <token id>.<secret> after the address; was it copied whole?")
    _check_secret(secret)
    pin = _PIN.fullmatch(parts.query)
    if pin is None or parts.fragment:
        raise ValueError("join string must end with ?ca=sha256:<64 hex digits>; was it copied whole?")
    return JoinString(host=host, port=port, token_id=token_id, token_secret=secret, ca_pin=bytes.fromhex(pin[1]))


def format_secret(secret: bytes) -> str:
    """Return the bytes of a token's secret as they stand in a join string."""
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def spki_sha256(certificate: x509.Certificate) -> bytes:
    """Return the pin of a CA certificate: SHA-256 of its SubjectPublicKeyInfo, 32 bytes."""
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).digest()


def _check_secret(secret: str) -> None:
    try:
        raw = base64.b64decode(secret + "=" * (-len(secret) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("join string has a malformed secret; was it copied whole?") from error
    if len(raw) < TOKEN_SECRET_BYTES_MIN:
        raise ValueError(f"join string's secret has {len(raw) * 8} bits, at least {TOKEN_SECRET_BYTES_MIN * 8} needed")
