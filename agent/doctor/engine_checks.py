"""Checks of each engine: its interpreter, its packages, the flags it knows, its model, and room on its card."""

import re
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agent.cards.use import desktop_uuids
from agent.config import EngineSettings
from agent.doctor.check import DEADLINE_S, Finding, Patient, Probe, fail, ok, warn
from agent.engines.choice import ModelNeed, choose_engine
from agent.engines.files import StartFiles
from agent.engines.install import installed_engines
from agent.engines.launch import launch_engine
from agent.engines.settling import UNNAMED, settle_engine
from agent.errors import NoEngine
from agent.host import read_host
from agent.identity import load_identity
from agent.model_store.store import StoredState
from agent.model_supply import open_store
from inference.manifest import Manifest, ManifestError, read_manifest, verify_directory
from inference.model_files import list_directory

# A first start of an interpreter from a slow disk; nothing of the engine is imported.
PYTHON_TIMEOUT_S = 4.0
# vLLM imports torch and itself before it lists its flags: 15 s with warm files on two cores.
FLAGS_TIMEOUT_S = 110.0
FLAGS_DEADLINE_S = 120.0
# About a second per gigabyte, and the largest models have hundreds.
HASH_DEADLINE_S = 3600.0

_FIND_PACKAGE = """
import importlib.metadata, importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        sys.exit(f"{name} is not installed")
try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    print("of another distribution")
"""
_PACKAGES = {"torch": ("torch", "transformers"), "vllm": ("vllm", "torch"), "fake": ("aiohttp",)}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def engine_probes(patient: Patient) -> list[Probe]:
    """Return the checks of every configured engine, in the order of the file."""
    probes = []
    for engine in patient.settings.engines:
        name = f"engine {engine.engine_id}"
        probes.append(Probe(name, partial(check_installation, engine)))
        if engine.kind == "vllm":
            probes.append(Probe(f"{name}: flags", partial(check_flags, engine), FLAGS_DEADLINE_S))
        deadline_s = HASH_DEADLINE_S if patient.full else DEADLINE_S
        probes.append(Probe(f"{name}: model", partial(check_model, engine), deadline_s))
        probes.append(Probe(f"{name}: room", partial(check_room, engine)))
    return probes


