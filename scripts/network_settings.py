"""What the parts of a development network are told: engines, configurations, ports."""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "var" / "models"
RELEASE_KEY = ROOT / "var" / "release" / "dev.pub"
ENVIRONMENTS = {"fake": ".venv", "torch": ".venv-torch", "vllm": ".venv-vllm"}


# `nvidia-smi` wakes a sleeping driver, which takes seconds.
NVIDIA_SMI_TIMEOUT_S = 30.0


class NetworkError(Exception):
    """The network did not come up; the text says which part, and what to do or what its log says."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine every agent runs; speed and faults are for the fake only."""

    kind: str = "fake"
    slots: int = 8
    fake_tokens_per_second: float = 100.0
    fake_ttft_ms: float = 20.0
    fake_faults: tuple[str, ...] = ()
    # Cards of this machine; vLLM without one runs on the processor. Agents share them in turn.
    gpu_uuids: tuple[str, ...] = ()
    # Whether the coordinator asks nodes to show what they can do.
    challenges: bool = False
    # Of a thousand attempts of a proven node so many are audited, where the model has a calibration.
    audit_permille: int = 20

    @property
    def interpreter(self) -> Path:
        return ROOT / ENVIRONMENTS[self.kind] / "bin" / "python"

    @property
    def model_directory(self) -> Path:
        return MODELS / ("fake-smollm2" if self.kind == "fake" else "smollm2-135m-instruct")

    def settings(self, index: int = 0, agents: int = 1) -> dict[str, object]:
        """Return the keys of the [[engines]] table of one of some agents."""
        table: dict[str, object] = {
            "engine_id": "main",
            "kind": self.kind,
            "model_directory": str(self.model_directory),
            "python": str(self.interpreter),
            "slots": self.slots,
        }
        if self.kind == "fake":
            table["fake_tokens_per_second"] = self.fake_tokens_per_second
            table["fake_ttft_ms"] = self.fake_ttft_ms
            table["fake_faults"] = list(self.fake_faults)
        if self.gpu_uuids:
            table["gpu_uuids"] = [self.gpu_uuids[index % len(self.gpu_uuids)]]
            # One more share than engines: each also needs memory outside of what vLLM counts.
            table["gpu_memory_share"] = round(1 / (math.ceil(agents / len(self.gpu_uuids)) + 1), 3)
        return table


def require(engine: EngineOptions) -> None:
    """Raise NetworkError where something is missing that `make setup` makes."""
    for path in (engine.interpreter, engine.model_directory / "manifest.envelope", RELEASE_KEY):
        if not path.exists():
            target = "setup-vllm" if engine.kind == "vllm" and path == engine.interpreter else "setup"
            raise NetworkError(f"{path.relative_to(ROOT)} is missing: run `make {target}`")


def coordinator_config(state_dir: Path, engine: EngineOptions, ports: Sequence[int] = (0, 0, 0)) -> str:
    """Return a configuration; ports (public, node, gateway) of 0 are chosen by the coordinator."""
    public, node, gateway = ports
    return toml(
        {
            "state_dir": str(state_dir),
            "public_listen": f"127.0.0.1:{public}",
            "node_listen": f"127.0.0.1:{node}",
            "gateway_listen": f"127.0.0.1:{gateway}",
            "release_keys": [str(RELEASE_KEY)],
            "models": [str(engine.model_directory)],
            # Seconds of a core for each agent, which share this machine.
            "challenges": engine.challenges,
            "audit_permille": engine.audit_permille,
        }
    )


def agent_config(state_dir: Path, label: str, engine_table: dict[str, object]) -> str:
    """Return a configuration; nobody waits here until a person leaves the machine."""
    top = toml({"state_dir": str(state_dir), "label": label}) + "\n[owner]\n" + toml({"mode": "always"})
    # Whoever tries this out has not said that a card may be slowed down.
    return top + "\n[power]\n" + toml({"cap": "off"}) + "\n[[engines]]\n" + toml(engine_table)


def gpu_uuids() -> tuple[str, ...]:
    """Return the NVIDIA cards of this machine; none where there is no driver, or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ()
    return tuple(line.strip() for line in result.stdout.splitlines() if line.startswith("GPU-"))


def toml(table: dict[str, object]) -> str:
    """Write strings, numbers and lists of strings: JSON's notation of them is TOML's too."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def clean_environment() -> dict[str, str]:
    """Return the environment without settings that would overrule the configurations written here."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLACKWATER_")}
