"""What every command of the agent shares."""

import pytest
from typer.testing import CliRunner

from agent.__main__ import app


@pytest.mark.parametrize("command", ["doctor", "models"])
def test_a_command_that_prints_a_json_array_promises_no_object(command: str) -> None:
    """Mutation seen to fail here: say "one JSON object" of every command."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert "JSON" in shown
    assert "object" not in shown
