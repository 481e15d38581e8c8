"""`slackwater-coordinator simulate` as a program: what it prints, writes and refuses, and that a seed is enough."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.__main__ import app
from coordinator.planning.simulation.scenario import SCENARIOS
from coordinator.startup import ExitCode

SMALL = SCENARIOS / "small.toml"
SHORT = (str(SMALL), "--hours", "0.01")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_it_prints_tables_without_colours_where_nobody_looks() -> None:
    result = run(*SHORT)
    assert result.exit_code == ExitCode.OK
    assert "interactive" in result.stdout
    assert "RTX-4090" in result.stdout
    assert "hash " in result.stdout
    assert "\x1b" not in result.output


def test_two_processes_give_the_same_hash_whatever_python_hashes() -> None:
    """Fails when the order of a set of strings decides anything."""

    def digest(hash_seed: str) -> str:
        command = (sys.executable, "-m", "coordinator", "simulate", *SHORT, "--json")
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return str(json.loads(done.stdout)["hash"])

    assert digest("1") == digest("2")


def test_seed_and_hours_stand_in_place_of_the_scenario_s() -> None:
    first, again, other = (json.loads(run(*SHORT, "--seed", seed, "--json").stdout) for seed in ("5", "5", "6"))
    assert first == again
    assert first["hash"] != other["hash"]
    assert first["virtual_hours"] < 0.03


def test_a_trace_takes_the_place_of_the_loads(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    one = {"model": "Meta-Llama-3-8B-Instruct", "service_class": "batch", "prompt_tokens": 40, "answer_tokens": 7}
    trace.write_text("".join(json.dumps({"at_s": at_s, **one}) + "\n" for at_s in (0.5, 1.5, 31.0)))
    figures = json.loads(run(str(SMALL), "--trace", str(trace), "--json").stdout)
    assert (figures["tasks"], figures["answered"], figures["answer_tokens"]) == (3, 3, 21)
    # The first two came before the warm-up's end.
    assert [(one["service_class"], one["tasks"]) for one in figures["classes"]] == [("batch", 1)]


def test_it_writes_charts(tmp_path: Path) -> None:
    result = run(*SHORT, "--plots", str(tmp_path / "plots"))
    assert result.exit_code == ExitCode.OK
    written = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert written == ["end_to_end.svg", "first_token.svg", "fleet.svg", "token.svg"]
    assert all((tmp_path / "plots" / name).read_text().startswith("<svg ") for name in written)


@pytest.mark.parametrize("wrong", ["scenario", "trace", "plots"])
def test_what_cannot_be_used_is_said_in_one_line(tmp_path: Path, wrong: str) -> None:
    absent, file = str(tmp_path / "absent"), tmp_path / "file"
    file.write_text("")
    arguments, code = {
        "scenario": ((absent,), ExitCode.BAD_DATA),
        "trace": ((*SHORT, "--trace", absent), ExitCode.BAD_DATA),
        "plots": ((*SHORT, "--plots", str(file / "below")), ExitCode.IO_ERROR),
    }[wrong]
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith("slackwater-coordinator: cannot ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_its_help_teaches_with_an_example() -> None:
    shown = run("--help").stdout
    assert "small.toml" in shown
    assert '"at_s"' in shown
