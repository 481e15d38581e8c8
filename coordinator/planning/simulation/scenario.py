"""What is simulated: fleet, owners, network, loads and targets, as a TOML file says it. Reads files, decides nothing.

docs/simulator.md explains each key; `coordinator/planning/scenarios/` has examples.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated, Final

import msgspec

from coordinator.ledger.prices import Price
from coordinator.planning.benchmark import (
    ANSWER_SPREAD,
    ANSWER_TOKENS_MAX,
    PROMPT_SPREAD,
    PROMPT_TOKENS_MAX,
    TOKENS_MIN,
    lengths,
)
from coordinator.planning.curve_file import read_curves
from coordinator.planning.curves import EngineCurve
from coordinator.planning.rows import Configuration
from inference.task import ManifestDigest, ServiceClass

# Examples.
SCENARIOS: Final = Path(__file__).parent.parent / "scenarios"
HOURS_A_DAY: Final = 24

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class ScenarioInvalid(ValueError):
    """A scenario or a trace cannot be used; the message says what, where and what to do."""


class Owners(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a node is lost, and for how long.

    Args:
        losses_per_hour: owners who come back, while a node is lent; the mean over a day. 0.011 is published for a
            consumer fleet (Salad: 1.1 reallocations an hour over 100 machines).
        crashes_per_hour: nodes that vanish without a word, while lent.
        away_median_min, away_spread: how long the card is the owner's: log-normal, and the spread of its logarithm.
        reload_s: until an engine is up again.
        rhythm: how much more or less often owners come back in each hour of their day; scaled to a mean of 1.
        time_zones: each owner's hours from that of the simulation, drawn from these.
    """

    losses_per_hour: _NotNegative = 0.0
    crashes_per_hour: _NotNegative = 0.0
    away_median_min: _Positive = 20.0
    away_spread: _NotNegative = 1.0
    reload_s: _NotNegative = 90.0
    rhythm: Annotated[tuple[_NotNegative, ...], msgspec.Meta(min_length=24, max_length=24)] = (1.0,) * HOURS_A_DAY
    time_zones: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)] = (0,)


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal nodes, each with one engine.

    Args:
        model, card, cards: one of the measured configurations (planning/data/curves.csv).
        usd_per_hour: of a node, while it is lent.
        idle_w, load_w: of all its cards, with the model loaded: waiting, and computing.
        slots: answers that the node takes at once; what the engine has by default.
        open: their owners leave the model to the fleet: nodes begin with `model`, and change to others of the scenario
            that were measured on their cards, as placement has it.
        line_bytes_per_s: of the line over which an open node fetches models; 50 Mbit/s by default.
        ask: what the owner asks, micro-credits per 1,000 tokens of prompt and of answer; the list's share by default.
    """

    model: str
    card: str
    cards: _Count = 1
    nodes: _Count
    usd_per_hour: _NotNegative
    idle_w: _NotNegative
    load_w: _NotNegative
    slots: _Count | None = None
    open: bool = False
    line_bytes_per_s: _Positive = 6.25e6
    ask: tuple[int, int] | None = None
    owners: Owners = Owners()

    @property
    def name(self) -> str:
        return f"{self.cards}x{self.card} {self.model}"

    @property
    def digest(self) -> ManifestDigest:
        return digest_of(self.model)

    @property
    def price(self) -> Price | None:
        return None if self.ask is None else Price(*self.ask)

    def slots_of(self, curve: EngineCurve) -> int:
        return min(self.slots or curve.slots_max, curve.slots_max)


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one kind that come at random (Poisson).

    Args:
        requests_per_second, capacity_share: one of the two; the second is of what the nodes that begin with the model
            serve at most, with their owners' absence counted (capacity.py).
        from_hour, until_hour: of the run, between which they come; all of it by default.
        prompt_tokens_mean, answer_tokens_mean: of log-normal lengths, which are cut off at the maxima.
        max_tokens: what a client asks for at most; by default the longest answer. Answers end before it by a stop id.
        deadline_s: from submission; none by default.
    """

    model: str
    service_class: ServiceClass
    requests_per_second: _Positive | None = None
    capacity_share: _Positive | None = None
    from_hour: _NotNegative = 0.0
    until_hour: _Positive | None = None
    prompt_tokens_mean: _Positive = 208.0
    answer_tokens_mean: _Positive = 210.0
    prompt_spread: _NotNegative = PROMPT_SPREAD
    answer_spread: _NotNegative = ANSWER_SPREAD
    prompt_tokens_max: _Tokens = PROMPT_TOKENS_MAX
    answer_tokens_max: _Tokens = ANSWER_TOKENS_MAX
    max_tokens: _Tokens | None = None
    deadline_s: _Positive | None = None

    def __post_init__(self) -> None:
        if (self.requests_per_second is None) == (self.capacity_share is None):
            raise ValueError("a load needs either requests_per_second or capacity_share")
        if self.until_hour is not None and self.until_hour <= self.from_hour:
            raise ValueError("until_hour must be later than from_hour")
        for name, mean, longest in (
            ("prompt", self.prompt_tokens_mean, self.prompt_tokens_max),
            ("answer", self.answer_tokens_mean, self.answer_tokens_max),
        ):
            if not TOKENS_MIN <= mean <= longest:
                raise ValueError(f"{name}_tokens_mean must lie from {TOKENS_MIN} to {name}_tokens_max ({longest})")
        if self.max_tokens is not None and self.max_tokens < self.answer_tokens_max:
            raise ValueError("max_tokens must not be less than answer_tokens_max")

    def prompt_lengths(self) -> list[int]:
        """Return lengths of prompts, each as likely as the others."""
        return lengths(self.prompt_tokens_mean, self.prompt_spread, self.prompt_tokens_max)

    def answer_lengths(self) -> list[int]:
        """Return lengths of answers, each as likely as the others."""
        return lengths(self.answer_tokens_mean, self.answer_spread, self.answer_tokens_max)


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way between coordinator and node.

    Args:
        one_way_ms, spread: each node's delay is log-normal: median, and the spread of its logarithm; it stays the same.
        slow_share, slow_factor: so many of the nodes are that much further away.
    """

    one_way_ms: _NotNegative = 15.0
    spread: _NotNegative = 0.5
    slow_share: _Share = 0.0
    slow_factor: _Positive = 10.0


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an answer was good: first token, time per token after it, and its end. What is missing is not asked."""

    first_token_ms: _Positive | None = None
    token_ms: _Positive | None = None
    end_to_end_s: _Positive | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Args:
        hours: for how long requests come; the run ends when the last one has ended.
        tasks_max: no more requests than these, if they come sooner.
        seed: of everything that is drawn.
        warm_up_s: requests before it are served and not counted in latencies and targets.
        start_hour: of the day, where owners have a rhythm.
    """

    hours: _Positive
    fleet: Annotated[tuple[Fleet, ...], msgspec.Meta(min_length=1)]
    load: tuple[Load, ...] = ()
    tasks_max: _Count | None = None
    seed: int = 1
    warm_up_s: _NotNegative = 0.0
    start_hour: Annotated[int, msgspec.Meta(ge=0, lt=HOURS_A_DAY)] = 0
    network: Network = Network()
    targets: dict[ServiceClass, Target] = {}

    def models(self) -> list[str]:
        """Return the models that nodes have or are asked for, in order."""
        return list(dict.fromkeys([*(fleet.model for fleet in self.fleet), *(load.model for load in self.load)]))

    def longest(self, model: str) -> int:
        """Return how many tokens the longest request for a model may have, prompt and answer; 0 for none."""
        loads = (load for load in self.load if load.model == model)
        return max((load.prompt_tokens_max + load.answer_tokens_max for load in loads), default=0)


@cache
def digest_of(model: str) -> ManifestDigest:
    """Return a digest that stands for a model that has no manifest here."""
    return ManifestDigest("sha256:" + hashlib.sha256(model.encode()).hexdigest())


def read_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ScenarioInvalid: it cannot be read, or does not say what it should.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ScenarioInvalid(f"cannot read the scenario {path}: {error.strerror}") from error
    try:
        return msgspec.toml.decode(content, type=Scenario)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScenarioInvalid(f"the scenario {path} is wrong: {error}; docs/simulator.md lists the keys") from error


def curves_of(scenario: Scenario) -> list[EngineCurve]:
    """Return the engines' curves, in the order of the fleet.

    Raises:
        ScenarioInvalid: nothing was measured of a configuration, or a load asks what no engine of its model has.
    """
    measured = read_curves()
    for fleet in scenario.fleet:
        if Configuration(fleet.model, fleet.card, fleet.cards) not in measured:
            known = "; ".join(str(one) for one in measured)
            raise ScenarioInvalid(f"nothing was measured of {fleet.name}; there is: {known}")
    runnable = [models_of(scenario, fleet) for fleet in scenario.fleet]
    for number, load in enumerate(scenario.load):
        has_it = [one[load.model] for one in runnable if load.model in one]
        if not has_it:
            raise ScenarioInvalid(
                f"load[{number}] is for {load.model}, which no node has"
                + (" or was measured with" if any(fleet.open for fleet in scenario.fleet) else "")
                + "; the fleet has: "
                + ", ".join(dict.fromkeys(fleet.model for fleet in scenario.fleet))
            )
        if load.capacity_share is not None and all(fleet.model != load.model for fleet in scenario.fleet):
            raise ScenarioInvalid(
                f"load[{number}] is a share of what nodes with {load.model} serve, and none begins with it; "
                "give requests_per_second"
            )
        room = min(curve.kv_tokens_max for curve in has_it)
        longest = load.prompt_tokens_max + load.answer_tokens_max
        if longest > room:
            raise ScenarioInvalid(
                f"load[{number}] has requests of up to {longest} tokens, and an engine of its model "
                f"has room for {room}; lower prompt_tokens_max or answer_tokens_max"
            )
    return [models[fleet.model] for fleet, models in zip(scenario.fleet, runnable, strict=True)]


def models_of(scenario: Scenario, fleet: Fleet) -> dict[str, EngineCurve]:
    """Return the models that nodes of a fleet may have, with their curves: its own, or where it is open also others."""
    measured = read_curves()
    models = {model: Configuration(model, fleet.card, fleet.cards) for model in scenario.models()}
    return {
        model: measured[configuration]
        for model, configuration in models.items()
        if configuration in measured
        and (
            model == fleet.model
            # One that has no room for what is asked of it is of no use.
            or (fleet.open and measured[configuration].kv_tokens_max >= scenario.longest(model))
        )
    }
