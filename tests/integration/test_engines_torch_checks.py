"""The torch engine's refusals at start, and its sampler beside the numpy one, in its own environment."""

import json
import subprocess
from pathlib import Path

import pytest

from inference.launch import launch_torch

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-torch" / "bin" / "python"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({}, "no architecture"),
    ],
)
@pytest.mark.slow
def test_a_folder_that_cannot_be_served_is_one_clear_line(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    launch = launch_torch(PYTHON, tmp_path / "engine.sock", tmp_path, slots=1, context_tokens=64, threads=1)
    done = subprocess.run(launch.argv, env=launch.env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert reason in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


COMPARE_SAMPLERS = """
import sys
sys.path.append(sys.argv[1])
import numpy as np, torch
from inference import sampling, torch_sampling
from inference.task import Sampling
random = np.random.default_rng(5)
wrong = 0
for trial in range(300):
    logits = (random.standard_normal(1000) * 4).astype(np.float32)
    settings = Sampling(
        temperature=float(random.choice([0.0, 0.3, 1.0, 1.7])), top_p=float(random.choice([1.0, 0.9, 0.3])),
        top_k=int(random.choice([0, 1, 40])), seed=int(random.integers(2**63 - 1)),
        presence_penalty=float(random.choice([0.0, 1.0])), frequency_penalty=float(random.choice([0.0, 0.5])),
        repetition_penalty=float(random.choice([1.0, 1.3])))
    ids = random.integers(0, 1000, 60).tolist()
    position = int(random.integers(100_000))
    drawn = sampling.choose(logits, settings, position, ids[:30], ids[30:])
    wrong += drawn != torch_sampling.choose(torch.from_numpy(logits), settings, position, ids[:30], ids[30:])
print(wrong)
"""


def test_the_sampler_in_torch_draws_what_the_one_in_numpy_draws() -> None:
    # Mutation seen to fail: an arithmetic shift in the torch hash, which brings sign bits in.
    done = subprocess.run([PYTHON, "-c", COMPARE_SAMPLERS, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
