"""Who this node is: keys, certificate, and whom it trusts, in one file that is replaced as a whole."""

import base64
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from agent.errors import ConfigInvalid, DiskFailed, NotJoined

IDENTITY_FILE = "identity.json"
LOCK_FILE = "agent.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that enrolment gave; renewal replaces `tls_key` and `certificate_chain`."""

    node_id: str
    cluster_id: str
    # "host:port" of the public port, for renewal by key, and of the node port.
    public_address: str
    node_address: str
    ca_certificate: bytes
    certificate_chain: bytes
    tls_key: bytes
    # Raw Ed25519.
    signing_key: bytes
    coordinator_keys: tuple[bytes, ...]
    release_keys: tuple[bytes, ...]

    def signer(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.signing_key)

    def certificate(self) -> x509.Certificate:
        """The node's own certificate, the first of the chain."""
        return x509.load_pem_x509_certificate(self.certificate_chain)


def generate_tls_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a request (DER) for the key; the coordinator decides on every name in the certificate."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def load_identity(state_dir: Path) -> Identity:
    """Read the identity of a joined node.

    Raises:
        NotJoined: there is none, or it cannot be read.
    """
    path = state_dir / IDENTITY_FILE
    try:
        return _from_json(json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        raise NotJoined(f"no identity in {state_dir}; run `slackwater-agent join` first") from error
    except OSError as error:
        advice = "; run this as the agent's user, or with sudo" if isinstance(error, PermissionError) else ""
        raise NotJoined(f"cannot read {path}: {error.strerror}{advice}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NotJoined(f"{path} is damaged ({error}); remove it and join again") from error


def store_identity(identity: Identity, state_dir: Path) -> None:
    """Write the identity so that a crash leaves the old one or the new one. Blocks on the disk."""
    write_private(state_dir / IDENTITY_FILE, json.dumps(_to_json(identity), indent=1).encode())


def write_private(path: Path, data: bytes) -> None:
    """Replace a file by one that only its owner can read, on the disk when this returns."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        keep_owner(file.fileno(), path.parent)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def keep_owner(descriptor: int, directory: Path) -> None:
    """Give a new file to whoever the directory belongs to: what root writes, the agent's own user must read."""
    owner = directory.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def keep_owners(directory: Path) -> None:
    """As `keep_owner`, for everything below a directory that root has worked in."""
    owner = directory.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        return
    give_all(directory, owner.st_uid, owner.st_gid)


def give_all(directory: Path, uid: int, gid: int) -> None:
    """Give a directory and all below it to a user.

    By descriptors, since that user may put a link in the way while root works.
    """
    for _, names, files, descriptor in os.fwalk(directory):
        os.fchown(descriptor, uid, gid)
        for name in (*names, *files):
            os.chown(name, uid, gid, dir_fd=descriptor, follow_symlinks=False)


def open_state_dir(state_dir: Path) -> None:
    """Make the state directory, for its owner only.

    Raises:
        ConfigInvalid: it cannot be made or written.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigInvalid(f"cannot make state_dir {state_dir}: {error.strerror}") from error
    if not os.access(state_dir, os.W_OK | os.X_OK):
        raise ConfigInvalid(f"state_dir {state_dir} is not writable; check its owner")


@contextmanager
def one_line_for_the_disk(state_dir: Path) -> Iterator[None]:
    """Turn what the disk says about a write in the state directory into one line for the operator.

    Raises:
        DiskFailed: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full; free some space and start again" if full else error.strerror
        raise DiskFailed(f"cannot write in {state_dir}: {what}") from error


@contextmanager
def lock_state_dir(state_dir: Path) -> Iterator[None]:
    """Keep other agents off the state directory; the lock goes with the process, however it ends.

    Raises:
        ConfigInvalid: another agent holds it.
        DiskFailed: it cannot be made.
    """
    open_state_dir(state_dir)
    with one_line_for_the_disk(state_dir):
        descriptor = os.open(state_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        keep_owner(descriptor, state_dir)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigInvalid(f"another agent runs on {state_dir}; stop it first") from error
        yield
    finally:
        os.close(descriptor)


def _to_json(identity: Identity) -> dict[str, object]:
    document: dict[str, object] = {}
    for entry in fields(identity):
        value = getattr(identity, entry.name)
        if isinstance(value, bytes):
            value = _encode(value)
        elif isinstance(value, tuple):
            value = [_encode(one) for one in value]
        document[entry.name] = value
    return document


def _from_json(document: dict[str, Any]) -> Identity:
    return Identity(
        node_id=document["node_id"],
        cluster_id=document["cluster_id"],
        public_address=document["public_address"],
        node_address=document["node_address"],
        ca_certificate=_decode(document["ca_certificate"]),
        certificate_chain=_decode(document["certificate_chain"]),
        tls_key=_decode(document["tls_key"]),
        signing_key=_decode(document["signing_key"]),
        coordinator_keys=tuple(_decode(one) for one in document["coordinator_keys"]),
        release_keys=tuple(_decode(one) for one in document["release_keys"]),
    )


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(value: str) -> bytes:
    return base64.b64decode(value, validate=True)
