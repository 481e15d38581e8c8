"""The engine port over HTTP on a Unix socket: one client for every kind of engine."""

import asyncio
import contextlib
import io
import itertools
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
import structlog

from inference.engine import EngineError, EngineUnreachable, GenerateRequest, TokenChunk
from inference.engine_protocol import (
    ABORT_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    SEQUENCE_NAME_PREFIX,
    VERSION_PATH,
    AbortBody,
    Candidate,
    Choice,
    EmbeddingsAnswer,
    EmbeddingsBody,
    GenerateBody,
    Position,
    SamplingBody,
    ScoreAnswer,
    StreamEvent,
    VersionAnswer,
)
from inference.task import FinishReason, PositionLogprobs, Sampling, TaskKind, TokenLogprob

logger = structlog.get_logger()

# Longest line of a stream. A position with 21 alternatives is about 2 KB, and an engine that was
# held up may put hundreds of positions into one event; anything longer is not an engine talking.
MAX_LINE_BYTES: Final = 4 * 1024 * 1024

# Longest request that is handed to the socket in one piece; about 40,000 ids.
MAX_WHOLE_WRITE_BYTES: Final = 256 * 1024

# Most bytes of an error answer that are read and shown.
MAX_ERROR_BYTES: Final = 4096

# Most bytes of a score or embedding: 128k positions with 21 alternatives at about 60 bytes each.
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024

# How long an abort may take. The closed connection has ended the sequence by then in any case.
ABORT_TIMEOUT_S: Final = 1.0

# How long to wait for the end mark after a finish reason, so that the connection can be used again.
END_MARK_TIMEOUT_S: Final = 1.0

# A vector counts as unit-length within this: bf16 keeps three decimal digits.
UNIT_LENGTH_TOLERANCE: Final = 0.01

# Any vocabulary has it; what it means does not matter to a health check.
_PROBE_TOKEN_ID: Final = 1

_FINISH_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_PROBE_SAMPLING: Final = Sampling(temperature=0.0)

_JSON: Final = {"Content-Type": "application/json"}

_encode = msgspec.json.Encoder().encode
_decode_event = msgspec.json.Decoder(StreamEvent).decode

_Answer = TypeVar("_Answer")


