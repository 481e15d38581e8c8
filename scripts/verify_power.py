"""Power and false alarms of output verification, from the recorded runs: tables, a ROC plot, the calibration.

    .venv/bin/python scripts/verify_power.py --json

Reads tests/golden/verification/*.npz (made by scripts/record_verification.py). Takes some 20 seconds.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from roc_plot import Curve, draw_roc
from verification_figures import (
    Rate,
    Recorded,
    Trials,
    calibrate,
    false_stops,
    honest_pool,
    read_variant,
)

from inference.calibration import Calibration, encode_calibration
from inference.evidence import ALARM
from inference.task import ManifestDigest

ROOT: Final = Path(__file__).resolve().parent.parent
RECORD: Final = ROOT / "tests" / "golden" / "verification"
TRIALS: Final = 400
HONEST_AUDITS: Final = 10_000
# An audit is one task; so many ids on average in the record.
AUDIT_TOKENS: Final = 128
# A node that is audited for days.
HONEST_NODE_TOKENS: Final = 3000


@dataclass(frozen=True, slots=True)
class Target:
    """So much power within so many tokens is promised."""

    label: str
    variant: str
    tokens: int
    power: float | None
    field: str = "margins"


TARGETS: Final = (
    Target("canned text", "canned", 120, None),
    Target("repeated text", "repeated", 120, None),
    Target("wrong seed", "honest-bf16", 120, 0.99, "wrong_seed_margins"),
    Target("4-bit weights, groups of 32", "int4", 120, 0.99),
    Target("one of 30 layers dropped", "dropped-layer", 120, 0.99),
    Target("temperature 0.7 for 1.0", "t0.7", 120, 0.99),
    Target("temperature 0.9 for 1.0", "t0.9", 300, 0.99),
    Target("8-bit weights by channel, bf16", "int8-bf16", 3000, 0.95),
    Target("8-bit weights by channel, fp32", "int8", 3000, None),
)


def measure(target: Target, calibration: Calibration) -> Rate:
    variant = read_variant(RECORD, target.variant, target.field)
    return Trials(variant, calibration).alarms(target.tokens, TRIALS)


def honest_alarms(calibration: Calibration, tokens: int, trials: int) -> Rate:
    """Return how many nodes made of all honest variants ever reach an alarm."""
    pool = honest_pool(RECORD)
    each = [trials // len(pool)] * len(pool)
    each[0] += trials - sum(each)
    rates = [
        Trials(variant, calibration, seed=7).alarms(min(tokens, variant.tokens), count)
        for variant, count in zip(pool, each, strict=True)
    ]
    return Rate(sum(rate.hits for rate in rates), trials)


def error_table(calibration: Calibration) -> list[str]:
    lines = ["| variant | ids | match | mean margin | power at 60 | 120 | 300 | 1,000 | 3,000 |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for variant in honest_pool(RECORD):
        lines.append(_row(variant.name, variant, calibration, honest=True))
    for target in TARGETS:
        lines.append(_row(target.label, read_variant(RECORD, target.variant, target.field), calibration, honest=False))
    return lines


def _row(label: str, variant: Recorded, calibration: Calibration, *, honest: bool) -> str:
    cells = []
    for tokens in (60, 120, 300, 1000, 3000):
        if tokens > variant.tokens:
            cells.append("-")
        else:
            cells.append(f"{Trials(variant, calibration).alarms(tokens, TRIALS).share:.3f}")
    name = f"*{label}*" if honest else label
    return f"| {name} | {variant.tokens:,} | {variant.match:.4f} | {variant.mean:.5f} | " + " | ".join(cells) + " |"


def curves(calibration: Calibration) -> list[Curve]:
    """Return ROC curves: largest evidence of cheats against that of honest nodes, as many tokens for both."""
    result = []
    for label, name, tokens in (
        ("8-bit weights, 300 tokens", "int8", 300),
        ("8-bit weights, 1,000", "int8", 1000),
        ("8-bit weights, 3,000", "int8", 3000),
        ("temperature 0.9, 60", "t0.9", 60),
        ("temperature 0.9, 120", "t0.9", 120),
        ("temperature 0.7, 60", "t0.7", 60),
    ):
        honest = _evidences(read_variant(RECORD, "honest-bf16"), calibration, tokens)
        cheating = _evidences(read_variant(RECORD, name), calibration, tokens)
        thresholds = np.unique(np.concatenate([honest, cheating]))[::-1]
        points = [(float((honest >= limit).mean()), float((cheating >= limit).mean())) for limit in thresholds]
        result.append(Curve(label, [(0.0, 0.0), *points]))
    return result


def _evidences(
    variant: Recorded, calibration: Calibration, tokens: int
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    trials = Trials(variant, calibration, seed=11)
    return np.array([trials.evidence(tokens) for _ in range(TRIALS)])


def read_calibration_of_record() -> Calibration:
    """Return the calibration that the honest part of the record gives."""
    meta = json.loads((RECORD / "record.json").read_text())
    return calibrate(
        honest_pool(RECORD),
        digest=ManifestDigest(meta["manifest_digest"]),
        model=meta["model"],
        dtype=meta["dtype"],
        verifier=meta["verifier"],
    )


def main(
    json_output: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    write: Annotated[bool, typer.Option(help="Write docs/images/verification_roc.svg and the calibration.")] = False,
) -> None:
    """Print the table of errors; with --json the figures alone."""
    calibration = read_calibration_of_record()
    figures = {target.label: (target, measure(target, calibration)) for target in TARGETS}
    audits = honest_alarms(calibration, AUDIT_TOKENS, HONEST_AUDITS)
    nodes = honest_alarms(calibration, HONEST_NODE_TOKENS, TRIALS)
    truncated = false_stops(RECORD)
    if write:
        (RECORD / "calibration.json").write_bytes(encode_calibration(calibration))
        (ROOT / "docs" / "images" / "verification_roc.svg").write_text(draw_roc(curves(calibration)))
    if json_output:
        print(json.dumps(_as_json(figures, audits, nodes, truncated), indent=2))
        return
    print("\n".join(error_table(calibration)))
    for label, (target, rate) in figures.items():
        print(f"{label}: {rate} within {target.tokens} tokens (wanted {target.power})")
    print(f"false stop at a place of chance: {truncated}")
    print(f"honest audits that reach an alarm (ln 100 = {ALARM:.2f}): {audits.hits} of {audits.trials}: {audits}")
    print(f"honest nodes that do within {HONEST_NODE_TOKENS} tokens: {nodes.hits} of {nodes.trials}: {nodes}")


def _as_json(figures: dict[str, tuple[Target, Rate]], audits: Rate, nodes: Rate, truncated: Rate) -> dict[str, object]:
    power = {
        label: {"tokens": target.tokens, "power": rate.share, "interval": rate.interval, "trials": rate.trials}
        for label, (target, rate) in figures.items()
    }
    power["truncation with a false stop"] = {
        "tokens": 1,
        "power": truncated.share,
        "interval": truncated.interval,
        "trials": truncated.trials,
    }
    return {
        "audits": audits.trials,
        "audit_alarms": audits.hits,
        "false_positive_rate": nodes.share,
        "false_positive_interval": nodes.interval,
        "power": power,
    }


if __name__ == "__main__":
    typer.run(main)
