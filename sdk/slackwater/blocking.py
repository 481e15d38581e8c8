"""The synchronous client: the asynchronous one, run on a thread of its own.

There is no second implementation to keep in step. Every method below is made
from the asynchronous one by `_waiting`, `_answering` or `_iterating`, which
keep its name, signature and docstring; a test compares the two classes.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from slackwater.answer import Answer
from slackwater.client import CALL_TIMEOUT_S, AsyncClient
from slackwater.events import Accepted, AttemptBroken, AttemptStarted, Completion, Delta, Event, Finished
from slackwater.verification import VerifiedStatement

P = ParamSpec("P")
Result = TypeVar("Result")


class LoopThread:
    """An event loop on a daemon thread; a waiting caller can be interrupted from the keyboard."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slackwater-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Wait for a coroutine; whatever interrupts the wait (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingAnswer(Iterator[Event]):
    """An `Answer` that is iterated without `await`; see there."""

    def __init__(self, answer: Answer, thread: LoopThread) -> None:
        self._answer = answer
        self._thread = thread

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self._thread.run(_next_or_none(self._answer))
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def completion(self) -> Completion:
        """Read to the end and return the whole answer."""
        return self._thread.run(self._answer.completion())

    def text(self) -> str:
        """Read to the end and return the text."""
        return self._thread.run(self._answer.text())

    def texts(self) -> Iterator[str]:
        """Yield pieces of text as they come."""
        for event in self:
            if isinstance(event, Delta) and event.text:
                yield event.text

    def cancel(self) -> None:
        """End the task, down to the engine. Without effect once it is over."""
        self._thread.run(self._answer.cancel())

    def close(self) -> None:
        """Stop reading and leave the task; unless somebody attaches, the coordinator ends it after its grace."""
        self._thread.run(self._answer.aclose())

    def verify(self, *, coordinator_public_keys: Iterable[bytes] | None = None) -> VerifiedStatement:
        """Check the signed statement of the attempt that finished; see `verify_finished`."""
        return self._answer.verify(coordinator_public_keys=coordinator_public_keys)

    @property
    def task_id(self) -> str | None:
        return self._answer.task_id

    @property
    def accepted(self) -> Accepted | None:
        return self._answer.accepted

    @property
    def started(self) -> AttemptStarted | None:
        return self._answer.started

    @property
    def broken_attempts(self) -> tuple[AttemptBroken, ...]:
        return self._answer.broken_attempts

    @property
    def finished(self) -> Finished | None:
        return self._answer.finished

    @property
    def text_so_far(self) -> str:
        return self._answer.text_so_far

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._answer.token_ids

    @property
    def reattachments(self) -> int:
        return self._answer.reattachments


def _waiting(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Result]],
) -> "Callable[Concatenate[Client, P], Result]":
    @functools.wraps(method)
    def wait(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._thread.run(method(self._client, *args, **kwargs))

    return wait


def _answering(
    method: Callable[Concatenate[AsyncClient, P], Answer],
) -> "Callable[Concatenate[Client, P], BlockingAnswer]":
    @functools.wraps(method)
    def answer(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> BlockingAnswer:
        return BlockingAnswer(method(self._client, *args, **kwargs), self._thread)

    return answer


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[Result]],
) -> "Callable[Concatenate[Client, P], Iterator[Result]]":
    @functools.wraps(method)
    def iterate(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Result]:
        iterator = method(self._client, *args, **kwargs)
        while (item := self._thread.run(_next_or_none(iterator))) is not None:
            yield item

    return iterate


async def _next_or_none(iterator: AsyncIterator[Result]) -> Result | None:
    return await anext(iterator, None)


class Client:
    """`AsyncClient` for programs without an event loop; same methods, and the same arguments.

    Not for use across `os.fork`: gRPC's threads do not survive it.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        ca_file: str | Path | bytes | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._client = AsyncClient(address, api_key=api_key, ca_file=ca_file, timeout_s=timeout_s)
        self._thread = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._thread.run(self._client.close())
        self._thread.stop()

    chat = _answering(AsyncClient.chat)
    complete = _answering(AsyncClient.complete)
    quote = _waiting(AsyncClient.quote)
    attach = _answering(AsyncClient.attach)
    cancel = _waiting(AsyncClient.cancel)
    get_task = _waiting(AsyncClient.get_task)
    receipts = _waiting(AsyncClient.receipts)
    checkpoint = _waiting(AsyncClient.checkpoint)
    checkpoint_note = _waiting(AsyncClient.checkpoint_note)
    models = _waiting(AsyncClient.models)
    nodes = _waiting(AsyncClient.nodes)
    watch_nodes = _iterating(AsyncClient.watch_nodes)
    create_owner = _waiting(AsyncClient.create_owner)
    owners = _waiting(AsyncClient.owners)
    create_join_string = _waiting(AsyncClient.create_join_string)
    drain = _waiting(AsyncClient.drain)
    resume = _waiting(AsyncClient.resume)
    ban = _waiting(AsyncClient.ban)
    release = _waiting(AsyncClient.release)
    set_verification_mode = _waiting(AsyncClient.set_verification_mode)
    create_api_key = _waiting(AsyncClient.create_api_key)
    api_keys = _waiting(AsyncClient.api_keys)
    grant_credit = _waiting(AsyncClient.grant_credit)
    ledger_accounts = _waiting(AsyncClient.ledger_accounts)
    ledger_entries = _waiting(AsyncClient.ledger_entries)
    revoke_api_key = _waiting(AsyncClient.revoke_api_key)
    register_model = _waiting(AsyncClient.register_model)
