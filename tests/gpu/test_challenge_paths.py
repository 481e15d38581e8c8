"""Capability challenges on a card: CUDA gives numpy's bytes by int8 and by float32, within the deadlines of its class.

What is printed (`pytest -s`) are the figures that inference/challenge/schedule.py has from data sheets only.
"""

import json
import subprocess
from pathlib import Path

import pytest

from inference.challenge.testing import numpy_digests

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PATHS = """
import json, sys
sys.path.append(sys.argv[1])
import torch
from inference.challenge.testing import path_digests
from inference.challenge.torch_arithmetic import TorchArithmetic, fastest
found = {"fastest": "int8" if fastest("cuda").integer else "float32"}
for path in ("int8", "float32"):
    arithmetic = TorchArithmetic("cuda", integer=path == "int8")
    found[path] = path_digests(arithmetic, lambda matrix: torch.from_numpy(matrix).cuda())
print(json.dumps(found))
"""

TIMES = """
import json, sys, time
sys.path.append(sys.argv[1])
import torch
from inference.challenge.compute import ComputeProver
from inference.challenge.memory import MemoryProver
from inference.challenge.schedule import DeviceClass, compute_plan, memory_plan, per_second
from inference.challenge.testing import CONTEXT, WALK_NONCE
from inference.challenge.torch_arithmetic import fastest
def timed(work):
    torch.cuda.synchronize(); started = time.perf_counter(); work(); torch.cuda.synchronize()
    return round((time.perf_counter() - started) * 1000)
arithmetic = fastest("cuda")
free, total = torch.cuda.mem_get_info()
device_class = DeviceClass.DATA_CENTRE_CARD if total > 32 * 2**30 else DeviceClass.CONSUMER_CARD
plan = compute_plan(device_class)
timed(ComputeProver(CONTEXT, compute_plan(DeviceClass.CPU).size, arithmetic).commit)
compute_ms = timed(ComputeProver(CONTEXT, plan.size, arithmetic).commit)
torch.cuda.empty_cache()
shown = per_second(plan.size.operations, compute_ms)
memory = memory_plan(device_class, torch.cuda.mem_get_info()[0], shown)
prover = MemoryProver(CONTEXT, memory.size, arithmetic)
fill_ms, walk_ms = timed(prover.fill), timed(lambda: prover.walk(WALK_NONCE))
print(json.dumps({
    "card": torch.cuda.get_device_name(), "class": device_class.value, "operations_per_s": shown,
    "compute_ms": compute_ms, "compute_deadline_ms": plan.commitment_deadline_ms,
    "fill_bytes": memory.size.fill_bytes, "fill_ms": fill_ms, "fill_deadline_ms": memory.fill_deadline_ms,
    "walk_ms": walk_ms, "walk_deadline_ms": memory.walk_deadline_ms,
    "walk_bytes_per_s": per_second(memory.size.walk_bytes, walk_ms)}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The first of the engines' environments whose torch sees the card."""
    for name in (".venv-vllm", ".venv-torch"):
        candidate = ROOT / name / "bin" / "python"
        check = [str(candidate), "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
        if candidate.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return candidate
    pytest.fail("no engine environment here has a torch that sees the card: run `make setup-vllm` with the GPU wheel")


def measured(python: Path, script: str) -> dict[str, object]:
    done = subprocess.run([python, "-c", script, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_card_gives_numpy_s_bytes(python: Path) -> None:
    found, wanted = measured(python, PATHS), numpy_digests()
    assert found["int8"] == wanted
    assert found["float32"] == wanted
    assert found["fastest"] == "int8"


def test_a_card_keeps_the_deadlines_of_its_class(python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(python, TIMES)
    with capsys.disabled():
        print(json.dumps(found, indent=2))  # noqa: T201
    for part in ("compute", "fill", "walk"):
        assert int(str(found[f"{part}_ms"])) < int(str(found[f"{part}_deadline_ms"])), part
