"""How many grams of CO2 a kWh stands for: a yearly table by country, or a file that another program keeps.

The daemon asks nobody on the network for this. Whoever has a live source lets
a program of theirs write its newest figure into a file (`carbon_file`); while
that file is missing, broken or old, the table answers, and the label says so.
"""

import csv
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from agent.energy.meter import CarbonIntensity
from agent.energy.settings import EnergySettings
from agent.errors import ConfigInvalid

TABLE = Path(__file__).parent / "data" / "carbon_intensity.csv"
# Live sources publish every 5 to 60 minutes; two of the slowest may fail.
FILE_AGE_S_MAX = 3 * 3600
# A number and a label; a longer file is another file.
FILE_BYTES_MAX = 4096
# The dirtiest grid of the table has 1,306.
GRAMS_PER_KWH_MAX = 5000.0
_LABEL_CHARACTERS_MAX = 80

log = structlog.get_logger()


class CarbonSource(Protocol):
    def grams_per_kwh(self, now_ms: int) -> CarbonIntensity | None:
        """Return the figure for now (Unix milliseconds); None where there is none. May read a small file."""
        ...


@dataclass(frozen=True, slots=True)
class Country:
    alpha_2: str
    alpha_3: str
    name: str
    grams_per_kwh: int
    year: int


class YearlyTable:
    """The bundled figure of one country."""

    def __init__(self, country: Country) -> None:
        label = f"{country.name}, yearly average of {country.year} (Ember, Our World in Data)"
        self._figure = CarbonIntensity(float(country.grams_per_kwh), label)

    def grams_per_kwh(self, now_ms: int) -> CarbonIntensity:
        return self._figure


class CarbonFile:
    """A file with a number, or with {"grams_per_kwh": 123.4, "label": "who says so"}.

    Args:
        otherwise: who answers while the file does not.
    """

    def __init__(self, path: Path, otherwise: CarbonSource | None) -> None:
        self._path = path
        self._otherwise = otherwise
        # Told once per change, not at every look.
        self._told = ""

    def grams_per_kwh(self, now_ms: int) -> CarbonIntensity | None:
        try:
            figure = self._read(now_ms)
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            if why != self._told:
                log.warning("carbon_file is not used", path=str(self._path), reason=why)
                self._told = why
            return self._fall_back(why)
        self._told = ""
        return figure

    def _fall_back(self, why: str) -> CarbonIntensity | None:
        figure = self._otherwise.grams_per_kwh(0) if self._otherwise is not None else None
        if figure is None:
            return None
        return CarbonIntensity(figure.grams_per_kwh, f"{figure.label}; carbon_file is not used: {why}")

    def _read(self, now_ms: int) -> CarbonIntensity:
        with self._path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ValueError(f"it is longer than {FILE_BYTES_MAX} bytes")
        age_s = now_ms / 1000 - self._path.stat().st_mtime
        if age_s > FILE_AGE_S_MAX:
            raise ValueError(f"it is older than {FILE_AGE_S_MAX // 3600} h")
        try:
            document = json.loads(content)
        except ValueError as error:
            raise ValueError("it is neither a number nor JSON") from error
        grams: object = document
        label: object = ""
        if isinstance(document, dict):
            grams, label = document.get("grams_per_kwh"), document.get("label", "")
        # True is an int, and NaN is in no range.
        if isinstance(grams, bool) or not isinstance(grams, int | float) or not 0 <= grams <= GRAMS_PER_KWH_MAX:
            raise ValueError(f"its grams_per_kwh is no number from 0 to {GRAMS_PER_KWH_MAX:g}")
        if not isinstance(label, str) or not label.isprintable():
            raise ValueError("its label is no text")
        return CarbonIntensity(float(grams), label[:_LABEL_CHARACTERS_MAX] or self._path.name)


def open_carbon_source(settings: EnergySettings) -> CarbonSource | None:
    """Return where the figure comes from; None where the owner named neither country nor file.

    Raises:
        ConfigInvalid: the table does not have the country; the message lists what is close to it.
    """
    table = YearlyTable(find_country(settings.country)) if settings.country is not None else None
    if settings.carbon_file is None:
        return table
    return CarbonFile(settings.carbon_file, table)


def find_country(code: str) -> Country:
    """Return the country of an ISO 3166 code of two or three letters.

    Raises:
        ConfigInvalid: the table does not have it; the message lists what is close to it.
    """
    countries = read_table()
    wanted = code.strip().upper()
    for country in countries:
        if wanted in (country.alpha_2, country.alpha_3):
            return country
    close = _close_to(code.strip(), countries)
    hint = "; did you mean " + " or ".join(f'"{one.alpha_2}" ({one.name})' for one in close) + "?" if close else ""
    raise ConfigInvalid(
        f'energy.country: {code!r} is no ISO 3166 code in the table of carbon intensities, such as "DE" or "DEU"{hint}'
    )


def read_table() -> list[Country]:
    """Return the bundled table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Country(row["alpha_2"], row["alpha_3"], row["country"], int(row["grams_per_kwh"]), int(row["year"]))
            for row in rows
        ]


def _close_to(text: str, countries: list[Country]) -> list[Country]:
    by_word: dict[str, list[Country]] = {}
    for country in countries:
        for word in (country.name.casefold(), country.alpha_3.casefold(), country.alpha_2.casefold()):
            by_word.setdefault(word, []).append(country)
    found: list[Country] = []
    for word in difflib.get_close_matches(text.casefold(), by_word, n=4, cutoff=0.6):
        found += [country for country in by_word[word] if country not in found]
    return found[:4]
