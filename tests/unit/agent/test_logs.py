"""Logs are kept short, read from their end, and followed over whatever happens to their files."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from agent.cli.options import log_to_standard_error
from agent.errors import ConfigInvalid
from agent.logs import FileLog, LogPlaces, follow_lines, journal_command, last_lines, under_journal
from agent.service.units import SERVICE


def test_what_commands_log_stays_out_of_what_they_print(capsys: pytest.CaptureFixture[str]) -> None:
    """`calibrate-power` ends with a table that programs read. Mutation seen to fail here: a logger for stdout."""
    try:
        log_to_standard_error()
        structlog.get_logger().warning("the engine is taken down")
    finally:
        structlog.reset_defaults()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the engine is taken down" in captured.err


class Ended(Exception):
    """Nothing more is written."""


def follow(path: Path, *steps: Callable[[], object]) -> list[str]:
    """Return what is followed while the steps are taken, one each time that there is nothing to read."""
    waiting = iter(steps)

    def wait() -> None:
        try:
            next(waiting)()
        except StopIteration:
            raise Ended from None

    lines: list[str] = []
    source: Iterator[str] = follow_lines(lambda: path, wait)
    with pytest.raises(Ended):
        lines.extend(source)
        raise AssertionError("following does not end by itself")
    return lines


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_full_file_is_turned_over_and_the_oldest_goes(tmp_path: Path) -> None:
    """Mutations seen to fail here: turn over in the other order; keep one more."""
    log = FileLog(tmp_path / "state", bytes_max=60, kept=3)
    for number in range(20):
        log(None, "info", {"event": "engine changed", "number": number})
    folder = tmp_path / "state/log"
    assert sorted(path.name for path in folder.iterdir()) == ["agent.log.1", "agent.log.2"]
    newest = [json.loads(line)["number"] for line in (folder / "agent.log.1").read_text().splitlines()]
    older = [json.loads(line)["number"] for line in (folder / "agent.log.2").read_text().splitlines()]
    assert (older, newest) == ([16, 17], [18, 19])


def test_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    FileLog(tmp_path / "state")(None, "info", {"event": "x"})
    assert LogPlaces(tmp_path / "state").agent.stat().st_mode & 0o777 == 0o600
    assert LogPlaces(tmp_path / "state").agent.parent.stat().st_mode & 0o777 == 0o700


def test_a_log_that_cannot_be_written_costs_nothing_but_the_line(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    LogPlaces(tmp_path).agent.mkdir()
    event = log(None, "info", {"event": "x"})
    assert event["event"] == "x"
    assert "Is a directory" in event["log_file_error"]


@pytest.mark.parametrize("count", [1, 3, 5000])
def test_the_last_lines_are_those_at_the_end(tmp_path: Path, count: int) -> None:
    path = tmp_path / "log"
    written = [f"line {number} {'x' * 90}" for number in range(4000)]
    path.write_text("\n".join(written) + "\n")
    assert last_lines(path, count) == written[-count:]
    assert last_lines(tmp_path / "none", count) == []


def test_lines_are_followed_over_a_half_line_a_turn_a_cut_and_a_gap(tmp_path: Path) -> None:
    """Mutation seen to fail here: leave out the comparison of inodes."""
    path = tmp_path / "log"
    path.write_text("old\n")

    def turn_over() -> None:
        path.rename(tmp_path / "log.1")

    lines = follow(
        path,
        lambda: append(path, "one\ntw"),
        lambda: append(path, "o\n"),
        turn_over,
        lambda: append(path, "three\n"),
        lambda: path.write_text("cut\n"),
    )
    assert lines == ["one", "two", "three", "cut"]


def test_a_newer_start_of_an_engine_is_followed_from_its_beginning(tmp_path: Path) -> None:
    first, second = tmp_path / "1-1.log", tmp_path / "2-2.log"
    first.write_text("first start\n")
    lines: list[str] = []
    steps = iter([lambda: second.write_text("second start\n")])

    def wait() -> None:
        try:
            next(steps)()
        except StopIteration:
            raise Ended from None

    with pytest.raises(Ended):
        lines.extend(follow_lines(lambda: sorted(tmp_path.glob("*.log"))[-1], wait))
    assert lines == ["second start"]


def test_an_engines_newest_log_is_found_and_a_wrong_name_gets_the_right_ones(tmp_path: Path) -> None:
    logs = tmp_path / "engines/main/logs"
    logs.mkdir(parents=True)
    for name in ("100-1.log", "200-2.log"):
        (logs / name).touch()
    places = LogPlaces(tmp_path)
    assert places.engine("main").name == "200-2.log"
    assert set(places.all()) == {"engine-main.log"}
    with pytest.raises(ConfigInvalid, match="engines with one: main"):
        places.engine("mian")


def test_a_service_is_read_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert journal_command(5, False, root=tmp_path) is None
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system" / SERVICE).touch()
    command = journal_command(5, True, root=tmp_path)
    assert command == [
        *("journalctl", f"--unit={SERVICE}", "--lines=5", "--output=cat", "--no-pager", "--follow"),
    ]


def test_the_journal_is_known_by_its_socket_since_the_variable_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        status = os.fstat(stream.fileno())
        ours = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert under_journal(ours, stream.fileno())
        assert not under_journal({"JOURNAL_STREAM": "9:1"}, stream.fileno())
        assert not under_journal({}, stream.fileno())


def test_an_exception_is_kept_with_its_place(tmp_path: Path) -> None:
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError as error:
        FileLog(tmp_path)(None, "error", {"event": "x", "exc_info": error})
    [line] = LogPlaces(tmp_path).agent.read_text().splitlines()
    assert "ZeroDivisionError: a bug" in json.loads(line)["exception"]


def test_a_log_of_another_user_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path, mode: str) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(ConfigInvalid, match="with sudo"):
        last_lines(tmp_path / "agent.log", 5)
