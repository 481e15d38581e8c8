"""The import contracts of pyproject.toml hold, and each one is seen to break on a planted import."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [LINT_IMPORTS, "--config", str(directory / "pyproject.toml"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def settings() -> dict[str, object]:
    configuration: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return configuration


def decision_modules() -> list[str]:
    contracts = settings()["contracts"]
    assert isinstance(contracts, list)
    [pure] = [contract for contract in contracts if contract["name"].startswith("Decisions are pure")]
    modules: list[str] = pure["source_modules"]
    return modules


def test_every_contract_holds() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """The same packages and contracts with empty modules, to plant an import in."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for package in ("agent", "coordinator", "inference", "protos", "slackwater"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for module in [*decision_modules(), "inference.text", "agent.daemon", "coordinator.driver", "slackwater.client"]:
        path = tmp_path / Path(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(tmp_path).parents:
            (tmp_path / parent / "__init__.py").touch()
        path.touch()
    (tmp_path / "__init__.py").unlink(missing_ok=True)
    (tmp_path / "inference" / "assembler.py").write_text("from inference.text import Detokenizer\n")
    return tmp_path


def test_the_skeleton_itself_keeps_every_contract(skeleton: Path) -> None:
    result = lint(skeleton)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("agent/daemon.py", "import coordinator.driver\n"),
        ("coordinator/driver.py", "import agent.daemon\n"),
        ("inference/task.py", "import coordinator.driver\n"),
        ("protos/__init__.py", "import inference.task\n"),
        ("slackwater/client.py", "import protos\n"),
        ("agent/daemon.py", "import torch\n"),
        ("inference/failover.py", "import time\n"),
        ("inference/task.py", "import asyncio\n"),
    ],
)
def test_a_planted_import_breaks_a_contract(skeleton: Path, module: str, planted: str) -> None:
    (skeleton / module).write_text(planted)
    result = lint(skeleton)
    assert result.returncode != 0
    assert "BROKEN" in result.stdout
