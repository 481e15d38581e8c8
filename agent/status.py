"""What a running agent tells about itself on its own machine: a small file, and who may trust it."""

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog

from agent.assignments import ask_of
from agent.clock import until_next_s
from agent.energy.status import EnergyStatus
from agent.errors import DiskFailed, NothingTold, NotRunning
from agent.events import NodeCredits
from agent.identity import LOCK_FILE
from agent.ledger.driver import LedgerStanding
from agent.model_store.progress import FetchProgress
from agent.owner.asks import Ask, EngineTerms
from agent.owner.driver import CardStanding
from agent.owner.pause import Pause
from agent.power.cap import CapStatus
from protos.slackwater.common.v1 import capability_pb2

STATUS_FILE = "status.json"
# For figures that change all the time; what an owner waits for is told at once.
STATUS_PERIOD_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLine:
    engine_id: str
    kind: str
    model: str
    status: str
    pid: int
    slots: int
    running: int
    tokens_per_second: float
    restarts: int
    fenced: bool
    note: str
    # What the owner asks, and what the coordinator pays; None where neither said anything.
    asked: Ask | None
    terms: EngineTerms | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One agent, now."""

    node_id: str
    pid: int
    connected: bool
    # Finished results that the coordinator has not taken yet.
    results_waiting: int
    draining: bool
    ledger: LedgerStanding
    credits: NodeCredits | None
    pause: Pause
    cards: tuple[CardStanding, ...]
    power: dict[str, CapStatus]
    fetches: list[FetchProgress]
    energy: EnergyStatus
    engines: tuple[EngineLine, ...]


def engine_line(engine: capability_pb2.Engine, terms: Sequence[EngineTerms]) -> EngineLine:
    return EngineLine(
        engine_id=engine.engine_id,
        kind=engine.kind,
        model=engine.model,
        status=capability_pb2.EngineStatus.Name(engine.status).removeprefix("ENGINE_STATUS_").lower(),
        pid=engine.pid,
        slots=engine.slots,
        running=engine.running,
        tokens_per_second=engine.tokens_per_second,
        restarts=engine.restarts,
        fenced=engine.fenced,
        note=engine.note,
        asked=ask_of(engine),
        terms=next((one for one in terms if one.engine_id == engine.engine_id), None),
    )


def write_status(status: Status, state_dir: Path) -> None:
    """Replace the file as a whole; a reader never sees half of it."""
    fresh = state_dir / (STATUS_FILE + ".new")
    fresh.write_bytes(msgspec.json.encode(status))
    fresh.replace(state_dir / STATUS_FILE)


class StatusFile:
    """The file of a running agent, written when there is something new to tell.

    Args:
        tell: returns how the agent stands now.
    """

    def __init__(self, tell: Callable[[], Status], state_dir: Path) -> None:
        self._tell = tell
        self._state_dir = state_dir
        self._wanted = asyncio.Event()
        self._told: Status | None = None
        # The file as it was left: one that somebody has deleted or changed is written again.
        self._left: tuple[int, int] | None = None
        self._failed = False
        # What the agent before told is no word about this one.
        self.remove()

    def refresh(self) -> None:
        """Have news told at once instead of within STATUS_PERIOD_S."""
        self._wanted.set()

    def write(self) -> None:
        """Write the file whatever it said before. Blocks on the disk; raises OSError."""
        self._write(self._tell())

    def remove(self) -> None:
        """Take the file away, so that nobody reads what an agent that is gone has told. Blocks on the disk."""
        with suppress(OSError):
            (self._state_dir / STATUS_FILE).unlink(missing_ok=True)

    async def run(self) -> NoReturn:
        """Keep the file up to date until cancellation."""
        while True:
            self._wanted.clear()
            status = self._tell()
            if status != self._told or self._stamp() != self._left:
                try:
                    await asyncio.to_thread(self._write, status)
                    self._failed = False
                except OSError as error:
                    # For people only: a disk that filled up meanwhile ends no answer that runs. Said once, tried on.
                    if not self._failed:
                        log.error("cannot write the status file", path=str(self._state_dir), error=str(error))
                    self._failed = True
            with suppress(TimeoutError):
                async with asyncio.timeout(until_next_s(STATUS_PERIOD_S)):
                    await self._wanted.wait()

    def _write(self, status: Status) -> None:
        write_status(status, self._state_dir)
        self._told, self._left = status, self._stamp()

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._state_dir / STATUS_FILE)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns


def read_status(state_dir: Path) -> dict[str, Any]:
    """Return what the running agent last told.

    Raises:
        NotRunning: none runs.
        NothingTold: one does, and has told nothing yet, or nothing that can be understood.
        DiskFailed: the state directory cannot be looked into.
    """
    path = state_dir / STATUS_FILE
    try:
        if not _locked(state_dir):
            raise NotRunning(f"no agent runs on {state_dir}")
        data = path.read_bytes()
        msgspec.json.decode(data, type=Status)
    except FileNotFoundError as error:
        raise NothingTold(
            f"no status of {state_dir} yet: its agent is starting, or another command is at work there; "
            f"try again in a moment"
        ) from error
    except OSError as error:
        raise DiskFailed(f"cannot look into {state_dir}: {error.strerror}; is this your agent? try sudo") from error
    except msgspec.MsgspecError as error:
        raise NothingTold(
            f"cannot understand {path} ({error}): a running agent of this release writes it again within "
            f"{STATUS_PERIOD_S:g} s; if this stays, restart the agent"
        ) from error
    told: dict[str, Any] = json.loads(data)
    return told


def _locked(state_dir: Path) -> bool:
    try:
        descriptor = os.open(state_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
