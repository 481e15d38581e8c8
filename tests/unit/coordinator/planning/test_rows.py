"""The measured rows are read whole, and a table that cannot be right is refused where it is wrong."""

import pytest

from coordinator.planning.rows import TABLE, Configuration, RowsInvalid, parse_rows, read_rows

LINES = TABLE.read_text(encoding="utf-8").splitlines()
COLUMNS = LINES[0].split(",")


def with_value(column: str, value: str) -> list[str]:
    """The table's first row alone, with one value changed."""
    values = LINES[1].split(",")
    values[COLUMNS.index(column)] = value
    return [LINES[0], ",".join(values)]


def test_the_table_has_every_run_of_the_benchmark() -> None:
    rows = read_rows()
    assert len(rows) == 130
    assert len({row.configuration for row in rows}) == 24
    assert {row.requests for row in rows} == {200}
    first = rows[0]
    assert first.configuration == Configuration("AceMath-7B-Instruct", "H100-PCIe", 1)
    assert (first.requests_per_second, first.prompt_tokens, first.answer_tokens) == (1.0, 40991, 43344)
    # As the source states it. Fails when the rate is made of prompt tokens.
    assert first.answer_tokens_per_second == pytest.approx(228.98285892387642)
    assert (first.first_token_ms_p50, first.token_ms_mean) == pytest.approx((20.589392486726865, 10.06218475539359))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("model", ""),
        ("gpu", ""),
        ("n_gpu", "0"),
        ("n_gpu", "1.5"),
        ("qps", "-1"),
        ("rep", "x"),
        ("duration_s", "nan"),
        ("duration_s", "inf"),
        ("completed", "0"),
        ("in_tok", "-5"),
        ("ttft_p50", "0"),
        ("tpot_mean", "fast"),
    ],
)
def test_a_value_that_cannot_be_is_named_by_line_and_column(column: str, value: str) -> None:
    """Fails when `positive` lets nan through (`value <= 0.0` in place of its comparison), for nan."""
    with pytest.raises(RowsInvalid, match=rf"^line 2: column {column} "):
        parse_rows(with_value(column, value))


def test_quantiles_out_of_order_are_two_columns_exchanged() -> None:
    """Fails without the comparison of the three."""
    with pytest.raises(RowsInvalid, match="line 2: columns ttft_p50, ttft_p90 and ttft_p99"):
        parse_rows(with_value("ttft_p90", "1.0"))


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(RowsInvalid, match="line 2: column tpot_mean is missing"):
        parse_rows(line.replace("tpot_mean", "tpot") for line in LINES[:2])


def test_a_short_line_is_refused() -> None:
    with pytest.raises(RowsInvalid, match=r"line 2: column .* is missing"):
        parse_rows([LINES[0], ",".join(LINES[1].split(",")[:12])])


def test_the_same_run_twice_would_count_double() -> None:
    """Fails when the repetition is left out of the key: the table itself has second repetitions."""
    with pytest.raises(RowsInvalid, match=r"line 3: .* twice"):
        parse_rows([*LINES[:2], LINES[1]])


@pytest.mark.parametrize("lines", [[], LINES[:1]])
def test_a_table_without_rows_is_refused(lines: list[str]) -> None:
    with pytest.raises(RowsInvalid, match="no rows"):
        parse_rows(lines)
