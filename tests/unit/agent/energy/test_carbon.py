"""Grams of CO2 per kWh: the bundled table, a file of somebody else's, and countries that are misspelt."""

import json
import os
from pathlib import Path

import pytest

from agent.energy.carbon import (
    FILE_AGE_S_MAX,
    FILE_BYTES_MAX,
    CarbonFile,
    find_country,
    open_carbon_source,
    read_table,
)
from agent.energy.meter import CarbonIntensity
from agent.energy.settings import EnergySettings
from agent.errors import ConfigInvalid

# The file's time is set, so that no clock is read.
WRITTEN_S = 1_700_000_000
NOW_MS = WRITTEN_S * 1000 + 60_000


def write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.utime(path, (WRITTEN_S, WRITTEN_S))


def test_the_table_is_whole_and_plausible() -> None:
    table = read_table()
    assert len(table) > 200
    assert len({country.alpha_2 for country in table}) == len({country.alpha_3 for country in table}) == len(table)
    for country in table:
        assert len(country.alpha_2) == 2
        assert len(country.alpha_3) == 3
        # No grid is free of emissions over its life, and none is dirtier than lignite alone.
        assert 10 <= country.grams_per_kwh <= 1400
        assert country.year >= 2021


def test_two_and_three_letters_name_the_same_country_in_any_case() -> None:
    assert find_country("DE") == find_country("deu") == find_country(" De ")
    assert find_country("FR").grams_per_kwh < find_country("PL").grams_per_kwh


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [("Germany", '"DE" (Germany)'), ("Germny", '"DE" (Germany)'), ("GBN", '"GB" (United Kingdom)')],
)
def test_an_unknown_country_is_refused_with_what_is_close_to_it(text: str, suggestion: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        find_country(text)
    assert suggestion in str(refused.value)
    assert "energy.country" in str(refused.value)


def test_a_country_that_is_close_to_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        find_country("????????")
    assert "did you mean" not in str(refused.value)


def test_without_country_and_file_there_is_no_figure() -> None:
    assert open_carbon_source(EnergySettings()) is None


def test_the_table_says_which_year_and_source_its_figure_is_of() -> None:
    source = open_carbon_source(EnergySettings(country="DE"))
    assert source is not None
    figure = source.grams_per_kwh(NOW_MS)
    assert figure is not None
    assert figure.grams_per_kwh == 381
    assert figure.label == "Germany, yearly average of 2023 (Ember, Our World in Data)"


@pytest.mark.parametrize(
    ("content", "figure"),
    [
        ("123.5\n", CarbonIntensity(123.5, "carbon")),
        ("0", CarbonIntensity(0.0, "carbon")),
        (json.dumps({"grams_per_kwh": 88, "label": "grid operator"}), CarbonIntensity(88.0, "grid operator")),
    ],
)
def test_a_fresh_file_answers(tmp_path: Path, content: str, figure: CarbonIntensity) -> None:
    write(tmp_path / "carbon", content)
    source = open_carbon_source(EnergySettings(country="DE", carbon_file=tmp_path / "carbon"))
    assert source is not None
    # Mutation: asking the table first fails this.
    assert source.grams_per_kwh(NOW_MS) == figure


@pytest.mark.parametrize(
    "content",
    [
        "",
        "many",
        "NaN",
        "-1",
        "99999",
        "true",
        "[1]",
        "{}",
        '{"grams_per_kwh": "12"}',
        '{"grams_per_kwh": 12, "label": 5}',
        '{"grams_per_kwh": 12, "label": "\\u001b[31m"}',
        b"\xff\xfe",
        " " * (FILE_BYTES_MAX + 1),
    ],
)
def test_a_broken_file_leaves_the_answer_to_the_table_and_says_so(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "carbon"
    write(path, content)
    assert CarbonFile(path, None).grams_per_kwh(NOW_MS) is None
    source = open_carbon_source(EnergySettings(country="DE", carbon_file=path))
    assert source is not None
    figure = source.grams_per_kwh(NOW_MS)
    assert figure is not None
    assert figure.grams_per_kwh == 381
    assert "carbon_file is not used" in figure.label


def test_a_missing_or_old_file_is_not_used(tmp_path: Path) -> None:
    source = CarbonFile(tmp_path / "carbon", None)
    assert source.grams_per_kwh(NOW_MS) is None
    write(tmp_path / "carbon", "50")
    assert source.grams_per_kwh(NOW_MS) == CarbonIntensity(50.0, "carbon")
    # Mutation: without the bound a feed that ended in spring still answers in winter.
    assert source.grams_per_kwh(NOW_MS + FILE_AGE_S_MAX * 1000) is None
