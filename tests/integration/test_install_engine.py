"""An engine's environment is built with real pip out of a folder of tiny wheels; no gigabyte is moved."""

import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from agent.engines.install import InstalledEngine, InstallFailed, Recipe, install_engine, installed_engines, make_recipe
from agent.errors import ConfigInvalid

# Makes virtual environments.
pytestmark = pytest.mark.slow


def write_wheel(folder: Path, name: str, version: str, content: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"__version__ = '{version}'\n{content}")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def recipe(wheels: Path, version: str, check: str = "import torch, sys; sys.path.append(sys.argv[1])") -> Recipe:
    index = ("--no-index", f"--find-links={wheels}")
    return Recipe(
        kind="torch",
        pins=(f"torch=={version}",),
        index_arguments=index,
        needed_bytes=1,
        check=check + "; import inference",
    )


@pytest.fixture(autouse=True)
def _pip_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own index and constraints are no part of a test."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def run_version(engine: InstalledEngine) -> str:
    program = [str(engine.python), "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()


def test_an_engine_is_installed_once_replaced_and_kept_through_a_broken_release(tmp_path: Path) -> None:
    """Mutations seen to fail here: link before the check; keep what was never completed."""
    wheels, state, lines = tmp_path / "wheels", tmp_path / "state", list[str]()
    wheels.mkdir()
    for version in ("1.0", "2.0"):
        write_wheel(wheels, "torch", version)
    write_wheel(wheels, "torch", "3.0", "raise ImportError('undefined symbol')")

    first = install_engine(recipe(wheels, "1.0"), state, lines.append)
    assert run_version(first) == "1.0"
    assert installed_engines(state) == [first]
    assert any("Successfully installed torch-1.0" in line for line in lines)

    lines.clear()
    assert install_engine(recipe(wheels, "1.0"), state, lines.append) == first
    assert not any("Successfully installed" in line for line in lines), "the second run has nothing to do"

    with pytest.raises(InstallFailed, match="undefined symbol"):
        install_engine(recipe(wheels, "3.0"), state, lines.append)
    assert installed_engines(state) == [first], "what does not import is not put to use"

    # Whatever stopped it, the next run goes on in the directory that is there.
    write_wheel(wheels, "torch", "3.0")
    lines.clear()
    with pytest.raises(InstallFailed, match="undefined symbol"):
        install_engine(recipe(wheels, "3.0"), state, lines.append)
    assert "going on with what an earlier run has left" in lines

    second = install_engine(recipe(wheels, "2.0"), state, lines.append)
    assert installed_engines(state) == [second]
    assert run_version(second) == "2.0"
    kept = {path.name.split("-")[1] for path in (state / "environments").glob("torch-*")}
    assert kept == {"1.0", "2.0"}, "the one before stays, the broken one goes"
    assert not (state / "environments" / "downloads").exists()


def test_a_package_that_cannot_be_had_leaves_no_engine_and_says_what_pip_said(tmp_path: Path) -> None:
    with pytest.raises(InstallFailed, match=r"No matching distribution found for torch==4\.0"):
        install_engine(recipe(tmp_path, "4.0"), tmp_path / "state", lambda line: None)
    assert installed_engines(tmp_path / "state") == []


def test_too_little_space_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InstallFailed, match="GB of free space"):
        install_engine(replace(recipe(tmp_path, "1.0"), needed_bytes=10**18), tmp_path, lambda line: None)
    assert list((tmp_path / "environments").glob("torch*")) == []


def test_another_python_is_taken_only_if_it_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"no Python of version 3\.11"):
        install_engine(recipe(tmp_path, "1.0"), tmp_path, lambda line: None, python=Path("/bin/false"))


def test_the_pins_are_those_of_the_agent_that_is_installed() -> None:
    made = make_recipe("torch", gpu=False, cpu_index=["--extra-index-url", "https://example.org"])
    names = {pin.partition("==")[0] for pin in made.pins}
    assert {"torch", "transformers", "structlog", "protobuf", "msgspec"} <= names
    assert all("==" in pin for pin in made.pins)
    assert made.version
    assert {pin.partition("=")[0].rstrip(">") for pin in make_recipe("vllm", gpu=True).pins} == {"vllm"}
    assert "--extra-index-url" not in make_recipe("torch", gpu=True).index_arguments


def test_vllm_is_not_offered_to_a_machine_without_a_card() -> None:
    with pytest.raises(ConfigInvalid, match="install-engine torch"):
        make_recipe("vllm", gpu=False)
    with pytest.raises(ConfigInvalid, match="there are torch, vllm"):
        make_recipe("tgi", gpu=True)
