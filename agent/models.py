"""Which models may be loaded: those whose every byte a pinned release key vouches for."""

from collections.abc import Callable, Sequence

from agent.assignments import ServedModel
from agent.config import EngineSettings
from agent.errors import ModelRefused
from inference.manifest import Manifest, ManifestError, read_manifest, verify_directory

# Called with bytes read so far and bytes in all.
Progress = Callable[[int, int], None]


def load_model(
    settings: EngineSettings, release_keys: Sequence[bytes], on_progress: Progress | None = None
) -> Manifest:
    """Check manifest and files of one engine's model and return the manifest. Reads every byte: call it in a thread.

    Raises:
        ModelRefused: names the model directory, the file at fault and what to do.
    """
    try:
        manifest = read_manifest(settings.model_directory, release_keys)
        verify_directory(manifest, settings.model_directory, on_progress)
    except ManifestError as error:
        raise ModelRefused(f"engine {settings.engine_id}: model {settings.model_directory}: {error}") from error
    return manifest


def served_model(manifest: Manifest) -> ServedModel:
    """Return what the checks of assignments need to know of a manifest."""
    return ServedModel(
        manifest_digest=manifest.digest,
        name=manifest.name,
        licence=manifest.licence,
        kind=manifest.kind,
        context_tokens=manifest.context_tokens,
        vocabulary_size=manifest.vocabulary_size,
    )
