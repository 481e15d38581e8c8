"""The fake engine: a process with the engines' socket, a set speed, deterministic ids, and faults on demand.

One loop paces all streams on a common grid of steps, as a batching engine
does: a step gives each running stream one id. Steps are equally long, or take
what those of a real engine would (`fake_steps.py`). For tests and benchmarks
only.
"""

import argparse
import asyncio
import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from aiohttp import web

from inference.engine_protocol import Candidate, GenerateBody, Position, SamplingBody
from inference.engine_server import EngineServer, Limits, Overloaded, TokenStream, read_body, serve
from inference.fake_faults import FROM_THE_START, Fault
from inference.fake_model import FakeSequence, FakeVocabulary, fake_candidates, fake_embedding
from inference.fake_steps import StepPlan, StepTimes
from inference.task import Sampling, TaskKind

logger = structlog.get_logger()

VERSION: Final = "slackwater-fake-1"

# Streams that may wait for a slot, as a multiple of the slots.
MAX_WAITING_PER_SLOT: Final = 4

# A loop that is late makes up for it, as the average speed is what was asked for; but a process that
# was frozen does not gush on waking, just as an engine would not.
MAX_CATCH_UP_S: Final = 0.1

# The first step of a stream whose prompt is not computed yet.
NOT_YET: Final = sys.maxsize

# Exit status of the crash fault: EX_SOFTWARE.
CRASH_STATUS: Final = 70

# How many ids too many the lie about the count sends.
EXCESS_IDS: Final = 8


class FakeStream:
    """One running or waiting sequence."""

    def __init__(self, body: GenerateBody, vocabulary: FakeVocabulary) -> None:
        sampling = body.sampling_params
        self.request_id = body.request_id
        self.sequence = FakeSequence(body.token_ids, sampling_of(sampling), vocabulary)
        self.max_tokens = sampling.max_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.logprobs = sampling.logprobs
        self.emitted = 0
        self.prompt_tokens = len(body.token_ids)
        # The step that brings the first id; None while no slot is free or nobody listens yet.
        self.first_step: int | None = None
        self.fault: Fault | None = None
        self.stream: TokenStream | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    @property
    def struck(self) -> bool:
        """Whether its fault, if any, acts from the next id on."""
        return self.fault is not None and self.emitted >= self.fault.after_tokens


