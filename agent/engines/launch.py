"""From an engine's settings to its command line."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from agent.cards.use import CardReading, desktop_uuids
from agent.config import EngineSettings
from agent.engines.choice import launch_adjustments, memory_utilization, runs_under_wsl
from agent.engines.files import StartFiles
from inference.launch import (
    FAKE_SAMPLER_PROFILE,
    TORCH_SAMPLER_PROFILE,
    VLLM_CPU_SAMPLER_PROFILE,
    VLLM_GPU_SAMPLER_PROFILE,
    EngineLaunch,
    launch_fake,
    launch_torch,
    launch_vllm,
    launch_vllm_cpu,
)
from inference.manifest import Manifest

# Enough for 16 sequences of 2k tokens of a model of up to 1B parameters, which is what tests run.
CPU_KV_CACHE_GIB = 1


def sampler_profile(settings: EngineSettings) -> str:
    """Return how the engine of these settings draws; attempts move between engines of one profile only."""
    if settings.kind == "vllm":
        return VLLM_GPU_SAMPLER_PROFILE if settings.gpu_uuids else VLLM_CPU_SAMPLER_PROFILE
    return {"fake": FAKE_SAMPLER_PROFILE, "torch": TORCH_SAMPLER_PROFILE}[settings.kind]


def launch_engine(
    settings: EngineSettings, manifest: Manifest, files: StartFiles, cards: Sequence[CardReading]
) -> EngineLaunch:
    """Return how to start this engine now; `cards` are the newest readings of the machine's cards.

    Raises:
        ValueError: the kind of engine is not known.
    """
    # The engine has another working directory. The interpreter stays a link: what it leads to has no packages.
    paths = (settings.python.absolute(), files.socket_path, settings.model_directory.absolute())
    context_tokens, slots = manifest.context_tokens, settings.slots
    match settings.kind:
        case "fake":
            return _launch_fake(settings, paths, context_tokens)
        case "torch":
            return launch_torch(
                *paths,
                slots=slots,
                context_tokens=context_tokens,
                threads=len(os.sched_getaffinity(0)),
                # CPUs are no faster in bfloat16, and in float32 an answer does not depend on its batch.
                dtype=manifest.dtype if settings.gpu_uuids else "float32",
                device="cuda" if settings.gpu_uuids else "cpu",
                gpu_uuids=settings.gpu_uuids,
            )
        case "vllm" if settings.gpu_uuids:
            gpus = [card.gpu for card in cards]
            launch = launch_vllm(
                *paths,
                cache_directory=files.cache,
                kind=manifest.kind,
                context_tokens=context_tokens,
                slots=slots,
                dtype=manifest.dtype,
                gpu_uuids=settings.gpu_uuids,
                gpu_memory_utilization=memory_utilization(
                    settings.gpu_uuids, gpus, settings.gpu_memory_share, desktop_uuids(cards)
                ),
            )
            argv, env = launch_adjustments(runs_under_wsl(platform.release()), gpus, settings.gpu_uuids)
            return EngineLaunch(launch.argv + argv, launch.env | env)
        case "vllm":
            return launch_vllm_cpu(
                *paths,
                cache_directory=files.cache,
                kind=manifest.kind,
                context_tokens=context_tokens,
                slots=slots,
                dtype=manifest.dtype,
                kv_cache_gib=CPU_KV_CACHE_GIB,
            )
        case _:
            raise ValueError(f"unknown kind of engine {settings.kind!r}")


def _launch_fake(settings: EngineSettings, paths: tuple[Path, Path, Path], context_tokens: int) -> EngineLaunch:
    return launch_fake(
        *paths,
        tokens_per_second=settings.fake_tokens_per_second,
        ttft_ms=settings.fake_ttft_ms,
        context_tokens=context_tokens,
        slots=settings.slots,
        faults=f"[{','.join(settings.fake_faults)}]",
        step_times=settings.fake_step_times,
    )
