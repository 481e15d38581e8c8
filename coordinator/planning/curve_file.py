"""The fitted curves as a file, so that whoever needs one does not fit it again: `scripts/fit_curves.py` writes it."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from coordinator.planning.curves import EngineCurve
from coordinator.planning.rows import Configuration

CURVES: Final = Path(__file__).parent / "data" / "curves.csv"
_TIMES: Final = ("step_base_ms", "step_sequence_ms", "step_kv_token_ms", "prefill_token_ms", "request_ms")
_COUNTS: Final = ("kv_tokens_max", "slots_max", "step_tokens_max")


def read_curves(path: Path = CURVES) -> dict[Configuration, EngineCurve]:
    """Return the fitted curves, as `write_curves` wrote them."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            Configuration(row["model"], row["card"], int(row["cards"])): EngineCurve(
                step_base_ms=float(row["step_base_ms"]),
                step_sequence_ms=float(row["step_sequence_ms"]),
                step_kv_token_ms=float(row["step_kv_token_ms"]),
                prefill_token_ms=float(row["prefill_token_ms"]),
                request_ms=float(row["request_ms"]),
                kv_tokens_max=int(row["kv_tokens_max"]),
                slots_max=int(row["slots_max"]),
                step_tokens_max=int(row["step_tokens_max"]),
            )
            for row in csv.DictReader(file)
        }


def write_curves(curves: Iterable[tuple[Configuration, EngineCurve]], path: Path = CURVES) -> None:
    """Write curves, times to five digits: more would only record the arithmetic of one machine."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "card", "cards", *_TIMES, *_COUNTS))
        for of, curve in curves:
            times = [f"{getattr(curve, name):.5g}" for name in _TIMES]
            writer.writerow((of.model, of.card, of.cards, *times, *(getattr(curve, name) for name in _COUNTS)))
