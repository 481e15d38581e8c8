"""What every RPC passes before its handler, and how every failure leaves.

A gate is gRPC's interceptor of one port with one visible list of checks
(server.py): identity, access, rate. Request bytes are parsed behind the checks'
error mapping, so that garbage is a refusal with a reason and not a stack trace.
Handlers are coroutines (one answer) or async generators (a stream of answers);
a generator is closed as soon as its call ends, however it ends.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from coordinator.access import ACCESS, CallerKind, Port, Row
from coordinator.api.identity import CALLER, CallerIdentity, Context
from coordinator.api.rate_limit import RateLimits
from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError, store_unavailable
from coordinator.store.port import StoreError

ERROR_METADATA = "slackwater-error-bin"

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Call:
    """One RPC on its way through the checks. `caller` is set by the first."""

    method: str
    port: Port
    context: Context
    caller: CallerIdentity | None = None


# Only the stub is generic.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]
Check = Callable[[Call], Awaitable[None]]
Identify = Callable[[Context], Awaitable[CallerIdentity]]


def check_identity(identify: Identify) -> Check:
    """Return the check that finds out who calls and tells the handler."""

    async def check(call: Call) -> None:
        call.caller = await identify(call.context)
        CALLER.set(call.caller)

    return check


async def check_access(call: Call) -> None:
    """Refuse a method without a row, on the wrong port, or for another kind of caller."""
    row = ACCESS.get(call.method)
    if row is None or row.port is not call.port:
        raise SlackwaterError(Reason.PERMISSION_DENIED, f"nobody may call {call.method} on this port")
    kind = _identified(call).kind
    if row.caller.admits(kind):
        return
    if kind is CallerKind.BANNED_NODE:
        raise _banned(_identified(call))
    needed = row.caller.name.lower().replace("_", " ")
    if kind is CallerKind.ANYONE:
        raise SlackwaterError(
            Reason.UNAUTHENTICATED,
            f"{call.method} needs a key ({needed}): send it as metadata 'authorization: Bearer KEY'",
        )
    raise SlackwaterError(Reason.PERMISSION_DENIED, f"{call.method} is for: {needed}; this caller is: {kind.value}")


def check_rate(limits: RateLimits, clock: Clock) -> Check:
    """Return the check that counts calls against the method's row."""

    async def check(call: Call) -> None:
        row: Row = ACCESS[call.method]
        if row.calls_per_minute is None:
            return
        wait_s = limits.take(_identified(call).name, call.method, row.calls_per_minute, clock.monotonic())
        if wait_s > 0:
            raise SlackwaterError(
                Reason.RATE_LIMITED,
                f"more than {row.calls_per_minute} calls of {call.method} in a minute; wait {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    return check


class Gate(grpc.aio.ServerInterceptor):
    """Runs the checks in order, then the handler; maps every failure to a status with details."""

    def __init__(self, port: Port, checks: Sequence[Check]) -> None:
        self._port = port
        self._checks = tuple(checks)

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            # No such method: gRPC answers UNIMPLEMENTED.
            return None
        method = handler_call_details.method
        parse = _parser(handler.request_deserializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._single(method, handler.unary_unary, parse), None, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream, parse), None, handler.response_serializer
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(method, handler.stream_stream, _unparsed), parse, handler.response_serializer
            )
        raise TypeError(f"{method} takes a stream and gives one answer; no service of ours does")

    def _single(self, method: str, handler: Any, parse: Callable[[bytes], object]) -> Any:
        async def behaviour(request: bytes, context: Context) -> object:
            try:
                await self._check(method, context)
                return await handler(parse(request), context)
            except Exception as error:
                await _abort(context, method, error)

        return behaviour

    def _stream(self, method: str, handler: Any, parse: Callable[[Any], object]) -> Any:
        async def behaviour(request: object, context: Context) -> None:
            try:
                await self._check(method, context)
                # An abandoned generator would hold its task until the garbage collector comes by.
                async with aclosing(handler(parse(request), context)) as answers:
                    async for answer in answers:
                        await context.write(answer)
            except Exception as error:
                await _abort(context, method, error)

        return behaviour

    async def _check(self, method: str, context: Context) -> None:
        call = Call(method, self._port, context)
        for check in self._checks:
            await check(call)


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    """End the call with the status of a failure; only what nobody expected is logged here."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    refusal = _find_refusal(error)
    if isinstance(error, StoreError):
        _log.error("store unavailable", method=method, reason=str(error))
        refusal = store_unavailable()
    elif refusal is None:
        error_id = secrets.token_hex(4)
        _log.error("call failed", method=method, error_id=error_id, exc_info=error)
        refusal = SlackwaterError(Reason.INTERNAL, f"internal error {error_id}; give this id to the operator")
    await context.abort(
        refusal.presentation.grpc_status,
        refusal.message,
        ((ERROR_METADATA, refusal.to_proto().SerializeToString()),),
    )
    raise AssertionError("abort raises")


def _find_refusal(error: BaseException) -> SlackwaterError | None:
    """Return the refusal in a failure; a handler's task group wraps it in a group."""
    if isinstance(error, SlackwaterError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [_find_refusal(inner) for inner in error.exceptions]
        # One failure that nobody expected must not hide behind a refusal beside it.
        return found[0] if all(found) else None
    return None


def _parser(deserialize: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def parse(raw: bytes) -> object:
        try:
            return deserialize(raw)
        except DecodeError as error:
            raise SlackwaterError(
                Reason.PROTOCOL_VIOLATION, "the message is not the protobuf message that this method takes"
            ) from error

    return parse


def _unparsed(request: object) -> object:
    return request


def _banned(caller: CallerIdentity) -> SlackwaterError:
    assert caller.node is not None, "its row says that it is banned"
    _log.warning("banned node refused", node_id=caller.node_id, address=caller.address)
    return SlackwaterError(Reason.NODE_BANNED, f"this node is banned: {caller.node.ban_reason}; write to the operator")


def _identified(call: Call) -> CallerIdentity:
    if call.caller is None:
        raise LookupError("check_identity must come first in the list of checks")
    return call.caller
