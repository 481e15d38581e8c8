"""Draw ids with the kernels of the installed vLLM wheel. Runs in its environment (`.venv-vllm`), as a program.

Reads an .npz with `logits`, `temperatures`, `seeds`, `positions` (of last input ids) and `steps`; writes the ids that
the V2 runner's Triton kernel drew (in Triton's interpreter, so that it needs no GPU) and those that the CPU build
draws in so many steps of one generator.
"""

import importlib.util
import os
import sys
import sysconfig
import types
from pathlib import Path

# Has to be set before Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
import vllm._C  # noqa: F401  # registers the operators

KERNEL = Path("vllm", "v1", "worker", "gpu", "sample", "gumbel.py")


def load_kernel() -> types.ModuleType:
    """Return the wheel's gumbel.py. vLLM's CPU build would give it placeholders for Triton; it gets the real one."""
    stand_in = types.ModuleType("vllm.triton_utils")
    stand_in.__dict__.update(tl=tl, triton=triton)
    sys.modules["vllm.triton_utils"] = stand_in
    spec = importlib.util.spec_from_file_location("gumbel", Path(sysconfig.get_paths()["purelib"]) / KERNEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gumbel"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    given = np.load(sys.argv[1])
    logits = torch.from_numpy(given["logits"])
    rows = len(logits)
    temperatures = torch.from_numpy(given["temperatures"])
    seeds = torch.from_numpy(given["seeds"])
    gumbel = load_kernel().gumbel_sample(
        logits,
        torch.arange(rows, dtype=torch.int32),
        temperatures,
        seeds,
        torch.from_numpy(given["positions"]),
        True,
        False,
    )
    scaled = logits / temperatures[:, None]
    generator_ids = np.zeros((rows, int(given["steps"])), dtype=np.int64)
    for row, seed in enumerate(seeds.tolist()):
        generator = torch.Generator()
        generator.manual_seed(seed)
        for step in range(generator_ids.shape[1]):
            # As `forward_cpu` of vllm/v1/sample/ops/topk_topp_sampler.py does for a request with a seed.
            draw = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
            generator_ids[row, step] = torch.ops._C.fused_gumbel_argmax(scaled[row : row + 1], draw).item()
    np.savez(sys.argv[2], gumbel=gumbel.numpy(), generator=generator_ids)


if __name__ == "__main__":
    main()
