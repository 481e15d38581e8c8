"""Count after how many drawn canaries a vLLM node is found that draws otherwise than it is asked to, and false alarms.

    .venv-torch/bin/python scripts/make_canaries.py var/models/smollm2-135m-instruct held-out.msgpack \
        --release-key var/release/dev.pub --prompts scripts/held_out_prompts.toml --most 48
    .venv/bin/python scripts/canary_power.py var/models/smollm2-135m-instruct held-out.msgpack

vLLM's CPU build answers every drawn canary of its profile: as asked, at other
temperatures, with another seed. A trial is a node that gets the bank's drawn
canaries in an order of its own, each once before any again, while the detector
of the coordinator's verdicts adds up. The calibration is fitted on
tests/golden/verification, whose prompts are others than the held-out ones.
Takes two minutes on two cores.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import typer
from network_settings import ENVIRONMENTS, ROOT
from verification_figures import Rate
from verify_power import read_calibration_of_record

from coordinator.verification.events import SAMPLED
from coordinator.verification.jobs import Finding, finding_of
from coordinator.verification.record import QUARANTINE_LOG, WATCH_LOG, Detector
from inference.calibration import Calibration
from inference.canaries import Canary, CanaryBank
from inference.engine import Engine, GenerateRequest
from inference.launch import VLLM_CPU_SAMPLER_PROFILE, launch_vllm_cpu
from inference.rescoring import Rescored, rescore
from inference.sampling import mix
from inference.task import Sampling, TaskKind, unpack_token_ids
from inference.testing import started

PYTHON: Final = ROOT / ENVIRONMENTS["vllm"] / "bin" / "python"
SLOTS: Final = 32
READY_WITHIN_S: Final = 400.0
TRIALS: Final = 1000
# Given to one node, at most.
CANARIES_MAX: Final = 100

# What a node makes of the sampling that it is asked for.
ALTERED: Final[dict[str, Callable[[Sampling], Sampling]]] = {
    "honest": lambda asked: asked,
    "temperature 0.7 for 1.0": lambda asked: replace(asked, temperature=0.7),
    "temperature 0.9 for 1.0": lambda asked: replace(asked, temperature=0.9),
    "another seed": lambda asked: replace(asked, seed=mix(asked.seed) >> 1),
}


def drawn_for(bank: CanaryBank, sampler_profile: str) -> list[Canary]:
    """Return what a node of this profile is asked and has to draw."""
    return [canary for canary in bank.to_answer if canary.drawn and canary.fits(sampler_profile)]


async def answer(engine: Engine, canary: Canary, sampling: Sampling) -> Rescored:
    """Return what the coordinator makes of an answer."""
    request = GenerateRequest(
        request_id=canary.name,
        prompt_ids=unpack_token_ids(canary.prompt),
        sampling=sampling,
        max_tokens=canary.max_tokens,
        stop_token_ids=list(canary.stop_token_ids),
    )
    output_ids: list[int] = []
    finish_reason = None
    async for chunk in engine.generate(request):
        output_ids += chunk.token_ids
        finish_reason = chunk.finish_reason
    return rescore(canary.attempt(output_ids, finish_reason))


async def answer_all(model: Path, canaries: Sequence[Canary]) -> dict[str, list[Rescored]]:
    """Have vLLM's CPU build answer all canaries, honestly and not, as an agent would run it."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch:
        folder = Path(scratch)
        launch = launch_vllm_cpu(
            PYTHON,
            folder / "engine.sock",
            model,
            cache_directory=folder,
            kind=TaskKind.GENERATE,
            context_tokens=1024,
            slots=SLOTS,
            dtype="bfloat16",
            kv_cache_gib=1,
        )
        async with started(launch, folder / "engine.sock", ready_within_s=READY_WITHIN_S) as process:
            return {
                name: await asyncio.gather(*(answer(process.engine, one, altered(one.sampling)) for one in canaries))
                for name, altered in ALTERED.items()
            }


def findings_of(answers: Sequence[Rescored], calibration: Calibration) -> list[Finding]:
    """Raises: ValueError: an answer could not be measured."""
    findings = []
    for answer in answers:
        finding = finding_of(answer, calibration)
        if isinstance(finding, str):
            raise ValueError(finding)
        findings.append(finding)
    return findings


def evidence_course(findings: Sequence[Finding]) -> list[float]:
    """Return the evidence against a node after each of its canaries, as the verdicts add it up."""
    detector = Detector(mode=SAMPLED, log_ms=(0.0,))
    course = []
    for finding in findings:
        detector = detector.after(finding.log_capitals)
        course.append(detector.log_m)
    return course


@dataclass(frozen=True, slots=True)
class Power:
    """Of nodes that get 100 canaries: which are found, and `after` how many, of those; the largest evidence of all."""

    watched: Rate
    quarantined: Rate
    after: tuple[int, ...]
    largest: float

    def canaries_until(self, share: float) -> int | None:
        """Return after how many canaries so many of all nodes are quarantined."""
        needed = int(np.ceil(share * self.quarantined.trials))
        return sorted(self.after)[needed - 1] if len(self.after) >= needed else None


def measure(findings: Sequence[Finding], trials: int = TRIALS, seed: int = 1) -> Power:
    """Draw nodes that get the same canaries in different orders."""
    random = np.random.default_rng(seed)
    courses = []
    for _ in range(trials):
        rounds = [random.permutation(len(findings)) for _ in range(0, CANARIES_MAX, len(findings))]
        courses.append(evidence_course([findings[i] for i in np.concatenate(rounds)[:CANARIES_MAX]]))
    largest = [max(course) for course in courses]
    after = [
        next(count for count, evidence in enumerate(course, start=1) if evidence >= QUARANTINE_LOG)
        for course in courses
        if max(course) >= QUARANTINE_LOG
    ]
    return Power(
        watched=Rate(sum(value >= WATCH_LOG for value in largest), trials),
        quarantined=Rate(len(after), trials),
        after=tuple(after),
        largest=max(largest),
    )


def print_row(name: str, answers: Sequence[Rescored], power: Power) -> None:
    margins = np.concatenate([answer.margins for answer in answers])
    failures = sum(len(answer.failures) for answer in answers)
    half, most = power.canaries_until(0.5), power.canaries_until(0.9)
    cells = [
        name,
        len(margins),
        f"{margins.mean():.5f}",
        f"{(margins**2).mean():.6f}",
        failures,
        f"{power.largest:.2f}",
    ]
    print("|", " | ".join(map(str, [*cells, power.watched, power.quarantined, half, most])), "|")


def main(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    bank: Annotated[Path, typer.Argument(help="Its bank of canaries.")],
) -> None:
    """Print a table."""
    canaries = drawn_for(msgspec.msgpack.decode(bank.read_bytes(), type=CanaryBank), VLLM_CPU_SAMPLER_PROFILE)
    answers = asyncio.run(answer_all(model, canaries))
    calibration = read_calibration_of_record()
    print(
        f"{len(canaries)} drawn canaries of profile {VLLM_CPU_SAMPLER_PROFILE}, {TRIALS} nodes each; "
        f"honest mean squares are at most {calibration.bound(1.0)}"
    )
    columns = ["node", "ids compared", "mean margin", "mean square", "hard failures", "largest evidence"]
    print("|", " | ".join([*columns, "watched", "quarantined", "half after", "nine tenths after"]), "|")
    print("|---" * 10 + "|")
    for name in ALTERED:
        print_row(name, answers[name], measure(findings_of(answers[name], calibration)))


if __name__ == "__main__":
    typer.run(main)
