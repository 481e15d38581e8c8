"""Which bytes a model is: building, signing, loading and checking manifests.

A manifest lists every file that may be loaded, with size and SHA-256, and is
signed by a release key that no server holds. Whatever it does not name is
refused by name, never ignored.

A directory is checked before each load. A loader opens the files again by
name: only the owner of the agent may be able to write there.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf.message import DecodeError

from inference.licences import LICENCES
from inference.model_chunks import ManifestFile, chunk_count
from inference.model_files import (
    CALIBRATION_FILE,
    CANARIES_FILE,
    JSON_BYTES_MAX,
    REQUIRED_FILES,
    TOKENIZER_FILES,
    ManifestError,
    Progress,
    check_contents,
    check_file_name,
    hash_files,
    list_directory,
    read_json_object,
    verify_files,
)
from inference.task import ManifestDigest, TaskKind
from protos.signing import MANIFEST_TYPE, PAYLOAD_BYTES_MAX, SignatureInvalid, key_id, open_envelope, seal
from protos.slackwater.common.v1 import completion_pb2, envelope_pb2, statement_pb2

__all__ = [
    "DTYPES",
    "MANIFEST_FILE",
    "Manifest",
    "ManifestError",
    "ManifestFile",
    "Progress",
    "build_manifest",
    "load_manifest",
    "load_release_public_key",
    "read_manifest",
    "sign_manifest",
    "verify_directory",
    "verify_tokenizer_files",
]

# The signed manifest, beside the files it names.
MANIFEST_FILE = "manifest.envelope"
# What may lie beside the files without being one of them.
_BESIDE = frozenset({MANIFEST_FILE, CALIBRATION_FILE, CANARIES_FILE})

DTYPES = frozenset({"bfloat16", "float16", "float32"})

# A model with a trillion parameters in 1 GB shards has this many files.
FILES_MAX = 4096
# A label of a metric, a directory name and a column: longer names serve nobody.
NAME_LENGTH_MAX = 96
# For people to read in a listing.
ORIGIN_LENGTH_MAX = 1024
# Ten times the longest context and the largest vocabulary in use; larger values are mistakes.
CONTEXT_TOKENS_MAX = 1 << 24
VOCABULARY_MAX = 1 << 22
# As many as a task header carries.
STOP_TOKEN_IDS_MAX = 16
# The signatures and the type beside a payload.
_ENVELOPE_OVERHEAD_BYTES = 4096

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ARCHITECTURE = re.compile(r"[A-Za-z][A-Za-z0-9]*")

_KIND_TO_PROTO = {
    TaskKind.GENERATE: completion_pb2.TASK_KIND_GENERATE,
    TaskKind.SCORE: completion_pb2.TASK_KIND_SCORE,
    TaskKind.EMBED: completion_pb2.TASK_KIND_EMBED,
}
_KIND_FROM_PROTO = {proto: kind for kind, proto in _KIND_TO_PROTO.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest whose signature held and whose fields are valid."""

    digest: ManifestDigest
    name: str
    revision: str
    architecture: str
    licence: str
    dtype: str
    context_tokens: int
    vocabulary_size: int
    stop_token_ids: tuple[int, ...]
    files: tuple[ManifestFile, ...]
    origin: str
    kind: TaskKind

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def check_fetchable(self) -> None:
        """Refuse to fetch what could not be checked chunk by chunk.

        Raises:
            ManifestError: the manifest was made before manifests had hashes of chunks.
        """
        for file in self.files:
            if not file.has_chunk_hashes:
                raise ManifestError(
                    f"the manifest of {self.name} {self.revision} has no chunk hashes for {file.path}, so the model "
                    f"cannot be fetched; sign it again with scripts/build_model.py, or put its files into a local "
                    f"directory and name that as model_directory"
                )


def build_manifest(
    directory: Path,
    *,
    name: str,
    revision: str,
    licence: str,
    dtype: str,
    origin: str,
    kind: TaskKind = TaskKind.GENERATE,
    on_progress: Progress | None = None,
) -> statement_pb2.ModelManifest:
    """Describe every file of a model directory.

    Raises:
        ManifestError: a file that may not be part of a model, a field that is
            not valid, or a config.json that says too little.
    """
    paths = sorted(list_directory(directory) - _BESIDE)
    for path in paths:
        check_file_name(path)
    for path in sorted(REQUIRED_FILES - set(paths)):
        raise ManifestError(f"{directory / path} is missing: a model needs it")
    config = read_json_object(directory, "config.json")
    files = hash_files(directory, paths, on_progress, with_chunks=True)
    manifest = statement_pb2.ModelManifest(
        name=name,
        revision=revision,
        architecture=_architecture(config),
        licence=licence,
        dtype=dtype,
        context_tokens=_config_int(config, "max_position_embeddings"),
        vocabulary_size=_config_int(config, "vocab_size"),
        stop_token_ids=_stop_token_ids(directory, paths, config),
        files=[
            statement_pb2.ModelFile(path=f.path, size_bytes=f.size_bytes, sha256=f.sha256, chunk_sha256=f.chunk_sha256)
            for f in files
        ],
        origin=origin,
        kind=_KIND_TO_PROTO[kind],
    )
    check_contents(files, directory)
    _to_domain(manifest, ManifestDigest(""))
    return manifest


