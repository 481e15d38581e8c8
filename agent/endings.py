"""What an agent does when the coordinator says goodbye. Pure."""

from dataclasses import replace

from agent import events as e
from agent.errors import ExitStatus

PROTOCOL_VERSION = 1
# A rejoin after a protocol violation: long enough not to burden, short enough for an operator who watches.
VIOLATION_PAUSE_S = 5.0

VERSION_UNSUPPORTED = e.Exit(
    ExitStatus.VERSION_UNSUPPORTED,
    f"the coordinator does not speak protocol version {PROTOCOL_VERSION}; update the agent",
)
_EXITS = {
    e.ClosingReason.CLOSING_REASON_SUPERSEDED: e.Exit(
        ExitStatus.SUPERSEDED, "a newer agent with this identity has connected"
    ),
    e.ClosingReason.CLOSING_REASON_BANNED: e.Exit(ExitStatus.BANNED, "the coordinator has banned this node"),
    e.ClosingReason.CLOSING_REASON_VERSION_UNSUPPORTED: VERSION_UNSUPPORTED,
}


def after_closing(event: e.ClosingReceived) -> list[e.Command]:
    """Return whether to end for good or to come back."""
    final = _EXITS.get(event.reason)
    if final is not None:
        return [replace(final, detail=f"{final.detail} ({event.detail})") if event.detail else final]
    violated = event.reason == e.ClosingReason.CLOSING_REASON_PROTOCOL_VIOLATION
    return [e.CloseConnection(f"the coordinator closes: {event.detail}", VIOLATION_PAUSE_S if violated else 0.0)]
