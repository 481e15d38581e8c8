"""The HTTP side that our own engines (torch, fake) share: vLLM's routes over a Unix socket.

Checks every request before a backend sees it, writes the answer streams, and
maps names to running sequences for aborts. What computes lies behind `Backend`.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import structlog
from aiohttp import web

from inference.engine_protocol import (
    ABORT_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    HEALTH_PATH,
    SEQUENCE_NAME_PREFIX,
    VERSION_PATH,
    AbortBody,
    Candidate,
    EmbeddingItem,
    EmbeddingsAnswer,
    EmbeddingsBody,
    GenerateBody,
    Position,
    Positions,
    VersionAnswer,
)
from inference.task import TaskKind

logger = structlog.get_logger()

# Largest request: 1 M ids at up to 8 characters each, which no model here takes.
MAX_BODY_BYTES = 8 * 1024 * 1024

# A reader this far behind (about 500 tokens) gets nothing more until it has caught up.
MAX_UNREAD_BYTES = 64 * 1024

# Seconds that running answers get to end when the server is told to stop.
SHUTDOWN_GRACE_S = 1.0

END_MARK = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode

Job = TypeVar("Job")
Body = TypeVar("Body")
Handler = Any


class Refusal(Exception):
    """The request cannot be served; the text says which field is at fault."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class Overloaded(Refusal):
    """As many sequences wait as may wait."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} sequences are waiting already; send it to another engine", status=503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request is checked against."""

    kind: TaskKind
    context_tokens: int
    vocabulary_size: int


class TokenStream:
    """The answer stream of one sequence."""

    def __init__(self, response: web.StreamResponse, request: web.Request, request_id: str) -> None:
        self._response = response
        self._request = request
        self._head = b'data: {"request_id":%b,"choices":[{"index":0,"token_ids":[' % _encode(request_id)

    def event(
        self, token_ids: Sequence[int], positions: list[Position] | None = None, finish_reason: str | None = None
    ) -> bytes:
        """Return one event; the last one brings the end mark along."""
        ids = b"%d" % token_ids[0] if len(token_ids) == 1 else b",".join(b"%d" % item for item in token_ids)
        logprobs = b"null" if positions is None else _encode(Positions(positions))
        if finish_reason is None:
            return b'%b%b],"logprobs":%b,"finish_reason":null}]}\n\n' % (self._head, ids, logprobs)
        last = (self._head, ids, logprobs, finish_reason.encode(), END_MARK)
        return b'%b%b],"logprobs":%b,"finish_reason":"%b"}]}\n\n%b' % last

    def error_event(self, message: str) -> bytes:
        """Return the event that breaks an answer off."""
        return b"data: %b\n\n%b" % (_encode(_error(message, 500)), END_MARK)

    @property
    def congested(self) -> bool:
        """Whether the reader is so far behind that a write would wait for it."""
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() > MAX_UNREAD_BYTES

    async def write(self, data: bytes) -> None:
        """Send events. Raises ConnectionError where the reader has gone."""
        await self._response.write(data)

    def cut(self) -> None:
        """Break the connection without an end."""
        if self._request.transport is not None:
            self._request.transport.abort()


class Backend(Protocol[Job]):
    """What computes. A job is one sequence, from `submit` to `drop`."""

    @property
    def limits(self) -> Limits: ...

    @property
    def version(self) -> str: ...

    @property
    def failure(self) -> str | None:
        """Why nothing can be computed any more; None while all is well."""
        ...

    def submit(self, body: GenerateBody) -> Job:
        """Take a checked request. Raises `Refusal`."""
        ...

    async def run(self, job: Job, stream: TokenStream) -> None:
        """Write the whole answer, its end included."""
        ...

    def abort(self, job: Job) -> None:
        """End the answer early, with the finish reason "abort"."""
        ...

    def drop(self, job: Job) -> None:
        """Forget a job, ended or not; nobody reads it any more."""
        ...

    async def score(self, token_ids: Sequence[int], top: int) -> list[list[Candidate]]:
        """Return for ids 1.. the id itself, then its `top` best rivals."""
        ...

    async def embed(self, token_ids: Sequence[int]) -> list[float]: ...


