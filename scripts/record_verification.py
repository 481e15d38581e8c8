"""Record what honest and cheating runs of a real model look like to a verifier.

    .venv-torch/bin/python scripts/record_verification.py var/models/smollm2-135m-instruct tests/golden/verification

For every variant it lets the model (or an altered copy) answer the prompts in
scripts/calibration_prompts.toml, re-scores the answers in float32, and stores
margins, failures and a few whole attempts in VARIANT.npz. --prompts names
another file of prompts, --examples how many whole attempts. Variants whose file
exists are not run again: empty the folder where something about all has changed,
as one calibration is of one number of candidates. --vllm-answers takes what
scripts/answer_with_vllm.py wrote. All take some 25 minutes on two cores.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import typer
from altered_models import Alteration, write_altered
from tokenizers import Tokenizer
from verification_prompts import (
    END_OF_TURN,
    MAX_TOKENS,
    PROMPTS_FILE,
    StoredAnswer,
    read_answers,
    read_prompts,
    read_texts,
    seed_of,
)
from verification_runs import Answer, Request, as_attempt, generate, load, score

from inference.engine_protocol import MAX_SCORE_RIVALS
from inference.rescoring import MARGIN_CLIP, Attempt, Rescored, rescore
from inference.sampler_noise import POSITION_HASH, VLLM_GENERATOR, candidate_noise
from inference.sampling import mix
from inference.task import FinishReason, Sampling
from inference.torch_model import CausalModel

# Rows of the batches, but where a variant is about their number.
ROWS: Final = 64
# Whole attempts stored of each variant, for tests that re-score them.
EXAMPLES: Final = 2


PLAIN: Final = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of answering. `claimed` is what the verifier believes; None where that is what was done."""

    name: str
    answers: int
    alteration: Alteration | None = None
    dtype: Any = torch.float32
    rounded_to: Any = None
    rows: int = ROWS
    sampling: Sampling = PLAIN
    claimed: Sampling | None = None
    # The second half of an answer as an attempt of its own.
    resumed: bool = False


HONEST: Final = (
    Variant(name="honest-bf16", answers=190, dtype=torch.bfloat16),
    Variant(name="honest-fp16", answers=130, rounded_to=torch.float16),
    Variant(name="honest-greedy-bf16", answers=48, dtype=torch.bfloat16, sampling=Sampling(temperature=0.0)),
    Variant(name="honest-t0.3-bf16", answers=48, dtype=torch.bfloat16, sampling=Sampling(temperature=0.3)),
    Variant(
        name="honest-t0.7-top-p-bf16",
        answers=48,
        dtype=torch.bfloat16,
        sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40),
    ),
    Variant(name="honest-resumed-bf16", answers=48, dtype=torch.bfloat16, resumed=True),
    Variant(name="honest-bf16-8-rows", answers=32, dtype=torch.bfloat16, rows=8),
    Variant(name="honest-fp32", answers=32),
)
CHEATS: Final = (
    Variant(name="int8", answers=120, alteration=Alteration.INT8),
    Variant(name="int8-bf16", answers=60, alteration=Alteration.INT8, dtype=torch.bfloat16),
    Variant(name="int4", answers=60, alteration=Alteration.INT4),
    Variant(name="dropped-layer", answers=60, alteration=Alteration.DROPPED_LAYER),
    Variant(name="t0.7", answers=60, sampling=Sampling(temperature=0.7), claimed=PLAIN),
    Variant(name="t0.9", answers=90, sampling=Sampling(temperature=0.9), claimed=PLAIN),
)
# In the order in which they are run, so that a recording that is broken off holds something of everything.
ORDER: Final = ("t0.9", "honest-bf16", "int8", "int8-bf16", "int4", "dropped-layer", "t0.7", "honest-fp16")


