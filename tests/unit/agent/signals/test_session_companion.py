"""What a companion sends: the whole state, at once when the owner returns, and a last word."""

from agent.owner.events import BusyObserved, InputObserved, Unknown
from agent.session_companion import Session
from agent.signals.companion_report import BusyReport, InputReport, decode_report, encode_report


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_time_grows_until_it_is_sent() -> None:
    """Mutation: sending the time as it was seen makes the owner come back a little with each report."""
    clock = Clock()
    session = Session(clock)
    session.observe(InputObserved("x11", 5.0, "a\x1bb"))
    clock.now += 2.5
    assert session.report().input == (InputReport(source="x11", idle_ms=7500, detail="a b"),)


def test_a_return_is_news_and_growing_idle_time_or_typing_on_is_not() -> None:
    clock = Clock()
    session = Session(clock)

    def news(event: InputObserved | BusyObserved) -> bool:
        session.news.clear()
        session.observe(event)
        return session.news.is_set()

    assert news(InputObserved("x11", 0.0))
    clock.now += 1
    assert not news(InputObserved("x11", 0.0))
    clock.now += 10
    assert not news(InputObserved("x11", 10.0))
    assert news(InputObserved("x11", 0.1))
    assert news(InputObserved("x11", Unknown.BROKEN))
    assert not news(InputObserved("x11", Unknown.BROKEN))
    assert news(InputObserved("x11", 3.0))
    assert news(BusyObserved("gamemode", ""))
    assert not news(BusyObserved("gamemode", ""))
    assert news(BusyObserved("gamemode", "a game"))


def test_what_cannot_be_seen_is_reported_as_such() -> None:
    session = Session(Clock())
    session.observe(InputObserved("wayland", Unknown.ABSENT, "none"))
    session.observe(BusyObserved("screen", Unknown.BROKEN))
    report = session.report(leaving=True)
    assert report.input == (InputReport(source="wayland", unknown="absent", detail="none"),)
    assert report.busy == (BusyReport(source="screen", unknown="broken"),)
    assert report.leaving is True


def test_whatever_a_desktop_says_the_report_is_one_that_the_agent_takes() -> None:
    """Mutation: uncut, a program with a long name silences its whole session, and the card is never lent."""
    session = Session(Clock())
    session.observe(InputObserved("mutter", 1e15, "x" * 1000))
    session.observe(InputObserved("x11", -1.0, "a\nb"))
    session.observe(BusyObserved("desktop", "\x1b" + "long name " * 100))
    report = decode_report(encode_report(session.report()))
    assert len(report.input) == 2
    assert len(report.busy[0].what or "") == 200
