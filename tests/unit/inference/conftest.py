from pathlib import Path

import pytest

from inference.text import Tokenizer

_DIRECTORY = Path(__file__).parents[3] / "var" / "models" / "fake-smollm2"


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """The tokenizer files of SmolLM2, real ones."""
    if not _DIRECTORY.is_dir():
        pytest.fail(f"{_DIRECTORY} is missing: run `make setup`")
    return _DIRECTORY


@pytest.fixture(scope="session")
def smollm2(smollm2_directory: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_directory)