class StreamParser:
    """Turns the bytes of one answer stream into chunks. Pure; however the bytes are cut, the ids are the same."""

    def __init__(self, top: int | None) -> None:
        self._top = top
        self._rest = b""
        self._finish_reason: FinishReason | None = None
        self.ended = False

    def feed(self, data: bytes) -> TokenChunk | None:
        """Return all that the complete lines up to here bring, as one chunk; None where they bring nothing.

        Raises:
            EngineError: the engine reported an error or an abort, or sent something else than its protocol.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise EngineError(f"engine sent a line longer than {MAX_LINE_BYTES} bytes")
        token_ids: list[int] = []
        positions: list[PositionLogprobs] = []
        finished_before = self._finish_reason is not None
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), token_ids, positions)
            elif line and line != b"\r" and line[:1] != b":":
                raise EngineError("engine sent a line that is no event")
        if not token_ids and (self._finish_reason is None or finished_before):
            return None
        return TokenChunk(tuple(token_ids), tuple(positions), self._finish_reason)

    def check_end(self) -> None:
        """Say that no byte will follow.

        Raises:
            EngineError: the answer is not complete.
        """
        if self._finish_reason is None:
            raise EngineError("engine ended its answer without a finish reason")

    def _take(self, payload: bytes, token_ids: list[int], positions: list[PositionLogprobs]) -> None:
        if self.ended:
            raise EngineError("engine sent an event after its end mark")
        if payload == b"[DONE]":
            self.ended = True
            self.check_end()
            return
        try:
            event = _decode_event(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(f"engine sent an event that cannot be read: {error}") from error
        if event.error is not None:
            raise EngineError(f"engine broke the answer off: {_error_message(event.error)}")
        for choice in event.choices:
            self._take_choice(choice, token_ids, positions)

    def _take_choice(self, choice: Choice, token_ids: list[int], positions: list[PositionLogprobs]) -> None:
        if choice.index != 0:
            raise EngineError(f"engine sent choice {choice.index} of an answer that has one")
        ids = choice.token_ids or []
        if self._finish_reason is not None:
            raise EngineError("engine sent more after its finish reason")
        token_ids += ids
        if self._top is not None:
            content = choice.logprobs.content if choice.logprobs is not None else None
            content = content or []
            if len(content) != len(ids):
                raise EngineError(f"engine sent {len(content)} logprobs for {len(ids)} ids")
            positions += [_position_logprobs(position, self._top) for position in content]
        if choice.finish_reason is not None:
            try:
                self._finish_reason = _FINISH_REASONS[choice.finish_reason]
            except KeyError:
                raise EngineError(f"engine ended the answer with {choice.finish_reason!r}") from None


class HttpEngine:
    """An engine process behind a Unix socket.

    Args:
        socket_path: where the engine listens.
        model: the name to put into requests; None leaves it to the engine, which serves one model.
        kind: what the engine's model does; decides what a health check asks of it.
    """

    def __init__(self, socket_path: Path, model: str | None = None, kind: TaskKind = TaskKind.GENERATE) -> None:
        self._socket_path = socket_path
        self._model = model
        self._kind = kind
        self._session: aiohttp.ClientSession | None = None
        self._ending = False
        # Names for the requests that no caller named.
        self._own_requests = itertools.count()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield chunks until one carries a finish reason. Closing the iterator aborts the sequence."""
        top = request.sampling.logprobs
        body = GenerateBody(
            request_id=request.request_id,
            token_ids=list(request.prompt_ids),
            sampling_params=_sampling_body(request),
            stream=True,
            model=self._model,
            # Nobody else has this one: nothing is shared.
            cache_salt=request.cache_salt or secrets.token_hex(16),
        )
        parser = StreamParser(top)
        complete = False
        async with self._post(GENERATE_PATH, body) as response:
            try:
                async for data in response.content.iter_any():
                    chunk = parser.feed(data)
                    if chunk is None:
                        continue
                    if chunk.finish_reason is not None:
                        await self._read_end_mark(response, parser)
                        complete = True
                        yield chunk
                        return
                    yield chunk
                parser.check_end()
            finally:
                if not complete:
                    # Closing the connection aborts the sequence; an engine that is slow to notice is told as well.
                    response.close()
                    await self._abort_quietly(request.request_id)

    async def score(self, token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
        """Return log-probabilities of ids 1.. under teacher forcing, with `top` alternatives each."""
        body = GenerateBody(
            request_id=f"score-{next(self._own_requests)}",
            token_ids=list(token_ids),
            sampling_params=SamplingBody(max_tokens=1, temperature=0.0, prompt_logprobs=top),
            model=self._model,
            cache_salt=secrets.token_hex(16),
        )
        answer = await self._fetch(GENERATE_PATH, body, ScoreAnswer)
        entries = answer.prompt_logprobs or []
        if len(entries) != len(token_ids):
            raise EngineError(f"engine scored {len(entries)} positions of {len(token_ids)}")
        # A thousand ids with 64 rivals each take 0.1 s.
        return await asyncio.to_thread(_scored_positions, token_ids, entries, top)

    async def embed(self, token_ids: Sequence[int]) -> list[float]:
        """Return one unit-length vector for the sequence."""
        body = EmbeddingsBody(input=list(token_ids), model=self._model)
        answer = await self._fetch(EMBEDDINGS_PATH, body, EmbeddingsAnswer)
        if len(answer.data) != 1:
            raise EngineError(f"engine sent {len(answer.data)} vectors for one sequence")
        vector = answer.data[0].embedding
        length = math.sqrt(sum(value * value for value in vector))
        # A NaN is within no tolerance.
        if not abs(length - 1.0) <= UNIT_LENGTH_TOLERANCE:
            raise EngineError(f"engine sent a vector of length {length:.3f}, not of unit length")
        return vector

    async def abort(self, request_id: str) -> None:
        """Stop a sequence; unknown ids are fine, since it may just have ended."""
        async with self._post(ABORT_PATH, AbortBody(request_ids=[SEQUENCE_NAME_PREFIX + request_id])) as response:
            await response.read()

    async def version(self) -> str:
        """Return what the engine calls its version."""
        try:
            async with self._open_session().get(VERSION_PATH) as response:
                return msgspec.json.decode(await response.read(), type=VersionAnswer).version
        except msgspec.DecodeError as error:
            raise EngineError(f"engine does not tell its version: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error

    async def check_health(self, timeout_s: float) -> None:
        """Generate one real token (or embed one); an open port proves nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._kind is TaskKind.EMBED:
                    await self.embed([_PROBE_TOKEN_ID])
                else:
                    await self._generate_probe()
        except TimeoutError as error:
            raise EngineUnreachable(f"engine at {self._socket_path} made no token within {timeout_s:g} s") from error

    def expect_end(self) -> None:
        """Say that the process is being ended on purpose: its sequences end with it, and none is aborted by itself."""
        self._ending = True

    async def aclose(self) -> None:
        """Release the connection pool; the process is the supervisor's."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _generate_probe(self) -> None:
        request = GenerateRequest(
            request_id=f"health-{next(self._own_requests)}",
            prompt_ids=[_PROBE_TOKEN_ID],
            sampling=_PROBE_SAMPLING,
            max_tokens=1,
            stop_token_ids=(),
        )
        count = 0
        async with contextlib.aclosing(self.generate(request)) as chunks:
            async for chunk in chunks:
                count += len(chunk.token_ids)
        if count != 1:
            raise EngineError(f"engine made {count} tokens where one was asked for")

    async def _read_end_mark(self, response: aiohttp.ClientResponse, parser: StreamParser) -> None:
        """Read to the end of a finished answer; without its end mark the connection is not used again."""
        try:
            async with asyncio.timeout(END_MARK_TIMEOUT_S):
                async for data in response.content.iter_any():
                    parser.feed(data)
        except (TimeoutError, aiohttp.ClientError) as error:
            logger.warning("engine left its answer open after the finish reason", error=repr(error))
        if not parser.ended:
            response.close()

    async def _abort_quietly(self, request_id: str) -> None:
        """Abort on the way out of a failure, which must not be replaced by the abort's own."""
        if self._ending:
            return
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.abort(request_id)
        except (EngineError, TimeoutError) as error:
            logger.warning("engine did not take the abort; the closed connection aborts as well", error=str(error))

    async def _fetch(self, path: str, body: msgspec.Struct, answer_type: type[_Answer]) -> _Answer:
        async with self._post(path, body) as response:
            try:
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        raise EngineError(f"engine's answer on {path} is longer than {MAX_ANSWER_BYTES} bytes")
                return await asyncio.to_thread(msgspec.json.decode, data, type=answer_type)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise EngineError(f"engine's answer on {path} cannot be read: {error}") from error

    @contextlib.asynccontextmanager
    async def _post(self, path: str, body: msgspec.Struct) -> AsyncIterator[aiohttp.ClientResponse]:
        data = _encode(body)
        # What is longer is sent piece by piece, so that one long prompt does not hold up the event loop.
        payload = data if len(data) <= MAX_WHOLE_WRITE_BYTES else io.BytesIO(data)
        try:
            async with self._open_session().post(path, data=payload, headers=_JSON) as response:
                if response.status != 200:
                    detail = await response.content.read(MAX_ERROR_BYTES)
                    raise EngineError(f"engine refused {path} with {response.status}: {_refusal(detail)}")
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # limit=0 lifts aiohttp's cap of 100 connections: how many sequences run is the agent's decision.
            connector = aiohttp.UnixConnector(path=str(self._socket_path), limit=0)
            # No time limit on silence: a long prefill is silent too, and stalls are judged above, across tasks.
            timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
            self._session = aiohttp.ClientSession("http://engine", connector=connector, timeout=timeout)
        return self._session

    def _unreachable(self, error: Exception) -> EngineUnreachable:
        return EngineUnreachable(f"engine at {self._socket_path} does not answer: {error!r}")


def _sampling_body(request: GenerateRequest) -> SamplingBody:
    sampling = request.sampling
    top = sampling.logprobs
    return SamplingBody(
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=list(request.stop_token_ids),
        # One more than asked, see MAX_LOGPROBS.
        logprobs=top + 1 if top else top,
    )


def _position_logprobs(position: Position, top: int) -> PositionLogprobs:
    chosen = TokenLogprob(position.token_id, position.logprob, position.rank or 0)
    candidates = [TokenLogprob(rival.token_id, rival.logprob, rival.rank or 0) for rival in position.top_logprobs]
    return PositionLogprobs(chosen, _best(candidates, top))


def _scored_positions(
    token_ids: Sequence[int], entries: Sequence[dict[int, Candidate] | None], top: int
) -> list[PositionLogprobs]:
    positions = []
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        if entry is None or token_id not in entry:
            raise EngineError("engine left out the logprob of an id it was to score")
        candidates = [TokenLogprob(key, value.logprob, value.rank or 0) for key, value in entry.items()]
        chosen = next(candidate for candidate in candidates if candidate.token_id == token_id)
        positions.append(PositionLogprobs(chosen, _best(candidates, top)))
    return positions


def _best(candidates: Sequence[TokenLogprob], top: int) -> tuple[TokenLogprob, ...]:
    """Return the candidates of rank 1 to `top`, most likely first; a drawn id of a lower rank is not among them."""
    return tuple(sorted((item for item in candidates if 1 <= item.rank <= top), key=lambda item: item.rank))


def _refusal(detail: bytes) -> str:
    """Return the reason out of an error answer, or the answer itself."""
    try:
        body = msgspec.json.decode(detail)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return detail.decode(errors="replace")
    return _error_message(body.get("error", body) if isinstance(body, dict) else body)


def _error_message(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)