class Recorder:
    """Holds the verifier's model and collects what becomes of answers."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        prompts: Sequence[tuple[int, ...]],
        stop_ids: frozenset[int],
        examples: int = EXAMPLES,
    ) -> None:
        self._model = model
        self._examples = examples
        self._scratch = scratch
        self._prompts = prompts
        self._stop_ids = stop_ids
        # The stop whose margin is recorded at every position.
        self._watched = min(stop_ids)
        self._verifier = load(model, rows=1)

    def record(self, variant: Variant) -> dict[str, Any]:
        """Run a variant and return its arrays."""
        model = self._load(variant)
        record = Record(self._examples)
        for answer in self._answers(model, variant):
            self._judge(record, answer, variant.claimed)
        return record.arrays()

    def record_texts(self, texts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """Return the arrays of text that no model wrote, in answer to each prompt."""
        record = Record(self._examples)
        for index, prompt in enumerate(self._prompts):
            output = texts[index % len(texts)]
            request = Request(
                prompt_ids=prompt, sampling=Sampling(seed=seed_of("text", index, prompt)), max_tokens=MAX_TOKENS
            )
            self._judge(record, Answer(request, output, output[-1] in self._stop_ids), None)
        return record.arrays()

    def record_answers(self, answers: Sequence[StoredAnswer], sampler_profile: str) -> dict[str, Any]:
        """Return the arrays of answers that another engine gave."""
        record = Record(self._examples)
        for stored in answers:
            request = Request(
                prompt_ids=tuple(stored.prompt_ids), sampling=Sampling(seed=stored.seed), max_tokens=MAX_TOKENS
            )
            self._judge(record, Answer(request, tuple(stored.output_ids), stored.stopped), None, sampler_profile)
        return record.arrays()

    def _load(self, variant: Variant) -> CausalModel:
        directory = self._model
        if variant.alteration is not None:
            directory = self._scratch / variant.alteration.value
            write_altered(self._model, directory, variant.alteration)
        return load(directory, rows=variant.rows, dtype=variant.dtype, rounded_to=variant.rounded_to)

    def _answers(self, model: CausalModel, variant: Variant) -> Iterator[Answer]:
        prompts = itertools.islice(itertools.cycle(self._prompts), variant.answers)
        requests = [
            Request(
                prompt_ids=prompt,
                sampling=_seeded(variant.sampling, seed_of(variant.name, index, prompt)),
                max_tokens=MAX_TOKENS,
            )
            for index, prompt in enumerate(prompts)
        ]
        answers = generate(model, requests, self._stop_ids, variant.rows)
        if not variant.resumed:
            yield from answers
            return
        halves = []
        for answer in answers:
            cut = len(answer.output_ids) // 2
            prompt = (*answer.request.prompt_ids, *answer.output_ids[:cut])
            request = Request(prompt_ids=prompt, sampling=answer.request.sampling, max_tokens=MAX_TOKENS - cut)
            halves.append(request)
        yield from generate(model, halves, self._stop_ids, variant.rows)

    def _judge(
        self, record: "Record", answer: Answer, claimed: Sampling | None, sampler_profile: str = POSITION_HASH
    ) -> None:
        sampling = answer.request.sampling
        reference, stop_logprobs = score(self._verifier, answer.request.prompt_ids, answer.output_ids, self._watched)
        believed = sampling if claimed is None else _seeded(claimed, sampling.seed)
        attempt = as_attempt(answer, believed, self._stop_ids, reference, sampler_profile)
        other = replace(attempt, sampling=_seeded(believed, mix(sampling.seed) >> 1))
        record.add(attempt, rescore(attempt), rescore(other), stop_margins(attempt, self._watched, stop_logprobs))


class Record:
    """What is kept of a variant: one entry for each attempt in `lengths`, `failures`, `worst`; one for each id in
    `margins`, `wrong_seed_margins` (had the draws had another seed), `stop_margins` (had the answer stopped there)."""

    def __init__(self, examples: int) -> None:
        self._examples_wanted = examples
        self._rescored: list[Rescored] = []
        self._wrong_seed: list[Rescored] = []
        self._stops: list[Any] = []
        self._examples: list[Attempt] = []

    def add(self, attempt: Attempt, rescored: Rescored, wrong_seed: Rescored, stops: Any) -> None:
        assert rescored.could_not_measure is None, rescored.could_not_measure
        self._rescored.append(rescored)
        self._wrong_seed.append(wrong_seed)
        self._stops.append(stops)
        if len(self._examples) < self._examples_wanted:
            self._examples.append(attempt)

    def arrays(self) -> dict[str, Any]:
        # float16 keeps three digits, more than two engines agree on.
        result: dict[str, Any] = {
            "candidates": np.array(MAX_SCORE_RIVALS),
            "lengths": np.array([rescored.tokens_checked for rescored in self._rescored], dtype=np.int16),
            "margins": np.concatenate([rescored.margins for rescored in self._rescored]).astype(np.float16),
            "worst": np.array([rescored.worst_margin for rescored in self._rescored], dtype=np.float32),
            "failures": np.array([len(rescored.failures) for rescored in self._rescored], dtype=np.int16),
            "wrong_seed_margins": np.concatenate([item.margins for item in self._wrong_seed]).astype(np.float16),
            "wrong_seed_failures": np.array([len(item.failures) for item in self._wrong_seed], dtype=np.int16),
            "unlisted": np.concatenate([rescored.unlisted for rescored in self._rescored]),
            "unlisted_rates": np.concatenate([rescored.unlisted_rates for rescored in self._rescored]).astype(
                np.float16
            ),
            "stop_margins": np.concatenate(self._stops).astype(np.float16),
        }
        for index, attempt in enumerate(self._examples):
            result |= {f"example{index}_{name}": array for name, array in example_arrays(attempt).items()}
        return result


def stop_margins(attempt: Attempt, stop_id: int, stop_logprobs: Any) -> Any:
    """Return for every position by how much a stop there would lose, in nats, clipped where a float16 ends."""
    sampling = attempt.sampling
    ids = np.array([[candidate.token_id for candidate in position.top] for position in attempt.reference], np.uint64)
    logprobs = np.array([[candidate.logprob for candidate in position.top] for position in attempt.reference])
    ids = np.concatenate([ids, np.full((len(ids), 1), stop_id, dtype=np.uint64)], axis=1)
    scores = np.concatenate([logprobs, stop_logprobs[:, None]], axis=1)
    if not sampling.greedy:
        scores += sampling.temperature * candidate_noise(
            attempt.sampler_profile, sampling.seed, len(attempt.prompt_ids), ids
        )
    return np.minimum(scores[:, :-1].max(axis=1) - scores[:, -1], 1000.0).clip(min=0.0)


def example_arrays(attempt: Attempt) -> dict[str, Any]:
    """Return a whole attempt as arrays; tests/unit/inference/test_verification_record.py makes it an attempt again."""
    sampling = attempt.sampling
    return {
        "prompt": np.array(attempt.prompt_ids, dtype=np.uint16),
        "output": np.array(attempt.output_ids, dtype=np.uint16),
        "seed": np.array(sampling.seed, dtype=np.int64),
        "profile": np.array(attempt.sampler_profile),
        "sampling": np.array([sampling.temperature, sampling.top_p, sampling.top_k]),
        "max_tokens": np.array(attempt.max_tokens),
        "stopped": np.array(attempt.finish_reason is FinishReason.STOP),
        "chosen": np.array([position.chosen.logprob for position in attempt.reference], dtype=np.float32),
        "rank": np.array([position.chosen.rank for position in attempt.reference], dtype=np.uint16),
        "top_ids": np.array([[item.token_id for item in position.top] for position in attempt.reference], np.uint16),
        "top": np.array([[item.logprob for item in position.top] for position in attempt.reference], np.float32),
    }


def _seeded(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=seed)


def main(
    model: Path,
    out: Path,
    prompts: Path = PROMPTS_FILE,
    examples: int = EXAMPLES,
    vllm_answers: Path | None = None,
    threads: int = 2,
) -> None:
    """Record every variant that is not recorded yet."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    canned = [
        tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in read_texts(PROMPTS_FILE, "canned")
    ]
    texts = {"canned": [(*text, END_OF_TURN) for text in canned], "repeated": _repeated(canned)}
    variants = sorted(
        [*HONEST, *CHEATS], key=lambda variant: ORDER.index(variant.name) if variant.name in ORDER else len(ORDER)
    )
    with tempfile.TemporaryDirectory(prefix="altered-") as scratch:
        recorder = Recorder(model, Path(scratch), read_prompts(tokenizer, prompts), frozenset({END_OF_TURN}), examples)
        for name, outputs in texts.items():
            if not (out / f"{name}.npz").exists():
                _store(out, name, recorder.record_texts(outputs), begun)
        if vllm_answers is not None:
            answers = read_answers(vllm_answers)
            _store(out, "honest-vllm-bf16", recorder.record_answers(answers, VLLM_GENERATOR), begun)
        for variant in variants:
            if not (out / f"{variant.name}.npz").exists():
                _store(out, variant.name, recorder.record(variant), begun)


def _repeated(texts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return texts that say their first words over and over."""
    lengths = range(12, 19)
    return [(text[:length] * MAX_TOKENS)[:MAX_TOKENS] for length in lengths for text in texts]


def _store(out: Path, name: str, arrays: dict[str, Any], begun: float) -> None:
    np.savez_compressed(out / f"{name}.npz", **arrays)
    margins = arrays["margins"].astype(float)
    print(
        f"{time.monotonic() - begun:5.0f} s  {name:24} {len(margins):6} tokens  mean {margins.mean():.5f}  "
        f"match {(margins == 0).mean():.4f}  worst {arrays['worst'].max():.3f} (clip {MARGIN_CLIP})  "
        f"failures {int(arrays['failures'].sum())}",
        flush=True,
    )


if __name__ == "__main__":
    typer.run(main)
