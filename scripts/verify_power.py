"""Power and false alarms of output verification, from the recorded runs: tables, a ROC plot, the calibration.

    .venv/bin/python scripts/verify_power.py --json

Reads tests/golden/verification/*.npz (made by scripts/record_verification.py). Takes some 20 seconds.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from roc_plot import Curve, draw_roc
from verification_figures import (
    Course,
    Rate,
    Recorded,
    Trials,
    calibrate,
    false_stops,
    honest_pool,
    power_at_one_percent,
    read_variant,
)

from coordinator.verification.events import SAMPLED
from coordinator.verification.record import QUARANTINE_LOG, WATCH_LOG, Detector
from inference.calibration import Calibration, decode_calibration, encode_calibration
from inference.evidence import ALARM
from inference.task import ManifestDigest

ROOT: Final = Path(__file__).resolve().parent.parent
RECORD: Final = ROOT / "tests" / "golden" / "verification"
TRIALS: Final = 1000
HONEST_AUDITS: Final = 10_000
# An audit is one task; so many ids on average in the record.
AUDIT_TOKENS: Final = 128
# Nodes that cheat until they are quarantined, and audits after which one is given up.
COURSES: Final = 300
COURSE_AUDITS_MAX: Final = 400
# A node that is audited for days.
HONEST_NODE_TOKENS: Final = 3000


@dataclass(frozen=True, slots=True)
class Target:
    """So much power within so many tokens is promised."""

    label: str
    variant: str
    tokens: int
    power: float
    field: str = "margins"


TARGETS: Final = (
    Target("canned text", "canned", 120, 0.99),
    Target("repeated text", "repeated", 120, 0.99),
    Target("wrong seed", "honest-bf16", 120, 0.99, "wrong_seed_margins"),
    Target("4-bit weights, groups of 32", "int4", 120, 0.99),
    Target("one of 30 layers dropped", "dropped-layer", 120, 0.99),
    Target("temperature 0.7 for 1.0", "t0.7", 120, 0.99),
    Target("temperature 0.9 for 1.0", "t0.9", 300, 0.99),
    Target("8-bit weights by channel, bf16", "int8-bf16", 3000, 0.95),
    Target("8-bit weights by channel, fp32", "int8", 3000, 0.95),
)


@dataclass(frozen=True, slots=True)
class Power:
    """Found by an alarm at any time, and by one look at the end that alarms 1 % of honest nodes."""

    tokens: int
    any_time: Rate
    one_look: Rate


def measure(target: Target, tokens: int, calibration: Calibration) -> Power:
    trials = Trials(read_variant(RECORD, target.variant, target.field), calibration)
    courses = trials.courses(tokens, TRIALS)
    any_time = Rate(sum(course.largest >= ALARM for course in courses), TRIALS)
    return Power(tokens, any_time, power_at_one_percent(courses, honest_courses(calibration, tokens)))


@functools.cache
def _honest_trials(name: str, encoded: bytes) -> Trials:
    return Trials(read_variant(RECORD, name), decode_calibration(encoded), seed=7)


def honest_courses(calibration: Calibration, tokens: int) -> list[Course]:
    """Return honest nodes at temperature 1 in bf16, the arithmetic with the largest margins."""
    encoded = encode_calibration(calibration)
    return [
        course
        for name in ("honest-bf16", "honest-vllm-bf16")
        for course in _honest_trials(name, encoded).courses(tokens, TRIALS)
    ]


def honest_audits(calibration: Calibration) -> tuple[Rate, float]:
    """Return how many of 10,000 audits of one task, drawn from all honest variants, reach an alarm by themselves; and
    the largest evidence among them."""
    pool = honest_pool(RECORD)
    largest: list[float] = []
    for index, variant in enumerate(pool):
        count = HONEST_AUDITS // len(pool) + (index < HONEST_AUDITS % len(pool))
        courses = Trials(variant, calibration, seed=7).courses(AUDIT_TOKENS, count)
        largest += [course.largest for course in courses]
    return Rate(sum(value >= ALARM for value in largest), len(largest)), max(largest)


def honest_nodes(calibration: Calibration) -> Rate:
    """Return how many honest nodes ever reach an alarm within 3,000 tokens."""
    courses = honest_courses(calibration, HONEST_NODE_TOKENS)
    return Rate(sum(course.largest >= ALARM for course in courses), len(courses))


@dataclass(frozen=True, slots=True)
class HonestVerdicts:
    """What the coordinator's detectors made of honest audits, those of a variant one after the other."""

    audits: int
    over_watch: int
    over_quarantine: int
    largest: float


