"""Benchmark `challenge`: what a capability challenge costs who proves and who verifies, on one core of this machine.

The compute challenge is a processor's of inference/challenge/schedule.py, all of whose chains are drawn. The prover
runs twice: in numpy, and with torch's int8 products in the engine's environment, which is the faster one and the one
that counts. Both sides have one thread; seconds are seconds of a core. The checks of cards' challenges are timed on
made-up openings of the right size, which take the verifier as long as true ones: it multiplies before it compares.

Then corrupted results of a small challenge are checked, each with its own secret, and those accepted are counted.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from network_settings import ROOT, NetworkError

# Before numpy is imported: its products take all cores otherwise.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TRIALS = 20_000
QUICK_TRIALS = 500
ROUNDS = 3
TORCH_PYTHON = ROOT / ".venv-torch" / "bin" / "python"
# The memory of the memory challenge; a small one, since its fill takes a core minutes a GiB.
MEMORY_BYTES = 128 << 20


async def run(*, quick: bool) -> dict[str, Any]:
    """Measure in processes of one thread each.

    Raises:
        NetworkError: the engine's environment is missing, or a measurement failed.
    """
    if not TORCH_PYTHON.exists():
        raise NetworkError(f"{TORCH_PYTHON} is missing: run `make setup`")
    in_numpy = await asyncio.to_thread(_measured, sys.executable, "numpy", quick)
    in_torch = await asyncio.to_thread(_measured, str(TORCH_PYTHON), "int8", quick)
    return {
        "challenge_prover_s": in_torch["prover_s"],
        "challenge_verifier_s": in_numpy["verifier_s"],
        "verifier_share": round(in_numpy["verifier_s"] / in_torch["prover_s"], 4),
        "numpy_prover_s": in_numpy["prover_s"],
        "corrupted_trials": in_numpy["corrupted_trials"],
        "corrupted_accepted": in_numpy["corrupted_accepted"],
        "verifier_consumer_card_s": in_numpy["verifier_consumer_card_s"],
        "verifier_data_centre_card_s": in_numpy["verifier_data_centre_card_s"],
        "memory_fill_s": in_torch["memory_fill_s"],
        "memory_walk_s": in_torch["memory_walk_s"],
        "memory_recomputing_over_reading": in_torch["memory_recomputing_over_reading"],
        "memory_verifier_s": in_numpy["memory_verifier_s"],
        "memory_verifier_consumer_card_s": in_numpy["memory_verifier_consumer_card_s"],
        "memory_verifier_data_centre_card_s": in_numpy["memory_verifier_data_centre_card_s"],
    }


def _measured(python: str, arithmetic: str, quick: bool) -> dict[str, Any]:
    argv = [python, __file__, arithmetic, *(["--quick"] if quick else [])]
    done = subprocess.run(
        argv, env={**os.environ, **_ONE_THREAD, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise NetworkError(f"measuring the challenges with {arithmetic} failed:\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout)
    print(f"{arithmetic}: {figures}", file=sys.stderr)
    return figures


def _arithmetic(name: str) -> Any:
    from inference.challenge.arithmetic import NumpyArithmetic

    if name == "numpy":
        return NumpyArithmetic()
    import torch

    from inference.challenge.torch_arithmetic import TorchArithmetic

    torch.set_num_threads(1)
    return TorchArithmetic("cpu", integer=True)


def _seconds(work: Callable[[], object], rounds: int) -> float:
    """Return the median of some rounds, in seconds of a core: other processes have a part of this machine."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return round(sorted(taken)[rounds // 2], 4)


