"""What cards, electricity and carbon cost: read from a dated file, the default one beside this module."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.planning.toml_table import InputInvalid, read_table

PRICES: Final = Path(__file__).parent / "data" / "prices.toml"
_CARD_KEYS: Final = ("usd_per_hour", "electricity_included", "consumer", "idle_watts", "load_watts")
_KEYS: Final = (
    "as_of",
    "source",
    "electricity_usd_per_kwh",
    "carbon_grams_per_kwh",
    "carbon_usd_per_tonne",
    "cards",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPrice:
    """What one card of a kind costs and draws.

    Args:
        usd_per_hour: rent, or what owning it comes to.
        electricity_included: the price holds it already, as rents do.
        consumer: it comes and goes with its owner.
        idle_watts: with a model loaded and no work.
        load_watts: at the engine's capacity.
    """

    usd_per_hour: float
    electricity_included: bool
    consumer: bool
    idle_watts: float
    load_watts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one day, with their source."""

    as_of: str
    source: str
    electricity_usd_per_kwh: float
    carbon_grams_per_kwh: float
    carbon_usd_per_tonne: float
    cards: Mapping[str, CardPrice]


def read_prices(path: Path = PRICES) -> Prices:
    """Return the prices of a file.

    Raises:
        InputInvalid: it cannot be read, or a key is unknown, missing or wrong; the message names file and key.
    """
    table = read_table(path)
    table.allow(_KEYS)
    cards: dict[str, CardPrice] = {}
    for name in table.table("cards").values:
        card = table.table("cards").table(name)
        card.allow(_CARD_KEYS)
        idle_watts = card.number("idle_watts", 0.0)
        cards[name] = CardPrice(
            usd_per_hour=card.number("usd_per_hour", 0.0),
            electricity_included=card.switch("electricity_included"),
            consumer=card.switch("consumer"),
            idle_watts=idle_watts,
            load_watts=card.number("load_watts", idle_watts),
        )
    if not cards:
        raise InputInvalid(f"{path}: at least one table [cards.NAME] is needed")
    return Prices(
        as_of=table.text("as_of"),
        source=table.text("source"),
        electricity_usd_per_kwh=table.number("electricity_usd_per_kwh", 0.0),
        carbon_grams_per_kwh=table.number("carbon_grams_per_kwh", 0.0),
        carbon_usd_per_tonne=table.number("carbon_usd_per_tonne", 0.0),
        cards=cards,
    )