class FakeBackend:
    """Draws and paces the ids of all streams."""

    def __init__(
        self,
        vocabulary: FakeVocabulary,
        *,
        tokens_per_second: float,
        ttft_s: float,
        context_tokens: int,
        slots: int,
        faults: Sequence[Fault] = (),
        step_times: StepTimes | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._plan = None if step_times is None else StepPlan[FakeStream](step_times)
        self._step_s = 1.0 / tokens_per_second
        self._ttft_s = ttft_s
        self._slots = slots
        self._faults = list(faults)
        # How many streams each fault may still hit.
        self._hits_left = [fault.streams for fault in self._faults]
        self._waiting: deque[FakeStream] = deque()
        self._running: dict[FakeStream, None] = {}
        self._work = asyncio.Event()
        self._origin_s = 0.0
        self.limits = Limits(kind=TaskKind.GENERATE, context_tokens=context_tokens, vocabulary_size=vocabulary.size)
        self.version = VERSION
        self.failure: str | None = None

    def set_faults(self, faults: Sequence[Fault]) -> None:
        """Replace all faults; running streams are struck or healed by the next step."""
        self._faults = list(faults)
        self._hits_left = [fault.streams for fault in self._faults]
        for stream in [*self._running, *self._waiting]:
            stream.fault = self._pick_fault(stream.request_id)

    def submit(self, body: GenerateBody) -> FakeStream:
        if len(self._running) >= self._slots and len(self._waiting) >= self._slots * MAX_WAITING_PER_SLOT:
            raise Overloaded(len(self._waiting))
        stream = FakeStream(body, self._vocabulary)
        stream.fault = self._pick_fault(body.request_id)
        self._waiting.append(stream)
        return stream

    async def run(self, job: FakeStream, stream: TokenStream) -> None:
        if self._plan is not None:
            await asyncio.sleep(self._plan.times.request_ms / 1000.0)
        job.stream = stream
        self._admit()
        await job.done

    def abort(self, job: FakeStream) -> None:
        # The step that comes next says so; a stream that is not listening yet is told when it does.
        job.max_tokens = 0
        if job.first_step is None:
            self._waiting.remove(job)
            self._running[job] = None
            self._work.set()
        if job.first_step is None or job.first_step == NOT_YET:
            job.first_step = 0

    def drop(self, job: FakeStream) -> None:
        self._leave(job)
        if job in self._waiting:
            self._waiting.remove(job)
        self._admit()

    async def score(self, token_ids: Sequence[int], top: int) -> list[list[Candidate]]:
        return [self._candidates(token_id, top) for token_id in token_ids[1:]]

    async def embed(self, token_ids: Sequence[int]) -> list[float]:
        return fake_embedding(token_ids)

    async def pace(self) -> None:
        """Give every running stream its ids, step by step, for ever."""
        await (self._pace_evenly() if self._plan is None else self._pace_as_planned(self._plan))

    async def _pace_as_planned(self, plan: StepPlan[FakeStream]) -> None:
        step, due_s = 0, 0.0
        while True:
            await self._work.wait()
            due_s = self._now()
            while self._running:
                growing = [job for job in self._running if job.first_step is not None and job.first_step <= step]
                context = sum(job.prompt_tokens + job.emitted for job in growing)
                step_s, complete = plan.next(len(growing), context)
                due_s = max(due_s + step_s, self._now() - MAX_CATCH_UP_S)
                await asyncio.sleep(due_s - self._now())
                step += 1
                for job in complete:
                    job.first_step = step
                for job in list(self._running):
                    await self._advance(job, step)
            self._work.clear()

    async def _pace_evenly(self) -> None:
        while True:
            await self._work.wait()
            last = self._step_at(self._now()) - 1
            while self._running:
                step = self._step_at(self._now())
                late = step - last - 1 - int(MAX_CATCH_UP_S / self._step_s)
                if late > 0:
                    self._origin_s += late * self._step_s
                    step -= late
                last = step
                for stream in list(self._running):
                    await self._advance(stream, step)
                await asyncio.sleep(self._origin_s + (step + 1) * self._step_s - self._now())
            self._work.clear()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _step_at(self, now_s: float) -> int:
        return int((now_s - self._origin_s) / self._step_s)

    def _first_step(self, stream: FakeStream) -> int:
        prefill_s = self._ttft_s
        if stream.fault is not None and stream.fault.kind == "long_prefill":
            prefill_s += stream.fault.seconds
        return math.ceil((self._now() + prefill_s - self._origin_s) / self._step_s)

    def _admit(self) -> None:
        """Start waiting streams whose reader listens while slots are free."""
        for stream in list(self._waiting):
            if len(self._running) >= self._slots:
                return
            if stream.stream is not None:
                self._waiting.remove(stream)
                self._running[stream] = None
                if self._plan is None:
                    stream.first_step = self._first_step(stream)
                else:
                    stream.first_step = NOT_YET
                    self._plan.add(stream, stream.prompt_tokens)
                self._work.set()

    def _pick_fault(self, request_id: str) -> Fault | None:
        for index, fault in enumerate(self._faults):
            left = self._hits_left[index]
            if fault.request_id in request_id and left != 0:
                if left is not None:
                    self._hits_left[index] = left - 1
                return fault
        return None

    async def _advance(self, job: FakeStream, step: int) -> None:
        """Send a stream the ids that are due by this step."""
        stream = job.stream
        if stream is None or job.first_step is None or step < job.first_step or stream.congested:
            return
        due = step - job.first_step + 1 - job.emitted
        if job.fault is not None and job.fault.kind == "slow":
            due = (step - job.first_step) // job.fault.factor + 1 - job.emitted
        data = self._draw(job, stream, due) if job.fault is None else self._draw_faulty(job, stream, due, job.fault)
        if not data:
            return
        try:
            await stream.write(data)
        except ConnectionError:
            # The reader has gone; its handler is being cancelled and drops the job.
            self._leave(job)

    def _draw(self, job: FakeStream, stream: TokenStream, due: int) -> bytes:
        """Return the event with the next ids, at most to the end of the answer."""
        if job.max_tokens == 0:
            return self._end(job, stream, [], "abort")
        draw, stop_ids, token_ids = job.sequence.next_id, job.stop_ids, []
        for _ in range(min(due, job.max_tokens - job.emitted)):
            token_id = draw()
            token_ids.append(token_id)
            if token_id in stop_ids:
                return self._end(job, stream, token_ids, "stop")
        if job.emitted + len(token_ids) >= job.max_tokens:
            return self._end(job, stream, token_ids, "length")
        job.emitted += len(token_ids)
        return stream.event(token_ids, self._positions(job, token_ids)) if token_ids else b""

    def _draw_faulty(self, job: FakeStream, stream: TokenStream, due: int, fault: Fault) -> bytes:
        if job.max_tokens == 0:
            return self._draw(job, stream, due)
        if not job.struck and fault.kind not in FROM_THE_START:
            return self._draw(job, stream, min(due, fault.after_tokens - job.emitted))
        match fault.kind:
            case "slow" | "long_prefill":
                # The pacing does these.
                return self._draw(job, stream, due)
            case "stall":
                return b""
            case "crash":
                os._exit(CRASH_STATUS)
            case "truncate":
                return self._end(job, stream, [], "length")
            case "lie_finish":
                return self._end(job, stream, [job.sequence.next_id()], "stop")
            case "lie_count":
                excess = job.max_tokens - job.emitted + EXCESS_IDS
                return self._end(job, stream, [job.sequence.next_id() for _ in range(excess)], "length")
            case "wrong_ids":
                # Drawn ids that were not taken in twice: each id is fed a second time, so all that follows differs.
                job.sequence.take(job.sequence.next_id())
                return self._draw(job, stream, due)
            case "error":
                self._leave(job)
                return stream.error_event("fault on demand")
            case "cut":
                self._leave(job)
                stream.cut()
                return b""
            case "stop":
                ended_by = next((item for item in self._vocabulary.special_ids if item in job.stop_ids), None)
                return self._end(job, stream, [ended_by if ended_by is not None else min(job.stop_ids)], "stop")

    def _end(self, job: FakeStream, stream: TokenStream, token_ids: list[int], finish_reason: str) -> bytes:
        self._leave(job)
        job.emitted += len(token_ids)
        return stream.event(token_ids, self._positions(job, token_ids), finish_reason)

    def _leave(self, job: FakeStream) -> None:
        """Free the slot. The handler, woken by this, returns after the write that the caller is about to do."""
        self._running.pop(job, None)
        if self._plan is not None:
            self._plan.drop(job)
        job.finish()

    def _positions(self, job: FakeStream, token_ids: Sequence[int]) -> list[Position] | None:
        if job.logprobs is None:
            return None
        positions = []
        for token_id in token_ids:
            ranked = self._candidates(token_id, job.logprobs)
            positions.append(Position(token_id, ranked[0].logprob, 1, ranked))
        return positions

    def _candidates(self, token_id: int, top: int) -> list[Candidate]:
        return [Candidate(*item) for item in fake_candidates(token_id, max(top, 1), self._vocabulary)]


def sampling_of(body: SamplingBody) -> Sampling:
    """Return the sampling that the hash is keyed with."""
    return Sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, seed=body.seed)


