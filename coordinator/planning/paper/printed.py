"""What the benchmark paper prints, as it prints it (data/README.md). Reads a file, nothing else."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.planning.rows import Configuration

TABLE_2: Final = Path(__file__).parent.parent / "data" / "paper_table_2.csv"
# The model of the paper's Tables 2 and 3.
MODEL: Final = "DeepSeek-R1-Distill-Qwen-14B"
H100: Final = "H100-PCIe"
RTX_4090: Final = "RTX-4090"
# What is printed of each row: figures of the run, by the names that `measured.Run` has for them.
FIGURES: Final = (
    "usd_per_million",
    "tokens_per_second",
    "served_per_second",
    "first_token_ms_p50",
    "first_token_ms_p90",
    "first_token_ms_p99",
)


@dataclass(frozen=True, slots=True)
class PrintedRow:
    """A row of Table 2.

    Args:
        repetition: of the source's row that it is from.
        figures: as printed, digits and all, by name.
    """

    number: int
    configuration: Configuration
    requests_per_second: float
    repetition: int
    figures: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedEnergy:
    """A row of Table 3. Args: `row` is that of Table 2 whose tokens per second it takes."""

    row: int
    tokens_per_second: str
    kwh_per_hour: str
    million_tokens_per_kwh: str
    grams_per_million: str


TABLE_3: Final = (
    PrintedEnergy(
        row=13,
        tokens_per_second="3011.13",
        kwh_per_hour="0.7",
        million_tokens_per_kwh="15.4",
        grams_per_million="15.7",
    ),
    PrintedEnergy(
        row=6,
        tokens_per_second="1250.59",
        kwh_per_hour="0.9",
        million_tokens_per_kwh="5.0",
        grams_per_million="48.4",
    ),
)
# What Table 3 takes a card to draw, working or not.
PAPER_WATTS: Final = {H100: 700.0, RTX_4090: 450.0}
PAPER_GRAMS_PER_KWH: Final = 242.0


def read_table_2(path: Path = TABLE_2) -> tuple[PrintedRow, ...]:
    """Return the rows of the paper's Table 2, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            PrintedRow(
                number=int(row["row"]),
                configuration=Configuration(MODEL, row["card"], int(row["cards"])),
                requests_per_second=float(row["requests_per_second"]),
                repetition=int(row["repetition"]),
                figures={name: row[name] for name in FIGURES},
            )
            for row in csv.DictReader(file)
        )
