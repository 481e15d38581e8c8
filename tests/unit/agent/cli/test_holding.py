"""pause, resume and drain, where they cannot do what they are asked for."""

from pathlib import Path

import pytest

from agent.cli import holding
from agent.errors import ExitStatus
from agent.owner.pause import PAUSE_FILE, Pause, read_pause

CONFIG = """
state_dir = "state"
[[engines]]
engine_id = "main"
kind = "fake"
model_directory = "model"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(CONFIG)
    return path


def test_whoever_may_not_pause_this_agent_is_told_so_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation seen to fail here: read the file as the agent does, with a line in the log that it cannot be read."""
    # Whoever runs the tests may be root, who may read everything: but not a directory that is none.
    (config.parent / "state").write_text("")
    with pytest.raises(SystemExit) as ended:
        holding.pause(config=config)
    assert ended.value.code == ExitStatus.DISK_FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slackwater-agent: cannot write into ")
    assert err.endswith("; is this your agent? try sudo\n")
    assert err.count("\n") == 1


def test_a_damaged_pause_is_replaced_without_a_word(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = config.parent / "state"
    state.mkdir()
    (state / PAUSE_FILE).write_bytes(b"{")
    holding.drain(config=config)
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    # It may have been a pause, and `drain` ends none.
    assert read_pause(state) == Pause(paused=True, draining=True, asked_at_ms=read_pause(state).asked_at_ms)
