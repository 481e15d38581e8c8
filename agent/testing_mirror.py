"""A mirror of models as the world has them: it serves files over HTTP, and misbehaves in every way on request."""

import asyncio
import hashlib
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from inference.manifest import MANIFEST_FILE, Manifest, build_manifest, load_manifest, sign_manifest

RELEASE_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
RELEASE_PUBLIC = RELEASE_KEY.public_key().public_bytes_raw()

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
# Of a body that is sent without haste.
_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class MadeModel:
    manifest: Manifest
    envelope: bytes
    directory: Path


def make_model(
    directory: Path, weights: Sequence[int], *, name: str = "tiny", seed: int = 0, origin: str = ""
) -> MadeModel:
    """Write and sign a model with weight files of these sizes, of bytes that the seed decides."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["FakeForCausalLM"], "max_position_embeddings": 64, "vocab_size": 9, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    for index, size_bytes in enumerate(weights):
        (directory / f"model-{index:05}.safetensors").write_bytes(
            hashlib.shake_128(f"{seed}/{index}".encode()).digest(size_bytes)
        )
    proto = build_manifest(
        directory, name=name, revision=str(seed), licence="Apache-2.0", dtype="float32", origin=origin
    )
    envelope = sign_manifest(proto, RELEASE_KEY)
    (directory / MANIFEST_FILE).write_bytes(envelope)
    return MadeModel(load_manifest(envelope, [RELEASE_PUBLIC]), envelope, directory)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. Without a range `first` and `last` are None."""

    path: str
    first: int | None
    last: int | None
    headers: dict[str, str]


@dataclass(slots=True)
class Behaviour:
    """How one request is answered; the default is: well."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ignore_range: bool = False
    # Body: bytes in all before the connection breaks off, or before silence.
    truncate_after: int | None = None
    stall_after: int | None = None
    # One bit of the body is wrong.
    flip_at: int | None = None
    # The answer claims to have so many bytes.
    content_length: int | None = None
    content_range: str | None = None
    body: bytes | None = None
    piece_bytes: int = _PIECE_BYTES
    # Instead of HTTP.
    raw: bytes | None = None


class Mirror:
    """Serves the folders under a root. `behave` decides about each request; `script` comes first."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = ""
        self.asked: list[Asked] = []
        self.sent_bytes = 0
        self.script: deque[Behaviour] = deque()
        self.behave: Callable[[Asked], Behaviour] = lambda _: Behaviour()
        # Of each connection; None is as fast as it goes.
        self.bytes_per_s: float | None = None
        # Awaited before each piece, with its place in the file: lets a test hold what it likes.
        self.gate: Callable[[int], Awaitable[None]] | None = None

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["Mirror"]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = _read(request)
        self.asked.append(asked)
        behaviour = self.script.popleft() if self.script else self.behave(asked)
        if behaviour.raw is not None:
            assert request.transport is not None, "a request that was just read has one"
            request.transport.write(behaviour.raw)
            request.transport.close()
            return web.Response()
        if behaviour.status is not None:
            return web.Response(status=behaviour.status, headers=behaviour.headers, body=behaviour.body)
        path = self._root / asked.path
        if not await asyncio.to_thread(path.is_file):
            return web.Response(status=404)
        try:
            return await self._send(request, behaviour, asked, path)
        except ConnectionError:
            # Whoever asked is gone, or was cut off on purpose.
            return web.Response(status=500)

    async def _send(self, request: web.Request, behaviour: Behaviour, asked: Asked, path: Path) -> web.StreamResponse:
        size_bytes = await asyncio.to_thread(lambda: path.stat().st_size)
        first, last = 0, size_bytes - 1
        response = web.StreamResponse(status=200, headers=behaviour.headers)
        if asked.first is not None and asked.last is not None and not behaviour.ignore_range:
            first, last = asked.first, min(asked.last, last)
            if first >= size_bytes:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{size_bytes}"})
            response.set_status(206)
            response.headers["Content-Range"] = behaviour.content_range or f"bytes {first}-{last}/{size_bytes}"
        response.content_length = behaviour.content_length or last - first + 1
        await response.prepare(request)
        position = first
        with path.open("rb") as stream:
            stream.seek(first)
            while position <= last:
                piece = stream.read(min(behaviour.piece_bytes, last - position + 1))
                if self.gate is not None:
                    await self.gate(position)
                await self._send_piece(response, request, behaviour, piece, position - first)
                position += len(piece)
        await response.write_eof()
        return response

    async def _send_piece(
        self, response: web.StreamResponse, request: web.Request, behaviour: Behaviour, piece: bytes, done: int
    ) -> None:
        if behaviour.flip_at is not None and done <= behaviour.flip_at < done + len(piece):
            damaged = bytearray(piece)
            damaged[behaviour.flip_at - done] ^= 1
            piece = bytes(damaged)
        for limit, then in ((behaviour.truncate_after, "close"), (behaviour.stall_after, "stall")):
            if limit is not None and done + len(piece) > limit:
                await response.write(piece[: limit - done])
                if then == "stall":
                    await asyncio.Event().wait()
                assert request.transport is not None, "it is open: it was just written to"
                request.transport.close()
                raise ConnectionResetError("cut off on purpose")
        await response.write(piece)
        self.sent_bytes += len(piece)
        if self.bytes_per_s is not None:
            await asyncio.sleep(len(piece) / self.bytes_per_s)


def _read(request: web.Request) -> Asked:
    match = _RANGE.fullmatch(request.headers.get("Range", ""))
    first, last = (int(match[1]), int(match[2])) if match else (None, None)
    return Asked(request.match_info["path"], first, last, dict(request.headers))
