"""Money, energy and carbon of tokens. Pure; tokens are those of prompts and answers, as in the paper."""

from typing import Final

SECONDS_PER_HOUR: Final = 3600.0
JOULES_PER_KWH: Final = 3.6e6
GRAMS_PER_TONNE: Final = 1e6
MILLION: Final = 1e6


def usd_per_million_tokens(usd_per_hour: float, tokens_per_second: float) -> float:
    """Return $/M tokens of something that costs so much and serves so many."""
    return usd_per_hour / (tokens_per_second * SECONDS_PER_HOUR) * MILLION


def joules_per_million_tokens(watts: float, tokens_per_second: float) -> float:
    """Return J/M tokens of something that draws so much and serves so many."""
    return watts / tokens_per_second * MILLION


def grams(joules: float, grams_per_kwh: float) -> float:
    """Return the grams of CO2 that so much energy stands for."""
    return joules / JOULES_PER_KWH * grams_per_kwh


def power_usd_per_hour(watts: float, usd_per_kwh: float, grams_per_kwh: float, usd_per_tonne: float) -> float:
    """Return what an hour of that power costs: electricity, and carbon at its price."""
    kwh = watts / 1000.0
    return kwh * usd_per_kwh + kwh * grams_per_kwh / GRAMS_PER_TONNE * usd_per_tonne
