"""Nonces on disk, through restarts, cut records and full disks."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent import events as e
from agent.assignments import AttemptKey, NonceUse
from agent.nonce_file import NonceFile, NonceRecorder
from inference.task import TaskId


def use(number: int) -> NonceUse:
    return NonceUse(number.to_bytes(16, "big"), 1000 + number)


def test_every_nonce_is_there_after_a_restart(tmp_path: Path) -> None:
    file = NonceFile(tmp_path / "nonces")
    file.append([use(1), use(2)])
    file.append([use(3)])
    file.close()
    again = NonceFile(tmp_path / "nonces")
    assert again.load() == [use(1), use(2), use(3)]
    again.close()
    assert (tmp_path / "nonces").stat().st_mode & 0o777 == 0o600


# Mutation seen to fail: `load` without the truncation.
@pytest.mark.parametrize("cut", range(1, 24))
def test_a_record_cut_short_by_a_crash_spoils_no_later_one(tmp_path: Path, cut: int) -> None:
    file = NonceFile(tmp_path / "nonces")
    file.append([use(1), use(2)])
    file.close()
    os.truncate(tmp_path / "nonces", 48 - cut)
    again = NonceFile(tmp_path / "nonces")
    assert again.load() == [use(1)]
    again.append([use(3)])
    assert again.load() == [use(1), use(3)]
    again.close()


@pytest.mark.parametrize("garbage", [b"garbage ", b"what some other program has written here\n" * 3, b"\xff" * 48])
def test_garbage_is_dropped_and_counted_in_one_line(tmp_path: Path, garbage: bytes) -> None:
    """Mutations seen to fail here: take any number for a time; say nothing."""
    file = NonceFile(tmp_path / "nonces")
    file.append([use(1), use(2)])
    with (tmp_path / "nonces").open("ab") as damaged:
        damaged.write(garbage)
    with capture_logs() as logs:
        assert file.load() == [use(1), use(2)]
    [line] = logs
    assert (line["dropped"], line["kept"]) == (-(-len(garbage) // 24), 2)
    file.append([use(3)])
    assert file.load() == [use(1), use(2), use(3)]
    file.close()


def test_a_file_that_is_whole_is_loaded_without_a_word(tmp_path: Path) -> None:
    file = NonceFile(tmp_path / "nonces")
    file.append([use(1), use(2)])
    with capture_logs() as logs:
        file.load()
    assert logs == []
    file.close()


def test_rewriting_keeps_what_is_in_force_and_the_file_goes_on(tmp_path: Path) -> None:
    file = NonceFile(tmp_path / "nonces")
    file.append([use(number) for number in range(100)])
    file.rewrite([use(99)])
    file.append([use(100)])
    assert file.load() == [use(99), use(100)]
    file.close()


class FullDisk(NonceFile):
    def append(self, uses: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("make", "outcome"),
    [
        (NonceFile, lambda key, number: e.NonceRecorded(key, use(number))),
        (FullDisk, lambda key, _: e.NonceNotRecorded(key, "cannot record the nonce: No space left on device")),
    ],
    ids=["sound", "full"],
)
async def test_every_order_to_record_has_its_outcome(
    tmp_path: Path, make: type[NonceFile], outcome: Callable[[AttemptKey, int], e.Event]
) -> None:
    file = make(tmp_path / "nonces")
    events: list[e.Event] = []
    told = asyncio.Event()

    def on_event(event: e.Event) -> None:
        events.append(event)
        if len(events) == 3:
            told.set()

    recorder = NonceRecorder(file, list, on_event)
    keys = [AttemptKey(TaskId(f"task-{number}"), 1) for number in range(3)]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(recorder.run())
        for number, key in enumerate(keys):
            recorder.record(e.RecordNonce(key, use(number)))
        await told.wait()
        running.cancel()
    assert events == [outcome(key, number) for number, key in enumerate(keys)]
    file.close()
