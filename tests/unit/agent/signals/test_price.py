"""The price of electricity by window or by file; an old price never passes for today's."""

import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.owner.events import PriceObserved, Unknown
from agent.signals.local_time import LocalZone
from agent.signals.price import PriceSource, parse_prices, price_in_file, price_in_windows, read_price_file
from agent.signals.settings import SignalSettings
from agent.signals.source import SourceAbsent, SourceBroken
from agent.signals.testing import Finished, ScriptedPace, Seen

MONDAY = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
HOUR_MS = 3_600_000


def settings(text: str) -> SignalSettings:
    return msgspec.toml.decode(text, type=SignalSettings)


NIGHT = settings(
    """
    price_per_kwh = 0.40
    [[price_windows]]
    price_per_kwh = 0.20
    start = "22:00"
    until = "06:00"
    days = ["mon", "fri"]
    [[price_windows]]
    price_per_kwh = 0.30
    start = "12:00"
    until = "24:00"
    """
)


@pytest.mark.parametrize(
    ("day", "clock", "price"),
    [
        (0, "11:59", 0.40),
        (0, "12:00", 0.30),
        (0, "22:00", 0.20),
        (1, "05:59", 0.20),  # still Monday's night
        (1, "06:00", 0.40),
        (1, "22:00", 0.30),
        (0, "05:00", 0.40),  # Sunday's night, which is not in the list
        (5, "00:00", 0.20),
        (6, "23:59", 0.30),
    ],
)
def test_a_window_over_midnight_belongs_to_the_day_on_which_it_began(day: int, clock: str, price: float) -> None:
    """Mutation: asking for today's weekday after midnight gives Tuesday 05:59 the day price."""
    hour, minute = (int(part) for part in clock.split(":"))
    moment = MONDAY + datetime.timedelta(days=day, hours=hour, minutes=minute)
    assert price_in_windows(NIGHT, moment) == price


def test_an_hour_without_any_price_is_absent() -> None:
    only = settings('price_windows = [{price_per_kwh = 0.1, start = "01:00", until = "02:00"}]')
    with pytest.raises(SourceAbsent):
        price_in_windows(only, MONDAY)


@pytest.mark.parametrize(
    "text",
    [
        "price_per_kwh = inf",
        'price_windows = [{price_per_kwh = 0.1, start = "24:30", until = "02:00"}]',
        'price_windows = [{price_per_kwh = 0.1, start = "1:00", until = "02:00"}]',
        'price_windows = [{price_per_kwh = 0.1, start = "01:00"}]',
        "price_per_kw = 1.0",
        "companion_uids = [-1]",
    ],
)
def test_settings_out_of_range_or_unknown_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        settings(text)


ROWS = [(0, 1.0), (HOUR_MS, 2.0), (3 * HOUR_MS, 3.0)]


@pytest.mark.parametrize(
    ("now_ms", "price"), [(0, 1.0), (HOUR_MS - 1, 1.0), (HOUR_MS, 2.0), (3 * HOUR_MS, 3.0), (5 * HOUR_MS - 1, 3.0)]
)
def test_a_row_holds_until_the_next_and_the_last_as_long_as_the_one_before(now_ms: int, price: float) -> None:
    assert price_in_file(ROWS, now_ms, Path("prices")) == price


@pytest.mark.parametrize("now_ms", [-1, 5 * HOUR_MS])
def test_a_time_that_the_file_does_not_cover_has_no_price(now_ms: int) -> None:
    """Mutation: without the end of the last row, a price of last week is today's."""
    with pytest.raises(SourceBroken):
        price_in_file(ROWS, now_ms, Path("prices"))


def test_both_forms_of_a_file_say_the_same() -> None:
    rows = [(1_780_000_000_000, 0.25), (1_780_003_600_000, -0.01)]
    stamps = [datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC).isoformat() for ms, _ in rows]
    table = "start,price_per_kwh\n" + "".join(
        f"{stamp},{price}\n" for stamp, (_, price) in zip(stamps, rows, strict=True)
    )
    lines = "".join(
        f'{{"start": "{stamp}", "price_per_kwh": {price}}}\n\n' for stamp, (_, price) in zip(stamps, rows, strict=True)
    )
    assert parse_prices(table) == parse_prices(lines) == rows


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has no price"),
        (b"start,price_per_kwh\n", "has no price"),
        (b"start,price_per_kwh\n2026-12-02T00:00,0.3\n", "offset from UTC"),
        (b"start,price_per_kwh\n2026-12-02T00:00Z,much\n", "line 2"),
        (b"start,price_per_kwh\n2026-12-02T00:00Z,nan\n", "a price of nan"),
        (b"start,price_per_kwh,x\n2026-12-02T00:00Z,1,2\n", "line 2"),
        (b'{"start": "2026-12-02T00:00Z"}\n', "line 1"),
        (b"\xff\xfe", "codec"),
        (b"start,price_per_kwh\n" + b"x" * 5_000_000, "longer than"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_place(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "prices"
    path.write_bytes(content)
    with pytest.raises(SourceBroken, match=complaint):
        read_price_file(path)


@given(st.text())
def test_any_text_is_rows_or_an_error_that_says_so(text: str) -> None:
    import csv

    try:
        rows = parse_prices(text)
    except (ValueError, csv.Error):
        return
    assert rows == sorted(rows)


async def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("start,price_per_kwh\n1970-01-01T00:00Z,0.1\n")
    source = PriceSource(SignalSettings(price_file=str(path)), LocalZone(tmp_path / "none", {}), wall=lambda: 1000)
    seen = Seen()
    with pytest.raises(Finished):
        await source.watch(seen, ScriptedPace(lambda: path.write_text("start,price_per_kwh\n1970-01-01T00:00Z,0.25\n")))
    assert seen.events == [PriceObserved(0.1), PriceObserved(0.25)]


async def test_without_a_price_in_the_settings_it_is_absent() -> None:
    source = PriceSource(SignalSettings())
    with pytest.raises(SourceAbsent):
        await source.watch(Seen(), ScriptedPace())
    assert source.unseen(Unknown.ABSENT, "") == [PriceObserved(Unknown.ABSENT)]
