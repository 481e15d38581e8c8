"""What a plan is asked for: load by model and class, targets, caps, churn; read from a TOML file."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coordinator.planning.benchmark import TOKENS_MIN
from coordinator.planning.capacity import Targets
from coordinator.planning.churn import Churn
from coordinator.planning.rows import Configuration
from coordinator.planning.toml_table import InputInvalid, Table, read_table


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A class's defaults: what it promises, and how surely its capacity must be there.

    Args:
        present_probability: that enough engines are there at any time; 0 plans with the mean, for work that can wait.
    """

    targets: Targets
    present_probability: float


CLASSES: Final = {
    # The paper's prose: consumer cards are for first tokens of 200 to 500 ms. 20 tokens/s are faster than one reads.
    "interactive": ServiceClass(Targets(first_token_ms=500.0, token_ms=50.0, quantile=0.99), 0.99),
    # The benchmark's own threshold for goodput: 2 s.
    "standard": ServiceClass(Targets(first_token_ms=2000.0, token_ms=100.0, quantile=0.95), 0.95),
    "batch": ServiceClass(Targets(first_token_ms=None, token_ms=None, quantile=0.95), 0.0),
}
# Room for arrivals that are not as even as planned: engines are filled to 80 %.
HEADROOM: Final = 1.25
_LOAD_KEYS: Final = (
    "model",
    "class",
    "requests_per_second",
    "prompt_tokens",
    "answer_tokens",
    "first_token_ms",
    "token_ms",
    "quantile",
    "unfitted_first_token",
)
_CHURN_KEYS: Final = ("losses_per_hour", "away_median_minutes", "away_spread", "reload_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load of one model in one class; prompts' and answers' lengths are means.

    Args:
        unfitted_first_token: engines may serve it whose first tokens no curve tells.
    """

    model: str
    service_class: str
    requests_per_second: float
    prompt_tokens: float
    answer_tokens: float
    targets: Targets
    unfitted_first_token: bool = False

    def takes(self, configuration: Configuration) -> bool:
        """Whether engines of that configuration may serve it; interactive work hangs on its first tokens."""
        unfitted = self.unfitted_first_token or self.service_class != "interactive"
        return configuration.model == self.model and (unfitted or configuration.first_token_fitted)

    def __str__(self) -> str:
        return f"{self.model}, {self.service_class}"

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * (self.prompt_tokens + self.answer_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """A whole question.

    Args:
        headroom: capacity over load, at least 1.
        cards_max: by card kind; kinds that are not named are not limited.
        churn: by card kind; consumer cards that are not named have the default.
    """

    demands: tuple[Demand, ...]
    headroom: float = HEADROOM
    cards_max: Mapping[str, int] = field(default_factory=dict)
    churn: Mapping[str, Churn] = field(default_factory=dict)


def read_plan_input(path: Path, models: Collection[str], cards: Collection[str]) -> PlanInput:
    """Return the question in a file.

    Args:
        models: those with curves.
        cards: those with prices.

    Raises:
        InputInvalid: it cannot be read, or a key is unknown, missing or wrong; the message names file and key.
    """
    table = read_table(path)
    table.allow(("headroom", "load", "cards_max", "churn"))
    demands = tuple(_demand(load, models) for load in table.tables("load"))
    names = [str(demand) for demand in demands]
    for name in names:
        if names.count(name) > 1:
            raise InputInvalid(f"{path}: {name} has two tables [[load]]; add them up")
    caps, churn = table.table("cards_max"), table.table("churn")
    caps.allow(sorted(cards))
    churn.allow(sorted(cards))
    return PlanInput(
        demands=demands,
        headroom=table.number("headroom", 1.0, 100.0, HEADROOM),
        cards_max={card: int(caps.number(card, 0, 1_000_000)) for card in caps.values},
        churn={card: _churn(churn.table(card)) for card in churn.values},
    )


def _demand(load: Table, models: Collection[str]) -> Demand:
    load.allow(_LOAD_KEYS)
    model, name = load.text("model"), load.text("class")
    if model not in models:
        raise InputInvalid(f"{load.place}: no curve for model {model!r}; there are: {', '.join(sorted(models))}")
    if name not in CLASSES:
        raise InputInvalid(f"{load.place}: class must be one of {', '.join(CLASSES)}, not {name!r}")
    targets = CLASSES[name].targets
    return Demand(
        model=model,
        service_class=name,
        requests_per_second=load.number("requests_per_second", 0.001, 10_000.0),
        prompt_tokens=load.number("prompt_tokens", TOKENS_MIN, 100_000.0),
        answer_tokens=load.number("answer_tokens", TOKENS_MIN, 100_000.0),
        targets=Targets(
            first_token_ms=_target(load, "first_token_ms", targets.first_token_ms),
            token_ms=_target(load, "token_ms", targets.token_ms),
            quantile=load.number("quantile", 0.01, 0.999, targets.quantile),
        ),
        unfitted_first_token="unfitted_first_token" in load.values and load.switch("unfitted_first_token"),
    )


def _target(load: Table, key: str, default: float | None) -> float | None:
    if key not in load.values and default is None:
        return None
    return load.number(key, 0.001, default=default)


def _churn(table: Table) -> Churn:
    table.allow(_CHURN_KEYS)
    default = Churn()
    return Churn(
        losses_per_hour=table.number("losses_per_hour", 0.0, 60.0, default.losses_per_hour),
        away_median_minutes=table.number("away_median_minutes", 0.0, 100_000.0, default.away_median_minutes),
        away_spread=table.number("away_spread", 0.0, 5.0, default.away_spread),
        reload_s=table.number("reload_s", 0.0, 86_400.0, default.reload_s),
    )
