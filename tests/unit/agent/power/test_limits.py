"""Carrying out a power cap: the file of owners' limits, and the driver between the decisions, the disk and a card."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.cards.details import CardDetails, LimitOutcome
from agent.cards.use import CardReading
from agent.power.cap import OwnersLimit, Stage
from agent.power.limits import POWER_FILE, PowerKeeper, PowerLimitFile
from agent.power.settings import PowerSettings
from agent.testing import PATIENCE_S
from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_LOST, READING_STATUS_OK, Gpu, NumberReading
from protos.slackwater.common.v1.capability_pb2 import TextReading as Text

CARD = "GPU-1"


class Bench:
    """One card whose limit a test can see, and what its keeper did to it in order."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.limit_w = 450.0
        self.result = "ok"
        self.steps: list[str] = []
        self.now = 0.0
        # The card's stages since the newest keeper was made.
        self.stages: list[Stage] = []
        self._changed = asyncio.Event()

    def keeper(self) -> PowerKeeper:
        self.stages = []

        def note() -> None:
            self.stages.append(keeper.status(CARD).stage)
            self._changed.set()

        keeper = PowerKeeper(PowerSettings(), self.state_dir, self.set_limit, on_change=note, clock=lambda: self.now)
        return keeper

    async def until(self, stage: Stage) -> None:
        while stage not in self.stages:
            self._changed.clear()
            await self._changed.wait()

    def on_disk(self) -> dict[str, OwnersLimit]:
        return PowerLimitFile(self.state_dir).load()

    async def set_limit(self, uuid: str, limit_w: float, expected_w: float | None) -> LimitOutcome:
        assert uuid == CARD
        self.steps.append(f"{expected_w:.0f}->{limit_w:.0f}, disk {self.on_disk()[CARD].original_w:.0f}")
        if self.result != "ok":
            return LimitOutcome(result=self.result, detail="no permission")
        if self.limit_w != expected_w:
            return LimitOutcome(result="changed", limit_w=self.limit_w)
        self.limit_w = limit_w
        return LimitOutcome(result="ok", limit_w=limit_w)

    def reading(self) -> CardReading:
        self.now += 1.0
        gpu = Gpu(
            uuid=Text(status=READING_STATUS_OK, value=CARD),
            power_limit_min_w=NumberReading(status=READING_STATUS_OK, value=150.0),
            power_limit_max_w=NumberReading(status=READING_STATUS_OK, value=600.0),
        )
        details = CardDetails(power_limit_set_w=self.limit_w, power_limit_default_w=450.0)
        return CardReading(gpu, details, read_at=self.now)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@asynccontextmanager
async def running(keeper: PowerKeeper) -> AsyncIterator[None]:
    work = asyncio.create_task(keeper.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    finally:
        work.cancel()


async def test_a_lent_card_is_capped_and_has_its_owners_limit_when_all_is_over(bench: Bench) -> None:
    """Mutation tried: `restore_all` that does not wait for the last Forget leaves the file full."""
    keeper = bench.keeper()
    async with running(keeper):
        keeper.see([bench.reading()])
        keeper.want(CARD)
        await bench.until(Stage.CAPPED)
        assert bench.limit_w == 360.0
        assert bench.on_disk() == keeper.remembered == {CARD: OwnersLimit(450.0, 360.0)}
        await keeper.restore_all()
        assert bench.limit_w == 450.0
        assert bench.on_disk() == {}
    assert bench.steps == ["450->360, disk 450", "360->450, disk 450"]
    assert bench.stages == [Stage.REMEMBERING, Stage.CAPPING, Stage.CAPPED, Stage.RESTORING, Stage.FREE]


async def test_the_next_run_puts_back_what_a_killed_one_left(bench: Bench) -> None:
    keeper = bench.keeper()
    async with running(keeper):
        keeper.see([bench.reading()])
        keeper.want(CARD)
        await bench.until(Stage.CAPPED)
    next_run = bench.keeper()
    async with running(next_run):
        next_run.see([bench.reading()])
        await bench.until(Stage.FREE)
        await next_run.restore_all()
    assert bench.limit_w == 450.0
    assert bench.on_disk() == {}


async def test_a_card_that_refuses_is_left_alone_and_says_so(bench: Bench) -> None:
    bench.result = "denied"
    keeper = bench.keeper()
    async with running(keeper):
        keeper.see([bench.reading()])
        keeper.want(CARD)
        await bench.until(Stage.FREE)
        await keeper.restore_all()
    assert keeper.status(CARD).sequences_share == 1.0, "no longer lent"
    assert bench.on_disk() == {}


async def test_a_limit_that_cannot_be_put_back_stays_on_the_disk(bench: Bench) -> None:
    keeper = bench.keeper()
    async with running(keeper):
        keeper.see([bench.reading()])
        keeper.want(CARD)
        await bench.until(Stage.CAPPED)
        bench.result = "timeout"
        await keeper.restore_all()
    assert bench.on_disk() == {CARD: OwnersLimit(450.0, 360.0)}


async def test_a_disk_that_takes_nothing_means_no_cap(bench: Bench) -> None:
    keeper = bench.keeper()
    # write_private makes its new file beside the old one; a directory in its place stands for a broken disk.
    (bench.state_dir / f"{POWER_FILE}.new").mkdir()
    async with running(keeper):
        keeper.see([bench.reading()])
        keeper.want(CARD)
        await bench.until(Stage.FREE)
    assert bench.limit_w == 450.0
    assert "cannot be kept on disk" in keeper.status(CARD).note


def test_a_card_that_does_not_answer_says_nothing_about_its_limit(bench: Bench) -> None:
    keeper = bench.keeper()
    keeper.want(CARD)
    nameless = Gpu(uuid=Text(status=READING_STATUS_LOST))
    keeper.see([CardReading(bench.reading().gpu, None), CardReading(nameless, CardDetails())])
    assert keeper.status(CARD).stage is Stage.FREE
    assert keeper.status(CARD).note == ""


def test_the_file_is_its_owners_alone_and_whole(tmp_path: Path) -> None:
    file = PowerLimitFile(tmp_path)
    assert file.load() == {}
    limits = {CARD: OwnersLimit(450.0, 360.0)}
    file.save(limits)
    assert file.load() == limits
    assert os.stat(tmp_path / POWER_FILE).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"GPU-1": 3}', b"\xff\xfe"])
def test_a_damaged_file_is_put_aside_and_nobody_stumbles_over_it_again(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / POWER_FILE).write_bytes(damage)
    assert PowerLimitFile(tmp_path).load() == {}
    assert PowerLimitFile(tmp_path).load() == {}
    assert (tmp_path / "power_limits.damaged").read_bytes() == damage
