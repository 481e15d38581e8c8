"""The torch engine: transformers models where vLLM does not run, behind the engines' socket.

Runs in an environment of its own (`.venv-torch`); started by `inference/launch.py`.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import torch
import transformers

from inference.engine_protocol import Candidate, GenerateBody, SamplingBody
from inference.engine_server import EngineServer, Limits, Overloaded, Refusal, TokenStream, serve
from inference.task import Sampling, TaskKind
from inference.torch_engine import EngineThread, Output, Stream
from inference.torch_model import CausalModel, EncoderModel, UnsupportedModel, read_kind

logger = structlog.get_logger()

# Requests that may wait for a row, as a multiple of the rows.
MAX_WAITING_PER_SLOT: Final = 4

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Job:
    """A sequence, and what it has brought so far that is not written yet; never more than its max_tokens."""

    stream: Stream
    outputs: asyncio.Queue[Output]


class TorchBackend:
    """Lets the server's event loop and the engine's thread talk."""

    def __init__(self, model: CausalModel | EncoderModel, kind: TaskKind, *, slots: int, context_tokens: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots = slots
        self._open_jobs = 0
        self._thread = EngineThread(model, slots, self._fail)
        context = min(context_tokens, model.context_tokens)
        self.limits = Limits(kind=kind, context_tokens=context, vocabulary_size=model.vocabulary_size)
        self.version = f"slackwater-torch-1 (torch {torch.__version__}, transformers {transformers.__version__})"
        self.failure: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def submit(self, body: GenerateBody) -> Job:
        self._check_room()
        sampling = body.sampling_params
        job = self._open(
            body.token_ids,
            sampling=_sampling(sampling),
            max_tokens=sampling.max_tokens,
            stop_ids=frozenset(sampling.stop_token_ids),
            score_top=None,
        )
        self._open_jobs += 1
        return job

    async def run(self, job: Job, stream: TokenStream) -> None:
        finish_reason = None
        while finish_reason is None:
            output = await job.outputs.get()
            if output.error is not None:
                await stream.write(stream.error_event(output.error))
                return
            finish_reason = output.finish_reason
            await stream.write(stream.event(output.token_ids, output.positions, finish_reason))

    def abort(self, job: Job) -> None:
        self._thread.abort(job.stream)

    def drop(self, job: Job) -> None:
        self._open_jobs -= 1
        self._thread.abort(job.stream)

    async def score(self, token_ids: Sequence[int], top: int) -> list[list[Candidate]]:
        self._check_room()
        job = self._open(token_ids, sampling=Sampling(), max_tokens=0, stop_ids=frozenset(), score_top=top)
        self._open_jobs += 1
        try:
            output = await job.outputs.get()
        finally:
            self.drop(job)
        if output.scores is None:
            raise Refusal(output.error or "the engine scored nothing", status=500)
        return output.scores

    async def embed(self, token_ids: Sequence[int]) -> list[float]:
        if self.limits.kind is not TaskKind.EMBED:
            raise Refusal("this engine's model generates; it does not embed")
        self._check_room()
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._open_jobs += 1
        try:
            self._thread.embed(list(token_ids), self._deliver_to(outputs))
            output = await outputs.get()
        finally:
            self._open_jobs -= 1
        if output.vector is None:
            raise Refusal(output.error or "the engine embedded nothing", status=500)
        return output.vector

    def _check_room(self) -> None:
        if self.failure is not None:
            raise Refusal(self.failure, status=503)
        if self._open_jobs >= self._slots * (1 + MAX_WAITING_PER_SLOT):
            raise Overloaded(self._open_jobs)

    def _open(
        self,
        token_ids: Sequence[int],
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        score_top: int | None,
    ) -> Job:
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        stream = Stream(
            token_ids=list(token_ids),
            prompt_tokens=len(token_ids),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            deliver=self._deliver_to(outputs),
            score_top=score_top,
        )
        self._thread.submit(stream)
        return Job(stream, outputs)

    def _deliver_to(self, outputs: asyncio.Queue[Output]) -> Callable[[Output], None]:
        """Return what the engine's thread calls with each output."""
        return lambda output: self._tell(outputs.put_nowait, output)

    def _fail(self, reason: str) -> None:
        self.failure = reason

    def _tell(self, callback: Callable[[Output], None], output: Output) -> None:
        self._loop.call_soon_threadsafe(callback, output)


def _sampling(body: SamplingBody) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logprobs=body.logprobs,
    )


def load_model(directory: Path, kind: TaskKind, *, slots: int, dtype: str, device: str) -> CausalModel | EncoderModel:
    """Read a model from its folder."""
    if kind is TaskKind.EMBED:
        return EncoderModel(directory, dtype=_DTYPES[dtype], device=torch.device(device))
    return CausalModel(directory, rows=slots, dtype=_DTYPES[dtype], device=torch.device(device))


async def run_torch(model: CausalModel | EncoderModel, kind: TaskKind, arguments: argparse.Namespace) -> None:
    """Serve until told to stop."""
    backend = TorchBackend(model, kind, slots=arguments.slots, context_tokens=arguments.context)
    backend.start()
    try:
        await serve(EngineServer(backend).application(), arguments.socket)
    finally:
        await asyncio.to_thread(backend.stop)


def main() -> None:
    parser = argparse.ArgumentParser(prog="torch_server", description="Serves a transformers model to the agent.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model-directory", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        kind = read_kind(arguments.model_directory)
        model = load_model(
            arguments.model_directory, kind, slots=arguments.slots, dtype=arguments.dtype, device=arguments.device
        )
    except (OSError, UnsupportedModel) as error:
        parser.exit(1, f"torch_server: cannot load {arguments.model_directory}: {error}\n")
    asyncio.run(run_torch(model, kind, arguments))


if __name__ == "__main__":
    main()
