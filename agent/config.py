"""The agent's configuration: one TOML file, read once into frozen values.

  state_dir = "/var/lib/slackwater-agent"    where identity, nonces and sockets live
  label = "attic"                            a name for people

  [limits]                                   optional
  attempts = 64                              sequences at once over all engines
  context_tokens = 8192                      prompt and answer together, where the model allows more

  [[engines]]                                one per set of cards and model
  engine_id = "main"
  kind = "torch"                             "torch", "vllm" or "fake"
  model_directory = "/srv/models/smollm2"
  python = "/opt/slackwater/.venv-torch/bin/python"
  slots = 8
  gpu_uuids = []

No secret stands here: keys are made at join and stay in `state_dir`; the join
string comes from a file, standard input or the environment.
"""

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from agent.errors import ConfigInvalid

ENGINE_KINDS = ("torch", "vllm", "fake")
# As in CompleteEnrolmentRequest.label.
LABEL_CHARACTERS_MAX = 64
# A machine has at most a few dozen cards; more entries are a mistake.
ENGINES_MAX = 64
# More sequences than any engine of today runs at once.
SLOTS_MAX = 4096
# Engine names become file and socket names; a Unix socket's path has 107 bytes in all.
ENGINE_ID_CHARACTERS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One engine process: one set of cards and one model."""

    engine_id: str
    kind: str
    model_directory: Path
    # Interpreter of the engine's own virtual environment.
    python: Path = field(default_factory=lambda: Path(sys.executable))
    slots: int = 8
    gpu_uuids: tuple[str, ...] = ()
    # Of each card's memory, at most; less where less is free. For a card with several engines.
    gpu_memory_share: float = 1.0
    # Of the fake engine only.
    fake_tokens_per_second: float = 100.0
    fake_ttft_ms: float = 10.0
    fake_faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the owner allows beyond what engines and models allow anyway."""

    # Sequences at once over all engines.
    attempts: int = 256
    # Prompt and answer together; None leaves it to the model.
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    state_dir: Path
    label: str = ""
    engines: tuple[EngineSettings, ...]
    limits: Limits = Limits()


def load_config(path: Path) -> AgentConfig:
    """Read and check a configuration file; relative paths are relative to it.

    Raises:
        ConfigInvalid: unreadable, not TOML, an unknown or missing key, or a value out of range.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}") from error
    return parse_config(document, base=path.resolve().parent)


def parse_config(document: Mapping[str, Any], base: Path) -> AgentConfig:
    """Build the configuration from a parsed document.

    Raises:
        ConfigInvalid: an unknown or missing key, or a value out of range.
    """
    _check_keys(document, AgentConfig, where="")
    label = _text(document.get("label", ""), "label")
    if len(label) > LABEL_CHARACTERS_MAX:
        raise ConfigInvalid(f"label has {len(label)} characters, at most {LABEL_CHARACTERS_MAX} are allowed")
    return AgentConfig(
        state_dir=base / _text(document["state_dir"], "state_dir"),
        label=label,
        engines=_engines(document["engines"], base),
        limits=_limits(document.get("limits", {})),
    )


def _engines(entries: object, base: Path) -> tuple[EngineSettings, ...]:
    if not isinstance(entries, list) or not 1 <= len(entries) <= ENGINES_MAX:
        raise ConfigInvalid(f"engines must be 1 to {ENGINES_MAX} tables [[engines]]")
    engines = tuple(_engine(entry, f"engines[{index}]", base) for index, entry in enumerate(entries))
    names = [engine.engine_id for engine in engines]
    for name in names:
        if names.count(name) > 1:
            raise ConfigInvalid(f"engine_id {name!r} is used twice; each engine needs its own")
    return engines


def _engine(entry: object, where: str, base: Path) -> EngineSettings:
    if not isinstance(entry, dict):
        raise ConfigInvalid(f"{where} must be a table")
    _check_keys(entry, EngineSettings, where=f"{where}.")
    engine_id = _text(entry["engine_id"], f"{where}.engine_id")
    named = engine_id.replace("-", "").replace("_", "")
    if not (named.isascii() and named.isalnum() and len(engine_id) <= ENGINE_ID_CHARACTERS_MAX):
        raise ConfigInvalid(
            f"{where}.engine_id must be 1 to {ENGINE_ID_CHARACTERS_MAX} letters, digits, '-' or '_', not {engine_id!r}"
        )
    kind = _text(entry["kind"], f"{where}.kind")
    if kind not in ENGINE_KINDS:
        raise ConfigInvalid(f"{where}.kind must be one of {', '.join(ENGINE_KINDS)}, not {kind!r}")
    for key in entry:
        if key.startswith("fake_") and kind != "fake":
            raise ConfigInvalid(f"{where}.{key} is for engines of kind 'fake' only")
    return EngineSettings(
        engine_id=engine_id,
        kind=kind,
        model_directory=base / _text(entry["model_directory"], f"{where}.model_directory"),
        python=base / _text(entry.get("python", sys.executable), f"{where}.python"),
        slots=_integer(entry.get("slots", 8), f"{where}.slots", 1, SLOTS_MAX),
        gpu_uuids=_texts(entry.get("gpu_uuids", []), f"{where}.gpu_uuids"),
        gpu_memory_share=_share(entry.get("gpu_memory_share", 1.0), f"{where}.gpu_memory_share"),
        fake_tokens_per_second=_number(entry.get("fake_tokens_per_second", 100.0), f"{where}.fake_tokens_per_second"),
        fake_ttft_ms=_number(entry.get("fake_ttft_ms", 10.0), f"{where}.fake_ttft_ms"),
        fake_faults=_texts(entry.get("fake_faults", []), f"{where}.fake_faults"),
    )


def _limits(entry: object) -> Limits:
    if not isinstance(entry, dict):
        raise ConfigInvalid("limits must be a table")
    _check_keys(entry, Limits, where="limits.")
    context = entry.get("context_tokens")
    return Limits(
        attempts=_integer(entry.get("attempts", 256), "limits.attempts", 1, ENGINES_MAX * SLOTS_MAX),
        context_tokens=None if context is None else _integer(context, "limits.context_tokens", 1, 2**31),
    )


def _check_keys(table: Mapping[str, Any], shape: type, where: str) -> None:
    known = {entry.name for entry in fields(shape)}
    for key in table:
        if key not in known:
            raise ConfigInvalid(f"unknown key {where}{key}; known are {', '.join(sorted(known))}")
    for entry in fields(shape):
        if entry.default is MISSING and entry.default_factory is MISSING and entry.name not in table:
            raise ConfigInvalid(f"missing key {where}{entry.name}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ConfigInvalid(f"{where} must be a string")
    return value


def _texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigInvalid(f"{where} must be a list of strings")
    return tuple(_text(entry, f"{where}[{index}]") for index, entry in enumerate(value))


def _integer(value: object, where: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigInvalid(f"{where} must be a whole number from {least} to {most}, not {value!r}")
    return value


def _share(value: object, where: str) -> float:
    share = _number(value, where)
    if not 0 < share <= 1:
        raise ConfigInvalid(f"{where} must lie in (0, 1], not be {share:g}")
    return share


def _number(value: object, where: str) -> float:
    # The upper bound refuses infinity and NaN along with the absurd.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e9:
        raise ConfigInvalid(f"{where} must be a number from 0 to 1e9, not {value!r}")
    return float(value)
