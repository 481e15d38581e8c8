"""What a companion in a user's session says to the agent: one JSON line, always the whole of what it sees."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from agent.owner.events import BusyObserved, InputObserved, Unknown
from agent.signals.printable import printable

# A report of every source with the longest texts has under 4 KiB.
LINE_BYTES_MAX = 8192
# At least this often, so that silence means that the companion is gone.
REPORT_PERIOD_S = 5.0
# A companion that is silent for so long counts as broken: the owner may be there, unseen.
SILENT_S_MAX = 60.0

SourceName = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_-]{0,15}\Z")]
Why = Literal["absent", "broken"]
# The name of a program and its reason.
TEXT_CHARACTERS_MAX = 200
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
# Ten years; an idle time beyond that is a fault.
IDLE_MS_MAX = 315_360_000_000
IdleMs = Annotated[int, Meta(ge=0, le=IDLE_MS_MAX)]


class ReportRefused(Exception):
    """A line is no report."""


class InputReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long ago one source saw input; either `idle_ms` or `unknown`."""

    source: SourceName
    idle_ms: IdleMs | None = None
    unknown: Why | None = None
    detail: Text = ""


class BusyReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What asks not to be disturbed (empty: nothing does); either `what` or `unknown`."""

    source: SourceName
    what: Text | None = None
    unknown: Why | None = None


class Report(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line.

    Args:
        version: of this format.
        leaving: the session ends; its sources are gone, not broken. Nothing follows.
    """

    version: Literal[1]
    input: Annotated[tuple[InputReport, ...], Meta(max_length=8)] = ()
    busy: Annotated[tuple[BusyReport, ...], Meta(max_length=8)] = ()
    leaving: bool = False


SessionEvent = InputObserved | BusyObserved

_decoder = msgspec.json.Decoder(Report)


def encode_report(report: Report) -> bytes:
    """Return a report as a line."""
    return msgspec.json.encode(report) + b"\n"


def decode_report(line: bytes) -> Report:
    """Check one line.

    Raises:
        ReportRefused: it is too long, no JSON, has an unknown field, a value out of range, or says neither or both.
    """
    if len(line) > LINE_BYTES_MAX:
        raise ReportRefused(f"a line of more than {LINE_BYTES_MAX} bytes")
    try:
        report = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportRefused(printable(str(error))) from error
    for entry in report.input:
        if (entry.idle_ms is None) == (entry.unknown is None):
            raise ReportRefused(f"input {entry.source}: either idle_ms or unknown")
    for asking in report.busy:
        if (asking.what is None) == (asking.unknown is None):
            raise ReportRefused(f"busy {asking.source}: either what or unknown")
    return report


def report_events(report: Report, uid: int) -> list[SessionEvent]:
    """Return what a user's companion reports as events; each source is named for the user too."""
    events: list[SessionEvent] = []
    for entry in report.input:
        idle_s = Unknown(entry.unknown) if entry.idle_ms is None else entry.idle_ms / 1000
        events.append(InputObserved(f"{entry.source}:{uid}", idle_s, printable(entry.detail, TEXT_CHARACTERS_MAX)))
    for asking in report.busy:
        what = Unknown(asking.unknown) if asking.what is None else printable(asking.what, TEXT_CHARACTERS_MAX)
        events.append(BusyObserved(f"{asking.source}:{uid}", what))
    return events