def measure(name: str, *, quick: bool) -> dict[str, Any]:
    """Measure one arithmetic's prover, and what only numpy does: the checks."""
    from inference.challenge.compute import ComputeProver, verify_compute
    from inference.challenge.context import ChallengeContext
    from inference.challenge.memory import MemoryProver
    from inference.challenge.memory_check import MemoryClaim, verify_memory
    from inference.challenge.schedule import DeviceClass, compute_plan, memory_plan

    context = ChallengeContext(secrets.token_bytes(32), "node", "boot", secrets.token_bytes(32))
    rounds = 1 if quick else ROUNDS
    arithmetic = _arithmetic(name)
    plan = compute_plan(DeviceClass.CPU)
    drawn = list(range(plan.drawn))
    prover = ComputeProver(context, plan.size, arithmetic)
    # The factor is part of the work, and made where the prover is.
    prover_s = _seconds(lambda: ComputeProver(context, plan.size, arithmetic).commit(), rounds)
    root = prover.commit()
    openings = prover.open(drawn)
    figures: dict[str, Any] = {"prover_s": prover_s}
    figures["verifier_s"] = _seconds(
        lambda: verify_compute(context, plan.size, root, drawn, openings, secrets.token_bytes(32)), rounds
    )

    memory = memory_plan(DeviceClass.CPU, MEMORY_BYTES, plan.size.operations)
    steps, blocks = tuple(range(0, 2 * memory.steps_drawn, 2)), tuple(range(memory.blocks_drawn))
    filler = MemoryProver(context, memory.size, arithmetic)
    started = time.process_time()
    fill_root = filler.fill()
    filled = time.process_time()
    walk_root = filler.walk(b"a walk's nonce, 16 or more")
    walked = time.process_time()
    figures["memory_fill_s"] = round(filled - started, 3)
    figures["memory_walk_s"] = round(walked - filled, 3)
    recomputing_s = (filled - started) * memory.size.walk_bytes / memory.size.fill_bytes
    figures["memory_recomputing_over_reading"] = round(recomputing_s / (walked - filled), 1)
    claim = MemoryClaim(fill_root, b"a walk's nonce, 16 or more", walk_root, steps, blocks)
    opened = filler.open(steps, blocks)
    figures["memory_verifier_s"] = _seconds(
        lambda: verify_memory(
            context, memory.size, claim, *opened, rows=memory.rows_drawn, secret=secrets.token_bytes(32)
        ),
        rounds,
    )
    if name == "numpy":
        figures |= _checks_of_cards(rounds)
        figures |= _corrupted(QUICK_TRIALS if quick else TRIALS)
    return figures


def _checks_of_cards(rounds: int) -> dict[str, float]:
    import numpy as np

    from inference.challenge.compute import verify_compute
    from inference.challenge.context import ProofRejected
    from inference.challenge.memory_check import block_rows
    from inference.challenge.schedule import DeviceClass, compute_plan, memory_plan
    from inference.challenge.testing import CONTEXT, opened

    free_bytes = {DeviceClass.CONSUMER_CARD: 22 << 30, DeviceClass.DATA_CENTRE_CARD: 138 << 30}
    figures: dict[str, float] = {}
    for device_class, free in free_bytes.items():
        plan = compute_plan(device_class)
        drawn = list(range(plan.drawn))
        zeros = bytes(plan.size.result_bytes)
        root, openings = opened([zeros] * plan.drawn + [b""] * (plan.size.chains - plan.drawn), drawn)

        def check(plan: Any = plan, root: bytes = root, drawn: list[int] = drawn, openings: Any = openings) -> None:
            try:
                verify_compute(CONTEXT, plan.size, root, drawn, openings, secrets.token_bytes(32))
            except ProofRejected:
                return
            raise AssertionError("an answer without work was accepted")

        figures[f"verifier_{device_class.value}_s"] = _seconds(check, rounds)
        memory = memory_plan(device_class, free, 1 << 46)
        count = memory.rows_drawn * (memory.steps_drawn * memory.size.blocks_per_step + memory.blocks_drawn)
        rows = np.random.default_rng(1).integers(0, memory.size.blocks * memory.size.columns, count).astype(np.uint64)
        recompute = partial(block_rows, CONTEXT, memory.size, rows)
        figures[f"memory_verifier_{device_class.value}_s"] = _seconds(recompute, rounds)
    return figures


def _corrupted(trials: int) -> dict[str, int]:
    """Check results of which one entry, one row, two rows or all is wrong."""
    import numpy as np

    from inference.challenge.compute import ComputeSize, verify_compute
    from inference.challenge.context import ProofRejected
    from inference.challenge.testing import CONTEXT, computed, opened

    size = ComputeSize(columns=24, rows=24, products=2, chains=1)
    [true] = computed(size=size)
    random = np.random.default_rng()
    accepted = 0
    for trial in range(trials):
        result = np.frombuffer(true, dtype=np.int8).reshape(size.rows, size.columns).copy()
        row, column, other = random.choice(size.rows, 3, replace=False).tolist()
        match trial % 4:
            case 0:
                result[row, column] = (int(result[row, column]) + int(random.integers(1, 251)) + 125) % 251 - 125
            case 1:
                result[row] = random.integers(-125, 126, size.columns)
            case 2:
                result[[row, other]] = result[[other, row]]
            case _:
                result[:] = random.integers(-125, 126, result.shape)
        root, openings = opened([result.tobytes()], [0])
        try:
            verify_compute(CONTEXT, size, root, [0], openings, secrets.token_bytes(32))
        except ProofRejected:
            continue
        accepted += 1
    return {"corrupted_trials": trials, "corrupted_accepted": accepted}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], quick="--quick" in sys.argv)))
