"""Measure what honest output of a model looks like to a verifier, and make its bank of canaries.

    .venv-torch/bin/python scripts/calibrate_model.py var/models/my-model --release-key release.pub \
        --canary-prompts secret.toml

Writes calibration.json and canaries.msgpack beside the model's manifest, which
stays as it is. The model answers the prompts in scripts/calibration_prompts.toml
in bf16, fp16 and fp32, at several temperatures, in batches of several sizes and
resumed in the middle; each answer is re-scored in float32. For a model of 135
million parameters that takes some 15 minutes on two cores.

A canary that nodes know is worth nothing: give prompts of your own with
--canary-prompts (a TOML file with the lists `chat` and `raw`) and keep them.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer
from make_canaries import PROMPTS_MAX, VERIFIER, make_bank, read_prompts
from record_verification import HONEST, Recorder, Variant
from score_distances import computed, distances_of
from verification_figures import calibrate, honest_pool
from verification_prompts import PROMPTS_FILE

from inference.calibration import encode_calibration
from inference.canaries import CanaryBank, encode_bank
from inference.manifest import load_release_public_key, read_manifest
from inference.model_files import CALIBRATION_FILE, CANARIES_FILE
from inference.score_check import DISTANCE_MAX, HONEST_MULTIPLE
from inference.text import Tokenizer


def score_distance_max(model: Path, bank: CanaryBank) -> float:
    """Return the limit for scores that follows from honest arithmetic of other kinds than the bank's.

    Not below half of the usual limit, since the bank's texts are few, and not beyond where made-up numbers pass.
    """
    canaries = [canary for canary in bank.canaries if canary.drawn]
    farthest = max(
        distance
        for dtype in (torch.bfloat16, torch.float16)
        for distance in distances_of(computed(model, dtype), canaries)
    )
    print(f"scores of honest arithmetic are {farthest:.4f} from the bank's at most")
    return min(max(HONEST_MULTIPLE * farthest, DISTANCE_MAX / 2), 2 * DISTANCE_MAX)


def shortened(variant: Variant, share: float) -> Variant:
    # Two answers at least, as the spread between answers is measured.
    fields: dict[str, Any] = {name: getattr(variant, name) for name in Variant.__slots__}
    return Variant(**fields | {"answers": max(2, round(variant.answers * share))})


def main(
    model: Annotated[Path, typer.Argument(help="A model directory with its manifest.")],
    release_key: Annotated[Path, typer.Option(help="Public half of the key that signed the manifest.")],
    canary_prompts: Annotated[Path, typer.Option(help="Prompts for the canaries, to be kept secret.")] = PROMPTS_FILE,
    share: Annotated[float, typer.Option(help="How many of the usual answers; less than 1 for a quick look.")] = 1.0,
    threads: Annotated[int, typer.Option(help="Processor cores to use.")] = 2,
) -> None:
    """Measure a model and write calibration.json and canaries.msgpack beside its manifest."""
    torch.set_num_threads(threads)
    manifest = read_manifest(model, [load_release_public_key(release_key)])
    tokenizer = Tokenizer.load(model)
    bank = make_bank(model, manifest, read_prompts(canary_prompts, tokenizer)[:PROMPTS_MAX])
    (model / CANARIES_FILE).write_bytes(encode_bank(bank))
    print(f"{len(bank.canaries)} canaries in {model / CANARIES_FILE}")
    if canary_prompts == PROMPTS_FILE:
        print("their prompts are public, so that a node can know them: give your own with --canary-prompts")
    with tempfile.TemporaryDirectory(prefix="calibration-") as scratch:
        folder = Path(scratch)
        recorder = Recorder(model, folder, read_prompts(PROMPTS_FILE, tokenizer), frozenset(manifest.stop_token_ids))
        for variant in HONEST:
            arrays = recorder.record(shortened(variant, share))
            np.savez(folder / f"{variant.name}.npz", **arrays)
            print(
                f"{variant.name}: {len(arrays['margins'])} ids, mean margin {arrays['margins'].mean(dtype=float):.5f}"
            )
        calibration = calibrate(
            honest_pool(folder),
            digest=manifest.digest,
            model=f"{manifest.name} {manifest.revision}",
            dtype=manifest.dtype,
            verifier=VERIFIER,
        )
    calibration = msgspec.structs.replace(calibration, score_distance_max=score_distance_max(model, bank))
    (model / CALIBRATION_FILE).write_bytes(encode_calibration(calibration))
    print(
        f"{model / CALIBRATION_FILE}: "
        + ", ".join(f"{bound.mean_margin:.5f} at temperature {bound.temperature:g}" for bound in calibration.bounds)
    )


if __name__ == "__main__":
    typer.run(main)
