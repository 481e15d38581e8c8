"""A bank made by the reference model itself, in its own environment: each profile's answers by that profile's noise."""

import subprocess
from pathlib import Path

import msgspec
import pytest
from network_settings import MODELS, RELEASE_KEY, ROOT

from inference.canaries import Canary, CanaryBank
from inference.rescoring import rescore
from inference.sampler_noise import SAMPLER_PROFILES
from inference.task import unpack_token_ids

PYTHON = ROOT / ".venv-torch" / "bin" / "python"
PROMPTS = 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_reference_model_answers_as_each_engine_would(tmp_path: Path) -> None:
    """Fails when every draw takes the noise of the first position, and when all take that of the position hash."""
    out = tmp_path / "canaries.msgpack"
    command = [PYTHON, ROOT / "scripts" / "make_canaries.py", MODELS / "smollm2-135m-instruct", out]
    options = ["--release-key", RELEASE_KEY, "--most", str(PROMPTS)]
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=1100)
    bank = msgspec.msgpack.decode(out.read_bytes(), type=CanaryBank)
    drawn = [canary.sampler_profile for canary in bank.to_answer if canary.drawn]
    assert sorted(drawn) == sorted(SAMPLER_PROFILES * (PROMPTS - 1))
    assert (len(bank.to_score), len(bank.to_answer)) == (1, len(drawn) + PROMPTS - 1)
    assert max(max(margins(canary)) for canary in bank.canaries) < 1e-3


def margins(canary: Canary) -> tuple[float, ...]:
    return rescore(canary.attempt(list(unpack_token_ids(canary.output)), None)).margins
