"""Whether the network is paid by volume, as NetworkManager judges it."""

from collections.abc import Sequence
from typing import NoReturn

from agent.owner.events import MeteredObserved, OwnerEvent, Unknown
from agent.signals.bus import PROPERTIES, Bus, system_bus_address
from agent.signals.source import Pace, SourceAbsent, Tell

SERVICE = "org.freedesktop.NetworkManager"
PATH = "/org/freedesktop/NetworkManager"
# Changes are signalled; this only mends a signal that was missed.
RESYNC_S = 30.0

# NMMetered. A guess of "yes" (a phone's hotspot) counts: the owner pays for a wrong "no".
_YES = frozenset({1, 3})
_NO = frozenset({2, 4})


class MeteredSource:
    """Follows NetworkManager's `Metered` over the system bus."""

    name = "metered"

    def __init__(self, *, address: str | None = None) -> None:
        self._address = address

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        async with await Bus.connect(self._address or system_bus_address()) as bus:
            await bus.follow(SERVICE, f"path='{PATH}',interface='{PROPERTIES}'")
            while True:
                if not bus.running(SERVICE):
                    raise SourceAbsent("NetworkManager does not run")
                metered = await bus.property(SERVICE, PATH, SERVICE, "Metered")
                # 0, or a value of a later release: it does not know, for example while no network is up.
                tell(MeteredObserved(metered in _YES if metered in _YES | _NO else Unknown.ABSENT))
                await bus.wait(RESYNC_S)
                await pace.rest(0.2)

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [MeteredObserved(why)]
