"""Power and false alarms of output verification, from the recorded runs: tables, a ROC plot, the calibration.

    .venv/bin/python scripts/verify_power.py --json

The calibration, and the threshold of one look, are fitted on tests/golden/verification; false alarms and power are
counted on tests/golden/held_out: answers of the same variants to other prompts, which no fit has seen. Both were made
by scripts/record_verification.py; --fitted and --judged name others. Takes half a minute.
"""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    read_variant,
    threshold_at_one_percent,
)

from coordinator.verification.events import SAMPLED
from coordinator.verification.record import QUARANTINE_LOG, WATCH_LOG, Detector
from inference.calibration import Calibration, decode_calibration, encode_calibration
from inference.evidence import ALARM
from inference.task import ManifestDigest

ROOT: Final = Path(__file__).resolve().parent.parent
RECORD: Final = ROOT / "tests" / "golden" / "verification"
HELD_OUT: Final = ROOT / "tests" / "golden" / "held_out"
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
class Look:
    """How many cheats a rule finds within some tokens, and how many honest nodes it alarms within as many."""

    found: Rate
    false_alarms: Rate


@dataclass(frozen=True, slots=True)
class Power:
    """By an alarm at ln 100 at any time, which is the rule in force and was fitted on nothing; and by one look at the
    end, at the evidence that 1 % of the honest nodes of the calibration's record reach."""

    tokens: int
    any_time: Look
    one_look: Look


