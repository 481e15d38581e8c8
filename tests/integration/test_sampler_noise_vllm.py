"""The recomputed noise against the kernels of the installed vLLM wheel."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from inference.sampler_noise import VLLM_GENERATOR, VLLM_GUMBEL, candidate_noise

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ROWS, VOCABULARY, STEPS = 96, 5000, 4

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run `make setup-vllm`")
    folder = tmp_path_factory.mktemp("draws")
    random = np.random.default_rng(3)
    given = {
        "logits": random.normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32),
        "temperatures": random.uniform(0.3, 1.8, ROWS).astype(np.float32),
        "seeds": random.integers(0, 2**63 - 1, ROWS),
        "positions": random.integers(0, 100_000, ROWS),
    }
    np.savez(folder / "given.npz", steps=STEPS, **given)
    script = Path(__file__).with_name("vllm_draws.py")
    command = [PYTHON, script, folder / "given.npz", folder / "drawn.npz"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return given | dict(np.load(folder / "drawn.npz"))


def test_every_id_the_v2_runners_kernel_draws_is_recomputed(drawn: dict[str, "np.ndarray"]) -> None:
    # Mutation seen to fail: the halves of the seed were mixed in the other order.
    ids = np.arange(VOCABULARY, dtype=np.uint64)[None, :]
    for row in range(ROWS):
        noise = candidate_noise(VLLM_GUMBEL, int(drawn["seeds"][row]), int(drawn["positions"][row]) + 1, ids)[0]
        scores = drawn["logits"][row] / drawn["temperatures"][row] + noise
        assert int(np.argmax(scores)) == drawn["gumbel"][row]


def test_every_id_the_cpu_build_draws_is_recomputed(drawn: dict[str, "np.ndarray"]) -> None:
    # Mutation seen to fail: one word of the twister a step, not two.
    ids = np.broadcast_to(np.arange(VOCABULARY, dtype=np.uint64), (STEPS, VOCABULARY))
    for row in range(ROWS):
        noise = candidate_noise(VLLM_GENERATOR, int(drawn["seeds"][row]), 7, ids)
        scores = drawn["logits"][row] / drawn["temperatures"][row] + noise
        assert np.argmax(scores, axis=1).tolist() == drawn["generator"][row].tolist()
