"""One stream of server-sent events: opens late, beats while silent, cuts off who does not read."""

import asyncio
from types import TracebackType
from typing import Self

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from coordinator.gateway.limits import GatewayLimits

_log = structlog.get_logger()

DONE = b"data: [DONE]\n\n"
# A line that begins with a colon is a comment, which every client skips.
_HEARTBEAT = b": waiting\n\n"


class ClientTooSlowError(ConnectionError):
    """The client left what was sent to it unread for too long; its connection is gone."""


class EventStream:
    """The response of one streamed answer.

    Headers go out with the first event, so that what fails before it can still
    get a status of its own; a client that waits longer than `heartbeat_s` for
    the first event gets them with a comment.

    Events are written to the transport directly, one write each: aiohttp's own
    writer costs two coroutines per event more, and waits for a slow client
    without a deadline.
    """

    def __init__(self, request: web.Request, headers: dict[str, str], limits: GatewayLimits) -> None:
        self._request = request
        # Kept at hand for the write of every frame.
        self._protocol = request.protocol
        self._limits = limits
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Otherwise nginx collects the events and sends them all at the end.
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._chunked = request.version >= HttpVersion11
        self._opening = asyncio.Lock()
        self._writer: AbstractStreamWriter | None = None
        self._events_sent = 0
        self._heartbeats: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._heartbeats = asyncio.create_task(self._beat(), name="sse-heartbeats")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_heartbeats()

    @property
    def opened(self) -> bool:
        """Whether the status is spoken for, so that a failure has to be an event."""
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, events: bytes) -> None:
        """Send whole events; waits while more than the write buffer is unread.

        Raises:
            ConnectionError: the client is gone, or too slow.
        """
        if self._writer is None:
            await self._open()
        self._write(events)
        self._events_sent += 1
        if self._protocol.writing_paused:
            await self._wait_for_client()

    async def finish(self, events: bytes) -> None:
        """Send the last events and end the response."""
        if self._writer is None:
            await self._open()
        # A comment after the last chunk would belong to the connection's next response.
        self._stop_heartbeats()
        try:
            async with asyncio.timeout(self._limits.slow_client_s):
                await self._response.write_eof(events)
        except TimeoutError:
            raise self._cut_off() from None

    def _stop_heartbeats(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None

    async def _open(self) -> None:
        async with self._opening:
            if self._writer is not None:
                return
            transport = self._request.transport
            if transport is None:
                raise ConnectionResetError("the client is gone")
            transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
            self._writer = await self._response.prepare(self._request)

    def _write(self, data: bytes) -> None:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def _wait_for_client(self) -> None:
        assert self._writer is not None
        try:
            async with asyncio.timeout(self._limits.slow_client_s):
                await self._writer.drain()
        except TimeoutError:
            raise self._cut_off() from None

    def _cut_off(self) -> ClientTooSlowError:
        _log.warning("client_too_slow", path=self._request.path, unread_for_s=self._limits.slow_client_s)
        if self._request.transport is not None:
            self._request.transport.abort()
        return ClientTooSlowError(f"the client left its stream unread for {self._limits.slow_client_s:g} s")

    async def _beat(self) -> None:
        """Send a comment whenever nothing else was sent for `heartbeat_s`."""
        while True:
            sent_before = self._events_sent
            await asyncio.sleep(self._limits.heartbeat_s)
            if self._events_sent != sent_before or self._protocol.writing_paused:
                continue
            try:
                if self._writer is None:
                    await self._open()
                self._write(_HEARTBEAT)
            except ConnectionError:
                # The handler, which owns the answer, is told by its cancellation or its next write.
                return