@dataclass(frozen=True, slots=True)
class Bench:
    """A calibration, the folder of the record that it was fitted on, and of the one that it is judged on."""

    calibration: Calibration
    fitted: Path
    judged: Path

    @classmethod
    def of(cls, fitted: Path = RECORD, judged: Path = HELD_OUT) -> "Bench":
        return cls(read_calibration_of_record(fitted), fitted, judged)

    def measure(self, target: Target, tokens: int) -> Power:
        trials = Trials(read_variant(self.judged, target.variant, target.field), self.calibration)
        courses, honest = trials.courses(tokens, TRIALS), self.honest_courses(tokens)
        threshold = threshold_at_one_percent(replace(self, judged=self.fitted).honest_courses(tokens))
        return Power(
            tokens,
            any_time=Look(alarms_at_any_time(courses), alarms_at_any_time(honest)),
            one_look=Look(alarms_at_the_end(courses, threshold), alarms_at_the_end(honest, threshold)),
        )

    def honest_courses(self, tokens: int) -> list[Course]:
        """Return honest nodes at temperature 1 in bf16, the arithmetic with the largest margins."""
        return _honest_courses(self.judged, encode_calibration(self.calibration), tokens)

    def honest_audits(self) -> tuple[Rate, float]:
        """Return how many of 10,000 audits of one task, drawn from all honest variants, reach an alarm by themselves;
        and the largest evidence among them."""
        largest: list[float] = []
        for variant, count in self._shared_out():
            courses = Trials(variant, self.calibration, seed=7).courses(AUDIT_TOKENS, count)
            largest += [course.largest for course in courses]
        return Rate(sum(value >= ALARM for value in largest), len(largest)), max(largest)

    def honest_nodes(self) -> Rate:
        """Return how many honest nodes ever reach an alarm within 3,000 tokens."""
        return alarms_at_any_time(self.honest_courses(HONEST_NODE_TOKENS))

    def honest_verdicts(self) -> "HonestVerdicts":
        """Return how often 10,000 audits, drawn from all honest variants, hold an honest node for a cheat."""
        seen = list[float]()
        for variant, count in self._shared_out():
            seen += [log_m for log_m, _ in self._verdict_course(variant, count, seed=7)]
        values = np.array(seen)
        return HonestVerdicts(
            len(seen), int((values >= WATCH_LOG).sum()), int((values >= QUARANTINE_LOG).sum()), float(values.max())
        )

    def ids_until_quarantine(self, target: Target) -> tuple[float, float]:
        """Return how many audited ids half and nine tenths of 300 cheating nodes deliver before they are
        quarantined."""
        variant = read_variant(self.judged, target.variant, target.field)
        found = []
        for seed in range(COURSES):
            course = self._verdict_course(variant, COURSE_AUDITS_MAX, seed)
            found.append(next((ids for log_m, ids in course if log_m >= QUARANTINE_LOG), math.inf))
        half, most = np.quantile(found, [0.5, 0.9])
        return float(half), float(most)

    def curves(self) -> list[Curve]:
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
            honest = np.array([course.last for course in self.honest_courses(tokens)])
            trials = Trials(read_variant(self.judged, name), self.calibration)
            cheating = np.array([course.last for course in trials.courses(tokens, TRIALS)])
            thresholds = np.unique(np.concatenate([honest, cheating]))[::-1]
            points = [(float((honest >= limit).mean()), float((cheating >= limit).mean())) for limit in thresholds]
            result.append(Curve(label, [(0.0, 0.0), *points]))
        return result

    def error_table(self) -> list[str]:
        lines = ["| variant | ids | match | mean margin | found by 60 | 120 | 300 | 1,000 | 3,000 |"]
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for variant in honest_pool(self.judged):
            lines.append(self._row(f"*{variant.name}*", variant))
        for target in TARGETS:
            lines.append(self._row(target.label, read_variant(self.judged, target.variant, target.field)))
        return lines

    def _row(self, label: str, variant: Recorded) -> str:
        trials = Trials(variant, self.calibration)
        cells = [
            f"{trials.alarms(tokens, TRIALS).share:.3f}" if tokens <= variant.tokens else "-"
            for tokens in (60, 120, 300, 1000, 3000)
        ]
        return (
            f"| {label} | {variant.tokens:,} | {variant.match:.4f} | {variant.mean:.5f} | " + " | ".join(cells) + " |"
        )

    def _shared_out(self) -> Iterator[tuple[Recorded, int]]:
        """Yield all honest variants, and how many of 10,000 audits are drawn from each."""
        pool = honest_pool(self.judged)
        for index, variant in enumerate(pool):
            yield variant, HONEST_AUDITS // len(pool) + (index < HONEST_AUDITS % len(pool))

    def _verdict_course(self, variant: Recorded, audits: int, seed: int) -> Iterator[tuple[float, int]]:
        """Yield the evidence against a node after each audit, and the ids that were audited until then."""
        capitals = _capitals(
            self.judged, variant.name, variant.field, variant.temperature, encode_calibration(self.calibration)
        )
        detector, ids = Detector(mode=SAMPLED, log_ms=(0.0,)), 0
        for index in np.random.default_rng(seed).integers(0, len(capitals), audits).tolist():
            detector, ids = detector.after(capitals[index]), ids + len(variant.attempts[index])
            yield detector.log_m, ids


def alarms_at_any_time(courses: Sequence[Course]) -> Rate:
    return Rate(sum(course.largest >= ALARM for course in courses), len(courses))


def alarms_at_the_end(courses: Sequence[Course], threshold: float) -> Rate:
    return Rate(sum(course.last > threshold for course in courses), len(courses))


@functools.cache
def _honest_courses(folder: Path, encoded: bytes, tokens: int) -> list[Course]:
    calibration = decode_calibration(encoded)
    return [
        course
        for name in ("honest-bf16", "honest-vllm-bf16")
        for course in Trials(read_variant(folder, name), calibration, seed=7).courses(tokens, TRIALS)
    ]


@functools.cache
def _capitals(folder: Path, name: str, field: str, temperature: float, encoded: bytes) -> tuple[tuple[float, ...], ...]:
    variant = read_variant(folder, name, field, temperature)
    return tuple(tuple(whole.tolist()) for whole in Trials(variant, decode_calibration(encoded)).whole)


@dataclass(frozen=True, slots=True)
class HonestVerdicts:
    """What the coordinator's detectors made of honest audits, those of a variant one after the other."""

    audits: int
    over_watch: int
    over_quarantine: int
    largest: float