def honest_verdicts(calibration: Calibration) -> HonestVerdicts:
    """Return how often 10,000 audits, drawn from all honest variants, hold an honest node for a cheat."""
    pool, seen = honest_pool(RECORD), list[float]()
    for index, variant in enumerate(pool):
        count = HONEST_AUDITS // len(pool) + (index < HONEST_AUDITS % len(pool))
        seen += [log_m for log_m, _ in _verdict_course(variant, calibration, count, seed=7)]
    values = np.array(seen)
    return HonestVerdicts(
        len(seen), int((values >= WATCH_LOG).sum()), int((values >= QUARANTINE_LOG).sum()), float(values.max())
    )


def ids_until_quarantine(target: Target, calibration: Calibration) -> tuple[float, float]:
    """Return how many audited ids half and nine tenths of 300 cheating nodes deliver before they are quarantined."""
    variant = read_variant(RECORD, target.variant, target.field)
    found = []
    for seed in range(COURSES):
        course = _verdict_course(variant, calibration, COURSE_AUDITS_MAX, seed)
        found.append(next((ids for log_m, ids in course if log_m >= QUARANTINE_LOG), math.inf))
    half, most = np.quantile(found, [0.5, 0.9])
    return float(half), float(most)


@functools.cache
def _capitals(name: str, field: str, temperature: float, encoded: bytes) -> tuple[tuple[float, ...], ...]:
    variant = read_variant(RECORD, name, field, temperature)
    return tuple(tuple(whole.tolist()) for whole in Trials(variant, decode_calibration(encoded)).whole)


def _verdict_course(variant: Recorded, calibration: Calibration, audits: int, seed: int) -> Iterator[tuple[float, int]]:
    """Yield the evidence against a node after each audit, and the ids that were audited until then."""
    capitals = _capitals(variant.name, variant.field, variant.temperature, encode_calibration(calibration))
    detector, ids = Detector(mode=SAMPLED, log_ms=(0.0,)), 0
    for index in np.random.default_rng(seed).integers(0, len(capitals), audits).tolist():
        detector, ids = detector.after(capitals[index]), ids + len(variant.attempts[index])
        yield detector.log_m, ids


