"""The owner's hour is that of the machine's zone now, not of the zone in which the agent was started."""

import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from agent.owner.events import LocalTimeObserved
from agent.signals.local_time import LocalTimeSource, LocalZone
from agent.signals.source import SourceBroken
from agent.signals.testing import Finished, ScriptedPace, Seen

WEDNESDAY_MS = int(datetime.datetime(2026, 12, 2, 23, 30, tzinfo=datetime.UTC).timestamp() * 1000)


def zone_file(name: str) -> Path:
    """Return this machine's file of a zone."""
    for root in ("/usr/share/zoneinfo", "/usr/lib/zoneinfo"):
        if (Path(root) / name).exists():
            return Path(root) / name
    pytest.skip("this machine has no time zone files")


async def watch(zone: LocalZone, *steps: object, wall: object = lambda: WEDNESDAY_MS) -> list[object]:
    seen = Seen()
    with pytest.raises(Finished):
        await LocalTimeSource(zone, wall=wall).watch(seen, ScriptedPace(*steps))  # type: ignore[arg-type]
    return list(seen.events)


async def test_a_change_of_the_machines_zone_is_followed(tmp_path: Path) -> None:
    """Mutation: time.localtime stays in the first zone for the life of the process."""
    link = tmp_path / "localtime"
    link.symlink_to(zone_file("Europe/Berlin"))

    def travel() -> None:
        link.unlink()
        link.symlink_to(zone_file("America/New_York"))

    assert await watch(LocalZone(link, {}), travel) == [
        LocalTimeObserved(3, 30, "2026-12-03"),
        LocalTimeObserved(2, 18 * 60 + 30, "2026-12-02"),
    ]


async def test_each_minute_is_told_once(tmp_path: Path) -> None:
    now = WEDNESDAY_MS

    def later(seconds: int) -> None:
        nonlocal now
        now += seconds * 1000

    told = await watch(
        LocalZone(tmp_path / "none", {}), lambda: later(30), lambda: later(29), lambda: later(1), wall=lambda: now
    )
    assert told == [LocalTimeObserved(2, 23 * 60 + 30, "2026-12-02"), LocalTimeObserved(2, 23 * 60 + 31, "2026-12-02")]


async def test_tz_in_the_environment_wins_as_for_all_programs(tmp_path: Path) -> None:
    zone_file("Asia/Tokyo")
    assert await watch(LocalZone(tmp_path / "none", {"TZ": ":Asia/Tokyo"})) == [
        LocalTimeObserved(3, 8 * 60 + 30, "2026-12-03")
    ]


def test_the_hour_that_comes_twice_is_told_by_the_zone(tmp_path: Path) -> None:
    path = zone_file("Europe/Berlin")
    zone = LocalZone(path, {}).zone()
    moment = datetime.datetime(2026, 10, 25, 1, 30, tzinfo=datetime.UTC)
    assert moment.astimezone(zone).hour == moment.astimezone(ZoneInfo("Europe/Berlin")).hour == 2


@pytest.mark.parametrize("content", [b"", b"garbage", b"TZif" + b"\xff" * 60])
async def test_a_zone_file_that_is_none_is_broken_and_utc_is_told_meanwhile(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "localtime"
    path.write_bytes(content)
    seen = Seen()
    with pytest.raises(SourceBroken):
        await LocalTimeSource(LocalZone(path, {}), wall=lambda: WEDNESDAY_MS).watch(seen, ScriptedPace())
    assert seen.events == [LocalTimeObserved(2, 23 * 60 + 30, "2026-12-02")]


@pytest.mark.parametrize("name", ["No/Such", "UTC0", "../etc/passwd", "/etc/passwd"])
def test_a_tz_that_names_no_zone_is_broken(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceBroken, match="TZ="):
        LocalZone(tmp_path, {"TZ": name}).zone()
