"""Installing an engine: a virtual environment of its own, with pinned packages, beside the agent's.

<state_dir>/environments/<kind>-<version>-<hash of the pins>   one installation
<state_dir>/environments/<kind>                                a link to the newest complete one

An environment is built where it will stay, since scripts in it name their interpreter by path, and counts only once
the link leads to it: a broken download, a full disk or a kill leaves the previous engine in use. A second run goes on
where the first one stopped. The one before the newest is kept, so that a bad release can be undone.

The engine runs `inference` out of the agent's own installation (`inference.launch` puts it last on the path), so
nothing of Slackwater is installed into the environment and the two cannot differ.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from agent.errors import AgentError, ConfigInvalid, ExitStatus

DISTRIBUTION = "slackwater-network"
KINDS = ("torch", "vllm")
# What `inference` imports beside the engine's own packages; the agent's pins of them are taken.
SHARED_PACKAGES = ("cryptography", "jinja2", "protobuf", "structlog")
# PyTorch's own index has builds for processors only, a tenth of the size of the build on PyPI, which brings CUDA.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# An index that is there answers within a second; behind a wall nothing ever does.
INDEX_PROBE_TIMEOUT_S = 5.0
# Downloaded and unpacked, both on the disk for a while. torch for processors: 1.3 GB installed; with CUDA, 7 GB; vLLM
# about 10 GB installed.
NEEDED_BYTES = {"torch-cpu": 3 * 10**9, "torch-cuda": 12 * 10**9, "vllm-cuda": 20 * 10**9}
# The first import of torch compiles its modules: half a minute from a slow disk.
CHECK_TIMEOUT_S = 600.0
ENVIRONMENTS_KEPT = 2
# Lines of pip's output that an error quotes.
QUOTED_LINES = 5

_COMPLETE = "slackwater-complete"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# The program that must run in a finished environment; the package root is its argument, as in inference.launch.
_CHECKS = {
    "torch": "import sys; sys.path.append(sys.argv[1]); import torch, transformers, inference.torch_server",
    "vllm": "import sys; sys.path.append(sys.argv[1]); import torch, vllm, vllm.entrypoints.openai.api_server",
}

Report = Callable[[str], None]


class InstallFailed(AgentError):
    """The operator must read what stands in the message, and run the command again."""

    exit_status = ExitStatus.NO_ENGINE


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """One engine that was installed here; `python` is what `[[engines]].python` names."""

    kind: str
    version: str
    python: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What goes into an environment.

    Args:
        pins: requirements, each with an exact version.
        index_arguments: for pip: where to look beside its usual index.
        check: a program that runs in a good environment; its first argument is where `inference` lies.
    """

    kind: str
    pins: tuple[str, ...]
    index_arguments: tuple[str, ...] = ()
    needed_bytes: int
    check: str

    @property
    def version(self) -> str:
        """Version of the engine's main package, which has the engine's name."""
        return next(pin.partition("==")[2] for pin in self.pins if _name(pin) == self.kind)

    @property
    def directory_name(self) -> str:
        digest = hashlib.sha256("\0".join((*self.pins, *self.index_arguments, sys.version)).encode()).hexdigest()
        return f"{self.kind}-{self.version}-{digest[:8]}"


def environments_directory(state_dir: Path) -> Path:
    return state_dir / "environments"


def installed_engines(state_dir: Path) -> list[InstalledEngine]:
    """Return the engines that `install_engine` has completed here."""
    found = []
    for kind in KINDS:
        directory = (environments_directory(state_dir) / kind).resolve()
        python = directory / "bin" / "python"
        if (directory / _COMPLETE).is_file() and python.exists():
            # The name of the directory, not of the link: a fence hides the link.
            found.append(InstalledEngine(kind, directory.name.split("-")[1], python))
    return found


def make_recipe(kind: str, *, gpu: bool, cpu_index: Sequence[str] | None = None) -> Recipe:
    """Return what an engine of this kind consists of, by the pins of the agent that is installed.

    Args:
        gpu: whether this machine has a card for it.
        cpu_index: pip's arguments for an index with torch for processors; None: PyTorch's own, if it answers.

    Raises:
        ConfigInvalid: there is no such engine, or none for this machine.
    """
    if kind not in KINDS:
        raise ConfigInvalid(f"no engine {kind!r} can be installed; there are {', '.join(KINDS)}")
    if kind == "vllm" and not gpu:
        raise ConfigInvalid(
            "vLLM needs an NVIDIA card and its driver, and NVML lists none here; `install-engine torch` runs anywhere"
        )
    listed = [requirement.partition(";") for requirement in requires(DISTRIBUTION) or ()]
    extra = [name.strip() for name, _, condition in listed if _is_extra(condition, kind)]
    shared = [name.strip() for name, _, condition in listed if not condition and _name(name) in SHARED_PACKAGES]
    if kind == "vllm":
        # It runs nothing of ours, and brings its own versions of these.
        shared = []
    index: tuple[str, ...] = ()
    if not gpu:
        index = tuple(_torch_cpu_index() if cpu_index is None else cpu_index)
    return Recipe(
        kind=kind,
        pins=tuple(sorted({*extra, *shared})),
        index_arguments=index,
        needed_bytes=NEEDED_BYTES[f"{kind}-{'cuda' if gpu else 'cpu'}"],
        check=_CHECKS[kind],
    )