def read_calibration_of_record(folder: Path = RECORD) -> Calibration:
    """Return the calibration that the honest part of a record gives."""
    meta = json.loads((folder / "record.json").read_text())
    return calibrate(
        honest_pool(folder),
        digest=ManifestDigest(meta["manifest_digest"]),
        model=meta["model"],
        dtype=meta["dtype"],
        verifier=meta["verifier"],
    )


def main(
    json_output: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    fitted: Annotated[Path, typer.Option(help="The record that the calibration is of.")] = RECORD,
    judged: Annotated[Path, typer.Option(help="The record that the figures are of.")] = HELD_OUT,
    write: Annotated[bool, typer.Option(help="Write docs/images/verification_roc.svg.")] = False,
) -> None:
    """Print power and false alarms, and the table of errors; with --json the figures alone."""
    bench = Bench.of(fitted, judged)
    if write:
        (ROOT / "docs" / "images" / "verification_roc.svg").write_text(draw_roc(bench.curves()))
    if json_output:
        print(json.dumps(as_json(bench), indent=2))
    else:
        print_tables(bench)


def print_tables(bench: Bench) -> None:
    print("\n".join(bench.error_table()) + "\n")
    print("| cheat | within | found at any time (ln 100) | honest alarmed | found in one look | honest alarmed |")
    print("|---|---|---|---|---|---|")
    for target in TARGETS:
        power = bench.measure(target, target.tokens)
        cells = [f"{rate}" for look in (power.any_time, power.one_look) for rate in (look.found, look.false_alarms)]
        print(f"| {target.label} | {power.tokens:,} | " + " | ".join(cells) + " |")
    print(f"| false stop at a place of chance | 1 | {false_stops(bench.judged)} | | | |\n")
    audits, largest = bench.honest_audits()
    print(
        f"honest audits that reach an alarm: {audits.hits} of {audits.trials:,}; the largest evidence is {largest:.2f}"
    )
    nodes = bench.honest_nodes()
    print(f"honest nodes that ever do within {HONEST_NODE_TOKENS:,} tokens: {nodes.hits} of {nodes.trials}: {nodes}")
    verdicts = bench.honest_verdicts()
    print(
        f"detectors over {verdicts.audits:,} honest audits: {verdicts.over_watch} over watch, "
        f"{verdicts.over_quarantine} over quarantine, the largest evidence is {verdicts.largest:.2f}"
    )
    for target in TARGETS:
        half, most = bench.ids_until_quarantine(target)
        print(f"quarantined after {half:,.0f} ids (half), {most:,.0f} (nine tenths): {target.label}")
    for bound in bench.calibration.bounds:
        print(
            f"bound at temperature {bound.temperature:g}: {bound.mean_square:.7f}, measured {bound.measured_square:.7f}"
        )


def as_json(bench: Bench) -> dict[str, object]:
    (audits, _), nodes, verdicts = bench.honest_audits(), bench.honest_nodes(), bench.honest_verdicts()
    truncated = false_stops(bench.judged)
    found: dict[str, object] = {}
    for target in TARGETS:
        power = bench.measure(target, target.tokens)
        found[target.label] = {
            "tokens": power.tokens,
            **look_as_json(power.any_time),
            "in_one_look": look_as_json(power.one_look),
        }
    found["truncation with a false stop"] = {
        "tokens": 1,
        "power": truncated.share,
        "interval": truncated.interval,
        "trials": truncated.trials,
    }
    return {
        "calibrated_on": bench.fitted.name,
        "judged_on": bench.judged.name,
        "judged_ids": sum(variant.tokens for variant in honest_pool(bench.judged)),
        "audits": audits.trials,
        "audit_alarms": audits.hits,
        "judged_audits": verdicts.audits,
        "false_quarantines": verdicts.over_quarantine,
        "false_positive_rate": nodes.share,
        "false_positive_interval": nodes.interval,
        "power": found,
    }


def look_as_json(look: Look) -> dict[str, object]:
    return {
        "power": look.found.share,
        "interval": look.found.interval,
        "trials": look.found.trials,
        "false_positive_rate": look.false_alarms.share,
        "false_positive_interval": look.false_alarms.interval,
    }


if __name__ == "__main__":
    typer.run(main)
