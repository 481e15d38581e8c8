"""Terminals tell of input by their access times, whatever the wall clock does."""

import os
from pathlib import Path

import pytest

from agent.owner.events import InputObserved
from agent.signals.source import SourceAbsent
from agent.signals.testing import Finished, ScriptedPace, Seen
from agent.signals.tty import TtySource

WALL_S = 1_000_000


class Machine:
    """A /dev of plain files, and two clocks."""

    def __init__(self, directory: Path) -> None:
        self.dev = directory
        (directory / "pts").mkdir()
        self.now = 500.0
        self.wall_s = float(WALL_S)
        self.source = TtySource(
            directory, now=lambda: self.now, wall=lambda: int(self.wall_s * 1000), is_terminal=lambda mode: True
        )

    def touch(self, name: str, atime_s: float) -> None:
        (self.dev / name).touch()
        os.utime(self.dev / name, (atime_s, WALL_S))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.wall_s += seconds


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def watch(machine: Machine, *steps: object) -> list[float]:
    seen = Seen()
    with pytest.raises(Finished):
        await machine.source.watch(seen, ScriptedPace(*steps))  # type: ignore[arg-type]
    idle = []
    for event in seen.events:
        assert isinstance(event, InputObserved)
        assert isinstance(event.idle_s, float)
        idle.append(round(event.idle_s, 3))
    return idle


async def test_the_last_input_is_that_of_the_terminal_used_last(machine: Machine) -> None:
    machine.touch("tty1", WALL_S - 3600)
    machine.touch("pts/0", WALL_S - 40)
    machine.touch("pts/ptmx", WALL_S)
    machine.touch("tty0", WALL_S)
    machine.touch("ttyS0x", WALL_S)
    assert await watch(machine, lambda: machine.advance(10)) == [40.0, 50.0]


async def test_a_changed_time_is_input_now_although_the_kernel_rounds_it_down_by_eight_seconds(
    machine: Machine,
) -> None:
    """Mutation: wall - atime instead of "changed" would report a key press as 7 s old."""
    machine.touch("pts/0", WALL_S - 600)

    def type_a_key() -> None:
        machine.advance(10)
        machine.touch("pts/0", WALL_S + 3)

    assert await watch(machine, type_a_key, lambda: machine.advance(5)) == [600.0, 0.0, 5.0]


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
async def test_a_jump_of_the_wall_clock_neither_invents_input_nor_hides_it(machine: Machine, jump_s: int) -> None:
    """Mutation: reading the wall clock at each look makes the owner a day idler, or just returned."""
    machine.touch("pts/0", WALL_S - 60)

    def jump() -> None:
        machine.advance(10)
        machine.wall_s += jump_s

    assert await watch(machine, jump) == [60.0, 70.0]


async def test_an_access_time_in_the_future_counts_as_input_now(machine: Machine) -> None:
    machine.touch("pts/0", WALL_S + 5000)
    assert await watch(machine) == [0.0]


async def test_closing_a_terminal_makes_nobody_idler_and_opening_one_is_input(machine: Machine) -> None:
    machine.touch("tty1", WALL_S - 3600)
    machine.touch("pts/0", WALL_S - 10)

    def close() -> None:
        machine.advance(5)
        (machine.dev / "pts/0").unlink()

    def reopen() -> None:
        machine.advance(5)
        machine.touch("pts/0", machine.wall_s)

    assert await watch(machine, close, reopen) == [10.0, 15.0, 0.0]


async def test_without_a_terminal_the_source_is_absent(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsent, match="no terminal"):
        await TtySource(tmp_path / "nowhere").watch(Seen(), ScriptedPace())


async def test_plain_files_are_no_terminals(tmp_path: Path) -> None:
    (tmp_path / "tty1").touch()
    with pytest.raises(SourceAbsent):
        await TtySource(tmp_path).watch(Seen(), ScriptedPace())


async def test_this_machines_own_terminals_can_be_read() -> None:
    seen = Seen()
    with pytest.raises((Finished, SourceAbsent)):
        await TtySource().watch(seen, ScriptedPace())