def install_engine(recipe: Recipe, state_dir: Path, report: Report, *, python: Path | None = None) -> InstalledEngine:
    """Make the environment of an engine and return it. Blocks for minutes; safe to run again, and at any time.

    Args:
        report: called with one line at a time about what goes on.
        python: the interpreter to build on; None: the agent's own.

    Raises:
        InstallFailed: too little space, no network, a broken package; the engine in use before stays in use.
    """
    environments = environments_directory(state_dir)
    environments.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory = environments / recipe.directory_name
    with _only_one(environments):
        if (directory / _COMPLETE).is_file():
            report(f"{directory.name} is complete already")
        else:
            _check_space(environments, recipe.needed_bytes)
            report(f"installing {recipe.kind} {recipe.version} into {directory}")
            interpreter = _make_environment(directory, python or Path(sys.executable), report)
            _install(interpreter, recipe, environments / "downloads", report)
            report("checking that it can be imported (a minute at first)")
            _run([interpreter, "-P", "-c", recipe.check, _PACKAGE_ROOT], report, timeout_s=CHECK_TIMEOUT_S)
            (directory / _COMPLETE).touch()
        _switch(environments / recipe.kind, directory)
        _remove_old(environments, recipe.kind, report)
        shutil.rmtree(environments / "downloads", ignore_errors=True)
    report(f"{recipe.kind} {recipe.version} is in use from its next start on")
    return InstalledEngine(recipe.kind, recipe.version, directory / "bin" / "python")


def _make_environment(directory: Path, base: Path, report: Report) -> Path:
    interpreter = directory / "bin" / "python"
    if (directory / "pyvenv.cfg").is_file() and interpreter.exists():
        report("going on with what an earlier run has left")
        return interpreter
    try:
        _run([base, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], report)
    except InstallFailed as error:
        raise ConfigInvalid(f"{base} is no Python of version 3.11 or newer") from error
    try:
        _run([base, "-m", "venv", "--clear", directory], report)
    except InstallFailed as error:
        raise InstallFailed(f"{error}; on Debian and Ubuntu: apt install python3-venv") from error
    return interpreter


def _install(interpreter: Path, recipe: Recipe, downloads: Path, report: Report) -> None:
    """Have pip install the pins; what it has downloaded stays for the next try."""
    pip: list[str | Path] = [
        interpreter,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
    ]
    # A service has no home directory, so the cache needs a place; without one, a broken line costs gigabytes again.
    _run([*pip, f"--cache-dir={downloads}", *recipe.index_arguments, *recipe.pins], report)


def _run(command: Sequence[str | Path], report: Report, timeout_s: float | None = None) -> None:
    """Run a command and report its output line by line.

    Raises:
        InstallFailed: it cannot be started or ends with another status than 0; the last lines are quoted.
    """
    last: deque[str] = deque(maxlen=QUOTED_LINES)
    try:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise InstallFailed(f"cannot start {command[0]}: {error.strerror}") from error
    # Its end also ends the reading below.
    patience = threading.Timer(timeout_s, process.kill) if timeout_s is not None else None
    if patience is not None:
        patience.start()
    try:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line.rstrip())
                report(line.rstrip())
            status = process.wait()
    finally:
        if patience is not None:
            patience.cancel()
    if status != 0:
        raise InstallFailed(f"`{' '.join(map(str, command[:4]))} ...` ended with status {status}: {' | '.join(last)}")


def _check_space(environments: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(environments).free
    if free < needed_bytes:
        raise InstallFailed(
            f"{environments} has {free / 10**9:.1f} GB of free space and {needed_bytes / 10**9:.0f} GB are needed: "
            "free some, or move state_dir to a larger disk"
        )


def _switch(link: Path, directory: Path) -> None:
    """Have the link lead to the new environment; there is no moment without one."""
    fresh = link.with_name(link.name + ".new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(directory.name)
    os.replace(fresh, link)


def _remove_old(environments: Path, kind: str, report: Report) -> None:
    """Keep the environment in use and the one before it; what was never completed goes first."""
    in_use = (environments / kind).resolve()
    others = [path for path in environments.glob(f"{kind}-*") if path != in_use]
    others.sort(key=lambda path: ((path / _COMPLETE).is_file(), path.stat().st_mtime))
    for old in others[: len(others) + 1 - ENVIRONMENTS_KEPT]:
        report(f"removing the old {old.name}")
        shutil.rmtree(old)


@contextmanager
def _only_one(environments: Path) -> Iterator[None]:
    descriptor = os.open(environments / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InstallFailed("another install-engine runs already: wait for it") from error
        yield
    finally:
        os.close(descriptor)


def _torch_cpu_index() -> list[str]:
    """Return pip's arguments for PyTorch's CPU index, or none where it cannot be reached: PyPI's build works too."""
    try:
        with urllib.request.urlopen(f"{TORCH_CPU_INDEX}/torch/", timeout=INDEX_PROBE_TIMEOUT_S):
            return ["--extra-index-url", TORCH_CPU_INDEX]
    except (urllib.error.URLError, TimeoutError, OSError):
        return []


def _is_extra(condition: str, extra: str) -> bool:
    return condition.replace('"', "'").replace(" ", "") == f"extra=='{extra}'"


def _name(requirement: str) -> str:
    return requirement.partition("==")[0].partition("[")[0].strip()
