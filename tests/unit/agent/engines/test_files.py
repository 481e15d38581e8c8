"""Where an engine keeps its files, and what is cleared away."""

from pathlib import Path

import pytest

from agent.engines.files import LOG_BYTES_MAX, LOG_TAIL_BYTES, LOGS_KEPT, EngineFiles, remove_runtime_directory


@pytest.fixture(autouse=True)
def runtime_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def test_a_start_has_an_empty_home_and_a_private_short_runtime_directory(tmp_path: Path) -> None:
    files = EngineFiles(tmp_path, "main")
    first = files.prepare(1)
    (first.home / ".cache").mkdir()
    (first.cache / "compiled").touch()
    second = files.prepare(2)
    assert list(second.home.iterdir()) == []
    assert (second.cache / "compiled").exists()
    assert not first.runtime_directory.exists()
    for directory in (second.home, second.runtime_directory, second.cache):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert second.log_path.stat().st_mode & 0o777 == 0o600
    assert len(str(second.socket_path).encode()) < 107
    files.remove_runtime_directory()
    assert not second.runtime_directory.exists()


def test_a_runtime_directory_of_the_session_is_used_only_if_paths_in_it_stay_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    files = EngineFiles(tmp_path, "main")
    assert files.prepare(1).runtime_directory.parent == Path("/tmp")
    files.remove_runtime_directory()


def test_the_newest_logs_are_kept(tmp_path: Path) -> None:
    files = EngineFiles(tmp_path, "main")
    names = []
    for start in range(1, LOGS_KEPT + 4):
        names.append(files.prepare(start).log_path.name)
    assert sorted(path.name for path in files.prepare(99).log_path.parent.iterdir())[:-1] == names[-LOGS_KEPT + 1 :]
    files.remove_runtime_directory()


def test_a_log_that_has_grown_too_long_keeps_its_end(tmp_path: Path) -> None:
    files = EngineFiles(tmp_path, "main")
    log = files.prepare(1).log_path
    with log.open("wb") as stream:
        stream.truncate(LOG_BYTES_MAX)
    files.bound_log()
    assert log.stat().st_size == LOG_BYTES_MAX
    with log.open("ab") as stream:
        stream.write(b"the last words")
    files.bound_log()
    assert log.stat().st_size <= LOG_TAIL_BYTES + 100
    assert log.read_bytes().endswith(b"the last words")
    files.remove_runtime_directory()


def test_a_damaged_record_of_a_runtime_directory_deletes_nothing_else(tmp_path: Path) -> None:
    """Mutation tried: without the look at the name, the sweep deletes whatever the record says."""
    precious = tmp_path / "precious"
    precious.mkdir()
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "runtime-directory").write_text(str(precious))
    remove_runtime_directory(engine)
    assert precious.exists()