def check_installation(engine: EngineSettings, patient: Patient) -> Finding:
    try:
        settled = _settled(engine, patient)
    except NoEngine as error:
        wanted = "torch" if engine.kind == "auto" else engine.kind
        return fail(str(error), patient.command(f"install-engine {wanted}"))
    if settled is None:
        return ok("which engine runs it is chosen once its model is here")
    engine = settled
    here = {one.kind: one.python for one in installed_engines(patient.settings.state_dir)}
    if engine.kind in here and not engine.python.exists():
        return fail(f"{engine.python} does not exist; install-engine made {here[engine.kind]}", patient.edit)
    if not engine.python.exists():
        return fail(f"its interpreter {engine.python} does not exist", patient.command(f"install-engine {engine.kind}"))
    command = [str(engine.python), "-I", "-c", _FIND_PACKAGE, *_PACKAGES[engine.kind]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_TIMEOUT_S, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return fail(
            f"{engine.python}: {said[-1] if said else 'it ended without a word'}",
            patient.command(f"install-engine {engine.kind}"),
        )
    return ok(f"{engine.kind} {done.stdout.strip()}")


def check_flags(engine: EngineSettings, patient: Patient) -> Finding:
    """A release of vLLM that dropped a flag does not start; better known before its card is idle."""
    manifest, settled = _manifest(engine, patient), _settled(engine, patient)
    if manifest is None or settled is None:
        return ok("its model is not here yet")
    engine = settled
    nowhere = Path("/nonexistent")
    files = StartFiles(home=nowhere, cache=nowhere, runtime_directory=nowhere, socket_path=nowhere, log_path=nowhere)
    argv = launch_engine(engine, manifest, files, patient.cards).argv
    # Everything up to the module's name, and its own list of flags.
    command = [*argv[: argv.index("--model")], "--help=all"]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=FLAGS_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        return fail("vLLM does not list its flags: its installation is damaged", patient.command("install-engine vllm"))
    missing = missing_flags(argv, done.stdout)
    if missing:
        return fail(f"this vLLM no longer knows {', '.join(missing)}", patient.command("install-engine vllm"))
    return ok(f"it knows all {len(_flags(argv))} flags that it is started with")


def missing_flags(argv: Sequence[str], help_text: str) -> list[str]:
    """Return the flags of a command line that a program's help does not name."""
    known = set(_FLAG.findall(help_text))
    return [flag for flag in _flags(argv) if flag not in known]


def check_model(engine: EngineSettings, patient: Patient) -> Finding:
    directory = _directory(engine, patient)
    try:
        manifest = _manifest(engine, patient)
        if engine.open:
            return ok("the fleet chooses it, within [consent] and the quota of [models]")
        if manifest is None:
            return warn(f"{engine.model} is not here yet", patient.command(f"models fetch {engine.model}"))
        if patient.full:
            verify_directory(manifest, directory)
            return ok(f"{manifest.name}: signature and every byte are right")
        present = list_directory(directory)
        for file in manifest.files:
            path = directory / file.path
            if file.path not in present or path.stat().st_size != file.size_bytes:
                raise ManifestError(f"{path} is missing or cut off; fetch the model again")
    except ManifestError as error:
        return fail(str(error), f"ls -l {directory}")
    return ok(f"{manifest.name}: signature and sizes are right (`doctor --full` reads every byte)")


def check_room(engine: EngineSettings, patient: Patient) -> Finding:
    """Whether the configured engine is the one that fits this machine now."""
    if engine.kind == "fake":
        return ok("the fake engine needs none")
    manifest = _manifest(engine, patient)
    if manifest is None:
        return ok("its model is not here yet")
    choice = choose_engine(
        [card.gpu for card in patient.cards],
        read_host(patient.gpu_note),
        ModelNeed(weight_bytes=manifest.size_bytes, dtype=manifest.dtype),
        ("vllm", "torch"),
        asked_uuids=engine.gpu_uuids,
        desktop_uuids=desktop_uuids(patient.cards),
    )
    if not choice.kind:
        return fail(choice.reason, "nvidia-smi")
    wants_card = bool(engine.gpu_uuids)
    if wants_card and not choice.cards:
        return warn(f"its card has no room for the model: {choice.reason}", "nvidia-smi")
    if engine.kind == "vllm" and wants_card and choice.kind == "torch":
        return warn(f"vLLM does not fit: {choice.reason}", patient.edit)
    return ok(f"there is room: {choice.reason}" if wants_card else "on the processor there is room")


def _settled(engine: EngineSettings, patient: Patient) -> EngineSettings | None:
    """Return the engine as it would start now; None where only its model, which is still to be fetched, decides.

    Raises:
        NoEngine: it could not.
    """
    if engine.kind != "auto" and engine.python != UNNAMED:
        return engine
    manifest = _manifest(engine, patient)
    if manifest is None:
        return None
    host = read_host(patient.gpu_note)
    return settle_engine(engine, manifest, patient.settings.state_dir, patient.cards, host)


def _manifest(engine: EngineSettings, patient: Patient) -> Manifest | None:
    """Return the manifest of an engine's model; None for one that is still to be fetched."""
    directory = _directory(engine, patient)
    if engine.open:
        return None
    if engine.model and not directory.is_dir():
        return None
    return read_manifest(directory, load_identity(patient.settings.state_dir).release_keys)


def _directory(engine: EngineSettings, patient: Patient) -> Path:
    """Return where an engine's model lies, or would."""
    if not engine.model:
        return engine.model_directory
    settings = patient.settings
    place = settings.models.directory or settings.state_dir / "models"
    # Opening a store makes it, and this command may be another user's.
    if not place.is_dir():
        return place / engine.model
    store = open_store(settings, load_identity(settings.state_dir))
    for model in store.models():
        if engine.model in (model.name, model.digest) and model.state is StoredState.WHOLE:
            return store.model_directory(model.digest)
    return place / engine.model


def _flags(argv: Sequence[str]) -> list[str]:
    return [part.partition("=")[0] for part in argv if part.startswith("--")]
