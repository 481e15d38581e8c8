"""What an owner is told about watts, joules, money and CO2."""

import json
from dataclasses import asdict
from decimal import Decimal

from agent.energy.card import EnergyMethod
from agent.energy.day_counts import DayRecord, ModelDay
from agent.energy.meter import CarbonIntensity, CardFigures, WorkRate
from agent.energy.settings import EnergySettings
from agent.energy.status import EnergyStatus, energy_lines, energy_status

DAY = DayRecord(
    day="2026-12-02",
    models={"a": ModelDay(tasks=12, prompt_tokens=3400, completion_tokens=9812)},
    # 0.4 kWh and 0.1 kWh.
    work_mj={"counter": 1_368_000_000, "estimate": 72_000_000},
    idle_mj=360_000_000,
    unmeasured_s=42.4,
)
CARDS = [
    CardFigures("GPU-1", 212.4, WorkRate(1.912, 3.25, EnergyMethod.COUNTER)),
    CardFigures("GPU-2", 31.0, None),
    CardFigures("cpu", None, None),
]
GERMANY = CarbonIntensity(380.0, "Germany, yearly average of 2023")


def lines(status: EnergyStatus) -> list[str]:
    """As the command line sees it: over the file."""
    return energy_lines(json.loads(json.dumps(asdict(status))))


def test_an_owner_sees_watts_joules_money_and_co2_each_with_how_it_is_known() -> None:
    settings = EnergySettings(price_per_kwh=Decimal("0.32"))
    assert lines(energy_status(CARDS, DAY, settings, GERMANY)) == [
        "card GPU-1: 212 W, 1.91 J per generated token at 3.2 tasks at once (counter)",
        "card GPU-2: 31 W",
        "today: 12 tasks, 3,400 prompt tokens, 9,812 generated",
        (
            "today: 0.400 kWh at work (95% counter, 5% estimate), 0.100 kWh waiting for work; "
            "0.16 EUR at 0.32 EUR/kWh; 190 g CO2 (Germany, yearly average of 2023) (cards only)"
        ),
        "energy of 42 s of work is not known: the card tells nothing about it",
    ]


def test_without_price_and_country_no_money_and_no_co2_are_made_up() -> None:
    status = energy_status([], DAY, EnergySettings(), None)
    assert (status.cost_micro, status.carbon_g) == (None, None)
    text = " ".join(lines(status))
    # Mutation: a default price or country fails this.
    assert "EUR" not in text
    assert "CO2" not in text


def test_a_day_without_work_has_one_line() -> None:
    status = energy_status([], DayRecord(day="2026-12-02"), EnergySettings(), GERMANY)
    assert lines(status) == ["today: 0 tasks, 0 prompt tokens, 0 generated"]


def test_money_is_whole_millionths() -> None:
    status = energy_status([], DAY, EnergySettings(price_per_kwh=Decimal("0.32")), None)
    assert status.cost_micro == 160_000


def test_lost_counts_are_said_to_be_lost() -> None:
    """Mutation seen to fail here: show the counts as if they were whole."""
    status = energy_status([], DayRecord(day="2026-12-02", lost=True), EnergySettings(), None)
    assert any("counts are lost" in line and "consent.daily_tokens" in line for line in lines(status))
