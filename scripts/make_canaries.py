"""Make the bank of canaries of a model alone, as scripts/calibrate_model.py makes it with the calibration.

    .venv-torch/bin/python scripts/make_canaries.py var/models/smollm2-135m-instruct \
        tests/golden/cheats/canaries.msgpack --release-key var/release/dev.pub

So the bank of the repository was made: of public prompts, for tests and the
demo. Takes about a minute on two cores.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from canary_questions import CANARY_TOKENS, questions
from verification_prompts import PROMPTS_FILE
from verification_runs import Request, generate, load, score

from inference.canaries import CanaryBank, encode_bank, make_canary
from inference.manifest import Manifest, load_release_public_key, read_manifest
from inference.text import Message, Tokenizer

PROMPTS_MAX: Final = 24
# Of each id of a canary. A bank is read whole; 64 would make it three times as large.
CANARY_RIVALS: Final = 20
# Answers at once.
ROWS: Final = 48
VERIFIER: Final = "torch float32"

Prompts = list[tuple[int, ...]]


def read_prompts(path: Path, tokenizer: Tokenizer) -> Prompts:
    """Return the ids of the prompts in a file, chats through the model's own template."""
    content = tomllib.loads(path.read_text())
    chats = [tuple(tokenizer.encode_chat([Message("user", text)])) for text in content["chat"]]
    return [*chats, *(tuple(tokenizer.encode(text)) for text in content["raw"])]


def make_bank(model: Path, manifest: Manifest, prompts: Prompts) -> CanaryBank:
    """Let the model answer prompts in float32: greedily, and with the noise of every sampler."""
    engine = load(model, rows=ROWS)
    stop_ids = frozenset(manifest.stop_token_ids)
    names = {
        Request(
            prompt_ids=question.prompt_ids,
            sampling=question.sampling,
            max_tokens=CANARY_TOKENS,
            sampler_profile=question.sampler_profile,
        ): question.name
        for question in questions(manifest.digest, prompts)
    }
    canaries = []
    for answer in generate(engine, list(names), stop_ids, ROWS):
        request = answer.request
        reference, _ = score(engine, request.prompt_ids, answer.output_ids, min(stop_ids), CANARY_RIVALS)
        canary = make_canary(
            name=names[request],
            prompt_ids=list(request.prompt_ids),
            output_ids=list(answer.output_ids),
            sampling=request.sampling,
            sampler_profile=request.sampler_profile,
            max_tokens=CANARY_TOKENS,
            stop_token_ids=manifest.stop_token_ids,
            reference=reference,
        )
        canaries.append(canary)
    canaries.sort(key=lambda canary: canary.name)
    return CanaryBank(manifest_digest=manifest.digest, verifier=VERIFIER, canaries=tuple(canaries))


def main(
    model: Annotated[Path, typer.Argument(help="A model directory with its manifest.")],
    out: Annotated[Path, typer.Argument(help="The bank.")],
    release_key: Annotated[Path, typer.Option(help="Public half of the key that signed the manifest.")],
    prompts: Annotated[Path, typer.Option(help="A file of prompts.")] = PROMPTS_FILE,
    most: Annotated[int, typer.Option(help="How many of the prompts, at most.")] = PROMPTS_MAX,
    threads: Annotated[int, typer.Option(help="Processor cores to use.")] = 2,
) -> None:
    """Write a bank."""
    torch.set_num_threads(threads)
    manifest = read_manifest(model, [load_release_public_key(release_key)])
    bank = make_bank(model, manifest, read_prompts(prompts, Tokenizer.load(model))[:most])
    out.write_bytes(encode_bank(bank))
    print(f"{len(bank.canaries)} canaries, {out.stat().st_size} bytes: {out}")


if __name__ == "__main__":
    typer.run(main)
