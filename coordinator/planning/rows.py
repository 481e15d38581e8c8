"""The measured rows that curves are fitted from: one per benchmark run. Reads a file, nothing else.

Where they come from, what each column means and what is odd about them: data/README.md.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).parent / "data" / "llm_inference_4090_h100.csv"


class RowsInvalid(ValueError):
    """The table of measured rows cannot be used; the message names line and column."""


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """What was measured: a model on a number of equal cards in one machine, which hold it together."""

    model: str
    card: str
    cards: int

    @property
    def first_token_fitted(self) -> bool:
        """Whether its curve says when first tokens come: the rows of several RTX 4090 contradict each other there."""
        return self.card != "RTX-4090" or self.cards == 1

    def __str__(self) -> str:
        return f"{self.model} on {self.cards}x{self.card}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One run of 200 requests at one load.

    Args:
        requests_per_second: offered, not served.
        repetition: 0, or 1 for a second run of the same.
        prompt_tokens, answer_tokens: of all requests together.
        first_token_ms_p50, first_token_ms_p90, first_token_ms_p99: from sending a request to its first token.
        token_ms_mean, token_ms_p99: time per token after an answer's first, of one answer each.
    """

    configuration: Configuration
    requests_per_second: float
    repetition: int
    duration_s: float
    requests: int
    prompt_tokens: int
    answer_tokens: int
    first_token_ms_p50: float
    first_token_ms_p90: float
    first_token_ms_p99: float
    token_ms_mean: float
    token_ms_p99: float

    @property
    def answer_tokens_per_second(self) -> float:
        return self.answer_tokens / self.duration_s


def read_rows(path: Path = TABLE) -> tuple[MeasuredRow, ...]:
    """Return the rows of a file, in its order.

    Raises:
        RowsInvalid: the file has no row, lacks a column, or a value that cannot be.
    """
    with path.open(encoding="utf-8", newline="") as file:
        return parse_rows(file)


def parse_rows(lines: Iterable[str]) -> tuple[MeasuredRow, ...]:
    """Return the rows of a table given as lines, the first of which names the columns. Raises as `read_rows`."""
    reader = csv.DictReader(lines)
    rows: list[MeasuredRow] = []
    seen: set[tuple[Configuration, float, int]] = set()
    for values in reader:
        row = _parse_row(_Line(reader.line_num, values))
        key = (row.configuration, row.requests_per_second, row.repetition)
        if key in seen:
            raise RowsInvalid(f"line {reader.line_num}: {row.configuration} at this load and repetition is there twice")
        seen.add(key)
        rows.append(row)
    if not rows:
        raise RowsInvalid("no rows")
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    values: Mapping[str, str | None]

    def text(self, column: str) -> str:
        value = self.values.get(column)
        if not value:
            raise RowsInvalid(f"line {self.number}: column {column} is missing")
        return value

    def positive(self, column: str) -> float:
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise RowsInvalid(f"line {self.number}: column {column} must be a positive number, not {text!r}")
        return value

    def count(self, column: str, least: int) -> int:
        text = self.text(column)
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise RowsInvalid(f"line {self.number}: column {column} must be a count of at least {least}, not {text!r}")
        return int(text)


def _parse_row(line: _Line) -> MeasuredRow:
    row = MeasuredRow(
        configuration=Configuration(line.text("model"), line.text("gpu"), line.count("n_gpu", 1)),
        requests_per_second=line.positive("qps"),
        repetition=line.count("rep", 0),
        duration_s=line.positive("duration_s"),
        requests=line.count("completed", 1),
        prompt_tokens=line.count("in_tok", 1),
        answer_tokens=line.count("out_tok", 1),
        first_token_ms_p50=line.positive("ttft_p50"),
        first_token_ms_p90=line.positive("ttft_p90"),
        first_token_ms_p99=line.positive("ttft_p99"),
        token_ms_mean=line.positive("tpot_mean"),
        token_ms_p99=line.positive("tpot_p99"),
    )
    if not row.first_token_ms_p50 <= row.first_token_ms_p90 <= row.first_token_ms_p99:
        raise RowsInvalid(f"line {line.number}: columns ttft_p50, ttft_p90 and ttft_p99 are not in order")
    return row