class EngineServer(Generic[Job]):
    """Serves one backend."""

    def __init__(self, backend: Backend[Job]) -> None:
        self._backend = backend
        self._jobs: dict[str, Job] = {}

    def application(self) -> web.Application:
        """Return the routes; more may be added before it starts."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer_refusals])
        app.router.add_post(GENERATE_PATH, self._generate)
        app.router.add_post(ABORT_PATH, self._abort)
        app.router.add_post(EMBEDDINGS_PATH, self._embed)
        app.router.add_get(HEALTH_PATH, self._health)
        app.router.add_get(VERSION_PATH, self._version)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, GenerateBody)
        self._check(body)
        if body.sampling_params.prompt_logprobs is not None:
            return await self._score(body, body.sampling_params.prompt_logprobs)
        name = SEQUENCE_NAME_PREFIX + body.request_id
        if name in self._jobs:
            raise Refusal(f"request_id: {body.request_id!r} is running already")
        job = self._backend.submit(body)
        self._jobs[name] = job
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await self._backend.run(job, TokenStream(response, request, body.request_id))
            return response
        finally:
            del self._jobs[name]
            self._backend.drop(job)

    def _check(self, body: GenerateBody) -> None:
        limits, sampling = self._backend.limits, body.sampling_params
        if limits.kind is TaskKind.EMBED:
            raise Refusal("this engine's model embeds; it does not generate or score")
        if (sampling.prompt_logprobs is None) != body.stream:
            raise Refusal("stream: must be true to generate, false to score (prompt_logprobs)")
        if not sampling.ignore_eos or sampling.detokenize:
            raise Refusal("sampling_params: this engine needs ignore_eos true and detokenize false")
        self._check_ids("token_ids", body.token_ids)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        wanted = len(body.token_ids) + (sampling.max_tokens if body.stream else 0)
        if wanted > limits.context_tokens:
            raise Refusal(f"token_ids: prompt and max_tokens need {wanted} tokens, context is {limits.context_tokens}")

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        size = self._backend.limits.vocabulary_size
        if token_ids and max(token_ids) >= size:
            raise Refusal(f"{name}: id {max(token_ids)} is outside the vocabulary of {size}")

    async def _score(self, body: GenerateBody, top: int) -> web.Response:
        entries: list[dict[str, Candidate] | None] = [None]
        for candidates in await self._backend.score(body.token_ids, top):
            entries.append({str(candidate.token_id): candidate for candidate in candidates})
        answer = {"request_id": body.request_id, "choices": [], "prompt_logprobs": entries}
        return _json(await asyncio.to_thread(_encode, answer))

    async def _abort(self, request: web.Request) -> web.Response:
        body = await read_body(request, AbortBody)
        for name in body.request_ids:
            if name in self._jobs:
                self._backend.abort(self._jobs[name])
        return web.Response()

    async def _embed(self, request: web.Request) -> web.Response:
        body = await read_body(request, EmbeddingsBody)
        if body.encoding_format != "float" or not body.use_activation:
            raise Refusal("embeddings: this engine gives unit-length vectors as floats only")
        self._check_ids("input", body.input)
        if len(body.input) > self._backend.limits.context_tokens:
            raise Refusal(f"input: {len(body.input)} tokens, context is {self._backend.limits.context_tokens}")
        vector = await self._backend.embed(body.input)
        return _json(_encode(EmbeddingsAnswer([EmbeddingItem(vector)])))

    async def _health(self, request: web.Request) -> web.Response:
        if self._backend.failure is not None:
            raise Refusal(self._backend.failure, status=503)
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json(_encode(VersionAnswer(self._backend.version)))


async def read_body(request: web.Request, body_type: type[Body]) -> Body:
    """Return a checked request body. Raises `Refusal` naming the field at fault."""
    data = await request.read()
    try:
        return msgspec.json.decode(data, type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"request body: {error}") from error


async def serve(app: web.Application, socket_path: Path) -> None:
    """Serve on a Unix socket that only this user may use, until SIGTERM or SIGINT."""
    os.umask(0o077)
    # Cancelling the handler is how a reader that has gone away ends its sequence.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_GRACE_S)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket_path)).start()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        logger.info("engine listens", socket=str(socket_path))
        await stop.wait()
    finally:
        await runner.cleanup()


@web.middleware
async def _answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn refusals into vLLM's error envelope."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refusal as refusal:
        return _json(_encode(_error(str(refusal), refusal.status)), refusal.status)
    except web.HTTPException as error:
        return _json(_encode(_error(error.reason, error.status)), error.status)


def _error(message: str, status: int) -> dict[str, dict[str, str | int]]:
    return {"error": {"message": message, "type": "BadRequestError" if status < 500 else "EngineError", "code": status}}


def _json(data: bytes, status: int = 200) -> web.Response:
    return web.Response(body=data, status=status, content_type="application/json")
