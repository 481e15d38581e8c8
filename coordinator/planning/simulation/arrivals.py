"""Which requests come when: drawn from loads, or read from a trace."""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np

from coordinator.planning.simulation.churn import MS_PER_HOUR
from coordinator.planning.simulation.scenario import Load, ScenarioInvalid
from inference.task import ServiceClass

# Requests drawn at once: a call of numpy costs as much as some fifty of them.
DRAWN_AT_ONCE: Final = 1024
# Which of the streams of random numbers that a seed begins.
STREAM: Final = 1


class Arrival(NamedTuple):
    """A request.

    Args:
        answer_tokens: how long its answer will be, which nobody knows before.
        max_tokens: what it asks for at most.
    """

    at_ms: float
    model: str
    service_class: ServiceClass
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    deadline_s: float | None


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at_s: Annotated[float, msgspec.Meta(ge=0)]
    model: str
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    answer_tokens: Annotated[int, msgspec.Meta(ge=1)]
    service_class: ServiceClass = ServiceClass.STANDARD
    max_tokens: int | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


def poisson(loads: Sequence[Load], rates: Sequence[float], seed: int) -> Iterator[Arrival]:
    """Yield the requests of all loads in order of time, without an end where a load has none.

    Args:
        rates: requests per second of each load.
    """
    streams = [
        _requests(load, rate, np.random.default_rng([seed, STREAM, number]))
        for number, (load, rate) in enumerate(zip(loads, rates, strict=True))
    ]
    return heapq.merge(*streams, key=lambda arrival: arrival.at_ms)


def _requests(load: Load, rate: float, random: np.random.Generator) -> Iterator[Arrival]:
    prompts = np.array(load.prompt_lengths())
    answers = np.array(load.answer_lengths())
    max_tokens = load.max_tokens or load.answer_tokens_max
    now_ms = MS_PER_HOUR * load.from_hour
    end_ms = math.inf if load.until_hour is None else MS_PER_HOUR * load.until_hour
    while True:
        gaps = random.exponential(1000.0 / rate, DRAWN_AT_ONCE).tolist()
        drawn_prompts = random.choice(prompts, DRAWN_AT_ONCE).tolist()
        drawn_answers = random.choice(answers, DRAWN_AT_ONCE).tolist()
        for gap_ms, prompt, answer in zip(gaps, drawn_prompts, drawn_answers, strict=True):
            now_ms += gap_ms
            if now_ms > end_ms:
                return
            yield Arrival(now_ms, load.model, load.service_class, prompt, answer, max_tokens, load.deadline_s)


def read_trace(path: Path, rooms: Mapping[str, int]) -> Iterator[Arrival]:
    """Yield the requests of a trace: one JSON object a line, in order of time. It is read as it is needed.

    Args:
        rooms: by model the most tokens that a request may have, prompt and answer.

    Raises:
        ScenarioInvalid: the file cannot be read, or a line is wrong; the message has its number.
    """
    decoder = msgspec.json.Decoder(_Line)
    last_s = 0.0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    line = decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ScenarioInvalid(f"{path}:{number}: {error}") from error
                fault = _fault(line, last_s, rooms)
                if fault:
                    raise ScenarioInvalid(f"{path}:{number}: {fault}")
                last_s = line.at_s
                yield Arrival(
                    1000.0 * line.at_s,
                    line.model,
                    line.service_class,
                    line.prompt_tokens,
                    line.answer_tokens,
                    line.max_tokens or line.answer_tokens,
                    line.deadline_s,
                )
    except OSError as error:
        raise ScenarioInvalid(f"cannot read the trace {path}: {error.strerror}") from error


def _fault(line: _Line, last_s: float, rooms: Mapping[str, int]) -> str | None:
    room = rooms.get(line.model)
    if room is None:
        return f"no node of the fleet has the model {line.model!r}; it has: {', '.join(rooms)}"
    if line.at_s < last_s:
        return f"at_s is {line.at_s:g}, and the line before has {last_s:g}; sort the trace by at_s"
    if line.max_tokens is not None and line.max_tokens < line.answer_tokens:
        return "max_tokens is less than answer_tokens"
    if line.prompt_tokens + line.answer_tokens > room:
        return f"prompt and answer have {line.prompt_tokens + line.answer_tokens} tokens, and an engine has {room}"
    return None