async def run_fake(backend: FakeBackend, socket_path: Path) -> None:
    """Serve until told to stop."""
    app = EngineServer(backend).application()

    async def set_faults(request: web.Request) -> web.Response:
        backend.set_faults(await read_body(request, list[Fault]))
        return web.Response()

    # For tests: replaces the faults with the posted list; an empty one heals.
    app.router.add_post("/fault", set_faults)
    pacing = asyncio.create_task(backend.pace())
    serving = asyncio.create_task(serve(app, socket_path))
    done, pending = await asyncio.wait({pacing, serving}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="fake_server", description="A deterministic engine for tests.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, or the folder that holds it")
    parser.add_argument("--tokens-per-second", type=float, required=True, help="per stream")
    parser.add_argument("--ttft-ms", type=float, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--faults", default="[]", help="JSON list of faults")
    parser.add_argument("--step-times", default="", help="JSON object of fake_steps.StepTimes, in place of even steps")
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer / "tokenizer.json" if arguments.tokenizer.is_dir() else arguments.tokenizer
    vocabulary = FakeVocabulary.load(tokenizer)
    faults = msgspec.json.decode(arguments.faults, type=list[Fault])
    times = msgspec.json.decode(arguments.step_times, type=StepTimes) if arguments.step_times else None

    async def run() -> None:
        backend = FakeBackend(
            vocabulary,
            tokens_per_second=arguments.tokens_per_second,
            ttft_s=arguments.ttft_ms / 1000,
            context_tokens=arguments.context,
            slots=arguments.slots,
            faults=faults,
            step_times=times,
        )
        await run_fake(backend, arguments.socket)

    asyncio.run(run())


if __name__ == "__main__":
    main()
