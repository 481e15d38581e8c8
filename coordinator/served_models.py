"""The models that a coordinator serves, as their directories describe them. Everything here blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.clock import Clock
from coordinator.errors import SlackwaterError
from coordinator.fleet.models import register_directory
from coordinator.startup import ExitCode, StartupError, describe_os_error
from coordinator.store.port import ModelRow, Store
from inference.calibration import CALIBRATION_FILE, Calibration, CalibrationError, read_calibration
from inference.canaries import CANARIES_FILE, CanaryBank, read_bank
from inference.manifest import Manifest, ManifestError, load_manifest, load_release_public_key
from inference.task import unpack_token_ids
from inference.text import Tokenizer

# What the nodes of a model without canaries are asked when they are timed. Any model has something to say to it.
TIMED_PROMPT = "The weather in the mountains changes quickly. In the morning, the valley was quiet, and"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as its directory describes it. What has a calibration is audited; a bank adds canaries."""

    manifest: Manifest
    tokenizer: Tokenizer
    created_at_ms: int
    calibration: Calibration | None
    bank: CanaryBank | None

    @property
    def prompts(self) -> list[Sequence[int]]:
        """What its nodes are asked when they are timed: at least one prompt."""
        if self.bank is not None:
            # Those that are set apart for scoring are never asked; each of the others stands for several canaries.
            return [unpack_token_ids(prompt) for prompt in dict.fromkeys(c.prompt for c in self.bank.to_answer)]
        return [self.tokenizer.encode(TIMED_PROMPT)]


class ServedModels:
    """Args: `directories` are those that the operator names; they are registered at each start."""

    def __init__(
        self, store: Store, directories: Sequence[Path], release_public_keys: Sequence[bytes], clock: Clock
    ) -> None:
        self._store = store
        self._directories = directories
        self._release_public_keys = release_public_keys
        self._clock = clock

    def load(self) -> list[LoadedModel]:
        """Register what the operator names, and read all that is registered.

        Raises:
            StartupError: one of them cannot be served.
        """
        for directory in self._directories:
            register_configured(self._store, directory, self._release_public_keys, self._clock.now_ms())
        models = []
        for row in self._store.models():
            try:
                models.append(self.read(row))
            except (ManifestError, CalibrationError, OSError) as error:
                raise StartupError(
                    ExitCode.BAD_DATA, f"model {row.name} cannot be served from {row.tokenizer_directory}: {error}"
                ) from error
        return models

    def read(self, row: ModelRow) -> LoadedModel:
        """Read everything of a model that lies in its directory. Takes a second."""
        manifest, directory = load_manifest(row.envelope, self._release_public_keys), Path(row.tokenizer_directory)
        calibration = bank = None
        if (directory / CALIBRATION_FILE).exists():
            calibration = read_calibration(directory, manifest.digest)
            if (directory / CANARIES_FILE).exists():
                bank = read_bank(directory / CANARIES_FILE, manifest.digest)
        return LoadedModel(manifest, Tokenizer.load(directory), row.created_at_ms, calibration, bank)


def load_release_keys(paths: Sequence[Path]) -> tuple[bytes, ...]:
    """Return the raw release keys of a configuration.

    Raises:
        StartupError: a file is missing or holds no such key.
    """
    try:
        return tuple(load_release_public_key(path) for path in paths)
    except ManifestError as error:
        missing = any(not path.exists() for path in paths)
        raise StartupError(ExitCode.NO_INPUT if missing else ExitCode.BAD_DATA, str(error)) from error


def register_configured(store: Store, directory: Path, release_public_keys: Sequence[bytes], now_ms: int) -> ModelRow:
    """Register a model directory named by the operator.

    Raises:
        StartupError: a file is missing or is not what the manifest says.
    """
    try:
        return register_directory(store, directory, release_public_keys, now_ms)
    except OSError as error:
        raise describe_os_error(error, f"read {error.filename or directory}") from error
    except (ManifestError, SlackwaterError) as error:
        raise StartupError(ExitCode.BAD_DATA, f"model in {directory}: {error}") from error
