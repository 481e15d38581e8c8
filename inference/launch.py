"""Command lines and environments of the engine processes.

An environment is built from an allow-list, never inherited whole: the daemon's
own holds paths to keys and settings that are no engine's business.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inference.engine_protocol import MAX_SCORE_RIVALS
from inference.task import TaskKind

# How each kind of engine draws; attempts of one task may only move between engines of one profile.
# position-hash-v1: inference/sampling.py (torch); the fake's hash stands under the same name.
# vllm-generator-v1: vLLM's older model runner (CPU build), one torch.Generator per request.
# vllm-gumbel-v2: vLLM's V2 model runner (GPU), Gumbel noise as a hash of seed, position and id.
TORCH_SAMPLER_PROFILE: Final = "position-hash-v1"
FAKE_SAMPLER_PROFILE: Final = "position-hash-v1"
VLLM_CPU_SAMPLER_PROFILE: Final = "vllm-generator-v1"
VLLM_GPU_SAMPLER_PROFILE: Final = "vllm-gumbel-v2"

# What an engine may take over from the daemon's environment: where programs and the GPU driver's
# libraries are, the locale, and the temporary folder.
_PASSED_ON: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")

# Runs a module of this package under a foreign Python. The package's root goes last on the path:
# first, it would put this environment's packages before the engine's own.
_RUN_MODULE: Final = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_PACKAGE_ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """One engine process. Its standard input is unused; its output is log lines."""

    argv: list[str]
    env: dict[str, str]


def launch_fake(
    python: Path,
    socket_path: Path,
    model_directory: Path,
    *,
    tokens_per_second: float,
    ttft_ms: float,
    context_tokens: int,
    slots: int,
    faults: str = "[]",
    step_times: str = "",
) -> EngineLaunch:
    """Return how to start the fake engine.

    Args:
        python: an interpreter with the daemon's packages.
        model_directory: the folder with `tokenizer.json`, or that file.
        tokens_per_second: speed of each stream.
        faults: JSON list of `inference.fake_faults.Fault`.
        step_times: JSON object of `inference.fake_steps.StepTimes`, in place of speed and `ttft_ms`; or empty.
    """
    options = ["--socket", str(socket_path), "--tokenizer", str(model_directory)]
    options += ["--tokens-per-second", f"{tokens_per_second:g}", "--ttft-ms", f"{ttft_ms:g}"]
    options += ["--context", str(context_tokens), "--slots", str(slots), "--faults", faults]
    options += ["--step-times", step_times]
    return EngineLaunch(_run_module(python, "inference.fake_server", options), _environment())


def launch_torch(
    python: Path,
    socket_path: Path,
    model_directory: Path,
    *,
    slots: int,
    context_tokens: int,
    threads: int,
    dtype: str = "float32",
    device: str = "cpu",
    gpu_uuids: Sequence[str] = (),
) -> EngineLaunch:
    """Return how to start the torch engine.

    Args:
        python: an interpreter with torch and transformers (`.venv-torch`).
        slots: sequences that run at once; more wait.
        threads: CPU threads of one step.
        dtype: float32 (answers do not change with the batch), bfloat16 or float16.
        device: cpu or cuda.
        gpu_uuids: the cards the process may see.
    """
    options = ["--socket", str(socket_path), "--model-directory", str(model_directory)]
    options += ["--slots", str(slots), "--context", str(context_tokens), "--threads", str(threads)]
    options += ["--dtype", dtype, "--device", device]
    env = _environment() | _OFFLINE | {"CUDA_VISIBLE_DEVICES": ",".join(gpu_uuids)}
    # Threads that spin while they wait take the core from the next engine, where several share a machine.
    env["OMP_WAIT_POLICY"] = "passive"
    return EngineLaunch(_run_module(python, "inference.torch_server", options), env)


def launch_vllm(
    python: Path,
    socket_path: Path,
    model_directory: Path,
    *,
    cache_directory: Path,
    kind: TaskKind,
    context_tokens: int,
    slots: int,
    dtype: str,
    gpu_uuids: Sequence[str],
    gpu_memory_utilization: float,
) -> EngineLaunch:
    """Return how to start vLLM on GPUs.

    Args:
        python: an interpreter with vLLM.
        cache_directory: a folder of this engine alone; vLLM loads compiled code from it.
        gpu_uuids: the cards it may see and use, all for one model.
        gpu_memory_utilization: share of each card's whole memory, to be computed from what is free.
    """
    argv = _vllm_argv(python, socket_path, model_directory, kind, context_tokens, slots, dtype)
    argv += ["--gpu-memory-utilization", f"{gpu_memory_utilization:.3f}"]
    argv += ["--tensor-parallel-size", str(len(gpu_uuids))]
    env = _vllm_environment(cache_directory) | {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu_uuids),
        # The runner whose seeded noise does not depend on the batch; the sampler profile promises it.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    return EngineLaunch(argv, env)


def launch_vllm_cpu(
    python: Path,
    socket_path: Path,
    model_directory: Path,
    *,
    cache_directory: Path,
    kind: TaskKind,
    context_tokens: int,
    slots: int,
    dtype: str,
    kv_cache_gib: int,
) -> EngineLaunch:
    """Return how to start vLLM's CPU build (`vllm-cpu`, for tests).

    Args:
        kv_cache_gib: memory for keys and values; the build would take half of the machine's.
    """
    argv = _vllm_argv(python, socket_path, model_directory, kind, context_tokens, slots, dtype)
    # Compiling takes minutes on a CPU and gains little there.
    argv += ["--enforce-eager"]
    env = _vllm_environment(cache_directory) | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
    }
    return EngineLaunch(argv, env)


def launch_prover(
    python: Path,
    device: str,
    *,
    node_id: str,
    boot_id: str,
    certificate_sha256: bytes,
    memory_bytes: int = 0,
    gpu_uuids: Sequence[str] = (),
) -> EngineLaunch:
    """Return how to start the prover of capability challenges; it speaks frames over its standard input and output.

    Args:
        python: an interpreter with numpy, or with torch where `device` is one of torch's.
        device: "numpy", "cpu" or "cuda:0".
        memory_bytes: what it may be asked to fill.
        gpu_uuids: the cards the process may see.
    """
    options = ["--device", device, "--node-id", node_id, "--boot-id", boot_id]
    options += ["--certificate-sha256", certificate_sha256.hex(), "--memory-bytes", str(memory_bytes)]
    env = _environment() | _OFFLINE | {"CUDA_VISIBLE_DEVICES": ",".join(gpu_uuids)}
    return EngineLaunch(_run_module(python, "inference.challenge.prover", options), env)


# Engines load local files and nothing else.
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def _vllm_argv(
    python: Path,
    socket_path: Path,
    model_directory: Path,
    kind: TaskKind,
    context_tokens: int,
    slots: int,
    dtype: str,
) -> list[str]:
    """Return what both builds share. What is not switched on here stays off: remote code, LoRA, prompt
    embeddings, tool servers and parsers, speculation, key-value transfer, more than one machine."""
    argv = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_directory)]
    argv += ["--uds", str(socket_path), "--enable-scale-out", "--skip-tokenizer-init"]
    argv += ["--load-format", "safetensors", "--dtype", dtype]
    # No sampling defaults out of the model's folder: what was not asked for is neutral.
    argv += ["--generation-config", "vllm"]
    argv += ["--max-model-len", str(context_tokens), "--max-num-seqs", str(slots)]
    argv += ["--max-logprobs", str(MAX_SCORE_RIVALS)]
    # A cache that tenants share tells one by its speed what another has asked, so prompts have salts (GenerateRequest);
    # the texts of vectors have none, and nothing is kept of them.
    argv += ["--no-enable-prefix-caching" if kind is TaskKind.EMBED else "--enable-prefix-caching"]
    argv += ["--disable-fastapi-docs", "--disable-uvicorn-access-log", "--disable-log-stats"]
    if kind is TaskKind.EMBED:
        argv += ["--runner", "pooling"]
    return argv


def _vllm_environment(cache_directory: Path) -> dict[str, str]:
    return (
        _environment()
        | _OFFLINE
        | {
            "VLLM_NO_USAGE_STATS": "1",
            # Caches hold compiled code; another user's cache is another user's code.
            "VLLM_CACHE_ROOT": str(cache_directory / "vllm"),
            "TRITON_CACHE_DIR": str(cache_directory / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache_directory / "inductor"),
            "HOME": str(cache_directory),
            "VLLM_MAX_N_SEQUENCES": "1",
        }
    )


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _run_module(python: Path, module: str, options: Sequence[str]) -> list[str]:
    # -P keeps the working directory off the path.
    return [str(python), "-P", "-c", _RUN_MODULE, str(_PACKAGE_ROOT), module, *options]
