"""Carries out completion requests: admission, body, submission, and the way back.

A client that leaves cancels its handler (`handler_cancellation` in app.py), at
whatever await it stands; the answer's iterator is closed on the way out, which
aborts the task down to the engine.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway.api_keys import Authenticate, bearer_secret
from coordinator.gateway.body import BodyReader
from coordinator.gateway.limits import GatewayLimits
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.quote import quote_document
from coordinator.gateway.relay import Relay
from coordinator.gateway.request_ids import TASK_ID, identifying_headers
from coordinator.gateway.schema import quote_request
from coordinator.gateway.wire import AnswerHead, Endpoint
from coordinator.tasks_port import Tasks


class Calls:
    """The completion requests of one gateway process."""

    def __init__(
        self,
        tasks: Tasks,
        authenticate: Authenticate,
        metrics: GatewayMetrics,
        now_s: Callable[[], float],
        limits: GatewayLimits,
    ) -> None:
        self._tasks = tasks
        self._authenticate = authenticate
        self._metrics = metrics
        self._now_s = now_s
        self._limits = limits
        self._bodies = BodyReader(limits)
        self._open: set[asyncio.Task[object]] = set()
        self._stopping = False

    async def serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Answer one request to a completion endpoint.

        Raises:
            SlackwaterError: the request failed before anything of an answer was sent.
            ConnectionError: the client is gone, or was cut off.
        """
        arrived_at_s = asyncio.get_running_loop().time()
        with self._admitted(endpoint.name):
            # The key first: a stranger's body is never read into memory.
            tenant_id = await self._authenticate(bearer_secret(request))
            call = await self._bodies.read(request, endpoint.check)
            # Nothing may come between the submission and the loop over the answer that closes it.
            answer = await self._tasks.submit(tenant_id, call.task)
            request[TASK_ID] = answer.accepted.task_id
            head = AnswerHead.of(endpoint.id_prefix, answer.accepted, int(self._now_s()))
            relay = Relay(request, endpoint, call, answer, head, self._metrics, self._limits, arrived_at_s)
            if call.stream:
                return await relay.stream(identifying_headers(request), self._unless_stopping)
            return await relay.whole()

    async def quote(self, request: web.Request) -> web.Response:
        """Answer one request for a quote.

        Raises:
            SlackwaterError: the quote was refused.
        """
        with self._admitted("quote"):
            tenant_id = await self._authenticate(bearer_secret(request))
            wanted = await self._bodies.read(request, quote_request)
            return web.json_response(quote_document(await self._tasks.quote(tenant_id, wanted)))

    def stop(self) -> None:
        """End every open request with an error that its client sees, and refuse new ones."""
        self._stopping = True
        for task in self._open:
            task.cancel()

    @contextmanager
    def _admitted(self, endpoint_name: str) -> Iterator[None]:
        if self._stopping:
            raise _stopping()
        if len(self._open) >= self._limits.open_requests:
            raise SlackwaterError(
                Reason.QUEUE_FULL, f"{self._limits.open_requests} requests are open here; try again", retry_after_s=1.0
            )
        task = cast("asyncio.Task[object]", asyncio.current_task())
        in_flight = self._metrics.in_flight.labels(endpoint_name)
        self._open.add(task)
        in_flight.inc()
        try:
            with self._unless_stopping():
                yield
        finally:
            in_flight.dec()
            self._open.discard(task)

    @contextmanager
    def _unless_stopping(self) -> Iterator[None]:
        """Turn the cancellation by `stop` into the error that the client is told."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._stopping or task is None:
                raise
            task.uncancel()
            raise _stopping() from None


def _stopping() -> SlackwaterError:
    return SlackwaterError(
        Reason.COORDINATOR_STOPPING, "this coordinator is stopping; send the request again", retry_after_s=2.0
    )
