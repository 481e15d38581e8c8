"""A machine with its owner, for tests of `agent.owner.policy`: readers that report every few seconds, and a clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.owner import events as oe
from agent.owner.policy import OwnerPolicy, OwnerSettings

MIB = 1024 * 1024
# As the readers of a running agent do.
REPORT_S = 5.0
WALL_MS = 1_800_000_000_000


@dataclass
class OwnedCard:
    """One card as its reader sees it."""

    processes: tuple[oe.ForeignProcess, ...] | oe.Unknown = ()
    foreign_mib: int | None = 300
    free_mib: int | None = 8000
    temperature_c: float | oe.Unknown = 50.0
    throttled: bool = False
    silent: bool = False


@dataclass
class OwnedMachine:
    """Plays a history to a policy. Every command that comes back is kept, with its time."""

    settings: OwnerSettings = field(default_factory=OwnerSettings)
    names: Sequence[str] = ("gpu-a",)
    # By source of input: when it was last touched (monotonic), or why it does not know.
    inputs: dict[str, float | oe.Unknown] = field(default_factory=lambda: {"x11": 0.0})
    now: float = 0.0
    wall_ms: int = WALL_MS

    def __post_init__(self) -> None:
        self.policy = OwnerPolicy(self.settings, self.names, self.now)
        self.cards = {name: OwnedCard() for name in self.names}
        self.silent_inputs: set[str] = set()
        self.told: list[tuple[float, oe.OwnerCommand]] = []
        # Given back, and no outcome yet.
        self.pending: list[str] = []
        # Whether a give-back succeeds the moment it is asked for.
        self.obliging = True

    def feed(self, event: oe.OwnerEvent) -> list[oe.OwnerCommand]:
        commands = self.policy.handle(event, self.now)
        self.note(commands)
        return commands

    def note(self, commands: Sequence[oe.OwnerCommand]) -> None:
        self.told += [(self.now, command) for command in commands]
        self.pending += [command.card for command in commands if isinstance(command, oe.GiveBack)]
        while self.obliging and self.pending:
            self.feed(oe.GivenBack(self.pending.pop(0)))

    def change(self, settings: OwnerSettings) -> list[oe.OwnerCommand]:
        self.settings = settings
        commands = self.policy.change_settings(settings, self.now)
        self.note(commands)
        return commands

    def report(self) -> None:
        """Let every reader say what it sees."""
        for source, touched in self.inputs.items():
            if source not in self.silent_inputs:
                idle_s = touched if isinstance(touched, oe.Unknown) else self.now - touched
                self.feed(oe.InputObserved(source, idle_s))
        for name, card in self.cards.items():
            if not card.silent:
                self.feed(self.use_of(name))
                self.feed(oe.TemperatureObserved(name, card.temperature_c, 90.0, card.throttled))

    def use_of(self, name: str) -> oe.CardUseObserved:
        card = self.cards[name]
        foreign = None if card.foreign_mib is None else card.foreign_mib * MIB
        return oe.CardUseObserved(name, card.processes, foreign, None if card.free_mib is None else card.free_mib * MIB)

    def touch(self, source: str = "x11") -> list[oe.OwnerCommand]:
        self.inputs[source] = self.now
        return self.feed(oe.InputObserved(source, 0.0))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with reports and ticks."""
        end = self.now + seconds
        while self.now < end:
            step = min(REPORT_S, end - self.now)
            self.now += step
            self.wall_ms += round(step * 1000)
            self.report()
            self.feed(oe.Tick(self.wall_ms))

    def suspend(self, seconds: float) -> None:
        """The machine is suspended: its monotonic clock stands still, and nobody reports."""
        self.wall_ms += round(seconds * 1000)
        self.feed(oe.Tick(self.wall_ms))

    def lent(self, name: str = "gpu-a") -> bool:
        return self.policy.decisions[name].lent

    def reason(self, name: str = "gpu-a") -> str:
        return self.policy.decisions[name].reason

    def lendings(self, name: str = "gpu-a") -> list[float]:
        """Return when each lending of a card began."""
        return [at for at, command in self.told if command.card == name and isinstance(command, oe.Lend)]
