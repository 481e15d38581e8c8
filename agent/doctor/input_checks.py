"""Which sources tell that somebody is at this machine, found by asking each of them."""

import asyncio

from agent.doctor.check import Finding, Patient, Probe, fail, ok, warn
from agent.doctor.host_checks import companion_uids
from agent.owner.events import InputObserved, OwnerEvent, Unknown
from agent.signals.companion_socket import CompanionSource
from agent.signals.logind import LogindSource
from agent.signals.sight import SOURCE as SIGHT
from agent.signals.sight import SessionSight
from agent.signals.source import Pace, run_sources
from agent.signals.watch import daemon_sources

# Every source tells at once what it sees; a bus that is asked needs some milliseconds.
LISTEN_S = 2.0


def check_input(patient: Patient) -> Finding:
    seen = asyncio.run(_listen(patient))
    working = [event for event in seen.values() if not isinstance(event.idle_s, Unknown)]
    broken = [event for event in seen.values() if event.idle_s is Unknown.BROKEN]
    if SIGHT in {event.source for event in broken}:
        return fail(seen[SIGHT].detail, patient.command("install-service", root=True))
    if broken:
        first = broken[0]
        return warn(
            f"{first.source} cannot be read ({first.detail}): nothing is lent while that lasts",
            patient.command("install-service", root=True),
        )
    if not working:
        return warn(
            'nothing here sees input: nothing is lent unless [owner] when_input_unknown = "lend"',
            patient.edit,
        )
    return ok("input is seen by " + ", ".join(sorted(f"{event.source}" for event in working)))


INPUT_PROBES = (Probe("input", check_input, LISTEN_S + 4),)


async def _listen(patient: Patient) -> dict[str, InputObserved]:
    """Return the last word of each source of input after a short time."""
    seen: dict[str, InputObserved] = {}
    settings = patient.settings.signals
    logind = LogindSource(inhibitors_ignored=settings.inhibitors_ignored)
    # Whoever has a companion is seen by it, though it tells the running agent and not this process.
    accompanied = companion_uids(patient.path("/proc"))
    sight = SessionSight(lambda: logind.desktop_uids - accompanied)

    def tell(event: OwnerEvent) -> None:
        for one in (event, sight.observe(event)):
            if isinstance(one, InputObserved):
                seen[one.source] = one

    # The companions' socket belongs to the running agent; whether one runs is a check of its own.
    sources = [one for one in daemon_sources(settings, logind) if not isinstance(one, CompanionSource)]
    try:
        async with asyncio.timeout(LISTEN_S):
            await run_sources(sources, tell, Pace())
    except TimeoutError:
        # The sources run for ever; their last words are what was wanted.
        return seen
    return seen
