"""The owner's pause: a small file in the state directory, so that it needs no network and no running agent.

`slackwater-agent pause` writes it, the running daemon sees it within a tenth of a
second, and an agent that starts later finds it.
"""

import os
import re
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import msgspec
import structlog

from agent.errors import ConfigInvalid

PAUSE_FILE = "pause.json"
# A pause of more than a month is one without end, or a slip of the finger.
PAUSE_S_MAX = 31 * 24 * 3600.0

_FOR = re.compile(r"(?:(\d{1,4})\s*h)?\s*(?:(\d{1,5})\s*m(?:in)?)?", re.ASCII)
_UNTIL = re.compile(r"(\d{1,2}):(\d{2})", re.ASCII)

log = structlog.get_logger()


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner last asked for.

    Args:
        paused: no card is lent.
        until_ms: Unix milliseconds at which the pause ends by itself; None for one without end.
        draining: no new work is taken; what runs may end.
        asked_at_ms: when, by which a confirmation names what it confirms.
    """

    paused: bool = False
    until_ms: int | None = None
    draining: bool = False
    asked_at_ms: int = 0


# A file that cannot be read may have said "paused": the owner wins.
_UNREADABLE = Pause(paused=True)


def write_pause(pause: Pause, state_dir: Path) -> None:
    """Replace the file as a whole, for the owner's eyes only; it outlives a power cut.

    Raises:
        OSError: it cannot be written.
    """
    fresh = state_dir / (PAUSE_FILE + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if os.geteuid() == 0:
            # `sudo slackwater-agent pause`: the agent, which is another user, must be able to read it.
            owner = os.stat(state_dir)
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        file.write(msgspec.json.encode(pause))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(state_dir / PAUSE_FILE)


def pause_to_change(state_dir: Path) -> Pause:
    """Return what the owner last asked for, for whoever writes it anew at once.

    Raises:
        OSError: it may not be read, or the disk is broken.
    """
    try:
        return _load(state_dir)
    except msgspec.MsgspecError:
        return _UNREADABLE


def read_pause(state_dir: Path) -> Pause:
    """Return what the owner last asked for; a file that cannot be understood counts as a pause without end."""
    try:
        return _load(state_dir)
    except (OSError, msgspec.MsgspecError) as error:
        log.error(
            "cannot read the pause file: nothing is lent until `resume` writes it again",
            path=str(state_dir / PAUSE_FILE),
            error=str(error),
        )
        return _UNREADABLE


def _load(state_dir: Path) -> Pause:
    try:
        return msgspec.json.decode((state_dir / PAUSE_FILE).read_bytes(), type=Pause)
    except FileNotFoundError:
        return Pause()


class PauseWatch:
    """Notices that the file changed, at the cost of one stat."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        # Made once: it is looked at several times a second.
        self._path = str(state_dir / PAUSE_FILE)
        # Before it is read, so that a change in between is seen.
        self._seen = self._stamp()
        self.pause = read_pause(state_dir)

    def changed(self) -> bool:
        """Read the file again where it is another one than before; return whether it says something else."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        before, self.pause = self.pause, read_pause(self._state_dir)
        return self.pause != before

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        # Each write is a new file; its number alone may come back.
        return stat.st_ino, stat.st_mtime_ns


def parse_pause_end(words: list[str], now_ms: int, zone: tzinfo | None = None) -> int | None:
    """Return when a pause ends (Unix ms): "for 2h", "for 90m", "for 1h 30m", "until 18:00", or no words for no end.

    Args:
        zone: of the clock on the owner's wall; None is the machine's.

    Raises:
        ConfigInvalid: says what is understood.
    """
    if not words:
        return None
    # They may come as one, in quotes, as the help shows them.
    kind, _, rest = " ".join(" ".join(words).split()).partition(" ")
    if kind == "for" and rest:
        match = _FOR.fullmatch(rest)
        if match is not None and any(match.groups()):
            seconds = int(match[1] or 0) * 3600 + int(match[2] or 0) * 60
            if 0 < seconds <= PAUSE_S_MAX:
                return now_ms + seconds * 1000
    if kind == "until":
        match = _UNTIL.fullmatch(rest)
        if match is not None and int(match[1]) < 24 and int(match[2]) < 60:
            now = datetime.fromtimestamp(now_ms / 1000, zone)
            end = now.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
            if end <= now:
                end += timedelta(days=1)
            return round(end.timestamp() * 1000)
    raise ConfigInvalid(
        f"cannot understand {' '.join(words)!r}: say `pause`, `pause for 2h`, `pause for 90m` or `pause until 18:00`; "
        f"at most 31 days"
    )
