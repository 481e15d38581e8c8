"""Command lines and environments of the engines: what has to be in them, and what must not get in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from inference.launch import EngineLaunch, launch_fake, launch_torch, launch_vllm, launch_vllm_cpu
from inference.task import TaskKind

PYTHON, SOCKET, MODEL, CACHE = Path("/p/python"), Path("/run/e.sock"), Path("/models/m"), Path("/cache/e")


def fake() -> EngineLaunch:
    return launch_fake(PYTHON, SOCKET, MODEL, tokens_per_second=200, ttft_ms=20, context_tokens=4096, slots=8)


def torch_engine() -> EngineLaunch:
    return launch_torch(PYTHON, SOCKET, MODEL, slots=8, context_tokens=4096, threads=2)


def vllm(kind: TaskKind = TaskKind.GENERATE) -> EngineLaunch:
    return launch_vllm(
        PYTHON,
        SOCKET,
        MODEL,
        cache_directory=CACHE,
        kind=kind,
        context_tokens=4096,
        slots=64,
        dtype="auto",
        gpu_uuids=["GPU-a", "GPU-b"],
        gpu_memory_utilization=0.8512,
    )


def vllm_cpu() -> EngineLaunch:
    return launch_vllm_cpu(
        PYTHON,
        SOCKET,
        MODEL,
        cache_directory=CACHE,
        kind=TaskKind.GENERATE,
        context_tokens=4096,
        slots=8,
        dtype="bfloat16",
        kv_cache_gib=1,
    )


Build = Callable[[], EngineLaunch]
ALL: list[Build] = [fake, torch_engine, vllm, vllm_cpu]


@pytest.mark.parametrize("build", ALL)
def test_the_daemons_environment_does_not_reach_an_engine(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation seen to fail: the environment was a copy of os.environ.
    for name in ("SLACKWATER_KEY", "HF_TOKEN", "PYTHONPATH", "VLLM_SERVER_DEV_MODE", "LD_PRELOAD", "HTTP_PROXY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PATH", "/usr/bin")
    launch = build()
    assert launch.env["PATH"] == "/usr/bin"
    assert "x" not in launch.env.values()


@pytest.mark.parametrize("build", [torch_engine, vllm, vllm_cpu])
def test_engines_that_load_models_are_kept_offline(build: Build) -> None:
    env = build().env
    assert (env["HF_HUB_OFFLINE"], env["TRANSFORMERS_OFFLINE"], env["DO_NOT_TRACK"]) == ("1", "1", "1")


@pytest.mark.parametrize("build", [vllm, vllm_cpu])
def test_vllm_listens_on_the_socket_only_and_runs_nothing_foreign(build: Build) -> None:
    launch = build()
    options = launch.argv
    assert options[options.index("--uds") + 1] == str(SOCKET)
    assert options[options.index("--generation-config") + 1] == "vllm"
    assert options[options.index("--load-format") + 1] == "safetensors"
    assert {"--enable-scale-out", "--disable-fastapi-docs", "--skip-tokenizer-init"} <= set(options)
    forbidden = {"--trust-remote-code", "--enable-lora", "--enable-prompt-embeds", "--host", "--port", "-O"}
    assert not forbidden & set(options)
    assert launch.env["VLLM_CACHE_ROOT"].startswith(str(CACHE))
    assert launch.env["VLLM_NO_USAGE_STATS"] == "1"


def test_vllm_sees_the_cards_it_may_use_and_no_other() -> None:
    launch = vllm()
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert launch.argv[launch.argv.index("--tensor-parallel-size") + 1] == "2"
    assert launch.argv[launch.argv.index("--gpu-memory-utilization") + 1] == "0.851"


def test_an_embedding_model_runs_as_a_pooling_model() -> None:
    argv = vllm(TaskKind.EMBED).argv
    assert argv[argv.index("--runner") + 1] == "pooling"
    assert "--runner" not in vllm().argv


def test_the_torch_engine_without_cards_sees_none() -> None:
    assert torch_engine().env["CUDA_VISIBLE_DEVICES"] == ""
