"""Input on consoles, terminals and SSH sessions, by the access times of their device files."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from stat import S_ISCHR
from typing import NoReturn

from agent.clock import monotonic_s, wall_ms
from agent.owner.events import InputObserved, OwnerEvent, Unknown
from agent.signals.source import Pace, SourceAbsent, SourceBroken, Tell

# More terminals than that are a fault; each costs a system call a second.
TERMINALS_MAX = 512
# /dev/tty0 stands for the console in front, /dev/tty for the reader's own: both are seen as what they stand for.
_ALIASES = frozenset({"tty", "tty0"})


class TtySource:
    """Watches st_atime of /dev/tty1... and /dev/pts/0...

    The kernel moves a terminal's atime when its program reads what was typed,
    and only in steps of 8 s (so that nobody can time key strokes). Hence any
    *change* counts as input now, and the wall clock is asked only once per
    terminal, when it is first seen: later jumps of the clock do no harm. An
    atime in the future says that the clock jumped back, and counts as input now.

    Terminals of the machine's own programs count when something types into
    them; that errs on the owner's side.

    Args:
        dev: where the device files are.
        is_terminal: whether a file's mode is that of a terminal; tests have plain files.
    """

    name = "tty"

    def __init__(
        self,
        dev: Path = Path("/dev"),
        *,
        now: Callable[[], float] = monotonic_s,
        wall: Callable[[], int] = wall_ms,
        is_terminal: Callable[[int], bool] = S_ISCHR,
    ) -> None:
        self._dev = dev
        self._now = now
        self._wall = wall
        self._is_terminal = is_terminal

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        known: dict[str, int] = {}
        last: float | None = None
        while True:
            found = self._terminals()
            if not found:
                raise SourceAbsent(f"no terminal in {self._dev}")
            now = self._now()
            for path, atime_ns in found.items():
                if path not in known:
                    seen = now - max(0.0, self._wall() / 1e3 - atime_ns / 1e9)
                elif known[path] != atime_ns:
                    seen = now
                else:
                    continue
                last = seen if last is None else max(last, seen)
            # Closing a terminal does not undo what was typed in it: `last` outlives it.
            known = found
            assert last is not None, "at least one terminal was new"
            tell(InputObserved(self.name, max(0.0, now - last)))
            await pace.tick()

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [InputObserved(self.name, why, detail)]

    def _terminals(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for directory, prefix in ((str(self._dev), "tty"), (f"{self._dev}/pts", "")):
            try:
                names = os.listdir(directory)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SourceBroken(f"cannot list {directory}: {error.strerror}") from error
            for name in names:
                if name in _ALIASES or not name.startswith(prefix) or not name.removeprefix(prefix).isdigit():
                    continue
                try:
                    status = os.stat(f"{directory}/{name}")
                except FileNotFoundError:
                    continue  # closed since it was listed
                except OSError as error:
                    raise SourceBroken(f"cannot read the times of {directory}/{name}: {error.strerror}") from error
                if self._is_terminal(status.st_mode) and len(found) < TERMINALS_MAX:
                    found[f"{directory}/{name}"] = status.st_atime_ns
        return found
