"""Whether the owner is at the machine, joined from every source of input. Pure.

The newest sign over all sources counts. A source that is not there says
nothing; one that is broken, or has fallen silent, may be hiding the owner, which
`unknown` tells apart from "nobody is there".
"""

from dataclasses import dataclass

from agent.owner.events import BusyObserved, InputObserved, Unknown

# Readers report every few seconds at most; one that is silent for a minute has died (BOINC rejects idle times so old).
INPUT_STALE_S = 60.0
# HTCondor's KeyboardBusy: an input this fresh means that somebody works here now.
ACTIVE_S = 60.0
# Of sources that cannot see, this many are named to the owner; a machine has about six.
SOURCES_NAMED_MAX = 3

_TOUCHED = {
    "tty": "terminal used",
    "gamepad": "gamepad used",
    "evdev": "input device used",
    "sleep": "the machine woke up",
}


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of the owner: when (monotonic), what, and who saw it."""

    at: float
    what: str
    source: str = ""

    def in_words(self, now: float) -> str:
        """Return for example "keyboard or mouse used 40 s ago (x11)"."""
        seen_by = f" ({self.source})" if self.source else ""
        return f"{self.what} {span_in_words(now - self.at)} ago{seen_by}"


def span_in_words(seconds: float) -> str:
    """Return a span as a person says it: "40 s", "15 min", "2 h"."""
    whole = round(max(seconds, 0.0))
    if whole < 120:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole % 3600 >= 60 else f"{whole // 3600} h"


@dataclass(slots=True)
class _Source:
    observed_at: float
    unknown: Unknown | None
    detail: str


class Presence:
    """Takes what the sources of input and of "do not disturb" say.

    Args:
        absence_s: the owner who comes back for longer than this has ended the absence; shorter visits do not.
    """

    def __init__(self, absence_s: float) -> None:
        self.absence_s = absence_s
        self._inputs: dict[str, _Source] = {}
        self._busy: dict[str, str | Unknown] = {}
        self._present_since = 0.0
        self.last: Sign | None = None
        # When the owner was last seen in a visit longer than `absence_s`.
        self.long_visit_at: float | None = None
        # When idle times were last void, since the machine slept or its clock jumped.
        self.woke_at: float | None = None

    def handle(self, event: InputObserved | BusyObserved, now: float) -> None:
        match event:
            case InputObserved(source=source, idle_s=idle_s, detail=detail):
                unknown = idle_s if isinstance(idle_s, Unknown) else None
                self._inputs[source] = _Source(now, unknown, detail)
                if not isinstance(idle_s, Unknown):
                    # A source of one session is named with its user: "x11:1000".
                    what = _TOUCHED.get(source.partition(":")[0], "keyboard or mouse used")
                    self._seen(Sign(now - max(idle_s, 0.0), what, source))
            case BusyObserved(source=source, what=busy):
                self._mark_busy(now)
                self._busy[source] = busy
                self._mark_busy(now)

    def passed(self, now: float) -> None:
        """Time passed; whoever watches a film is still here."""
        self._mark_busy(now)

    def woke(self, now: float) -> None:
        """The machine slept, or its clock jumped: no idle time from before tells anything."""
        self.woke_at = now

    def idle_since(self) -> float | None:
        """Return the moment since which nobody was here (monotonic); None where no sign was ever seen."""
        if self.last is None:
            return None
        return self.last.at if self.woke_at is None else max(self.last.at, self.woke_at)

    def last_sign(self, now: float) -> str:
        """Return in words what `idle_since` counts from."""
        if self.last is not None and (self.woke_at is None or self.last.at >= self.woke_at):
            return self.last.in_words(now)
        return (
            "no sign of the owner yet"
            if self.woke_at is None
            else Sign(self.woke_at, "the machine slept or its clock jumped").in_words(now)
        )

    def active(self, now: float) -> bool:
        """Whether somebody works here right now."""
        return self.last is not None and now - self.last.at < ACTIVE_S

    def busy(self) -> str | None:
        """Return who asks not to be disturbed, in words."""
        asking = [f"{what} ({source})" for source, what in self._busy.items() if isinstance(what, str) and what]
        return ", ".join(asking[:SOURCES_NAMED_MAX]) or None

    def unknown(self, now: float) -> str | None:
        """Return why it cannot be told that nobody is here; None where it can."""
        broken = [
            f"{source}: {seen.detail or 'cannot be read'}" if seen.unknown else f"{source} has fallen silent"
            for source, seen in self._inputs.items()
            if seen.unknown is Unknown.BROKEN or (seen.unknown is None and now - seen.observed_at > INPUT_STALE_S)
        ]
        broken += [f"{source}: cannot be read" for source, what in self._busy.items() if what is Unknown.BROKEN]
        if broken:
            return f"input cannot be observed ({', '.join(broken[:SOURCES_NAMED_MAX])})"
        if any(seen.unknown is None for seen in self._inputs.values()):
            return None
        absent = [f"{source}: {seen.detail or 'not here'}" for source, seen in self._inputs.items()]
        tried = ", ".join(absent[:SOURCES_NAMED_MAX]) or "no source has reported yet"
        return f"nothing on this machine can see input ({tried})"

    def _mark_busy(self, now: float) -> None:
        asking = self.busy()
        if asking is not None:
            self._seen(Sign(now, f"{asking} ended"))

    def _seen(self, sign: Sign) -> None:
        if self.last is not None and sign.at <= self.last.at:
            return
        if self.last is None or sign.at - self.last.at > self.absence_s:
            self._present_since = sign.at
        elif sign.at - self._present_since >= self.absence_s:
            self.long_visit_at = sign.at
        self.last = sign
