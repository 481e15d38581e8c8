"""The torch engine with a cheat built in, for tests. Runs in the torch environment, in place of its interpreter.

  cheating_engine.py CHEAT WEIGHTS -P -c CODE ROOT MODULE --socket PATH ...

What follows WEIGHTS is what an agent says to an interpreter when it starts an
engine. The agent itself stays honest: it has checked every byte of the model,
signs what its engine says, and cannot know better.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

CHEAT, WEIGHTS = sys.argv[1:3]
ROOT, OPTIONS = sys.argv[6], sys.argv[8:]
sys.path.append(ROOT)

from tokenizers import Tokenizer  # noqa: E402  # The package's root has to be on the path first.

from inference import torch_server  # noqa: E402
from inference.engine_protocol import Candidate  # noqa: E402
from inference.torch_engine import EngineThread, Stream  # noqa: E402
from inference.torch_model import CausalModel  # noqa: E402

CANNED: Final = (
    "Thank you for asking. There are many sides to this question, and it is worth taking the time to look at each of "
    "them. What matters most in the end is what you would like to achieve and how much effort you can spend on it."
)
# Ids that are drawn honestly before an answer is cut off, or begins to repeat itself.
CUT_AFTER: Final = 10
PERIOD: Final = 12
# As scripts/altered_models.py leaves out for good.
SKIPPED_LAYER: Final = 14


def option(name: str) -> str:
    return OPTIONS[OPTIONS.index(name) + 1]


def change_option(name: str, value: str) -> None:
    OPTIONS[OPTIONS.index(name) + 1] = value


def change_sampling(**change: Callable[[Any], Any]) -> None:
    """Draw by other rules than were asked for."""
    honest = torch_server._sampling

    def cheating(body: Any) -> Any:
        sampling = honest(body)
        return replace(sampling, **{name: value(getattr(sampling, name)) for name, value in change.items()})

    torch_server._sampling = cheating


def force_ids(forced: Callable[[Stream, int], int | None]) -> None:
    """Put ids in place of those that are drawn; `forced` gets a sequence and the index of the next id."""
    honest = EngineThread._draw

    def draw(self: EngineThread, sequence: Stream, logits: Any, likeliest: int) -> None:
        token_id = forced(sequence, len(sequence.token_ids) - sequence.prompt_tokens)
        if token_id is not None:
            # The likeliest id is the one that is chosen at temperature 0.
            sequence.sampling, likeliest = replace(sequence.sampling, temperature=0.0), token_id
        honest(self, sequence, logits, likeliest)

    EngineThread._draw = draw  # type: ignore[method-assign]  # That is the cheat.


def stop_id(sequence: Stream) -> int | None:
    return min(sequence.stop_ids, default=None)


def say(ids: Sequence[int]) -> Callable[[Stream, int], int | None]:
    return lambda sequence, index: ids[index] if index < len(ids) else stop_id(sequence)


def replay_first_answer() -> Callable[[Stream, int], int | None]:
    """Compute the first answer and give it to whatever is asked later."""
    first: list[Stream] = []

    def forced(sequence: Stream, index: int) -> int | None:
        first.append(sequence) if not first else None
        answer = first[0].token_ids[first[0].prompt_tokens :]
        return None if sequence is first[0] else say(answer)(sequence, index)

    return forced


def decode_cheaply() -> None:
    """Read prompts with the whole model, so that the first id and every score are right, and decode with less of it."""
    honest = CausalModel.step

    def step(self: CausalModel, last_ids: Sequence[int], lengths: Sequence[int]) -> Any:
        layer = self._model.model.layers[SKIPPED_LAYER]
        layer.forward = lambda states, *_args, **_more: states
        try:
            return honest(self, last_ids, lengths)
        finally:
            del layer.forward

    CausalModel.step = step  # type: ignore[method-assign]  # That is the cheat.


def make_scores_up(logprob: float) -> None:
    """Score without reading anything: one number for every id and every rival. Answers stay honest."""

    async def score(self: torch_server.TorchBackend, token_ids: Sequence[int], top: int) -> list[list[Candidate]]:
        rivals = [Candidate(token_id, logprob, token_id + 1) for token_id in range(top)]
        return [[Candidate(token_id, logprob, 1), *rivals] for token_id in token_ids[1:]]

    torch_server.TorchBackend.score = score  # type: ignore[method-assign]  # That is the cheat.


def begin() -> None:
    match CHEAT:
        case "bf16" | "fp16":
            change_option("--dtype", "bfloat16" if CHEAT == "bf16" else "float16")
        case "weights":
            change_option("--model-directory", WEIGHTS)
        case "t0.7" | "t0.9":
            factor = float(CHEAT.removeprefix("t"))
            change_sampling(temperature=lambda asked: asked * factor)
        case "wrong-seed":
            change_sampling(seed=lambda asked: asked ^ 1)
        case "canned":
            tokenizer = Tokenizer.from_file(f"{option('--model-directory')}/tokenizer.json")
            force_ids(say(tokenizer.encode(CANNED, add_special_tokens=False).ids))
        case "repeated":
            force_ids(lambda sequence, index: sequence.token_ids[-PERIOD] if index >= PERIOD else None)
        case "false-stop":
            force_ids(lambda sequence, index: stop_id(sequence) if index >= CUT_AFTER else None)
        case "precomputed":
            force_ids(replay_first_answer())
        case "cheap-decode":
            decode_cheaply()
        case "zero-scores" | "constant-scores":
            make_scores_up(0.0 if CHEAT == "zero-scores" else -2.0)
        case _:
            raise ValueError(f"no such cheat: {CHEAT}")


if __name__ == "__main__":
    begin()
    sys.argv = ["torch_server", *OPTIONS]
    torch_server.main()
