"""An answer while it comes: a stream of events that survives the loss of its connection."""

import asyncio
import random
from collections.abc import AsyncIterator, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc.aio

from slackwater import errors
from slackwater._protos.slackwater.task.v1 import task_service_pb2
from slackwater._task_messages import attach_request, event_from_proto
from slackwater._transcript import ReattachPause, Transcript
from slackwater._transport import CUT_REASONS, Transport
from slackwater.events import Accepted, AttemptBroken, AttemptStarted, Completion, Delta, Event, Finished
from slackwater.verification import VerifiedStatement, verify_finished

# A submission's stream or an attachment's; both carry task events.
_Response = task_service_pb2.SubmitTaskResponse | task_service_pb2.AttachTaskResponse
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any]"


class Answer(AsyncIterator[Event]):
    """A task and what becomes of it. Made by `AsyncClient.chat`, `complete` and `attach`.

    Nothing is sent before the first use. Three ways to use it:

        completion = await client.chat(...)              # wait for the whole
        text = await client.chat(...).text()             # only the text
        async with client.chat(...) as answer:           # events as they come; leaving early cancels the task
            async for event in answer: ...

    When the stream breaks and the task is known, the answer attaches again
    from the first id it has not seen, for up to `reattach_window_s` without
    progress; the reader sees neither a gap nor a repetition. A task that
    failed raises its error from the iteration; what arrived before stays in
    `text_so_far` and `token_ids`. For one reader at a time.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        submission: task_service_pb2.SubmitTaskRequest | None = None,
        task_id: str | None = None,
        from_index: int = 0,
        reattach_window_s: float,
    ) -> None:
        self._transport = transport
        self._submission = submission
        self._task_id = task_id
        self._transcript = Transcript(from_index=from_index)
        self._pause = ReattachPause(reattach_window_s)
        self._call: _Call | None = None
        self._cancelled = False
        self._over = False
        self._reattachments = 0

    @property
    def task_id(self) -> str | None:
        """The task's id; None until the coordinator has accepted it."""
        return self._task_id

    @property
    def accepted(self) -> Accepted | None:
        return self._transcript.accepted

    @property
    def started(self) -> AttemptStarted | None:
        """The newest attempt."""
        return self._transcript.started

    @property
    def broken_attempts(self) -> tuple[AttemptBroken, ...]:
        """The coordinator's records of nodes that were lost on the way."""
        return tuple(self._transcript.broken)

    @property
    def finished(self) -> Finished | None:
        return self._transcript.finished

    @property
    def text_so_far(self) -> str:
        return self._transcript.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that have arrived, from `from_index` on."""
        return tuple(self._transcript.token_ids)

    @property
    def reattachments(self) -> int:
        """How often the connection to the coordinator was lost and the stream taken up again."""
        return self._reattachments

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._over:
            try:
                event = await self._next_event()
            except errors.SlackwaterError as error:
                await self._recover(error)
                continue
            if event is None:
                continue
            self._pause.progressed()
            if isinstance(event, Accepted):
                self._task_id = event.task_id
            if isinstance(event, Finished):
                self._end()
            return event
        if self._cancelled:
            raise errors.TaskCancelled(f"task {self._task_id} was cancelled", reason="TASK_CANCELLED")
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.completion().__await__()

    async def completion(self) -> Completion:
        """Read to the end and return the whole answer."""
        async for _ in self:
            continue
        return self._transcript.completion()

    async def text(self) -> str:
        """Read to the end and return the text."""
        return (await self.completion()).text

    async def texts(self) -> AsyncIterator[str]:
        """Yield pieces of text as they come."""
        async for event in self:
            if isinstance(event, Delta) and event.text:
                yield event.text

    async def cancel(self) -> None:
        """End the task, down to the engine; a later read raises `TaskCancelled`. Without effect once it is over."""
        if self._over:
            return
        self._cancelled = True
        try:
            if self._task_id is not None:
                request = task_service_pb2.CancelTaskRequest(task_id=self._task_id)
                await self._transport.call(self._transport.tasks.CancelTask, request)
        finally:
            self._end()

    async def aclose(self) -> None:
        """Stop reading and leave the task; unless somebody attaches, the coordinator ends it after its grace."""
        self._end()

    def verify(self, *, coordinator_public_keys: Iterable[bytes] | None = None) -> VerifiedStatement:
        """Check the signed statement of the attempt that finished; see `verify_finished`.

        Without keys, those count that the coordinator told with the task: they are
        as trustworthy as the connection. Give keys that you got in another way to
        hold the coordinator to them.

        Raises:
            VerificationError: a step failed, or the answer has not finished.
        """
        if self.finished is None or self.accepted is None or self.started is None:
            raise errors.VerificationError(0, "the answer has not finished, so there is no statement to check")
        return verify_finished(
            self.finished,
            accepted=self.accepted,
            started=self.started,
            token_ids=self.token_ids,
            first_token_index=self._transcript.from_index,
            stop_strings=self._submission is None or len(self._submission.stop) > 0,
            coordinator_public_keys=(
                self.accepted.coordinator_public_keys if coordinator_public_keys is None else coordinator_public_keys
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cancel()

    async def _next_event(self) -> Event | None:
        """Read one event; None where it brought nothing new."""
        if self._call is None:
            self._call = self._open()
        call = self._call
        try:
            response: _Response | None = await self._transport.read(call)
        except asyncio.CancelledError:
            # gRPC cancels the whole call with its reader, so that a later read needs a new one. It raises
            # the same when `cancel` or `aclose` closed the call under a reader, who was not cancelled himself.
            self._call = None
            task = asyncio.current_task()
            if self._over and task is not None and not task.cancelling():
                return None
            raise
        if response is None:
            # An orderly end without a result is a break like any other: a proxy that was stopped does this.
            raise errors.CoordinatorUnavailable(
                f"{self._transport.address}: the stream ended before the answer did", reason="GRPC_UNAVAILABLE"
            )
        event = event_from_proto(response.event)
        if isinstance(event, errors.SlackwaterError):
            # Told by the task itself: it is over, whatever the kind, and attaching would only hear it again.
            self._end()
            raise event
        return self._transcript.accept(event)

    def _open(self) -> _Call:
        if self._task_id is None and self._submission is not None:
            return self._transport.stream(self._transport.tasks.SubmitTask, self._submission)
        self._transcript.reattached()
        request = attach_request(self._task_id or "", self._transcript.next_index)
        return self._transport.stream(self._transport.tasks.AttachTask, request)

    async def _recover(self, error: errors.SlackwaterError) -> None:
        """Wait before the next attachment, or give up by raising.

        A submission that was never acknowledged is not repeated: the task may
        already run, and a second one would be paid for too.
        """
        self._close_call()
        if isinstance(error, errors.TaskNotFound) and self._transcript.accepted is not None:
            self._end()
            raise errors.CoordinatorRestarted(
                f"the coordinator no longer knows task {self._task_id}: it restarted, or nobody was attached for "
                f"too long; {self._transcript.next_index} ids had arrived; submit again",
                reason="COORDINATOR_RESTARTED",
            ) from error
        pause_s = None
        if not self._over and self._task_id is not None and _may_still_run(error):
            now = asyncio.get_running_loop().time()
            pause_s = self._pause.next_pause_s(now, random.random(), error.retry_after_s)
        if pause_s is None:
            self._end()
            raise error
        await asyncio.sleep(pause_s)
        self._reattachments += 1

    def _end(self) -> None:
        self._over = True
        self._close_call()

    def _close_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


def _may_still_run(error: errors.SlackwaterError) -> bool:
    """Whether a stream's end says nothing of its task, so that attaching makes sense."""
    return error.reason in CUT_REASONS or isinstance(error, errors.CoordinatorStopping | errors.RateLimited)
