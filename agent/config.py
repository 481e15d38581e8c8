"""The agent's configuration: one TOML file, decoded into frozen values.

  state_dir = "/var/lib/slackwater-agent"    where identity, nonces and sockets live
  label = "attic"                            a name for people

  [limits]                                   optional
  attempts = 64                              sequences at once over all engines

  [[engines]]                                one per set of cards and model
  engine_id = "main"
  kind = "torch"                             "torch", "vllm" or "fake"
  model_directory = "/srv/models/smollm2"
  python = "/opt/slackwater/.venv-torch/bin/python"
  slots = 8
  gpu_uuids = []

`agent.example.toml` documents every key. No secret stands here: keys are made
at join and stay in `state_dir`; the join string comes from a file, standard
input or the environment.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from agent.config_shape import decode
from agent.energy.carbon import find_country
from agent.energy.settings import EnergySettings
from agent.errors import ConfigInvalid
from agent.model_store.settings import StoreSettings
from agent.owner.asks import NOTHING_ASKED, AskSettings
from agent.owner.consent import ConsentSettings
from agent.owner.lending import EngineUse
from agent.owner.settings import OwnerSettings
from agent.power.settings import PowerSettings
from agent.signals.settings import SignalSettings

# A machine has at most a few dozen cards; more entries are a mistake.
ENGINES_MAX = 64
# More sequences than any engine of today runs at once.
SLOTS_MAX = 4096
# Engine names become file and socket names; a Unix socket's path has 107 bytes in all.
# Tables that act as soon as the file is saved; the rest do at the next start.
LIVE_TABLES = frozenset({"owner", "consent", "asks", "power", "energy"})
# In place of a model's name: which one is left to the fleet.
FLEET_MODEL = "fleet"
ENGINE_ID = re.compile(r"(?=.*[A-Za-z0-9])[A-Za-z0-9_-]{1,32}", re.ASCII)

# The upper bound refuses infinity and NaN along with the absurd.
Amount = Annotated[float, Meta(ge=0, le=1e9)]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine process: one set of cards and one model."""

    engine_id: str
    # "auto": at each start the best of what is installed and fits (agent.engines.choice).
    kind: Literal["auto", "torch", "vllm", "fake"]
    # Either a directory with a model's files and manifest, or the name or digest of a model of the fleet, which the
    # model store fetches, or "fleet", which leaves the choice to the fleet. The other one is empty.
    model_directory: Path = Path()
    model: str = ""
    # Interpreter of the engine's own virtual environment; empty: that of `install-engine`.
    python: Path = Path()
    slots: Annotated[int, Meta(ge=1, le=SLOTS_MAX)] = 8
    gpu_uuids: tuple[str, ...] = ()
    # Of each card's memory, at most; less where less is free. For a card with several engines.
    gpu_memory_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # Loaded and unused for so long, the engine leaves the card; 0 for never. Else 15 minutes on a GPU, never without.
    unload_after_s: Amount | None = None
    # Of the fake engine only.
    fake_tokens_per_second: Amount = 100.0
    fake_ttft_ms: Amount = 10.0
    fake_faults: tuple[str, ...] = ()
    # As a real engine's: a JSON object of inference.fake_steps.StepTimes; empty for even steps.
    fake_step_times: str = ""

    @property
    def open(self) -> bool:
        """Whether its model is left to the fleet."""
        return self.model == FLEET_MODEL

    def use(self) -> EngineUse:
        """Return what decides when this engine is up."""
        never = self.unload_after_s == 0
        unload_after_s = math.inf if never else self.unload_after_s
        return EngineUse(self.gpu_uuids, unload_after_s, self.open, self.gpu_memory_share)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the owner allows beyond what engines and models allow anyway."""

    # Sequences at once over all engines.
    attempts: Annotated[int, Meta(ge=1, le=ENGINES_MAX * SLOTS_MAX)] = 256


class ChallengeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a capability challenge may take."""

    # Of the machine's memory, for seconds, where the processor is what works. A card's is filled while it is empty.
    memory_mib: Annotated[int, Meta(ge=0, le=1 << 20)] = 64


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state_dir: Path
    # As in CompleteEnrolmentRequest.label.
    label: Annotated[str, Meta(max_length=64)] = ""
    engines: Annotated[tuple[EngineSettings, ...], Meta(min_length=1, max_length=ENGINES_MAX)]
    limits: Limits = Limits()
    owner: OwnerSettings = OwnerSettings()
    consent: ConsentSettings = ConsentSettings()
    asks: AskSettings = NOTHING_ASKED
    energy: EnergySettings = EnergySettings()
    signals: SignalSettings = SignalSettings()
    power: PowerSettings = PowerSettings()
    models: StoreSettings = StoreSettings()
    challenges: ChallengeSettings = ChallengeSettings()


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

    def read_path(kind: type, value: object) -> Path:
        if kind is not Path or not isinstance(value, str) or "\0" in value:
            raise TypeError("must be a string")
        return base / value

    limits = document.get("limits")
    if isinstance(limits, Mapping) and "context_tokens" in limits:
        raise ConfigInvalid("limits.context_tokens has moved: write context_tokens in table [consent], and not here")
    config = decode(document, AgentConfig, read_path)
    for index, (engine, table) in enumerate(zip(config.engines, document["engines"], strict=True)):
        _check_engine(engine, table, f"engines[{index}]")
    if config.energy.country is not None:
        find_country(config.energy.country)
    names = [engine.engine_id for engine in config.engines]
    for name in names:
        if names.count(name) > 1:
            raise ConfigInvalid(f"engine_id {name!r} is used twice; each engine needs its own")
    return config


def _check_engine(engine: EngineSettings, table: Mapping[str, Any], where: str) -> None:
    """Check what no type can say."""
    if not ENGINE_ID.fullmatch(engine.engine_id):
        raise ConfigInvalid(f"{where}.engine_id must be 1 to 32 letters, digits, '-' or '_', not {engine.engine_id!r}")
    if ("model_directory" in table) == bool(engine.model):
        raise ConfigInvalid(f"{where} needs either model_directory or model: a folder, or a name in the fleet")
    for key in table:
        if key.startswith("fake_") and engine.kind != "fake":
            raise ConfigInvalid(f"{where}.{key} is for engines of kind 'fake' only")
