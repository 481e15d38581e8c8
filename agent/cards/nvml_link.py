"""The agent's end of the line to the NVML child (`agent.cards.nvml_child`): starts it, asks, reads frames, ends it."""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from agent.cards.details import CardDetails, LimitOutcome, LimitRequest
from agent.cards.nvml_child import CARD, DETAILS, END, HEADER, LIMIT, NOTE, TOUCHING
from agent.cards.nvml_query import ReadingStatus
from agent.cards.use import CardReading
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_ERROR

# More than any child writes for one card; a longer frame is no frame.
FRAME_BYTES_MAX = 64 * 1024
# From SIGKILL until a child that is not stuck in the driver is gone.
_END_S = 1.0


class ChildFailed(Exception):
    """The child ended, broke the protocol or missed its deadline; `status` is what its card's readings get."""

    def __init__(self, reason: str, status: ReadingStatus = READING_STATUS_ERROR) -> None:
        super().__init__(reason)
        self.status = status


class Note(msgspec.Struct, frozen=True):
    """Why there is no answer; `lasting` where only a reboot or an installation changes that."""

    note: str
    lasting: bool


class NvmlLink:
    """A child at a time; started with the first request after it was ended.

    Args:
        argv: command line of the child; the id of this process is added to it.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        # Index of the card that the child said it would touch next; None between requests.
        self.touching: int | None = None
        self._argv = argv
        self._child: asyncio.subprocess.Process | None = None

    @property
    def up(self) -> bool:
        return self._child is not None

    async def list_cards(
        self, skipped: Sequence[int], asleep: Sequence[str], marker: str, found: list[CardReading]
    ) -> Note | None:
        """Have the child list the cards into `found`, one by one; return the note that came instead, if any.

        Raises:
            ChildFailed: the child died or talks nonsense; `touching` says of which card.
        """
        await self._send({"skipped": skipped, "asleep": asleep, "marker": marker})
        while True:
            tag, payload = await self._receive()
            with _reading():
                if tag == TOUCHING:
                    self.touching = int(payload)
                elif tag == CARD:
                    found.append(CardReading(capability_pb2.Gpu.FromString(payload), None))
                elif tag == DETAILS:
                    found[-1] = replace(found[-1], details=msgspec.json.decode(payload, type=CardDetails))
                elif tag == END:
                    return None
                elif tag == NOTE:
                    return msgspec.json.decode(payload, type=Note)
                else:
                    raise ChildFailed("the NVML child sent an unknown frame")

    async def set_power_limit(self, request: LimitRequest) -> LimitOutcome:
        """Have the child set a limit.

        Raises:
            ChildFailed: the child died or talks nonsense.
        """
        await self._send({"set_power_limit": msgspec.to_builtins(request)})
        tag, payload = await self._receive()
        with _reading():
            if tag == LIMIT:
                return msgspec.json.decode(payload, type=LimitOutcome)
            if tag == NOTE:
                return LimitOutcome(result="error", detail=msgspec.json.decode(payload, type=Note).note)
        raise ChildFailed("the NVML child sent an unknown frame")

    async def end(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            child.kill()
        # One stuck in the driver stays until the driver lets go of it; it must not hold up the agent.
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await child.wait()

    async def _send(self, request: dict[str, Any]) -> None:
        self.touching = None
        if self._child is None:
            self._child = await self._start()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            await self._child.stdin.drain()
        except ConnectionError as error:
            raise await self._ended() from error

    async def _receive(self) -> tuple[bytes, bytes]:
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            tag, size = HEADER.unpack(await self._child.stdout.readexactly(HEADER.size))
            if size > FRAME_BYTES_MAX:
                raise ChildFailed("the NVML child sent what is no frame")
            return tag, await self._child.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._ended() from error

    async def _ended(self) -> ChildFailed:
        assert self._child is not None
        return ChildFailed(f"the NVML child ended with status {await self._child.wait()}")

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._argv,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildFailed(f"cannot start the NVML child: {error}") from error


@contextmanager
def _reading() -> Iterator[None]:
    """Turn what a payload raises that is not what its tag says into ChildFailed."""
    try:
        yield
    except (DecodeError, msgspec.MsgspecError, ValueError, LookupError) as error:
        raise ChildFailed(f"the NVML child sent what cannot be read: {error!r}") from error
