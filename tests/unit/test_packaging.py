"""The generic package names (`agent`, `inference`, ...) must be ours: a foreign distribution could shadow them."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["agent", "coordinator", "inference", "protos"])
def test_top_level_package_loads_from_this_repository(name: str) -> None:
    # Mutation: installing PyPI's `inference` in front of the editable path makes this fail.
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / name


def test_the_sdk_loads_from_its_own_distribution() -> None:
    module = importlib.import_module("slackwater")
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / "sdk" / "slackwater"


def test_the_wheel_holds_the_four_packages_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["agent", "coordinator", "inference", "protos"]


@pytest.mark.parametrize("file", ["pyproject.toml", "sdk/pyproject.toml"])
def test_every_runtime_dependency_is_pinned(file: str) -> None:
    """A fleet of volunteers must not meet a release of a library that nobody has tried."""
    project = tomllib.loads((ROOT / file).read_text())["project"]
    loose = [requirement for requirement in project["dependencies"] if "==" not in requirement]
    assert loose == []


def test_daemon_and_sdk_pin_the_same_versions() -> None:
    """Both are installed into one environment by the developers."""
    pins: dict[str, set[str]] = {}
    for file in ("pyproject.toml", "sdk/pyproject.toml"):
        for requirement in tomllib.loads((ROOT / file).read_text())["project"]["dependencies"]:
            name, _, version = requirement.partition("==")
            pins.setdefault(name, set()).add(version)
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}


def test_the_daemons_install_without_torch() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [name for name in dependencies if name.startswith(("torch", "transformers", "vllm"))] == []
    assert "torch" not in sys.modules
