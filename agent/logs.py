"""Where the agent's log and its engines' logs are, how the agent's own is kept short, and how they are read.

A service writes to the journal. Without one, lines go to <state_dir>/log/agent.log as JSON, which is turned over
when it is full. An engine has one file per start (`agent.engines.files`). None of them ever holds a prompt or an
answer: the agent logs none, and engines are started with their request logs off.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.processors import format_exc_info

from agent.engines.files import engines_directory
from agent.errors import ConfigInvalid
from agent.identity import open_state_dir
from agent.service.units import SERVICE

# A day of an agent whose connection flaps is about 2 MB; five files hold the week before a question is asked.
LOG_BYTES_MAX = 5 * 1024 * 1024
LOGS_KEPT = 5
LINES_DEFAULT = 100
# Read at a time from the end of a file: about a thousand lines.
_BLOCK_BYTES = 128 * 1024
# How soon `logs -f` shows a new line.
FOLLOW_PERIOD_S = 0.25


class FileLog:
    """A structlog processor that also writes every line to the rotating file, as JSON.

    Put it in front of the renderer. A disk that is full costs lines, never the agent.
    """

    def __init__(self, state_dir: Path, *, bytes_max: int = LOG_BYTES_MAX, kept: int = LOGS_KEPT) -> None:
        self._path = LogPlaces(state_dir).agent
        self._bytes_max = bytes_max
        self._kept = kept
        open_state_dir(state_dir)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """Write one line; called by structlog."""
        line = json.dumps(format_exc_info(logger, method, dict(event)), default=str).encode() + b"\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write(line)
                full = file.tell() >= self._bytes_max
            if full:
                self._turn_over()
        except OSError as error:
            # It goes to the terminal all the same, with the reason why it is not in the file.
            event["log_file_error"] = str(error)
        return event

    def _turn_over(self) -> None:
        """Rename agent.log to agent.log.1 and so on; the oldest goes."""
        for number in range(self._kept - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                newer.replace(older)


@dataclass(frozen=True, slots=True)
class LogPlaces:
    """The log files of one state directory."""

    state_dir: Path

    @property
    def agent(self) -> Path:
        return self.state_dir / "log" / "agent.log"

    def engine(self, engine_id: str) -> Path:
        """Return the newest log of an engine.

        Raises:
            ConfigInvalid: it never started, or there is no such engine.
        """
        logs = sorted((engines_directory(self.state_dir) / engine_id / "logs").glob("*.log"))
        if not logs:
            known = sorted(self._engines())
            raise ConfigInvalid(f"engine {engine_id!r} has no log; engines with one: {', '.join(known) or 'none'}")
        return logs[-1]

    def all(self) -> dict[str, Path]:
        """Return the newest log of everything that has one, by a name for a bundle."""
        found = {f"engine-{engine_id}.log": self.engine(engine_id) for engine_id in self._engines()}
        return ({"agent.log": self.agent} if self.agent.exists() else {}) | found

    def _engines(self) -> list[str]:
        directory = engines_directory(self.state_dir)
        return [path.parent.name for path in directory.glob("*/logs") if any(path.glob("*.log"))]


def under_journal(environment: Mapping[str, str] = os.environ, descriptor: int = 2) -> bool:
    """Whether this process's standard error goes to the journal, which keeps lines better than a file.

    The variable alone says little: everything that a service starts inherits it (systemd.exec(5)).
    """
    status = os.fstat(descriptor)
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def journal_command(lines: int, follow: bool, *, root: Path = Path("/")) -> list[str] | None:
    """Return the command that shows the service's log; None where the agent is no service and writes a file."""
    system = root / "etc/systemd/system" / SERVICE
    own = Path.home() / ".config/systemd/user" / SERVICE
    # Not Path.exists: a home that may not be entered has no service of ours either.
    if not system.exists() and not os.path.exists(own):
        return None
    unit = f"--unit={SERVICE}" if system.exists() else f"--user-unit={SERVICE}"
    return ["journalctl", unit, f"--lines={lines}", "--output=cat", "--no-pager", *(["--follow"] if follow else [])]


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a file; none where it does not exist.

    Raises:
        ConfigInvalid: it may not be read by whoever asks.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise ConfigInvalid(f"cannot read {path}: run this as the agent's user, or with sudo") from error
    with file:
        place = file.seek(0, os.SEEK_END)
        tail = b""
        while place > 0 and tail.count(b"\n") <= count:
            step = min(_BLOCK_BYTES, place)
            place = file.seek(place - step)
            tail = file.read(step) + tail
    return list(deque(tail.decode(errors="replace").splitlines(), maxlen=count))


def follow_lines(
    newest: Callable[[], Path], wait: Callable[[], None] = lambda: time.sleep(FOLLOW_PERIOD_S)
) -> Iterator[str]:
    """Return lines as they are written, for ever: over turned files, cut files and new starts.

    Args:
        newest: which file to read now.
        wait: called when there is nothing new; tests end by raising from it.
    """
    identity, place, rest = None, 0, b""
    first = True
    while True:
        path = newest()
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != identity:
                    # What was there before following began was shown by `last_lines`.
                    identity, place, rest = (status.st_dev, status.st_ino), status.st_size if first else 0, b""
                elif status.st_size < place:
                    place, rest = 0, b""
                file.seek(place)
                data = file.read(_BLOCK_BYTES)
        except FileNotFoundError:
            # Turned over just now; the next one comes with the next line.
            data = b""
        first = False
        if not data:
            wait()
            continue
        place += len(data)
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