def error_table(calibration: Calibration) -> list[str]:
    lines = ["| variant | ids | match | mean margin | found by 60 | 120 | 300 | 1,000 | 3,000 |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for variant in honest_pool(RECORD):
        lines.append(_row(f"*{variant.name}*", variant, calibration))
    for target in TARGETS:
        lines.append(_row(target.label, read_variant(RECORD, target.variant, target.field), calibration))
    return lines


def _row(label: str, variant: Recorded, calibration: Calibration) -> str:
    trials = Trials(variant, calibration)
    cells = [
        f"{trials.alarms(tokens, TRIALS).share:.3f}" if tokens <= variant.tokens else "-"
        for tokens in (60, 120, 300, 1000, 3000)
    ]
    return f"| {label} | {variant.tokens:,} | {variant.match:.4f} | {variant.mean:.5f} | " + " | ".join(cells) + " |"


def curves(calibration: Calibration) -> list[Curve]:
    """Return ROC curves of one look after a fixed number of tokens."""
    result = []
    for label, name, tokens in (
        ("8-bit weights in bf16, 300", "int8-bf16", 300),
        ("8-bit weights in bf16, 1,000", "int8-bf16", 1000),
        ("8-bit weights in fp32, 1,000", "int8", 1000),
        ("temperature 0.9, 60 tokens", "t0.9", 60),
        ("temperature 0.9, 120", "t0.9", 120),
        ("temperature 0.9, 300", "t0.9", 300),
    ):
        honest = np.array([course.last for course in honest_courses(calibration, tokens)])
        trials = Trials(read_variant(RECORD, name), calibration)
        cheating = np.array([course.last for course in trials.courses(tokens, TRIALS)])
        thresholds = np.unique(np.concatenate([honest, cheating]))[::-1]
        points = [(float((honest >= limit).mean()), float((cheating >= limit).mean())) for limit in thresholds]
        result.append(Curve(label, [(0.0, 0.0), *points]))
    return result


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
    write: Annotated[bool, typer.Option(help="Write docs/images/verification_roc.svg.")] = False,
) -> None:
    """Print power and false alarms, and the table of errors; with --json the figures alone."""
    calibration = read_calibration_of_record()
    figures = {target.label: measure(target, target.tokens, calibration) for target in TARGETS}
    (audits, largest), nodes, truncated = honest_audits(calibration), honest_nodes(calibration), false_stops(RECORD)
    if write:
        (ROOT / "docs" / "images" / "verification_roc.svg").write_text(draw_roc(curves(calibration)))
    if json_output:
        print(json.dumps(_as_json(figures, audits, nodes, truncated, honest_verdicts(calibration)), indent=2))
        return
    print("\n".join(error_table(calibration)) + "\n")
    print(
        "| cheat | within | found at any time (ln 100) | in one look, 1 % of honest nodes alarmed |\n|---|---|---|---|"
    )
    for label, power in figures.items():
        print(f"| {label} | {power.tokens:,} | {power.any_time} | {power.one_look} |")
    print(f"| false stop at a place of chance | 1 | {truncated} | |\n")
    print(
        f"honest audits that reach an alarm: {audits.hits} of {audits.trials:,}; the largest evidence is {largest:.2f}"
    )
    print(f"honest nodes that ever do within {HONEST_NODE_TOKENS:,} tokens: {nodes.hits} of {nodes.trials}: {nodes}")
    verdicts = honest_verdicts(calibration)
    print(
        f"detectors over {verdicts.audits:,} honest audits: {verdicts.over_watch} over watch, "
        f"{verdicts.over_quarantine} over quarantine, the largest evidence is {verdicts.largest:.2f}"
    )
    for target in TARGETS:
        half, most = ids_until_quarantine(target, calibration)
        print(f"quarantined after {half:,.0f} ids (half), {most:,.0f} (nine tenths): {target.label}")
    for bound in calibration.bounds:
        print(
            f"bound at temperature {bound.temperature:g}: {bound.mean_square:.7f}, measured {bound.measured_square:.7f}"
        )


def _as_json(
    figures: dict[str, Power], audits: Rate, nodes: Rate, truncated: Rate, verdicts: HonestVerdicts
) -> dict[str, object]:
    found: dict[str, object] = {
        label: {
            "tokens": power.tokens,
            "power": power.one_look.share,
            "interval": power.one_look.interval,
            "power_at_any_time": power.any_time.share,
            "trials": power.one_look.trials,
        }
        for label, power in figures.items()
    }
    found["truncation with a false stop"] = {
        "tokens": 1,
        "power": truncated.share,
        "interval": truncated.interval,
        "trials": truncated.trials,
    }
    return {
        "audits": audits.trials,
        "audit_alarms": audits.hits,
        "judged_audits": verdicts.audits,
        "false_quarantines": verdicts.over_quarantine,
        "false_positive_rate": nodes.share,
        "false_positive_interval": nodes.interval,
        "power": found,
    }


if __name__ == "__main__":
    typer.run(main)
