"""From the bytes of a request to what its endpoint makes of it, in bounded time and memory."""

import asyncio
import json
from collections.abc import Callable
from typing import Never, TypeVar

from aiohttp import hdrs, web

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway.limits import GatewayLimits

CheckedT = TypeVar("CheckedT")
# Checks a parsed body; one per endpoint, in schema.py.
Check = Callable[[object], CheckedT]


class BodyReader:
    """Reads bodies of requests that are already admitted."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._large_slots = asyncio.Semaphore(limits.large_bodies)

    async def read(self, request: web.Request, check: Check[CheckedT]) -> CheckedT:
        """Return the checked request.

        Raises:
            SlackwaterError: PAYLOAD_TOO_LARGE, INVALID_ARGUMENT or UNSUPPORTED.
            web.HTTPException: a wrong content type, or a body that does not arrive in time.
        """
        _check_content_type(request)
        length = request.content_length
        if length is not None and length > self._limits.body_bytes:
            raise self._too_large()
        if length is not None and length <= self._limits.inline_parse_bytes:
            return parse(await self._receive(request), check)
        return await self._read_large(request, check)

    async def _read_large(self, request: web.Request, check: Check[CheckedT]) -> CheckedT:
        """Read a body that is large, or may be, while few others of that kind are in memory."""
        await self._large_slots.acquire()
        try:
            body = await self._receive(request)
        except BaseException:
            self._large_slots.release()
            raise
        parsing = asyncio.get_running_loop().run_in_executor(None, parse, body, check)
        # A client that leaves ends the wait but not the thread, so the slot goes back with the thread.
        parsing.add_done_callback(self._release)
        return await asyncio.shield(parsing)

    def _release(self, parsing: "asyncio.Future[CheckedT]") -> None:
        self._large_slots.release()
        if not parsing.cancelled():
            # Marks the failure as seen: whoever waited has it, or is gone.
            parsing.exception()

    async def _receive(self, request: web.Request) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    if size > self._limits.body_bytes:
                        raise self._too_large()
                    chunks.append(chunk)
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                reason=f"the body did not arrive within {self._limits.body_timeout_s:g} s"
            ) from None
        except web.RequestPayloadError as error:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT, "the request body does not keep to its Transfer-Encoding"
            ) from error
        return b"".join(chunks)

    def _too_large(self) -> SlackwaterError:
        return SlackwaterError(
            Reason.PAYLOAD_TOO_LARGE, f"the request body exceeds {self._limits.body_bytes} bytes; send less text"
        )


def parse(body: bytes, check: Check[CheckedT]) -> CheckedT:
    """Return the checked request of a body.

    Raises:
        SlackwaterError: INVALID_ARGUMENT, with the position where the body is no JSON.
    """
    try:
        # Decoded here because json.loads would let halves of surrogate pairs pass.
        document = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except ValueError:
        # Python refuses to read integers of more than 4300 digits.
        raise _not_json("it contains a number that is too long") from None
    return check(document)


def _refuse_constant(name: str) -> Never:
    raise _not_json(f"{name} is not a JSON number")


def _not_json(detail: str) -> SlackwaterError:
    return SlackwaterError(Reason.INVALID_ARGUMENT, f"the request body is not valid JSON: {detail}")


def _check_content_type(request: web.Request) -> None:
    # app.py turns decompression off, so that a small body cannot become a large one in here.
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(reason="send the body without Content-Encoding")
    if hdrs.CONTENT_TYPE not in request.headers:
        return
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise web.HTTPUnsupportedMediaType(reason="send JSON with 'Content-Type: application/json'")
