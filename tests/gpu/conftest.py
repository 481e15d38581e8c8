"""What every test on a card needs: a card."""

import shutil

import pytest


@pytest.fixture(scope="session", autouse=True)
def nvidia_card() -> None:
    """Without a card these tests are left out, before any engine starts; with a card and a broken driver they fail."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA driver on this machine")
