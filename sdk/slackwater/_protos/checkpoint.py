"""Checkpoints of the ledger's log: what the coordinator signs about the whole of it.

The form is that of C2SP (https://c2sp.org/tlog-checkpoint, signed-note), so
that witnesses and tools of others can read it:

    slackwater-ledger/<cluster id>
    <number of entries, decimal>
    <root hash, base64>

    — slackwater-ledger/<cluster id> <base64 of key hash (4 bytes) and Ed25519 signature>

It is read strictly: there is one way to write a checkpoint, and any other
byte is refused. A signed text begins with the log's name, an envelope's
signed bytes with "DSSEv1" (protos/signing.py), so that one key serves both
and neither signature passes as the other.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from slackwater._protos.merkle import HASH_BYTES, SIZE_MAX, ProofInvalid, verify_consistency

_ORIGIN_PREFIX = "slackwater-ledger/"
# The type of an Ed25519 key in a signed note.
_ED25519 = b"\x01"
_KEY_HASH_BYTES = 4
_SIGNATURE_BYTES = 64
# A name of 200 characters, and twice as many signatures as one ever carries.
NOTE_BYTES_MAX = 2048
# One now, two while keys rotate; four leaves room.
SIGNATURES_MAX = 4


class CheckpointInvalid(Exception):
    """These bytes are no checkpoint that a trusted key signed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The first `size` entries of the log called `origin` have the Merkle root `root`."""

    origin: str
    size: int
    root: bytes


class Fault(Enum):
    """How a later checkpoint contradicts, or fails to prove that it extends, one that was accepted before."""

    OTHER_LOG = "other_log"
    SMALLER = "smaller"
    SAME_SIZE_OTHER_ROOT = "same_size_other_root"
    NOT_AN_EXTENSION = "not_an_extension"


class LogRewritten(Exception):
    """The log is not, or is not shown to be, the one that was seen before."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


def log_origin(cluster_id: str) -> str:
    """Return the name of a coordinator's log."""
    return f"{_ORIGIN_PREFIX}{cluster_id}"


def sign_checkpoint(checkpoint: Checkpoint, key: Ed25519PrivateKey) -> bytes:
    """Return the signed note. Sign none before its entries are on the disk."""
    text = _text(checkpoint)
    key_hash = _key_hash(checkpoint.origin, key.public_key().public_bytes_raw())
    return _note(checkpoint.origin, text, [key_hash + key.sign(text)])


def open_checkpoint(note: bytes, public_keys: Iterable[bytes]) -> Checkpoint:
    """Return what a note says, after every signature of it held under one of the raw public keys.

    Raises:
        CheckpointInvalid: it is none, is written in another way, or a signature does not hold.
    """
    if len(note) > NOTE_BYTES_MAX:
        raise CheckpointInvalid(f"{len(note)} bytes; a checkpoint has at most {NOTE_BYTES_MAX}")
    checkpoint, signatures = _parse(note)
    text = _text(checkpoint)
    # Written again it must be the same: no second spelling of a number, no stray space, no loose bits of base64.
    if _note(checkpoint.origin, text, signatures) != note:
        raise CheckpointInvalid("the note is not written as a checkpoint is")
    keys = {_key_hash(checkpoint.origin, raw): raw for raw in public_keys}
    for signature in signatures:
        raw = keys.get(signature[:_KEY_HASH_BYTES])
        if raw is None:
            raise CheckpointInvalid("signed by a key that is not trusted for it")
        try:
            Ed25519PublicKey.from_public_bytes(raw).verify(signature[_KEY_HASH_BYTES:], text)
        except InvalidSignature as error:
            raise CheckpointInvalid("the signature does not hold") from error
    return checkpoint


def verify_growth(old: Checkpoint, new: Checkpoint, proof: Sequence[bytes]) -> None:
    """Check that a log went from one checkpoint to another by appending alone.

    Raises:
        LogRewritten: with the fault.
    """
    if new.origin != old.origin:
        raise LogRewritten(Fault.OTHER_LOG, f"a checkpoint of {new.origin!r}, expected {old.origin!r}")
    if new.size < old.size:
        raise LogRewritten(Fault.SMALLER, f"the log has {new.size} entries, and had {old.size} before")
    if new.size == old.size and new.root != old.root:
        raise LogRewritten(
            Fault.SAME_SIZE_OTHER_ROOT, f"two roots for {new.size} entries: {old.root.hex()} and {new.root.hex()}"
        )
    try:
        verify_consistency(old.size, old.root, new.size, new.root, proof)
    except ProofInvalid as error:
        raise LogRewritten(
            Fault.NOT_AN_EXTENSION, f"{new.size} entries are not shown to begin with the {old.size} seen: {error}"
        ) from error


def _text(checkpoint: Checkpoint) -> bytes:
    root = base64.b64encode(checkpoint.root).decode()
    return f"{checkpoint.origin}\n{checkpoint.size}\n{root}\n".encode()


def _note(origin: str, text: bytes, signatures: Sequence[bytes]) -> bytes:
    lines = (f"— {origin} {base64.b64encode(signature).decode()}\n" for signature in signatures)
    return text + b"\n" + "".join(lines).encode()


def _key_hash(name: str, public_key: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + _ED25519 + public_key).digest()[:_KEY_HASH_BYTES]


def _parse(note: bytes) -> tuple[Checkpoint, list[bytes]]:
    try:
        lines = note.decode().split("\n")
        origin, size, root = lines[0], int(lines[1]), base64.b64decode(lines[2], validate=True)
        signatures = [base64.b64decode(line.split(" ")[2], validate=True) for line in lines[4:-1]]
    except (ValueError, IndexError) as error:
        # ValueError is also bad UTF-8 and bad base64.
        raise CheckpointInvalid(f"the note cannot be read: {error}") from error
    if not origin.startswith(_ORIGIN_PREFIX) or not origin.isprintable() or " " in origin or "+" in origin:
        raise CheckpointInvalid("the first line is not the name of a ledger")
    if not 0 <= size <= SIZE_MAX or len(root) != HASH_BYTES:
        raise CheckpointInvalid(f"{size} entries or a root of {len(root)} bytes cannot be")
    if not 1 <= len(signatures) <= SIGNATURES_MAX:
        raise CheckpointInvalid(f"{len(signatures)} signatures, expected 1 to {SIGNATURES_MAX}")
    if any(len(signature) != _KEY_HASH_BYTES + _SIGNATURE_BYTES for signature in signatures):
        raise CheckpointInvalid("a signature of the wrong length")
    if len(set(signatures)) < len(signatures):
        raise CheckpointInvalid("one signature twice")
    return Checkpoint(origin=origin, size=size, root=root), signatures
