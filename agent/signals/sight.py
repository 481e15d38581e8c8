"""Finds desktops whose input nobody sees."""

from collections.abc import Callable

from agent.owner.events import InputObserved, OwnerEvent, Unknown

SOURCE = "session"
# See everybody at this machine's own screen; and, as `source:uid`, one user's desktop.
_SEE_ALL = frozenset({"evdev", "logind"})
_SEE_ONE = frozenset({"wayland", "mutter", "x11"})


class SessionSight:
    """Says BROKEN as long as somebody has a desktop open whose input no source sees.

    Each source that does not exist is ABSENT, which taken alone means nothing.
    Where somebody sits at a desktop, though, all of them being absent does not
    mean that nobody is there: the companion was not installed, and the agent may
    not read event devices.

    Args:
        desktop_uids: who has a desktop open now.
    """

    def __init__(self, desktop_uids: Callable[[], frozenset[int]]) -> None:
        self._desktop_uids = desktop_uids
        self._seeing: set[str] = set()
        self._said: InputObserved | None = None

    def observe(self, event: OwnerEvent) -> InputObserved | None:
        """Take note of an event; return what is to be told as well, if that has changed."""
        if isinstance(event, InputObserved):
            if isinstance(event.idle_s, Unknown):
                self._seeing.discard(event.source)
            else:
                self._seeing.add(event.source)
        now = self._judge()
        if now == self._said:
            return None
        self._said = now
        return now

    def _judge(self) -> InputObserved:
        unseen = set() if self._seeing & _SEE_ALL else {uid for uid in self._desktop_uids() if not self._sees(uid)}
        if not unseen:
            return InputObserved(SOURCE, Unknown.ABSENT, "every open desktop is seen")
        users = ", ".join(str(uid) for uid in sorted(unseen))
        detail = f"user {users} has a desktop open whose input nobody sees; install the session companion"
        return InputObserved(SOURCE, Unknown.BROKEN, detail)

    def _sees(self, uid: int) -> bool:
        return any(f"{source}:{uid}" in self._seeing for source in _SEE_ONE)
