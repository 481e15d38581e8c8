"""The files of a model: which may exist, what is in them, and whether they are the ones meant.

Weights are data here: only safetensors, JSON and tokenizer files are allowed,
since pickles and `auto_map` modules are programs. Files are read through
descriptors that follow no link.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from io import RawIOBase
from pathlib import Path

from inference.model_chunks import CHUNK_BYTES, ManifestFile

# Everything that the text side of a model is read from; the coordinator needs no more than these.
TOKENIZER_FILES = frozenset(
    {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
REQUIRED_FILES = frozenset({"config.json", "tokenizer.json"})
_WEIGHT_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors(\.index\.json)?")
_INDEX_SUFFIX = ".safetensors.index.json"

# What a coordinator keeps beside a model's files: no part of the model, and read by no engine.
CALIBRATION_FILE = "calibration.json"
CANARIES_FILE = "canaries.msgpack"

# The largest tokenizer.json in common use has 33 MB; JSON is read into memory whole.
JSON_BYTES_MAX = 128 * 1024 * 1024

# Keys by which a model's JSON names code to import.
_CODE_KEYS = frozenset({"auto_map", "trust_remote_code"})

# Called with bytes hashed so far and bytes in all.
Progress = Callable[[int, int], None]


class ManifestError(Exception):
    """A manifest or a file of its model is not what it must be; the text says which, and what to do."""


def check_file_name(path: str) -> None:
    """Refuse what is no plain name of a file that a model may have."""
    if "/" in path or "\\" in path or "\0" in path or path in ("", ".", ".."):
        raise ManifestError(f"{path!r} is not a plain file name: absolute paths, '..' and folders are refused")
    if path not in TOKENIZER_FILES and _WEIGHT_FILE.fullmatch(path) is None:
        raise ManifestError(
            f"{path!r} may not be part of a model: only *.safetensors with its index, and "
            f"{', '.join(sorted(TOKENIZER_FILES))} are loaded; remove it"
        )


def list_directory(directory: Path) -> set[str]:
    """Return the names of everything in a model directory, of whatever kind."""
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries}
    except OSError as error:
        raise ManifestError(f"model directory {directory} cannot be read ({error.strerror})") from error


def verify_files(
    files: Sequence[ManifestFile], present: set[str], directory: Path, on_progress: Progress | None
) -> None:
    """Check that the names present are those of `files`, and that every byte of each is as described."""
    expected = {file.path: file for file in files}
    for extra in sorted(present - expected.keys()):
        raise ManifestError(f"{directory / extra} is not in the manifest; remove it, or fetch the model again")
    for missing in sorted(expected.keys() - present):
        raise ManifestError(f"{directory / missing} is missing; fetch the model again")
    # Sizes first: they cost nothing, and a cut-off download shows at once.
    for file in files:
        size_bytes = _regular_size(directory / file.path)
        if size_bytes != file.size_bytes:
            raise ManifestError(
                f"{directory / file.path} has {size_bytes} bytes, the manifest says {file.size_bytes}; fetch it again"
            )
    for found in hash_files(directory, sorted(expected), on_progress):
        # The hash of the whole covers every byte; those of the chunks are for fetching.
        if found.sha256 != expected[found.path].sha256 or found.size_bytes != expected[found.path].size_bytes:
            raise ManifestError(f"{directory / found.path} does not have the hash in the manifest; fetch it again")
    check_contents(files, directory)


def _regular_size(path: Path) -> int:
    try:
        status = path.lstat()
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); fetch the model again") from error
    if stat.S_ISLNK(status.st_mode):
        raise ManifestError(f"{path} is a symbolic link; put the file itself there")
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"{path} is not a regular file; remove it")
    return status.st_size


def _open_regular(path: Path) -> int:
    """Return a descriptor of a file that is no link; the caller closes it."""
    _regular_size(path)
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


def hash_files(
    directory: Path, paths: Iterable[str], on_progress: Progress | None, *, with_chunks: bool = False
) -> list[ManifestFile]:
    """Describe files by their content, in the order given; each byte is read once, with or without chunks."""
    names = list(paths)
    total = sum(_regular_size(directory / name) for name in names)
    done = 0
    hashed: list[ManifestFile] = []
    chunk = memoryview(bytearray(CHUNK_BYTES))
    for name in names:
        digest, size_bytes, chunk_hashes = hashlib.sha256(), 0, []
        with open(_open_regular(directory / name), "rb", buffering=0) as stream:
            while count := _fill(stream, chunk):
                digest.update(chunk[:count])
                if with_chunks:
                    chunk_hashes.append(hashlib.sha256(chunk[:count]).digest())
                size_bytes += count
                if on_progress is not None:
                    on_progress(done + size_bytes, total)
        done += size_bytes
        hashed.append(ManifestFile(name, size_bytes, digest.digest(), tuple(chunk_hashes)))
    return hashed


def _fill(stream: RawIOBase, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends: one read may give less than was asked for."""
    filled = 0
    while filled < len(buffer) and (count := stream.readinto(buffer[filled:])):
        filled += count
    return filled


def check_contents(files: Sequence[ManifestFile], directory: Path) -> None:
    """Refuse JSON that names code, or weights that lie outside the manifest."""
    listed = {file.path for file in files}
    for name in sorted(name for name in listed if name.endswith(".json")):
        document = read_json_object(directory, name)
        if name.endswith(_INDEX_SUFFIX):
            shards = document.get("weight_map")
            if not isinstance(shards, dict):
                raise ManifestError(f"{directory / name} has no weight_map; fetch the model again")
            for shard in shards.values():
                if shard not in listed:
                    raise ManifestError(f"{directory / name} points to {shard!r}, which the manifest does not list")


def read_json_object(directory: Path, name: str) -> dict[str, object]:
    """Return a JSON object that names no code."""
    path = directory / name
    with open(_open_regular(path), "rb") as stream:
        content = stream.read(JSON_BYTES_MAX + 1)
    if len(content) > JSON_BYTES_MAX:
        raise ManifestError(f"{path} has more than {JSON_BYTES_MAX} bytes")

    def checked(pairs: list[tuple[str, object]]) -> dict[str, object]:
        for key, value in pairs:
            # A vocabulary is an object of fragments to ids and may hold any fragment.
            entry_of_vocabulary = name == "tokenizer.json" and type(value) is int
            if key in _CODE_KEYS and not entry_of_vocabulary:
                raise ManifestError(f"{path} contains {key!r}: models that bring code are refused")
        return dict(pairs)

    try:
        document = json.loads(content.decode(), object_pairs_hook=checked)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not valid JSON; fetch the model again") from error
    if not isinstance(document, dict):
        raise ManifestError(f"{path} is not a JSON object; fetch the model again")
    return document
