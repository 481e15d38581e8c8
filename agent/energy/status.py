"""What the agent tells its owner about watts, joules, money and CO2. Pure.

Every figure comes with how it is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.energy.card import EnergyMethod
from agent.energy.day_counts import DayRecord
from agent.energy.meter import CarbonIntensity, CardFigures
from agent.energy.settings import MJ_PER_KWH, EnergySettings, cost_micro

MICRO_PER_CREDIT = 1_000_000

_METHOD_WORDS = {
    EnergyMethod.COUNTER.value: "counter",
    EnergyMethod.INTEGRATED_POWER.value: "integrated power",
    EnergyMethod.ESTIMATE.value: "estimate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardEnergyLine:
    """One card. `joules_per_token` and what belongs to it are None before the first tokens, or where nothing is known.

    Args:
        concurrency: tasks at once, on average, while those tokens were generated.
        method: how `joules_per_token` is known.
    """

    card: str
    watts: float | None
    joules_per_token: float | None
    concurrency: float | None
    method: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyStatus:
    """Watts now, and the owner's local day.

    Args:
        work_mj: drawn by the cards while tasks ran, by method; processor and power supply are not in it.
        idle_mj: drawn while an engine held a card and no task ran.
        unmeasured_s: card seconds of work about which nothing is known.
        cost_micro: of work and idling at the owner's price, in millionths of `currency`; None without a price.
        carbon_g: grams of CO2 equivalent of work and idling; None without a source.
        carbon_label: where the intensity is from.
        counts_lost: what was counted earlier on this day cannot be read; a daily limit counts as used up.
    """

    cards: tuple[CardEnergyLine, ...]
    day: str
    tasks: int
    prompt_tokens: int
    completion_tokens: int
    work_mj: dict[str, int]
    idle_mj: int
    unmeasured_s: float
    price_per_kwh_micro: int | None
    cost_micro: int | None
    currency: str
    carbon_g: float | None
    carbon_label: str
    counts_lost: bool = False


def energy_status(
    figures: Sequence[CardFigures], record: DayRecord, settings: EnergySettings, carbon: CarbonIntensity | None
) -> EnergyStatus:
    drawn_mj = sum(record.work_mj.values()) + record.idle_mj
    price = settings.price_per_kwh_micro
    return EnergyStatus(
        cards=tuple(_card_line(one) for one in figures),
        day=record.day,
        tasks=record.tasks,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        work_mj=dict(record.work_mj),
        idle_mj=record.idle_mj,
        unmeasured_s=round(record.unmeasured_s, 1),
        price_per_kwh_micro=price,
        cost_micro=None if price is None else cost_micro(drawn_mj, price),
        currency=settings.currency,
        carbon_g=None if carbon is None else round(carbon.grams_per_kwh * drawn_mj / MJ_PER_KWH, 3),
        carbon_label="" if carbon is None else carbon.label,
        counts_lost=record.lost,
    )


def _card_line(figures: CardFigures) -> CardEnergyLine:
    rate = figures.rate
    return CardEnergyLine(
        card=figures.card,
        watts=None if figures.watts is None else round(figures.watts, 1),
        joules_per_token=None if rate is None else round(rate.joules_per_token, 4),
        concurrency=None if rate is None else round(rate.concurrency, 2),
        method=None if rate is None else rate.method.value,
    )


def energy_lines(energy: Mapping[str, Any]) -> list[str]:
    """Return the lines to show to a person.

    Args:
        energy: an `EnergyStatus` as `dataclasses.asdict` makes it, or as it was read back from JSON.
    """
    lines = [_card_text(card) for card in energy["cards"] if card["watts"] is not None or card["method"] is not None]
    lines.append(
        f"today: {_count(energy['tasks'], 'task')}, {energy['prompt_tokens']:,} prompt tokens, "
        f"{energy['completion_tokens']:,} generated"
    )
    if energy["counts_lost"]:
        lines.append("today's earlier counts are lost: consent.daily_tokens, if set, counts as used up until tomorrow")
    drawn = _drawn_text(energy)
    if drawn:
        lines.append(drawn)
    if energy["unmeasured_s"] >= 1:
        lines.append(f"energy of {energy['unmeasured_s']:,.0f} s of work is not known: the card tells nothing about it")
    return lines


def credits_lines(credits: Mapping[str, Any] | None) -> list[str]:
    """Return the line about a node's credits; none before the coordinator has told them.

    Args:
        credits: an `agent.events.NodeCredits` as `dataclasses.asdict` makes it, or as it was read back from JSON.
    """
    if credits is None:
        return []
    earned, held = (credits[name] / MICRO_PER_CREDIT for name in ("earned_micro", "held_micro"))
    return [f"credits: {earned:,.2f} earned, {held:,.2f} more held back until the work is old enough"]


def _card_text(card: Mapping[str, Any]) -> str:
    watts = "power not known" if card["watts"] is None else f"{card['watts']:.0f} W"
    if card["method"] is None:
        return f"card {card['card']}: {watts}"
    at_once = _count(card["concurrency"], "task", ".1f")
    return (
        f"card {card['card']}: {watts}, {card['joules_per_token']:.3g} J per generated token "
        f"at {at_once} at once ({_METHOD_WORDS[card['method']]})"
    )


def _drawn_text(energy: Mapping[str, Any]) -> str:
    work_mj = sum(energy["work_mj"].values())
    if not work_mj and not energy["idle_mj"]:
        return ""
    parts = [f"today: {_kwh(work_mj)} at work{_methods(energy['work_mj'])}, {_kwh(energy['idle_mj'])} waiting for work"]
    if energy["cost_micro"] is not None:
        price = f"{energy['price_per_kwh_micro'] / 1e6:g} {energy['currency']}/kWh"
        parts.append(f"{energy['cost_micro'] / 1e6:.2f} {energy['currency']} at {price}")
    if energy["carbon_g"] is not None:
        parts.append(f"{energy['carbon_g']:,.0f} g CO2 ({energy['carbon_label']})")
    return "; ".join(parts) + " (cards only)"


def _methods(work_mj: Mapping[str, int]) -> str:
    total = sum(work_mj.values())
    if not total:
        return ""
    shares = [f"{share / total:.0%} {_METHOD_WORDS[method]}" for method, share in work_mj.items() if share]
    return f" ({', '.join(shares)})"


def _kwh(energy_mj: int) -> str:
    return f"{energy_mj / MJ_PER_KWH:.3f} kWh"


def _count(number: float, what: str, form: str = ",") -> str:
    text = format(number, form)
    return f"{text} {what}" if text in ("1", "1.0") else f"{text} {what}s"
