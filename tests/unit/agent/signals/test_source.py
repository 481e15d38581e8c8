"""Whatever a source of signals does, the others go on, and the owner's side is told why nothing is seen."""

import asyncio
import inspect

import pytest
from structlog.testing import capture_logs

from agent.owner.events import BatteryObserved, InputObserved, OwnerEvent, Unknown
from agent.signals import settings, source
from agent.signals.sight import SessionSight
from agent.signals.source import Pace, SourceAbsent, SourceBroken, Tell, run_sources
from agent.signals.testing import FakeSource, NoPace, Seen
from agent.signals.watch import watch_signals


async def absent(tell: Tell) -> None:
    raise SourceAbsent("no such thing")


async def broken(tell: Tell) -> None:
    raise SourceBroken("it hangs")


async def faulty(tell: Tell) -> None:
    raise KeyError("a fault of ours")


async def well(tell: Tell) -> None:
    tell(InputObserved("one", 5.0))


async def run_until(sources: list[FakeSource], pace: Pace, seen: Seen, reached: asyncio.Event | None = None) -> None:
    task = asyncio.create_task(run_sources(sources, seen, pace))
    try:
        await seen.until(lambda: all(one.tried > 3 for one in sources))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_absent_source_says_so_once_and_is_looked_for_again_each_minute() -> None:
    """Mutation: telling on every attempt repeats the event; a fixed complaint set that is not kept logs it again."""
    seen, pace = Seen(), NoPace()
    one = FakeSource("one", absent, absent, absent, well)
    with capture_logs() as logs:
        await run_until([one], pace, seen)
    assert seen.events == [InputObserved("one", Unknown.ABSENT, "no such thing"), InputObserved("one", 5.0)]
    assert pace.rests == [source.ABSENT_RETRY_S] * 3
    assert len(logs) == 1


async def test_a_broken_source_is_tried_again_ever_more_seldom_and_logged_once() -> None:
    seen, pace = Seen(), NoPace()
    one = FakeSource("one", *[broken] * 9, well)
    with capture_logs() as logs:
        await run_until([one], pace, seen)
        await asyncio.sleep(0)
    assert seen.events[0] == InputObserved("one", Unknown.BROKEN, "it hangs")
    assert pace.rests[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [entry["log_level"] for entry in logs] == ["warning"]


async def test_a_source_that_recovers_and_breaks_again_says_so_again_but_is_not_logged_twice() -> None:
    async def briefly(tell: Tell) -> None:
        await well(tell)
        await broken(tell)

    seen = Seen()
    with capture_logs() as logs:
        await run_until([FakeSource("one", briefly, briefly, briefly)], NoPace(), seen)
    bad, good = InputObserved("one", Unknown.BROKEN, "it hangs"), InputObserved("one", 5.0)
    assert seen.events == [good, bad, good, bad, good, bad]
    assert len(logs) == 1


async def test_a_fault_in_one_source_is_told_as_broken_and_ends_no_other() -> None:
    """Mutation: without `except Exception` the group ends, and with it every other source."""
    seen = Seen()
    first, second = FakeSource("first", faulty), FakeSource("second", well)
    task = asyncio.create_task(run_sources([first, second], seen, NoPace()))
    await seen.until(lambda: len(seen.events) == 2)
    assert seen.last("first") == InputObserved("first", Unknown.BROKEN, "KeyError: 'a fault of ours'")
    assert InputObserved("one", 5.0) in seen.events
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_source_with_ever_new_complaints_does_not_fill_the_log() -> None:
    def complaint(number: int) -> source.Tell:
        async def attempt(tell: Tell) -> None:
            raise SourceBroken(f"complaint {number}")

        return attempt  # type: ignore[return-value]

    one = FakeSource("one", *[complaint(number) for number in range(50)], well)  # type: ignore[arg-type]
    seen = Seen()
    with capture_logs() as logs:
        task = asyncio.create_task(run_sources([one], seen, NoPace()))
        await seen.value("one", 5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(logs) == source.COMPLAINTS_MAX


async def test_a_fault_of_the_receiver_is_not_taken_for_one_of_the_source() -> None:
    def refuse(event: OwnerEvent) -> None:
        raise ZeroDivisionError("the daemon's own")

    with pytest.raises(ExceptionGroup) as raised:
        await run_sources([FakeSource("one", well)], refuse, NoPace())
    assert raised.group_contains(ZeroDivisionError)


async def test_lending_wakes_whoever_waits_for_the_slow_pace() -> None:
    """Mutation: a plain sleep of the slow period would leave a fresh lender blind for five seconds."""
    pace = Pace()
    waiting = asyncio.create_task(pace.tick())
    await asyncio.sleep(0)
    pace.lend(True)
    async with asyncio.timeout(source.LENDING_PERIOD_S / 2):
        await waiting


def sight(*uids: int) -> SessionSight:
    return SessionSight(lambda: frozenset(uids))


def test_an_open_desktop_that_nobody_sees_is_broken_although_each_source_is_merely_absent() -> None:
    """Mutation: dropping this, a desktop without a companion looks as empty as a server without a screen."""
    one = sight(1000)
    told = one.observe(InputObserved("logind", Unknown.ABSENT))
    assert told is not None
    assert told.idle_s is Unknown.BROKEN
    assert "1000" in told.detail
    assert one.observe(BatteryObserved(False)) is None
    told = one.observe(InputObserved("wayland:1000", 3.0))
    assert told is not None
    assert told.idle_s is Unknown.ABSENT
    told = one.observe(InputObserved("wayland:1000", Unknown.BROKEN))
    assert told is not None
    assert told.idle_s is Unknown.BROKEN


@pytest.mark.parametrize("name", ["evdev", "logind"])
def test_what_sees_the_whole_seat_sees_every_desktop(name: str) -> None:
    one = sight(1000, 1001)
    told = one.observe(InputObserved(name, 3.0))
    assert told is not None
    assert told.idle_s is Unknown.ABSENT


@pytest.mark.parametrize("name", ["wayland:1001", "tty", "gamepad", "sleep"])
def test_what_sees_something_else_does_not_see_this_desktop(name: str) -> None:
    told = sight(1000).observe(InputObserved(name, 3.0))
    assert told is not None
    assert told.idle_s is Unknown.BROKEN


async def test_watch_signals_takes_other_sources_and_tells_of_unseen_desktops_too() -> None:
    seen = Seen()
    watching = watch_signals(seen, settings.SignalSettings(), pace=NoPace(), sources=[FakeSource("one", well)])
    assert inspect.iscoroutine(watching)
    task = asyncio.create_task(watching)
    await seen.value("session", Unknown.ABSENT)
    assert seen.last("one") == InputObserved("one", 5.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
