"""The file with the owner's pause, and how a person says until when."""

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agent.errors import ConfigInvalid
from agent.owner.pause import PAUSE_FILE, Pause, PauseWatch, parse_pause_end, read_pause, write_pause

NOON_MS = round(datetime(2026, 12, 2, 12, 0, tzinfo=UTC).timestamp() * 1000)
MINUTE_MS = 60_000


def test_what_is_written_is_read_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    pause = Pause(paused=True, until_ms=123, draining=True, asked_at_ms=5)
    write_pause(pause, tmp_path)
    assert read_pause(tmp_path) == pause
    assert stat.S_IMODE(os.stat(tmp_path / PAUSE_FILE).st_mode) == 0o600


def test_no_file_is_no_pause(tmp_path: Path) -> None:
    assert read_pause(tmp_path) == Pause()


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"paused": 3}', b'{"paused": false, "until_ms": "x"}'])
def test_a_file_that_cannot_be_understood_counts_as_a_pause(tmp_path: Path, garbage: bytes) -> None:
    """It may have said so, and the owner wins. Mutation seen to fail here: take it for no pause."""
    (tmp_path / PAUSE_FILE).write_bytes(garbage)
    assert read_pause(tmp_path).paused


def test_a_change_is_noticed_once(tmp_path: Path) -> None:
    watch = PauseWatch(tmp_path)
    assert not watch.changed()
    write_pause(Pause(paused=True), tmp_path)
    assert watch.changed()
    assert watch.pause.paused
    assert not watch.changed()
    # The same again is a new file that says nothing new.
    write_pause(Pause(paused=True), tmp_path)
    assert not watch.changed()
    (tmp_path / PAUSE_FILE).unlink()
    assert watch.changed()
    assert watch.pause == Pause()


def test_a_change_while_the_watch_begins_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner who pauses while the agent starts is heard. Mutation seen to fail here: read, then take the stamp."""

    def read_just_before_a_pause(state_dir: Path) -> Pause:
        pause = read_pause(state_dir)
        write_pause(Pause(paused=True), state_dir)
        return pause

    with monkeypatch.context() as patch:
        patch.setattr("agent.owner.pause.read_pause", read_just_before_a_pause)
        watch = PauseWatch(tmp_path)
    assert watch.changed()
    assert watch.pause.paused


def test_the_words_may_come_as_one() -> None:
    assert parse_pause_end(["for 2h"], NOON_MS, UTC) == NOON_MS + 120 * MINUTE_MS
    assert parse_pause_end([" until  18:00 "], NOON_MS, UTC) == NOON_MS + 360 * MINUTE_MS
    # The variable that a script forgot to set.
    with pytest.raises(ConfigInvalid):
        parse_pause_end([""], NOON_MS, UTC)


@pytest.mark.parametrize(
    ("words", "minutes"),
    [
        ("for 2h", 120),
        ("for 90m", 90),
        ("for 90 min", 90),
        ("for 1h 30m", 90),
        ("for 1h30m", 90),
        ("until 18:00", 360),
        ("until 12:01", 1),
        ("until 12:00", 24 * 60),
        ("until 9:30", 21 * 60 + 30),
    ],
)
def test_an_end_is_said_as_people_say_it(words: str, minutes: int) -> None:
    assert parse_pause_end(words.split(), NOON_MS, UTC) == NOON_MS + minutes * MINUTE_MS


def test_a_pause_without_an_end_lasts_until_resume() -> None:
    assert parse_pause_end([], NOON_MS, UTC) is None


@pytest.mark.parametrize(
    "words", ["for", "for ever", "for 0h", "for 2x", "for -1h", "for 99999m", "until", "until 24:00", "until 7", "2h"]
)
def test_what_is_not_understood_is_refused_with_what_would_be(words: str) -> None:
    with pytest.raises(ConfigInvalid, match="pause for 2h"):
        parse_pause_end(words.split(), NOON_MS, UTC)
