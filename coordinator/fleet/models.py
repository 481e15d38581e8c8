"""Making a signed model known (manifest and tokenizer files are checked, then it is stored) and finding it again.

Everything here blocks (files, hashes, database): callers use threads.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.errors import Reason, SlackwaterError
from coordinator.store.port import ModelRow, Store
from inference.manifest import MANIFEST_FILE, Manifest, load_manifest, verify_tokenizer_files

# A digest has 71; what is longer is cut in messages.
NAME_CHARACTERS_SHOWN = 96
# What a coordinator may send agents to: they believe none of the bytes, but a plain http address or a file of
# their own machine or network is not for others to name.
SOURCE_SCHEMES = ("https://", "hf://")


def register_model(
    store: Store, envelope: bytes, directory: Path, release_public_keys: Sequence[bytes], now_ms: int
) -> ModelRow:
    """Check a serialised manifest envelope and the tokenizer files beside it; store the model.

    Raises:
        ManifestError: the envelope or a file is not what it must be.
        SlackwaterError: ALREADY_EXISTS for another manifest of the same name and revision.
    """
    manifest = load_manifest(envelope, release_public_keys)
    verify_tokenizer_files(manifest, directory)
    _check_revision(store, manifest, release_public_keys)
    row = ModelRow(
        manifest_digest=manifest.digest,
        name=manifest.name,
        envelope=envelope,
        tokenizer_directory=str(directory.resolve()),
        created_at_ms=now_ms,
    )
    store.add_model(row)
    return row


def register_directory(store: Store, directory: Path, release_public_keys: Sequence[bytes], now_ms: int) -> ModelRow:
    """Register the model whose signed manifest lies in a directory.

    Raises:
        OSError: the manifest cannot be read.
        ManifestError, SlackwaterError: as `register_model`.
    """
    envelope = (directory / MANIFEST_FILE).read_bytes()
    return register_model(store, envelope, directory, release_public_keys, now_ms)


def find_model(store: Store, name_or_digest: str) -> ModelRow:
    """Return a registered model by its digest, or the one registered last under a public name.

    Raises:
        SlackwaterError: MODEL_NOT_FOUND.
    """
    found = [row for row in store.models() if name_or_digest in (row.name, row.manifest_digest)]
    if not found:
        raise SlackwaterError(
            Reason.MODEL_NOT_FOUND,
            f"no model {name_or_digest[:NAME_CHARACTERS_SHOWN]!r} is registered here; "
            "ask the operator which models this fleet serves",
            param="model",
        )
    return max(found, key=lambda row: row.created_at_ms)


def check_model_sources(sources: Mapping[str, Sequence[str]]) -> None:
    """Refuse what no agent would fetch from.

    Raises:
        ValueError: names the model, the source and what is allowed.
    """
    for name, urls in sources.items():
        for url in urls:
            if not url.startswith(SOURCE_SCHEMES):
                raise ValueError(f"{url!r} of model {name!r} is no source: {' and '.join(SOURCE_SCHEMES)} are")


def _check_revision(store: Store, manifest: Manifest, release_public_keys: Sequence[bytes]) -> None:
    """One name maps to one digest per revision, or nobody could say what answered."""
    for row in store.models():
        if row.name != manifest.name or row.manifest_digest == manifest.digest:
            continue
        if load_manifest(row.envelope, release_public_keys).revision == manifest.revision:
            raise SlackwaterError(
                Reason.ALREADY_EXISTS,
                f"{manifest.name} {manifest.revision} is registered as {row.manifest_digest}, this manifest is "
                f"{manifest.digest}; give the new one a revision of its own",
                param="manifest",
            )
