"""Runs of a real model for calibration and power figures: generate in batches, re-score in float32.

Runs in the torch environment. Draws as the torch engine does (tests compare), only for many rows at once; and, where
a request says so, with the noise of another engine's sampler.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from inference.engine_protocol import MAX_SCORE_RIVALS
from inference.rescoring import Attempt
from inference.sampler_noise import POSITION_HASH, candidate_noise
from inference.sampling import LAST_SHIFT, MASK_64, MIX, TOKEN_STEP, choose, noise_of_ids, position_key
from inference.task import FinishReason, PositionLogprobs, Sampling, TokenLogprob
from inference.torch_model import CausalModel
from inference.torch_sampling import truncated

# Ids whose noise is computed for every draw; of the others only those that their noise could lift above the best.
LIKELY: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    sampler_profile: str = POSITION_HASH


@dataclass(frozen=True, slots=True)
class Answer:
    request: Request
    output_ids: tuple[int, ...]
    stopped: bool


def load(directory: Path, *, rows: int, dtype: Any = torch.float32, rounded_to: Any = None) -> CausalModel:
    """Load a model.

    Args:
        rounded_to: a type that the result of every layer is rounded to, while sums are kept in float32: what a GPU
            does in half precision, at the speed of float32 on a CPU.
    """
    model = CausalModel(directory, rows=rows, dtype=dtype, device=torch.device("cpu"))
    if rounded_to is not None:

        def rounded(_module: Any, _inputs: Any, output: Any) -> Any:
            return output.to(rounded_to).to(output.dtype) if torch.is_tensor(output) else output

        for module in model._model.modules():
            if not any(module.children()):
                module.register_forward_hook(rounded)
    return model


def generate(model: CausalModel, requests: Sequence[Request], stop_ids: frozenset[int], rows: int) -> Iterator[Answer]:
    """Answer requests, so many at once; a row that ends takes the next request. In the order in which they end."""
    waiting = list(reversed(requests))
    running: list[tuple[Request, list[int]]] = []
    with torch.inference_mode():
        while waiting or running:
            while waiting and len(running) < rows:
                request = waiting.pop()
                logits = model.read_prompt(list(request.prompt_ids), 0, 1)
                model.cache.move(model.cache.prompt_row, len(running), len(request.prompt_ids))
                running.append((request, draw(logits, [request], [[]])))
            lengths = [len(request.prompt_ids) + len(output) - 1 for request, output in running]
            for index in reversed(range(len(running))):
                request, output = running[index]
                stopped = output[-1] in stop_ids
                if not stopped and len(output) < request.max_tokens:
                    continue
                yield Answer(request, tuple(output), stopped)
                last, length = running.pop(), lengths.pop()
                if index < len(running):
                    model.cache.move(len(running), index, length)
                    running[index], lengths[index] = last, length
            if running:
                logits = model.step([output[-1] for _, output in running], lengths)
                drawn = draw(logits, [request for request, _ in running], [output for _, output in running])
                for (_, output), token_id in zip(running, drawn, strict=True):
                    output.append(token_id)


def draw(logits: Any, requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> list[int]:
    """Draw one id for each row."""
    likely = logits.topk(LIKELY, dim=-1)
    values, ids = likely.values.double().numpy(), likely.indices.numpy().astype(np.uint64)
    drawn = []
    for row, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        sampling = request.sampling
        position = len(request.prompt_ids) + len(output) - 1
        if sampling.greedy:
            drawn.append(int(ids[row, 0]))
        elif request.sampler_profile != POSITION_HASH:
            drawn.append(_draw_of_profile(logits[row], request, len(output)))
        elif sampling.top_k or sampling.top_p < 1.0:
            scaled = truncated(logits[row].double() / sampling.temperature, sampling.top_k, sampling.top_p)
            drawn.append(choose(scaled.numpy(), replace(sampling, temperature=1.0, top_k=0, top_p=1.0), position))
        else:
            drawn.append(_draw_plain(logits[row], values[row], ids[row], sampling, position))
    return drawn


def _draw_of_profile(logits: Any, request: Request, index: int) -> int:
    """Draw output id `index`, with the noise of every id: slow, and the same for all profiles."""
    sampling = request.sampling
    scaled = truncated(logits.double() / sampling.temperature, sampling.top_k, sampling.top_p).numpy()
    ids = np.arange(len(scaled), dtype=np.uint64)[None, :]
    noise = candidate_noise(request.sampler_profile, sampling.seed, len(request.prompt_ids), ids, first=index)[0]
    return int((scaled + noise).argmax())


def _draw_plain(logits: Any, values: Any, ids: Any, sampling: Sampling, position: int) -> int:
    key = position_key(sampling.seed & MASK_64, position)
    scores = values / sampling.temperature + noise_of_ids(np.uint64(key), ids)
    best = float(scores.max())
    # An id outside the likely ones needs this much noise; its uniform number, the hash's high bits, shows it at once.
    needed = best - float(values[-1]) / sampling.temperature
    hashed = _hashes(key, logits.shape[-1])
    threshold = int(min(max(np.exp(-np.exp(-needed)), 0.0), 1.0 - 2.0**-52) * 2.0**63)
    others = ((hashed >> 1) & ((1 << 63) - 1) >= threshold).nonzero()[:, 0].numpy().astype(np.uint64)
    if len(others):
        rest = logits.numpy()[others].astype(np.float64) / sampling.temperature + noise_of_ids(np.uint64(key), others)
        if rest.max() > best:
            return int(others[int(rest.argmax())])
    return int(ids[int(scores.argmax())])


_products: dict[int, Any] = {}


def _hashes(key: int, size: int) -> Any:
    """Return the hash of every id as int64, the same bits as `inference.sampling` has in uint64."""
    if size not in _products:
        _products[size] = torch.arange(size, dtype=torch.int64) * _signed(TOKEN_STEP)
    value = _products[size] + _signed(key)
    for shift, multiplier in MIX:
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * _signed(multiplier)
    return value ^ ((value >> LAST_SHIFT) & ((1 << (64 - LAST_SHIFT)) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def score(
    verifier: CausalModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    watched: int,
    top: int = MAX_SCORE_RIVALS,
) -> tuple[list[PositionLogprobs], Any]:
    """Read prompt and output at once; return what a SCORE task would say of the output, and the log-probability of
    one watched id at each of its positions."""
    with torch.inference_mode():
        count = len(output_ids)
        logits = verifier.read_prompt([*prompt_ids, *output_ids[:-1]], 0, count)
        logprobs = logits.log_softmax(dim=-1)
        rivals = logprobs.topk(top, dim=-1)
        chosen = logprobs[torch.arange(count), torch.tensor(output_ids)]
        ranks = (logprobs > chosen[:, None]).sum(dim=-1) + 1
    positions = [
        PositionLogprobs(
            TokenLogprob(token_id, logprob, rank),
            tuple(
                TokenLogprob(id_, value, place)
                for place, (id_, value) in enumerate(zip(ids, values, strict=True), start=1)
            ),
        )
        for token_id, logprob, rank, ids, values in zip(
            output_ids, chosen.tolist(), ranks.tolist(), rivals.indices.tolist(), rivals.values.tolist(), strict=True
        )
    ]
    return positions, logprobs[:, watched].double().numpy()


def as_attempt(
    answer: Answer,
    claimed: Sampling,
    stop_ids: frozenset[int],
    reference: Sequence[PositionLogprobs],
    sampler_profile: str,
) -> Attempt:
    """Return an answer as a verifier sees it, who believes that it was drawn as `claimed`."""
    return Attempt(
        prompt_ids=answer.request.prompt_ids,
        output_ids=answer.output_ids,
        sampling=claimed,
        sampler_profile=sampler_profile,
        stop_token_ids=tuple(sorted(stop_ids)),
        max_tokens=answer.request.max_tokens,
        finish_reason=FinishReason.STOP if answer.stopped else FinishReason.LENGTH,
        reference=reference,
    )
