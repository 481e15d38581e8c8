"""The prover in an engine's environment: torch's int8 and float32 paths give numpy's bytes, also as a process."""

import json
import subprocess
from pathlib import Path

import pytest

from inference.challenge import wire
from inference.challenge.compute import verify_compute
from inference.challenge.testing import CONTEXT, PATH_COMPUTE, SECRET, numpy_digests
from protos.slackwater.node.v1 import challenge_pb2 as pb

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-torch" / "bin" / "python"

PATHS = """
import json, sys
sys.path.append(sys.argv[1])
import torch
from inference.challenge.testing import path_digests
from inference.challenge.torch_arithmetic import TorchArithmetic, fastest
found = {"fastest": "int8" if fastest("cpu").integer else "float32"}
for path in ("int8", "float32"):
    arithmetic = TorchArithmetic("cpu", integer=path == "int8")
    found[path] = path_digests(arithmetic, lambda matrix: torch.from_numpy(matrix))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    done = subprocess.run([PYTHON, "-c", PATHS, str(ROOT)], capture_output=True, text=True, check=True)
    paths: dict[str, object] = json.loads(done.stdout)
    return paths


@pytest.mark.parametrize("path", ["int8", "float32"])
def test_torch_gives_numpy_s_bytes(found: dict[str, object], path: str) -> None:
    # Mutations seen to fail: an arithmetic shift in the torch hash; float32 sums of 2,048 terms.
    assert found[path] == numpy_digests()


def test_int8_products_are_taken_where_torch_has_them_right(found: dict[str, object]) -> None:
    assert found["fastest"] == "int8"


def frame(message: pb.ChallengeQuestion) -> bytes:
    body = message.SerializeToString()
    return len(body).to_bytes(4, "big") + body


def test_the_prover_s_process_answers_from_an_engine_s_environment() -> None:
    question = wire.compute_challenge("c", "", CONTEXT.nonce, PATH_COMPUTE, 1_000)
    draw = pb.ComputeDraw(challenge_id="c", chains=[2])
    questions = frame(pb.ChallengeQuestion(compute_challenge=question)) + frame(pb.ChallengeQuestion(compute_draw=draw))
    run = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    binding = ["--node-id", CONTEXT.node_id, "--boot-id", CONTEXT.boot_id]
    binding += ["--certificate-sha256", CONTEXT.certificate_sha256.hex()]
    done = subprocess.run(
        [PYTHON, "-P", "-c", run, str(ROOT), "inference.challenge.prover", "--device", "cpu", *binding],
        input=questions,
        capture_output=True,
        check=True,
    )
    replies, rest = [], done.stdout
    while rest:
        length = int.from_bytes(rest[:4], "big")
        replies.append(pb.ChallengeReply.FromString(rest[4 : 4 + length]))
        rest = rest[4 + length :]
    ready, commitment, answer = replies
    assert ready.prover_ready.arithmetic == "torch int8"
    results = wire.results([answer.compute_answer])
    verify_compute(CONTEXT, PATH_COMPUTE, commitment.compute_commitment.root, [2], results, SECRET)
