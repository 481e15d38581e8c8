"""The torch engine's own thread: reads prompts, steps the running sequences together, draws ids.

New sequences join while others run: each turn of the loop reads a limited piece
of waiting prompts, then makes one step for all running ones. Everything here
runs on the one thread; other threads only put commands into its queue, and
results leave through a callback.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
import torch

from inference.engine_protocol import Candidate, Position
from inference.task import Sampling
from inference.torch_model import CausalModel, EncoderModel
from inference.torch_sampling import choose

logger = structlog.get_logger()

# Prompt ids read per turn, and so per step of the running sequences: 128 cost about as much time
# as two steps of eight sequences (SmolLM2-135M, two cores), which bounds how long the others pause.
PROMPT_TOKENS_PER_TURN: Final = 128


@dataclass(frozen=True, slots=True)
class Output:
    """What a turn brought one sequence. `scores` and `vector` are of requests that ask for them."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[Position] | None = None
    finish_reason: str | None = None
    scores: list[list[Candidate]] | None = None
    vector: list[float] | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """One request on its way through the engine."""

    token_ids: list[int]
    prompt_tokens: int
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int]
    deliver: Callable[[Output], None]
    # Ask for scores of the prompt, with so many rivals, and no answer.
    score_top: int | None = None
    # How many of its ids the cache holds.
    cached: int = 0
    scores: list[list[Candidate]] = field(default_factory=list)
    ended: bool = False


class EngineThread:
    """Runs one model.

    Args:
        model: a decoder, or an encoder for embeddings.
        rows: sequences that run at once.
        failed: called from the thread with the reason when it can go on no more.
    """

    def __init__(self, model: CausalModel | EncoderModel, rows: int, failed: Callable[[str], None]) -> None:
        self._model = model
        self._rows_max = rows
        self._failed = failed
        # Unbounded here; the server refuses requests past its limit before they come this far.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Stream] = deque()
        self._rows: list[Stream] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current turn."""
        self._commands.put(None)
        self._thread.join()

    def submit(self, sequence: Stream) -> None:
        self._commands.put(lambda: self._waiting.append(sequence))

    def abort(self, sequence: Stream) -> None:
        self._commands.put(lambda: self._end(sequence, Output(finish_reason="abort")))

    def embed(self, token_ids: Sequence[int], deliver: Callable[[Output], None]) -> None:
        def run() -> None:
            assert isinstance(self._model, EncoderModel)
            deliver(Output(vector=self._model.embed(token_ids)))

        self._commands.put(run)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_commands():
                    if isinstance(self._model, CausalModel):
                        self._read_prompts(self._model)
                        self._step(self._model)
        except Exception as error:
            logger.exception("engine thread failed")
            self._failed(f"engine thread failed: {error!r}")
            for sequence in [*self._rows, *self._waiting]:
                sequence.deliver(Output(error="the engine failed"))

    def _take_commands(self) -> bool:
        """Carry out what has been asked, waiting for it while nothing runs. Returns whether to go on."""
        while True:
            try:
                command = self._commands.get(block=not (self._rows or self._waiting))
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _read_prompts(self, model: CausalModel) -> None:
        budget = PROMPT_TOKENS_PER_TURN
        while budget > 0 and self._waiting and len(self._rows) < self._rows_max:
            sequence = self._waiting[0]
            piece = sequence.token_ids[sequence.cached : sequence.cached + budget]
            budget -= len(piece)
            scored = sequence.score_top is not None
            logits = model.read_prompt(piece, sequence.cached, len(piece) if scored else 1)
            sequence.cached += len(piece)
            if scored:
                self._score(sequence, logits)
            if sequence.cached < len(sequence.token_ids):
                continue
            self._waiting.popleft()
            if scored:
                self._end(sequence, Output(scores=sequence.scores))
                continue
            row = len(self._rows)
            model.cache.move(model.cache.prompt_row, row, sequence.cached)
            self._rows.append(sequence)
            self._draw(sequence, logits[-1], int(logits[-1].argmax()))

    def _step(self, model: CausalModel) -> None:
        if not self._rows:
            if not self._waiting:
                model.cache.reset()
            return
        rows = list(self._rows)
        logits = model.step([row.token_ids[-1] for row in rows], [row.cached for row in rows])
        likeliest: list[int] = logits.argmax(dim=-1).tolist()
        # All of them before any draw: a draw may end a sequence, and then moves another with all it has cached.
        for sequence in rows:
            sequence.cached += 1
        for index, sequence in enumerate(rows):
            self._draw(sequence, logits[index], likeliest[index])

    def _draw(self, sequence: Stream, logits: torch.Tensor, likeliest: int) -> None:
        """Draw the next id of a running sequence, deliver it, and end the sequence where that is due."""
        sampling, token_ids = sequence.sampling, sequence.token_ids
        if sampling.greedy and not sampling.penalised:
            token_id = likeliest
        else:
            prompt, output = token_ids[: sequence.prompt_tokens], token_ids[sequence.prompt_tokens :]
            token_id = choose(logits, sampling, len(token_ids) - 1, prompt, output)
        token_ids.append(token_id)
        positions = None if sampling.logprobs is None else [_position(logits, token_id, sampling.logprobs)]
        finish_reason = None
        if token_id in sequence.stop_ids:
            finish_reason = "stop"
        elif len(token_ids) - sequence.prompt_tokens >= sequence.max_tokens:
            finish_reason = "length"
        output_now = Output([token_id], positions, finish_reason)
        if finish_reason is not None:
            self._end(sequence, output_now)
        else:
            sequence.deliver(output_now)

    def _end(self, sequence: Stream, output: Output) -> None:
        """Deliver the last output and free the row; the last running sequence moves into it."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._rows:
            assert isinstance(self._model, CausalModel)
            row, last = self._rows.index(sequence), self._rows.pop()
            if last is not sequence:
                self._rows[row] = last
                self._model.cache.move(len(self._rows), row, last.cached)
        sequence.deliver(output)

    def _score(self, sequence: Stream, logits: torch.Tensor) -> None:
        """Score the ids that follow the piece just read; its last one waits for the next piece."""
        assert sequence.score_top is not None
        first = sequence.cached - len(logits) + 1
        for line, token_id in zip(logits, sequence.token_ids[first : sequence.cached + 1], strict=False):
            # One more than asked, as the id itself may take the last rival's place.
            position = _position(line, token_id, sequence.score_top + 1)
            rivals = [item for item in position.top_logprobs if item.token_id != token_id]
            sequence.scores.append([Candidate(token_id, position.logprob, position.rank), *rivals])


def _position(logits: torch.Tensor, token_id: int, top: int) -> Position:
    """Return an id's log-probability and rank, and its rivals as vLLM lists them: the id itself first, then by
    rank, cut to `top`. Probabilities are the model's, before temperature, penalties and truncation."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    itself = Candidate(token_id, float(chosen), rank)
    values, ids = logprobs.topk(top) if top else (logprobs[:0], logprobs[:0])
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    rivals = [Candidate(int(rival), value, place) for place, (rival, value) in enumerate(pairs, start=1)]
    others = [rival for rival in rivals if rival.token_id != token_id]
    return Position(token_id, itself.logprob, rank, [itself, *others][: max(top, 1)])
