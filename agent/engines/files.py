"""Where an engine keeps its files: home, socket and logs.

<state_dir>/engines/<engine_id>/home               empty at each start
<state_dir>/engines/<engine_id>/cache              compiled code of this engine alone; stays
<state_dir>/engines/<engine_id>/logs               one file per start, the newest five
<state_dir>/engines/<engine_id>/runtime-directory  names the directory below, for the sweep after a crash
$XDG_RUNTIME_DIR or /tmp, slackwater-<random>      socket and temporary files; its path is short
"""

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.clock import wall_ms

LOGS_KEPT = 5
# An engine that logs each request at full speed fills this in hours; the end is what explains a crash.
LOG_BYTES_MAX = 16 * 1024 * 1024
LOG_TAIL_BYTES = 1024 * 1024
# sun_path has 108 bytes, of which one ends the string. Engines put sockets with names of up to 45 bytes (a UUID and
# a prefix) beside ours.
RUNTIME_DIRECTORY_BYTES_MAX = 60

_RUNTIME_PREFIX = "slackwater-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFiles:
    """The files of one start of an engine."""

    home: Path
    cache: Path
    runtime_directory: Path
    socket_path: Path
    log_path: Path


class EngineFiles:
    """The files of one engine. Every method blocks on the disk: call them in a thread."""

    def __init__(self, state_dir: Path, engine_id: str) -> None:
        self._directory = engines_directory(state_dir) / engine_id
        self._logs = self._directory / "logs"
        self._log: Path | None = None

    def prepare(self, start: int) -> StartFiles:
        """Make what the next start needs, empty the home, drop old logs.

        Raises:
            OSError: a directory cannot be made.
        """
        home = self._directory / "home"
        if home.exists():
            shutil.rmtree(home)
        home.mkdir(parents=True, mode=0o700)
        cache = self._directory / "cache"
        for directory in (cache, self._logs):
            directory.mkdir(mode=0o700, exist_ok=True)
        runtime_directory = self._make_runtime_directory()
        # The time in front makes names sort by age over restarts of the agent.
        self._log = self._logs / f"{wall_ms()}-{start}.log"
        self._log.touch(mode=0o600, exist_ok=False)
        for old in sorted(self._logs.glob("*.log"))[:-LOGS_KEPT]:
            # A clock that was set back makes the newest log sort first.
            if old != self._log:
                old.unlink()
        return StartFiles(
            home=home,
            cache=cache,
            runtime_directory=runtime_directory,
            socket_path=runtime_directory / "engine.sock",
            log_path=self._log,
        )

    @property
    def log_name(self) -> str:
        """File name of the newest log; it says nothing about the machine, unlike the path."""
        return "" if self._log is None else self._log.name

    def log_tail(self, size_bytes: int) -> str:
        """Return the end of the newest log; what is no text in it is replaced."""
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            log.seek(-min(size_bytes, log.seek(0, os.SEEK_END)), os.SEEK_END)
            return log.read(size_bytes).decode(errors="replace")

    def bound_log(self) -> None:
        """Cut the newest log down to its tail once it has grown too long.

        The engine appends, so it goes on at the new end; lines written during the cut may be lost.
        """
        if self._log is None or self._log.stat().st_size <= LOG_BYTES_MAX:
            return
        with self._log.open("rb+") as log:
            log.seek(-LOG_TAIL_BYTES, os.SEEK_END)
            tail = log.read(LOG_TAIL_BYTES)
            log.seek(0)
            log.write(b"(older lines were cut off here)\n" + tail)
            log.truncate()

    def remove_runtime_directory(self) -> None:
        """Remove socket and temporary files of the newest start, if any."""
        remove_runtime_directory(self._directory)

    def _make_runtime_directory(self) -> Path:
        self.remove_runtime_directory()
        base = _runtime_base()
        directory = Path(tempfile.mkdtemp(prefix=_RUNTIME_PREFIX, dir=base))
        (self._directory / "runtime-directory").write_text(str(directory))
        return directory


def engines_directory(state_dir: Path) -> Path:
    return state_dir / "engines"


def remove_runtime_directory(engine_directory: Path) -> None:
    """Remove the runtime directory that an engine's directory names, if any."""
    record = engine_directory / "runtime-directory"
    try:
        directory = Path(record.read_text())
    except FileNotFoundError:
        return
    # A damaged record must not make this delete something else.
    if directory.name.startswith(_RUNTIME_PREFIX):
        with suppress(FileNotFoundError):
            shutil.rmtree(directory)
    record.unlink()


def _runtime_base() -> Path:
    """Return a directory on this machine in which a short, private directory can be made."""
    candidate = os.environ.get("XDG_RUNTIME_DIR", "")
    # "slackwater-" and eight random characters come behind it.
    fits = len(os.fsencode(candidate)) + len(_RUNTIME_PREFIX) + 9 <= RUNTIME_DIRECTORY_BYTES_MAX
    if candidate and fits and os.access(candidate, os.W_OK | os.X_OK):
        return Path(candidate)
    # mkdtemp makes a directory of mode 0700 with a name that cannot be guessed.
    return Path("/tmp")
