"""Processes that a script starts and is answerable for: tied to it, logged, ended in order, and found again."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

# In the environment of every process of a network: its state directory, by which all of them are found again.
MARKER_VARIABLE = "SLACKWATER_DEV_NETWORK"
# What a daemon gets to end in good order: an agent gives its engine five seconds.
STOP_GRACE_S = 15.0
# Until the kernel has taken a killed process away; one with much memory takes a second.
KILL_CONFIRM_S = 10.0
POLL_S = 0.05
LOG_TAIL_LINES = 30

# Ties a child to this process (PR_SET_PDEATHSIG, SIGKILL), then becomes the program that was asked for. A program of
# its own, since code between fork and exec may deadlock in a process that has threads.
_TIE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before this process started")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildFailed(Exception):
    """A process ended that should not have; the text names it and quotes the end of its log."""


class ChildProcess:
    """One child: its command, its log, and the process while it runs. May be started again after its end."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str],
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self._command = tuple(map(str, command))
        self._log = log
        self._environment = dict(environment)
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process id of the newest start; 0 before the first."""
        return 0 if self._process is None else self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status (negative for a signal) of the newest start; None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._directory,
                # A Ctrl-C at the terminal is for the script, which then ends the others in order.
                start_new_session=True,
            )

    async def run(self, timeout_s: float) -> None:
        """Run to the end, which must be a good one.

        Raises:
            ChildFailed: a status other than 0, or no end in time.
        """
        await self.start()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            await self.kill()
            raise ChildFailed(f"{self.name} did not end within {timeout_s:.0f} s:\n{self.tail()}") from None
        if self.status != 0:
            raise ChildFailed(f"{self.name} ended with status {self.status}:\n{self.tail()}")

    async def wait(self) -> None:
        if self._process is not None:
            await self._process.wait()

    def check(self) -> None:
        """Raise ChildFailed where the process was started and has ended."""
        if self._process is not None and not self.running:
            raise ChildFailed(f"{self.name} ended with status {self.status}:\n{self.tail()}")

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self.running:
            # It may end between the two.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM, and after `grace_s` SIGKILL; a frozen process is woken first."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.wait()

    def tail(self) -> str:
        """Return the last lines of the log, indented."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])


@contextlib.asynccontextmanager
async def deadline(timeout_s: float, what: str, *children: ChildProcess) -> AsyncIterator[None]:
    """Turn a timeout of the block into a ChildFailed that quotes the logs of those waited for."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        logs = "\n".join(f"{child.name}:\n{child.tail()}" for child in children)
        raise ChildFailed(f"{what} within {timeout_s:.0f} s\n{logs}") from None


def end_on_signals() -> None:
    """Let SIGTERM and SIGINT end this program as Ctrl-C does, so that what it started is ended in order.

    A shell starts background jobs with SIGINT ignored, and a timeout sends SIGTERM, whose default is to end at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def kill_marked(marker: Path) -> list[int]:
    """SIGKILL every process that belongs to a network by its environment, and wait until none is left.

    Children of children are found too, and those whose parent has died. Blocks; run it in a thread.
    """
    killed: set[int] = set()
    deadline_s = time.monotonic() + KILL_CONFIRM_S
    while (alive := _find_marked(marker)) and time.monotonic() < deadline_s:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= alive
        time.sleep(POLL_S)
    return sorted(killed)


def _find_marked(marker: Path) -> set[int]:
    directory = os.fsencode(marker)
    # An engine has an environment of its own, but its home lies in the state directory.
    own = (b"\0" + MARKER_VARIABLE.encode() + b"=" + directory + b"\0", b"\0HOME=" + directory + b"/")
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        # Processes end while this reads, and those of other users are not ours.
        with contextlib.suppress(OSError):
            environment = b"\0" + Path("/proc", entry, "environ").read_bytes() + b"\0"
            if any(mark in environment for mark in own):
                found.add(int(entry))
    return found