def sign_manifest(manifest: statement_pb2.ModelManifest, key: Ed25519PrivateKey) -> bytes:
    """Return the serialised envelope that belongs beside the model's files."""
    return seal(MANIFEST_TYPE, manifest.SerializeToString(deterministic=True), key).SerializeToString()


def load_manifest(envelope_bytes: bytes, release_public_keys: Sequence[bytes]) -> Manifest:
    """Return the manifest of an envelope that one of the raw release keys signed.

    Raises:
        ManifestError: malformed, not signed by a trusted key, or a field that is not valid.
    """
    limit = PAYLOAD_BYTES_MAX + _ENVELOPE_OVERHEAD_BYTES
    if len(envelope_bytes) > limit:
        raise ManifestError(f"the manifest envelope has {len(envelope_bytes)} bytes, at most {limit} are read")
    envelope = envelope_pb2.SignedEnvelope()
    try:
        envelope.ParseFromString(envelope_bytes)
    except DecodeError as error:
        raise ManifestError("the manifest envelope is damaged; fetch it again") from error
    payload = _open(envelope, release_public_keys)
    manifest = statement_pb2.ModelManifest()
    try:
        manifest.ParseFromString(payload)
    except DecodeError as error:
        raise ManifestError("the signed payload is no manifest; ask whoever holds the release key") from error
    return _to_domain(manifest, ManifestDigest("sha256:" + hashlib.sha256(payload).hexdigest()))


def read_manifest(directory: Path, release_public_keys: Sequence[bytes]) -> Manifest:
    """Return the manifest that lies beside a model's files. Raises as `load_manifest`."""
    path = directory / MANIFEST_FILE
    try:
        envelope_bytes = path.read_bytes()
    except OSError as error:
        raise ManifestError(
            f"{path} cannot be read ({error.strerror}); build it with scripts/build_model.py"
        ) from error
    try:
        return load_manifest(envelope_bytes, release_public_keys)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def load_release_public_key(path: Path) -> bytes:
    """Return the raw 32 bytes of a release key's public half, from its PEM file.

    Raises:
        ManifestError: unreadable, or no Ed25519 public key.
    """
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"release key {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ManifestError(f"release key {path} is no PEM public key; the file ending in .pub is wanted") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ManifestError(f"release key {path} is no Ed25519 key; make one with scripts/build_model.py release-key")
    return key.public_bytes_raw()


def verify_directory(manifest: Manifest, directory: Path, on_progress: Progress | None = None) -> None:
    """Check every byte of every file of a model, and that nothing else lies beside them.

    Takes about a second per gigabyte: not for an event loop.

    Raises:
        ManifestError: names the file, and what is wrong with it.
    """
    verify_files(manifest.files, list_directory(directory) - _BESIDE, directory, on_progress)


def verify_tokenizer_files(manifest: Manifest, directory: Path) -> None:
    """Check the files of a model's text side, as `verify_directory` checks all; others are left unread."""
    files = [file for file in manifest.files if file.path in TOKENIZER_FILES]
    present = {name for name in os.listdir(directory) if name in TOKENIZER_FILES} if directory.is_dir() else set()
    verify_files(files, present, directory, None)


def _open(envelope: envelope_pb2.SignedEnvelope, release_public_keys: Sequence[bytes]) -> bytes:
    # A key id proves nothing, but one that fits no trusted key makes for the
    # clearer message, and leaves no byte of an envelope that may change unseen.
    trusted = {key_id(key) for key in release_public_keys}
    signers = {signature.key_id for signature in envelope.signatures}
    if not trusted & signers:
        raise ManifestError(
            f"the manifest is signed by release key {', '.join(sorted(signers)) or '(none)'}, "
            f"trusted is {', '.join(sorted(trusted)) or '(none)'}; check which release key is configured"
        )
    try:
        return open_envelope(envelope, MANIFEST_TYPE, release_public_keys)
    except SignatureInvalid as error:
        raise ManifestError(f"the manifest's signature does not hold: {error}; fetch it again") from error


