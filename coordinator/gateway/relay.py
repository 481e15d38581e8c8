"""The way back of one answer: from its events to the bytes of the response."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing

import structlog
from aiohttp import web

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway.envelope import error_event
from coordinator.gateway.limits import GatewayLimits
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.schema import Call
from coordinator.gateway.server_sent_events import DONE, EventStream
from coordinator.gateway.wire import AnswerHead, Endpoint
from coordinator.tasks_port import Answer, AnswerEvent, Batches, Delta, Failed, Finished

_log = structlog.get_logger()


class Progress:
    """How far one answer has come. Pure; holds the answer to the order it promises."""

    def __init__(self) -> None:
        self.next_index = 0
        self.finished: Finished | None = None
        self.failed: SlackwaterError | None = None

    def take(self, batch: tuple[AnswerEvent, ...]) -> list[Delta]:
        """Return the deltas of a batch, and note how the answer ended if it did.

        Raises:
            SlackwaterError: INTERNAL, when token ids are missing or come twice.
        """
        deltas: list[Delta] = []
        for event in batch:
            if isinstance(event, Delta):
                if event.first_index != self.next_index:
                    raise SlackwaterError(
                        Reason.INTERNAL,
                        f"the answer went on at token {event.first_index} where {self.next_index} was due",
                    )
                self.next_index += len(event.token_ids)
                deltas.append(event)
            elif isinstance(event, Finished):
                self.finished = event
            elif isinstance(event, Failed):
                self.failed = event.error
        return deltas


class Relay:
    """Follows one answer and writes it to its client."""

    def __init__(
        self,
        request: web.Request,
        endpoint: Endpoint,
        call: Call,
        answer: Answer,
        head: AnswerHead,
        metrics: GatewayMetrics,
        limits: GatewayLimits,
        arrived_at_s: float,
    ) -> None:
        self._request = request
        self._endpoint = endpoint
        self._call = call
        self._answer = answer
        self._metrics = metrics
        self._limits = limits
        self._head = head
        self._with_logprobs = call.task.sampling.logprobs is not None
        self._clock = asyncio.get_running_loop().time
        self._arrived_at_s = arrived_at_s
        self._last_frame_at_s: float | None = None

    async def whole(self) -> web.Response:
        """Wait for the whole answer and return it as one JSON document."""
        progress = Progress()
        deltas: list[Delta] = []
        async with aclosing(self._answer.follow()) as batches:
            async for batch in batches:
                if fresh := progress.take(batch):
                    self._observe_frame()
                    deltas += fresh
        if progress.failed is not None:
            raise progress.failed
        if progress.finished is None:
            raise _ended_early()
        self._observe_end(progress.finished)
        if self._with_logprobs:
            # Twenty alternatives for each of thousands of tokens take longer than the event loop can spare.
            body = await asyncio.to_thread(self._build_whole, deltas, progress.finished)
        else:
            body = self._build_whole(deltas, progress.finished)
        return web.Response(body=body, content_type="application/json")

    async def stream(
        self, headers: dict[str, str], unless_stopping: Callable[[], AbstractContextManager[None]]
    ) -> web.StreamResponse:
        """Send the answer as it comes, and end it with [DONE] or an error event: never with neither.

        Raises:
            SlackwaterError: it failed before anything was sent.
            ConnectionError: the client is gone, or was cut off.
        """
        async with EventStream(self._request, headers, self._limits) as stream:
            try:
                with unless_stopping():
                    async with aclosing(self._answer.follow()) as batches:
                        await self._send_all(batches, stream)
            except ConnectionError:
                raise
            except Exception as error:
                if not stream.opened:
                    raise
                failure = self._failure_of(error)
                self._metrics.errors.labels(failure.presentation.code).inc()
                await stream.finish(error_event(failure))
            return stream.response

    async def _send_all(self, batches: Batches, stream: EventStream) -> None:
        """The loop that every frame of every stream goes through: one event and one write per batch."""
        progress = Progress()
        events = self._endpoint.events(self._head, self._call, self._answer.tokenizer)
        opening = events.opening
        async for batch in batches:
            piece = ""
            if deltas := progress.take(batch):
                self._observe_frame()
                if self._with_logprobs:
                    piece = "".join(map(events.with_logprobs, deltas))
                elif text := deltas[0].text if len(deltas) == 1 else "".join([delta.text for delta in deltas]):
                    piece = events.text(text)
            if progress.finished is not None:
                self._observe_end(progress.finished)
                last = opening + piece + events.closing(progress.finished)
                await stream.finish(last.encode("ascii") + DONE)
                return
            if piece:
                await stream.send((opening + piece).encode("ascii"))
                opening = ""
            if progress.failed is not None:
                raise progress.failed
        raise _ended_early()

    def _build_whole(self, deltas: Sequence[Delta], finished: Finished) -> bytes:
        document = self._endpoint.whole(self._head, self._call, self._answer.tokenizer, deltas, finished)
        return json.dumps(document).encode("ascii")

    def _observe_frame(self) -> None:
        now_s = self._clock()
        if self._last_frame_at_s is None:
            self._metrics.time_to_first_token_s.labels(self._endpoint.name).observe(now_s - self._arrived_at_s)
        else:
            self._metrics.frame_gap_s.observe(now_s - self._last_frame_at_s)
        self._last_frame_at_s = now_s

    def _observe_end(self, finished: Finished) -> None:
        self._metrics.tokens.labels("prompt").inc(finished.prompt_tokens)
        self._metrics.tokens.labels("completion").inc(finished.completion_tokens)

    def _failure_of(self, error: Exception) -> SlackwaterError:
        if isinstance(error, SlackwaterError):
            return error
        _log.error("stream_failed", task_id=self._answer.accepted.task_id, exc_info=error)
        return SlackwaterError(
            Reason.INTERNAL, f"the coordinator failed; its log says more under {self._answer.accepted.task_id}"
        )


def _ended_early() -> SlackwaterError:
    return SlackwaterError(Reason.INTERNAL, "the answer ended without a finish and without an error")
