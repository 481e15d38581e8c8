"""Measure how far scores of honest and of dishonest engines are from a bank's reference.

    .venv-torch/bin/python scripts/score_distances.py var/models/smollm2-135m-instruct \
        tests/golden/cheats/canaries.msgpack

Prints for each variant the mean distance (inference/score_check.py) of a canary:
least, median, largest. From it follows `DISTANCE_MAX`.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import torch
import typer
from altered_models import Alteration, write_altered
from verification_runs import load, score

from inference.canaries import Canary, CanaryBank
from inference.score_check import score_distance
from inference.task import PositionLogprobs, TokenLogprob, unpack_token_ids

Scores = list[PositionLogprobs]
RIVALS: Final = 64


def made_up(logprob_of_rank: Callable[[int], float], rivals: int = RIVALS) -> Callable[[Canary], Scores]:
    """Return numbers that follow from the rank alone; the rivals are the first ids of the vocabulary."""

    def scores(canary: Canary) -> Scores:
        listed = tuple(TokenLogprob(id_, logprob_of_rank(id_ + 1), id_ + 1) for id_ in range(rivals))
        return [PositionLogprobs(TokenLogprob(id_, logprob_of_rank(1), 1), listed) for id_ in _output(canary)]

    return scores


def computed(directory: Path, dtype: torch.dtype) -> Callable[[Canary], Scores]:
    """Return what a model says."""
    model = load(directory, rows=1, dtype=dtype)

    def scores(canary: Canary) -> Scores:
        said, _ = score(model, _prompt(canary), _output(canary), canary.stop_token_ids[0], RIVALS)
        return said

    return scores


def main(model: Path, bank: Path) -> None:
    canaries = [
        canary for canary in msgspec.msgpack.decode(bank.read_bytes(), type=CanaryBank).canaries if canary.drawn
    ]
    # Nobody who makes numbers up knows the reference's; who is sure of every id says the least that is wrong of it.
    variants: dict[str, Callable[[Canary], Scores]] = {
        "all-zero": made_up(lambda rank: 0.0),
        "zero without rivals": made_up(lambda rank: 0.0, rivals=0),
        "constant": made_up(lambda rank: -1.0),
        "half the rest each": made_up(lambda rank: rank * math.log(0.5)),
        "honest float32": computed(model, torch.float32),
        "honest bf16": computed(model, torch.bfloat16),
    }
    print("| variant | canaries | least | median | largest |\n|---|---|---|---|---|")
    for name, variant in variants.items():
        _print_row(name, variant, canaries)
    for alteration in Alteration:
        with tempfile.TemporaryDirectory() as scratch:
            write_altered(model, Path(scratch, alteration.value), alteration)
            _print_row(alteration.value, computed(Path(scratch, alteration.value), torch.float32), canaries)


def distances_of(variant: Callable[[Canary], Scores], canaries: Sequence[Canary]) -> list[float]:
    """Return how far a variant's scores of each canary are from the bank's."""
    return [
        score_distance(variant(canary), canary.attempt(list(_output(canary)), None).reference) for canary in canaries
    ]


def _print_row(name: str, variant: Callable[[Canary], Scores], canaries: Sequence[Canary]) -> None:
    distances = distances_of(variant, canaries)
    figures = " | ".join(f"{figure:.4f}" for figure in (min(distances), median(distances), max(distances)))
    print(f"| {name} | {len(distances)} | {figures} |", flush=True)


def _prompt(canary: Canary) -> Sequence[int]:
    return list(unpack_token_ids(canary.prompt))


def _output(canary: Canary) -> Sequence[int]:
    return list(unpack_token_ids(canary.output))


if __name__ == "__main__":
    typer.run(main)
