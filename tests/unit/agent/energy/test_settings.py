"""What an owner may write about prices and places."""

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from agent.energy.settings import EnergySettings, cost_micro


def settings(**values: object) -> EnergySettings:
    def read_path(kind: type, value: object) -> Path:
        assert kind is Path
        if not isinstance(value, str):
            raise TypeError("must be a string")
        return Path("/etc/slackwater") / value

    return msgspec.convert(values, EnergySettings, dec_hook=read_path)


def test_a_price_may_be_written_as_text_or_number_and_stays_exact() -> None:
    assert settings(price_per_kwh="0.32").price_per_kwh_micro == 320_000
    assert settings(price_per_kwh=0.07).price_per_kwh_micro == 70_000
    assert settings(price_per_kwh=1).price_per_kwh == Decimal(1)
    assert settings().price_per_kwh_micro is None


@pytest.mark.parametrize(
    "values",
    [
        {"price_per_kwh": "-0.1"},
        {"price_per_kwh": "1001"},
        {"price_per_kwh": "nan"},
        {"price_per_kwh": "0.1234567"},
        {"price_per_kwh": "cheap"},
        {"currency": "euro"},
        {"country": ""},
        {"tdp_w": {"GPU-1": 0}},
        {"tdp_w": {"GPU-1": 1e9}},
        {"carbon_file": 5},
        {"pirce_per_kwh": "0.3"},
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        settings(**values)


def test_a_kwh_costs_its_price_and_less_costs_less() -> None:
    assert cost_micro(3_600_000_000, 320_000) == 320_000
    assert cost_micro(0, 320_000) == 0
    # 1 Wh at 0.32 a kWh.
    assert cost_micro(3_600_000, 320_000) == 320
    # Half a kWh at a millionth. Mutation: cutting off instead of rounding.
    assert cost_micro(1_800_000_000, 1) == 1
    assert cost_micro(1_799_999_999, 1) == 0


def test_a_file_is_found_where_the_configuration_is() -> None:
    assert settings(carbon_file="carbon.json").carbon_file == Path("/etc/slackwater/carbon.json")
