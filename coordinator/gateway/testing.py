"""The real gateway on a loopback port, over a fake `Tasks`. For tests only."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from coordinator.gateway.app import make_app, make_runner
from coordinator.gateway.limits import DEFAULT_LIMITS, GatewayLimits
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.tasks_port import Tasks
from coordinator.testing import FAKE_API_KEY, authenticate_fake_key

FAKE_NOW_S = 1_700_000_000.0
# A test that waits longer for anything has failed.
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    def json(self) -> dict[str, object]:
        document = json.loads(self.body)
        assert isinstance(document, dict)
        return document

    def events(self) -> list[dict[str, object]]:
        """Return the stream's events, without [DONE], which must come last and once."""
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        assert lines.pop() == "data: [DONE]", "the stream did not end with [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


class RunningGateway:
    """A gateway that listens, and the few ways in which tests speak to it."""

    def __init__(self, runner: web.AppRunner, metrics: GatewayMetrics, session: aiohttp.ClientSession) -> None:
        self.runner = runner
        self.metrics = metrics
        self.port: int = runner.addresses[0][1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._session = session

    async def post(self, path: str, document: object, headers: dict[str, str] | None = None) -> Reply:
        return await self.send("POST", path, json.dumps(document).encode(), headers)

    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request with the fake key; an empty header value leaves that header out."""
        merged = {"Authorization": f"Bearer {FAKE_API_KEY}", "Content-Type": "application/json", **(headers or {})}
        kept = {name: value for name, value in merged.items() if value}
        left_out = [name for name, value in merged.items() if not value]
        async with (
            asyncio.timeout(_PATIENCE_S),
            self._session.request(
                method,
                self.base_url + path,
                data=None if body is None else io.BytesIO(body),
                headers=kept,
                skip_auto_headers=left_out,
            ) as response,
        ):
            lowered = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, lowered, await response.read())

    @asynccontextmanager
    async def connection(
        self, path: str, document: object, limit: int = 64 * 1024
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection of its own and send one request on it; leaving the block drops it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        with closing(writer):
            writer.write(raw_request(path, json.dumps(document).encode()))
            async with asyncio.timeout(_PATIENCE_S):
                yield reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the event loop turn until the condition holds."""
        async with asyncio.timeout(_PATIENCE_S):
            # What is waited for, metrics above all, announces nothing.
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0)

    def sample(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0 for one that was never touched."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def raw_request(path: str, body: bytes, length: int | None = None) -> bytes:
    """Return the bytes of a POST with the fake key, of which `length` may promise more than `body` keeps."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {FAKE_API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def serve_gateway(tasks: Tasks, limits: GatewayLimits = DEFAULT_LIMITS) -> AsyncIterator[RunningGateway]:
    """Serve the gateway as production does, on a free port, with a clock that stands still."""
    metrics = GatewayMetrics(CollectorRegistry())
    runner = make_runner(make_app(tasks, authenticate_fake_key, metrics, lambda: FAKE_NOW_S, limits))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            yield RunningGateway(runner, metrics, session)
    finally:
        await runner.cleanup()