def _to_domain(proto: statement_pb2.ModelManifest, digest: ManifestDigest) -> Manifest:
    _check_text("name", proto.name, _NAME)
    _check_text("revision", proto.revision, _REVISION)
    _check_text("architecture", proto.architecture, _ARCHITECTURE)
    if proto.licence not in LICENCES:
        raise ManifestError(f"licence {proto.licence!r} is not one of {', '.join(sorted(LICENCES))}")
    if proto.dtype not in DTYPES:
        raise ManifestError(f"dtype {proto.dtype!r} is not one of {', '.join(sorted(DTYPES))}")
    _check_range("context_tokens", proto.context_tokens, 1, CONTEXT_TOKENS_MAX)
    _check_range("vocabulary_size", proto.vocabulary_size, 1, VOCABULARY_MAX)
    if len(proto.origin) > ORIGIN_LENGTH_MAX or not all(c.isprintable() for c in proto.origin):
        raise ManifestError(f"origin is not one printable line of at most {ORIGIN_LENGTH_MAX} characters")
    kind = _KIND_FROM_PROTO.get(proto.kind)
    if kind is None:
        raise ManifestError(f"kind {proto.kind} is unknown; a newer release may know it")
    return Manifest(
        digest=digest,
        name=proto.name,
        revision=proto.revision,
        architecture=proto.architecture,
        licence=proto.licence,
        dtype=proto.dtype,
        context_tokens=proto.context_tokens,
        vocabulary_size=proto.vocabulary_size,
        stop_token_ids=_checked_stop_ids(proto, kind),
        files=_checked_files(proto.files),
        origin=proto.origin,
        kind=kind,
    )


def _checked_stop_ids(proto: statement_pb2.ModelManifest, kind: TaskKind) -> tuple[int, ...]:
    ids = tuple(proto.stop_token_ids)
    if len(ids) > STOP_TOKEN_IDS_MAX or len(set(ids)) != len(ids):
        raise ManifestError(f"stop_token_ids are more than {STOP_TOKEN_IDS_MAX}, or one is there twice")
    if not ids and kind is TaskKind.GENERATE:
        raise ManifestError("stop_token_ids is empty: no answer would ever end by itself")
    for token_id in ids:
        if token_id >= proto.vocabulary_size:
            raise ManifestError(f"stop token id {token_id} is outside the vocabulary of {proto.vocabulary_size}")
    return ids


def _checked_files(files: Sequence[statement_pb2.ModelFile]) -> tuple[ManifestFile, ...]:
    _check_range("count of files", len(files), 1, FILES_MAX)
    seen: set[str] = set()
    for file in files:
        check_file_name(file.path)
        if file.path in seen:
            raise ManifestError(f"{file.path!r} is listed twice")
        seen.add(file.path)
        if len(file.sha256) != hashlib.sha256().digest_size:
            raise ManifestError(f"{file.path}: sha256 has {len(file.sha256)} bytes, not 32")
        if not file.path.endswith(".safetensors") and file.size_bytes > JSON_BYTES_MAX:
            raise ManifestError(f"{file.path}: {file.size_bytes} bytes, at most {JSON_BYTES_MAX} are read")
        _check_chunk_hashes(file)
    for missing in sorted(REQUIRED_FILES - seen):
        raise ManifestError(f"{missing} is not listed: a model needs it")
    return tuple(ManifestFile(file.path, file.size_bytes, file.sha256, tuple(file.chunk_sha256)) for file in files)


def _check_chunk_hashes(file: statement_pb2.ModelFile) -> None:
    # None at all is what manifests had before there were chunks; then the whole file's hash must do.
    if not file.chunk_sha256:
        return
    if len(file.chunk_sha256) != chunk_count(file.size_bytes):
        raise ManifestError(
            f"{file.path}: {len(file.chunk_sha256)} chunk hashes, {file.size_bytes} bytes have "
            f"{chunk_count(file.size_bytes)} chunks"
        )
    for index, digest in enumerate(file.chunk_sha256):
        if len(digest) != hashlib.sha256().digest_size:
            raise ManifestError(f"{file.path}: hash of chunk {index} has {len(digest)} bytes, not 32")


def _check_text(field: str, value: str, pattern: re.Pattern[str]) -> None:
    if len(value) > NAME_LENGTH_MAX or pattern.fullmatch(value) is None:
        raise ManifestError(
            f"{field} {value[:NAME_LENGTH_MAX]!r} does not match {pattern.pattern}, {NAME_LENGTH_MAX} at most"
        )


def _check_range(field: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise ManifestError(f"{field} is {value}, expected {lowest} to {highest}")


def _architecture(config: dict[str, object]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ManifestError("config.json: `architectures` must name exactly one architecture")
    return architectures[0]


def _config_int(config: dict[str, object], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 2**32:
        raise ManifestError(f"config.json: `{key}` is {value!r}, expected a positive integer")
    return value


def _stop_token_ids(directory: Path, paths: Sequence[str], config: dict[str, object]) -> list[int]:
    """Return eos ids as transformers would: generation_config.json wins over config.json."""
    eos = config.get("eos_token_id")
    if "generation_config.json" in paths:
        eos = read_json_object(directory, "generation_config.json").get("eos_token_id", eos)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < 2**32:
            raise ManifestError(f"eos_token_id {token_id!r} is no token id; correct generation_config.json")
    return list(ids)
