"""What an agent that was killed leaves behind is ended by the service's last step."""

import os
import subprocess
import sys
from pathlib import Path

from agent.daemon import marker_of
from agent.engines.processes import MARKER_VARIABLE
from agent.service.clean_up import clean_up


def test_engines_that_ignore_sigterm_are_ended_and_their_files_removed(tmp_path: Path) -> None:
    """Mutations seen to fail here: another directory's marker; leave the runtime directory."""
    engine_directory, runtime = tmp_path / "engines/main", tmp_path / "slackwater-run"
    engine_directory.mkdir(parents=True)
    runtime.mkdir()
    (engine_directory / "runtime-directory").write_text(str(runtime))
    program = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]
    ours = os.environ | {MARKER_VARIABLE: f"{marker_of(tmp_path)}/main"}
    others = os.environ | {MARKER_VARIABLE: f"{marker_of(tmp_path / 'other')}/main"}
    lines: list[str] = []
    with subprocess.Popen(program, env=ours) as engine, subprocess.Popen(program, env=others) as stranger:
        try:
            clean_up(tmp_path, lines.append)
            assert engine.wait(5) == -9
            assert stranger.poll() is None
        finally:
            stranger.kill()
    assert lines == [f"ended engine processes {engine.pid}"]
    assert not runtime.exists()
