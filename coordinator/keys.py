"""The coordinator's keys: made at the first start, kept in `state_dir/keys`.

    keys/ca.key       ECDSA P-256, signs server and node certificates
    keys/ca.pem       its self-signed certificate (a copy for clients: state_dir/ca.pem)
    keys/signing.key  Ed25519, signs task headers
    keys/seed.key     32 bytes, from which seeds are derived that a caller did not give

Directory 0700, files 0600, each written whole or not at all. The server's own
TLS key exists in memory only: each start issues a new leaf from the CA, whose
chain carries the CA certificate, so that a client that knows only the pin can
read the CA in the handshake and check it.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.clock import utc
from coordinator.startup import ExitCode, StartupError, describe_os_error
from protos.join import spki_sha256

# A fleet outlives its machines; agents pin this key, so that replacing it means to enrol again.
CA_LIFETIME = timedelta(days=3650)
# Clocks of volunteers are wrong by minutes as a rule; an hour is the usual allowance.
BACKDATE = timedelta(hours=1)
# The server's leaf is issued at every start and again at two thirds of this.
SERVER_LIFETIME = timedelta(days=30)
SEED_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a TLS server presents: PEM, leaf first, then the CA."""

    private_key: bytes = field(repr=False)
    certificate_chain: bytes
    renew_at_ms: int


@dataclass(frozen=True, slots=True)
class CoordinatorKeys:
    ca_key: ec.EllipticCurvePrivateKey = field(repr=False)
    ca_certificate: x509.Certificate
    signing_key: Ed25519PrivateKey = field(repr=False)
    seed_key: bytes = field(repr=False)

    @property
    def ca_pin(self) -> bytes:
        """SHA-256 of the CA's SubjectPublicKeyInfo."""
        return spki_sha256(self.ca_certificate)

    @property
    def ca_pem(self) -> bytes:
        return self.ca_certificate.public_bytes(Encoding.PEM)

    @property
    def signing_public_key(self) -> bytes:
        """Raw Ed25519, 32 bytes."""
        return self.signing_key.public_key().public_bytes_raw()

    def derive_seed(self, task_id: str) -> int:
        """Return the seed of a task whose caller gave none: PRF(seed key, task id), 63 bits."""
        mac = hmac.digest(self.seed_key, task_id.encode(), hashlib.sha256)
        # 63 bits, since engines take seeds as signed 64-bit integers.
        return int.from_bytes(mac[:8], "big") >> 1

    def audit_key(self) -> bytes:
        """Return the key from which the draws of audits follow: PRF(seed key, a name that no task has), 32 bytes."""
        return hmac.digest(self.seed_key, b"audits", hashlib.sha256)

    def cache_key(self) -> bytes:
        """Return the key from which the salts of engines' caches follow: PRF(seed key, another such name), 32 bytes."""
        return hmac.digest(self.seed_key, b"cache-salts", hashlib.sha256)

    def issue_server_identity(self, host_names: Sequence[str], now_ms: int) -> ServerIdentity:
        """Return a new key and certificate for the given names, 127.0.0.1, ::1 and localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = dict.fromkeys((*host_names, "localhost", "127.0.0.1", "::1"))
        builder = leaf_builder(self.ca_certificate, key.public_key(), "slackwater coordinator", now_ms, SERVER_LIFETIME)
        certificate = (
            builder.add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self.ca_key, hashes.SHA256())
        )
        return ServerIdentity(
            private_key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            certificate_chain=certificate.public_bytes(Encoding.PEM) + self.ca_pem,
            renew_at_ms=now_ms + round(SERVER_LIFETIME.total_seconds() * 1000 * 2 / 3),
        )


def load_or_create(state_dir: Path, now_ms: int) -> CoordinatorKeys:
    """Return the keys of a state directory, made now where they are missing.

    Raises:
        StartupError: a file cannot be read or written, or holds no key of the expected kind.
    """
    directory = state_dir / "keys"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        ca_key = _load_ca_key(directory / "ca.key")
        ca_certificate = _load_ca_certificate(directory / "ca.pem", ca_key, now_ms)
        keys = CoordinatorKeys(
            ca_key=ca_key,
            ca_certificate=ca_certificate,
            signing_key=_load_signing_key(directory / "signing.key"),
            seed_key=_load_seed_key(directory / "seed.key"),
        )
        # The certificate is public; clients and the SDK read this copy as their root.
        write_atomically(state_dir / "ca.pem", keys.ca_pem, mode=0o644)
    except OSError as error:
        raise describe_os_error(error, f"read or write {error.filename or directory}") from error
    return keys


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all, and durably; its mode is never wider than asked."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        # Without this a crash may forget the rename, and with it the key.
        os.fsync(parent)
    finally:
        os.close(parent)


def leaf_builder(
    ca: x509.Certificate, public_key: ec.EllipticCurvePublicKey, name: str, now_ms: int, lifetime: timedelta
) -> x509.CertificateBuilder:
    """Return what every leaf has in common; names and usage are the caller's."""
    now = utc(now_ms)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(ca.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
            ),
            critical=False,
        )
    )


def _load_ca_key(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        if path.with_name("ca.pem").exists():
            # A new key would cut off every node that pinned the old one.
            raise StartupError(ExitCode.NO_INPUT, f"{path} is missing while ca.pem is there; restore it from a backup")
        write_atomically(path, _private_pem(ec.generate_private_key(ec.SECP256R1())))
    key = _load_private_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise StartupError(ExitCode.BAD_DATA, f"{path} holds no P-256 key; restore it from a backup")
    return key


def _load_ca_certificate(path: Path, key: ec.EllipticCurvePrivateKey, now_ms: int) -> x509.Certificate:
    if not path.exists():
        write_atomically(path, _self_sign(key, now_ms).public_bytes(Encoding.PEM))
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise StartupError(ExitCode.BAD_DATA, f"{path} holds no certificate; restore it from a backup") from error
    if certificate.public_key() != key.public_key():
        raise StartupError(ExitCode.BAD_DATA, f"{path} does not belong to ca.key beside it; restore both from a backup")
    return certificate


def _load_signing_key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        write_atomically(path, _private_pem(Ed25519PrivateKey.generate()))
    key = _load_private_key(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise StartupError(ExitCode.BAD_DATA, f"{path} holds no Ed25519 key; restore it from a backup")
    return key


def _load_seed_key(path: Path) -> bytes:
    if not path.exists():
        write_atomically(path, secrets.token_bytes(SEED_KEY_BYTES))
    key = path.read_bytes()
    if len(key) != SEED_KEY_BYTES:
        raise StartupError(ExitCode.BAD_DATA, f"{path} has {len(key)} bytes instead of {SEED_KEY_BYTES}; restore it")
    return key


def _load_private_key(path: Path) -> object:
    try:
        return load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StartupError(ExitCode.BAD_DATA, f"{path} holds no private key; restore it from a backup") from error


def _private_pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _self_sign(key: ec.EllipticCurvePrivateKey, now_ms: int) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "slackwater fleet CA")])
    now = utc(now_ms)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + CA_LIFETIME)
        # Signs leaves only: no certificate below may sign another.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
