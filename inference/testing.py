"""Fakes for tests of what stands above the engine port."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inference.engine import EngineError, EngineUnreachable, GenerateRequest, TokenChunk
from inference.engine_client import HttpEngine
from inference.fake_model import FakeSequence, FakeVocabulary, fake_candidates, fake_embedding
from inference.launch import EngineLaunch
from inference.task import FinishReason, PositionLogprobs, TaskKind, TokenLogprob, token_array

# How often to ask an engine process that is starting whether it makes tokens yet.
_READY_POLL_S: Final = 0.1

# Two special ids (0 and 1), the rest text.
SMALL_VOCABULARY = FakeVocabulary(ids=token_array(range(2, 1000)), special_ids=(0, 1), size=1000)


class FakeEngine:
    """The engine port in memory: the fake model, as fast as it is read, failing on demand.

    Attributes:
        requests: every generate request so far.
        running: request ids of the sequences that are being read.
        aborted: request ids that `abort` was called with, or whose iterator was closed early.
    """

    def __init__(self, vocabulary: FakeVocabulary = SMALL_VOCABULARY, chunk_tokens: int = 1) -> None:
        self._vocabulary = vocabulary
        self._chunk_tokens = chunk_tokens
        self._failure: EngineError | None = None
        self._failure_after = 0
        self._stalled: asyncio.Event | None = None
        self._stall_after = 0
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.closed = False

    def fail(self, error: EngineError | None = None, after_tokens: int = 0) -> None:
        """Make every call fail; generation after so many ids of its own answer."""
        self._failure = error or EngineUnreachable("engine failed on demand")
        self._failure_after = after_tokens

    def stall(self, after_tokens: int = 0) -> None:
        """Make generation hang after so many ids, until `recover`."""
        self._stalled = asyncio.Event()
        self._stall_after = after_tokens

    def recover(self) -> None:
        """Undo `fail` and `stall`; stalled answers go on."""
        self._failure = None
        if self._stalled is not None:
            self._stalled.set()
        self._stalled = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        sequence = FakeSequence(request.prompt_ids, request.sampling, self._vocabulary)
        finished = False
        emitted = 0
        try:
            while not finished:
                # A turn of the loop, as an engine's answer takes at least that.
                await asyncio.sleep(0)
                await self._misbehave(request.request_id, emitted)
                count = min(self._chunk_tokens, request.max_tokens - emitted, self._until_misbehaviour(emitted))
                token_ids, reason = _draw(sequence, request, count, emitted)
                emitted += len(token_ids)
                finished = reason is not None
                yield TokenChunk(tuple(token_ids), self._positions(request, token_ids), reason)
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    async def score(self, token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
        self._fail_now()
        return [self._position(token_id, top) for token_id in token_ids[1:]]

    async def embed(self, token_ids: Sequence[int]) -> list[float]:
        self._fail_now()
        return fake_embedding(token_ids)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.discard(request_id)

    async def check_health(self, timeout_s: float) -> None:
        self._fail_now()
        if self._stalled is not None and self._stall_after == 0:
            raise EngineUnreachable(f"engine made no token within {timeout_s:g} s")

    async def aclose(self) -> None:
        self.closed = True

    async def _misbehave(self, request_id: str, emitted: int) -> None:
        if request_id not in self.running:
            raise EngineError("engine ended the answer with 'abort'")
        if self._failure is not None and emitted >= self._failure_after:
            raise self._failure
        if self._stalled is not None and emitted >= self._stall_after:
            await self._stalled.wait()

    def _until_misbehaviour(self, emitted: int) -> int:
        limits = []
        if self._failure is not None:
            limits.append(self._failure_after - emitted)
        if self._stalled is not None:
            limits.append(self._stall_after - emitted)
        return min(limits, default=self._chunk_tokens)

    def _fail_now(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _positions(self, request: GenerateRequest, token_ids: Sequence[int]) -> tuple[PositionLogprobs, ...]:
        top = request.sampling.logprobs
        return () if top is None else tuple(self._position(token_id, top) for token_id in token_ids)

    def _position(self, token_id: int, top: int) -> PositionLogprobs:
        ranked = [TokenLogprob(*item) for item in fake_candidates(token_id, max(top, 1), self._vocabulary)]
        return PositionLogprobs(ranked[0], tuple(ranked[:top]))


def _draw(
    sequence: FakeSequence, request: GenerateRequest, count: int, emitted: int
) -> tuple[list[int], FinishReason | None]:
    token_ids: list[int] = []
    for _ in range(count):
        token_ids.append(sequence.next_id())
        if token_ids[-1] in request.stop_token_ids:
            return token_ids, FinishReason.STOP
    return token_ids, FinishReason.LENGTH if emitted + len(token_ids) >= request.max_tokens else None


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A real engine process, for integration tests."""

    engine: HttpEngine
    process: asyncio.subprocess.Process
    socket_path: Path


@contextlib.asynccontextmanager
async def started(
    launch: EngineLaunch, socket_path: Path, *, ready_within_s: float, kind: TaskKind = TaskKind.GENERATE
) -> AsyncGenerator[EngineProcess, None]:
    """Run an engine process from its first token until the block ends; its whole process group is killed then.

    Raises:
        AssertionError: it ended, or made no token in time.
    """
    process = await asyncio.create_subprocess_exec(*launch.argv, env=launch.env, start_new_session=True)
    engine = HttpEngine(socket_path, kind=kind)
    deadline_s = asyncio.get_running_loop().time() + ready_within_s
    try:
        while True:
            try:
                await engine.check_health(timeout_s=ready_within_s)
                break
            except EngineUnreachable as error:
                if process.returncode is not None or asyncio.get_running_loop().time() > deadline_s:
                    raise AssertionError(f"engine is not ready (exit status {process.returncode})") from error
                await asyncio.sleep(_READY_POLL_S)
        yield EngineProcess(engine, process, socket_path)
    finally:
        await engine.aclose()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
