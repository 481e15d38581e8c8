"""The energy counter of the processor, where the kernel has one and lets this user read it.

RAPL counts microjoules per package, for everything that the machine's
processors do, and starts again at `max_energy_range_uj` (every half hour or so
under load). Since it can be used to spy on other programs (CVE-2020-8694), Linux
lets only root read it; an administrator may allow it to the agent's user.
"""

from dataclasses import dataclass
from pathlib import Path

from agent.energy.card import CardSample
from agent.owner.events import CPU_CARD

POWERCAP = Path("/sys/class/powercap")
_UJ_PER_MJ = 1000


@dataclass(slots=True)
class _Package:
    directory: Path
    range_uj: int
    last_uj: int


class Rapl:
    """The packages of this machine, added up into a counter that does not wrap.

    Args:
        powercap: the kernel's directory.

    `note` says why there is no counter, where there is none.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self.note = ""
        self._total_uj = 0
        self._packages: list[_Package] = []
        try:
            # Besides packages there are their parts, and the whole platform, which would count twice.
            zones = [zone for zone in powercap.glob("intel-rapl:*") if _text(zone / "name").startswith("package")]
            self._packages = [
                _Package(zone, int(_text(zone / "max_energy_range_uj")), int(_text(zone / "energy_uj")))
                for zone in sorted(zones)
            ]
        except PermissionError:
            self.note = "the energy counter of the processor is readable by root only"
        except (OSError, ValueError) as error:
            self.note = f"the energy counter of the processor cannot be read: {error}"
        if not self._packages and not self.note:
            self.note = "the kernel shows no energy counter of the processor"

    def sample(self) -> CardSample:
        """Return what the processors drew since this object was made. Blocks for a few system calls."""
        if not self._packages:
            return CardSample(card=CPU_CARD)
        try:
            for package in self._packages:
                now_uj = int(_text(package.directory / "energy_uj"))
                passed_uj = now_uj - package.last_uj
                # One that starts again for another reason, such as a sleep of the machine, gives an absurd
                # difference here, which the meter does not use.
                self._total_uj += passed_uj if passed_uj >= 0 else passed_uj + package.range_uj
                package.last_uj = now_uj
        except (OSError, ValueError) as error:
            self.note = f"the energy counter of the processor cannot be read: {error}"
            return CardSample(card=CPU_CARD)
        return CardSample(card=CPU_CARD, energy_mj=self._total_uj / _UJ_PER_MJ)


def _text(path: Path) -> str:
    return path.read_text().strip()
