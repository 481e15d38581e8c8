"""The status file: that it comes back, and what its readers say where it is not as the agent left it."""

import asyncio
import json
from pathlib import Path

import pytest

from agent.energy.status import EnergyStatus
from agent.errors import DiskFailed, NothingTold, NotRunning
from agent.identity import LOCK_FILE, lock_state_dir
from agent.ledger.driver import LedgerStanding
from agent.owner.pause import Pause
from agent.status import STATUS_FILE, Status, StatusFile, read_status, write_status

WAIT_S = 10.0


def status() -> Status:
    return Status(
        node_id="n",
        pid=1,
        connected=True,
        results_waiting=0,
        draining=False,
        ledger=LedgerStanding(entries_seen=0, refused="", detail="", evidence=""),
        credits=None,
        pause=Pause(),
        cards=(),
        power={},
        fetches=[],
        energy=EnergyStatus(
            cards=(),
            day="",
            tasks=0,
            prompt_tokens=0,
            completion_tokens=0,
            work_mj={},
            idle_mj=0,
            unmeasured_s=0.0,
            price_per_kwh_micro=None,
            cost_micro=None,
            currency="EUR",
            carbon_g=None,
            carbon_label="",
        ),
        engines=(),
    )


@pytest.mark.parametrize("garbage", [b"", b"{garbage", b"\xff\xfe", b"[]", b"{}"])
def test_a_file_that_is_no_status_is_said_to_be_none(tmp_path: Path, garbage: bytes) -> None:
    """Mutation seen to fail here: the error of the JSON reader, as a traceback."""
    with lock_state_dir(tmp_path):
        (tmp_path / STATUS_FILE).write_bytes(garbage)
        with pytest.raises(NothingTold, match=r"status\.json"):
            read_status(tmp_path)


def test_no_agent_and_one_that_has_told_nothing_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="no agent runs"):
        read_status(tmp_path)
    with lock_state_dir(tmp_path):
        with pytest.raises(NothingTold, match="in a moment"):
            read_status(tmp_path)
        write_status(status(), tmp_path)
        assert read_status(tmp_path)["node_id"] == "n"
    with pytest.raises(NotRunning, match="no agent runs"):
        read_status(tmp_path)


def test_a_state_directory_that_cannot_be_looked_into_is_said(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(LOCK_FILE)
    with pytest.raises(DiskFailed, match="cannot look into"):
        read_status(tmp_path)


class Rounds:
    """Counts how often a status was asked for, which begins each round of a `StatusFile`."""

    def __init__(self) -> None:
        self._begun: asyncio.Queue[None] = asyncio.Queue()

    def tell(self) -> Status:
        self._begun.put_nowait(None)
        return status()

    async def pass_by(self, count: int = 3) -> None:
        """Wait until what happened before was seen: the second round from now sees it, the third begins after."""
        while not self._begun.empty():
            self._begun.get_nowait()
        async with asyncio.timeout(WAIT_S):
            for _ in range(count):
                await self._begun.get()


async def test_a_file_that_was_deleted_or_changed_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation seen to fail here: write only what is news."""
    monkeypatch.setattr("agent.status.STATUS_PERIOD_S", 0.01)
    path = tmp_path / STATUS_FILE
    path.write_bytes(b"of an agent that is gone")
    rounds = Rounds()
    file = StatusFile(rounds.tell, tmp_path)
    assert not path.exists()
    running = asyncio.create_task(file.run())
    await rounds.pass_by()
    path.unlink()
    await rounds.pass_by()
    assert path.exists()
    path.write_bytes(b"garbage")
    await rounds.pass_by()
    assert json.loads(path.read_bytes())["node_id"] == "n"
    running.cancel()
    file.remove()
    assert not path.exists()


async def test_what_could_not_be_written_is_written_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutations seen to fail here: take what failed for told; say so each time."""
    monkeypatch.setattr("agent.status.STATUS_PERIOD_S", 0.01)
    path = tmp_path / "later" / STATUS_FILE
    rounds = Rounds()
    running = asyncio.create_task(StatusFile(rounds.tell, path.parent).run())
    await rounds.pass_by(5)
    path.parent.mkdir()
    await rounds.pass_by()
    assert path.exists()
    running.cancel()
    assert capsys.readouterr().out.count("cannot write the status file") == 1
