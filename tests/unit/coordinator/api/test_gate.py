"""What every call passes, and how every failure leaves."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import pytest
import structlog.testing

from coordinator.access import CallerKind, Port
from coordinator.api.gate import ERROR_METADATA, Call, Check, Gate, check_access, check_identity, check_rate
from coordinator.api.identity import CallerIdentity, Context, caller, peer_address, tenant
from coordinator.api.rate_limit import RateLimits
from coordinator.api.testing import FakeClock
from coordinator.errors import Reason, SlackwaterError
from coordinator.store.port import StoreError
from inference.task import TenantId
from protos.slackwater.common.v1 import error_pb2
from protos.slackwater.fleet.v1 import fleet_service_pb2 as fleet

LIST_NODES = "/slackwater.fleet.v1.FleetService/ListNodes"
TENANT = CallerIdentity(kind=CallerKind.TENANT, address="ipv4:10.0.0.1", tenant_id=TenantId("key-1"))


@dataclass
class FakeContext:
    """Keeps what is written, and ends a call as grpc.aio does."""

    written: list[object] = field(default_factory=list)
    status: grpc.StatusCode | None = None
    detail: str = ""
    error: error_pb2.ErrorDetail = field(default_factory=error_pb2.ErrorDetail)

    async def write(self, message: object) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]) -> NoReturn:
        self.status, self.detail = code, details
        assert [key for key, _ in metadata] == [ERROR_METADATA]
        self.error = error_pb2.ErrorDetail.FromString(metadata[0][1])
        raise grpc.aio.AbortError


@dataclass
class Details:
    method: str
    invocation_metadata: tuple[()] = ()


async def behaviour(handler: object, *, method: str = LIST_NODES, checks: tuple[Check, ...] = ()) -> Any:
    """The handler as gRPC would call it behind a gate."""

    async def continuation(_: object) -> Any:
        return handler

    gate = Gate(Port.PUBLIC, checks or (identified, check_access))
    wrapped: Any = await gate.intercept_service(continuation, cast(grpc.HandlerCallDetails, Details(method)))
    return wrapped.unary_unary or wrapped.unary_stream or wrapped.stream_stream


async def identify(_: Context) -> CallerIdentity:
    return TENANT


identified = check_identity(identify)


def single(handler: Callable[[fleet.ListNodesRequest, Context], Awaitable[object]]) -> object:
    return grpc.unary_unary_rpc_method_handler(handler, fleet.ListNodesRequest.FromString)


def streaming(handler: Callable[[fleet.ListNodesRequest, Context], AsyncIterator[object]]) -> object:
    return grpc.unary_stream_rpc_method_handler(handler, fleet.ListNodesRequest.FromString)


async def call(handler: object, request: bytes = b"", **options: Any) -> FakeContext:
    context = FakeContext()
    run = await behaviour(handler, **options)
    with pytest.raises(grpc.aio.AbortError):
        await run(request, context)
    return context


async def test_a_handler_learns_who_calls() -> None:
    async def handler(request: fleet.ListNodesRequest, context: Context) -> object:
        assert tenant() == "key-1"
        return caller()

    run = await behaviour(single(handler))
    assert await run(b"", FakeContext()) is TENANT


async def test_a_refusal_leaves_with_status_and_details() -> None:
    # Mutation seen to fail: `to_proto` left out of the metadata.
    async def handler(request: fleet.ListNodesRequest, context: Context) -> object:
        raise SlackwaterError(Reason.RATE_LIMITED, "wait", param="x", retry_after_s=1.5)

    with structlog.testing.capture_logs() as logs:
        context = await call(single(handler))
    assert (context.status, context.detail) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "wait")
    assert context.error.reason == error_pb2.ERROR_REASON_RATE_LIMITED
    assert (context.error.param, context.error.retry_after_ms) == ("x", 1500)
    assert context.error.actor == error_pb2.ERROR_ACTOR_RETRY
    # Whoever refuses logs it, where it is worth a line.
    assert logs == []


async def test_a_bug_is_logged_once_and_tells_the_caller_an_id_only() -> None:
    # Mutation seen to fail: str(error) in the message.
    async def handler(request: fleet.ListNodesRequest, context: Context) -> object:
        raise ValueError("a secret path")

    with structlog.testing.capture_logs() as logs:
        context = await call(single(handler))
    assert context.status is grpc.StatusCode.INTERNAL
    assert "secret" not in context.detail
    assert [log["error_id"] for log in logs if log["error_id"] in context.detail] == [logs[0]["error_id"]]


async def test_a_lost_database_is_logged_and_the_caller_told_to_come_back() -> None:
    # Mutation seen to fail: the StoreError's own message to the caller.
    async def handler(request: fleet.ListNodesRequest, context: Context) -> object:
        raise StoreError("cannot use the database /secret/path: disk full")

    with structlog.testing.capture_logs() as logs:
        context = await call(single(handler))
    assert context.status is grpc.StatusCode.UNAVAILABLE
    assert (context.error.actor, context.error.retry_after_ms) == (error_pb2.ERROR_ACTOR_RETRY, 5000)
    assert "secret" not in context.detail
    assert ["disk full" in log["reason"] for log in logs] == [True]


async def test_a_refusal_inside_a_task_group_is_found_but_hides_no_bug() -> None:
    # Mutation seen to fail: `any` instead of `all`.
    refusal = SlackwaterError(Reason.TASK_NOT_FOUND, "gone")
    cases: list[tuple[list[Exception], grpc.StatusCode]] = [
        ([refusal], grpc.StatusCode.NOT_FOUND),
        ([ExceptionGroup("inner", [refusal])], grpc.StatusCode.NOT_FOUND),
        ([refusal, ValueError("bug")], grpc.StatusCode.INTERNAL),
    ]
    for errors, status in cases:

        async def handler(
            request: fleet.ListNodesRequest, context: Context, errors: list[Exception] = errors
        ) -> object:
            raise ExceptionGroup("unhandled errors in a TaskGroup", errors)

        context = await call(single(handler))
        assert context.status is status


async def test_garbage_never_reaches_a_handler() -> None:
    async def handler(request: fleet.ListNodesRequest, context: Context) -> object:
        raise AssertionError("reached")

    context = await call(single(handler), b"\xff")
    assert context.error.reason == error_pb2.ERROR_REASON_PROTOCOL_VIOLATION


async def test_a_stream_is_written_and_its_generator_closed_when_the_client_goes() -> None:
    # Mutation seen to fail: no `aclosing`.
    closed = []

    async def handler(request: fleet.ListNodesRequest, context: Context) -> AsyncIterator[object]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    class Gone(FakeContext):
        async def write(self, message: object) -> None:
            await super().write(message)
            raise ConnectionResetError

    run = await behaviour(streaming(handler))
    context = FakeContext()
    await run(b"", context)
    assert context.written == [1, 2]
    context = Gone()
    with pytest.raises(grpc.aio.AbortError):
        await run(b"", context)
    assert (context.written, closed) == ([1], [True, True])


async def test_a_failure_in_mid_stream_leaves_with_details() -> None:
    async def handler(request: fleet.ListNodesRequest, context: Context) -> AsyncIterator[object]:
        yield 1
        raise SlackwaterError(Reason.COORDINATOR_STOPPING, "later")

    context = await call(streaming(handler))
    assert context.written == [1]
    assert context.error.reason == error_pb2.ERROR_REASON_COORDINATOR_STOPPING


async def test_calls_are_counted_per_caller() -> None:
    # Mutation seen to fail: no limit in the row of ListNodes.
    clock = FakeClock()
    rate = check_rate(RateLimits(), clock)
    calls = Call(LIST_NODES, Port.PUBLIC, cast(Context, None), TENANT)
    for _ in range(600):
        await rate(calls)
    with pytest.raises(SlackwaterError) as refused:
        await rate(calls)
    assert refused.value.reason is Reason.RATE_LIMITED
    assert refused.value.retry_after_s == pytest.approx(0.1)
    other = CallerIdentity(kind=CallerKind.TENANT, address="ipv4:10.0.0.1", tenant_id=TenantId("key-2"))
    await rate(Call(LIST_NODES, Port.PUBLIC, cast(Context, None), other))
    clock.advance(0.11)
    await rate(calls)


async def test_checks_in_the_wrong_order_do_not_let_anybody_through() -> None:
    with pytest.raises(LookupError):
        await check_access(Call(LIST_NODES, Port.PUBLIC, cast(Context, None)))


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5341", "ipv4:127.0.0.1"),
        ("ipv6:%5B::1%5D:1234", "ipv6:[::1]"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_a_peers_port_does_not_make_it_another_caller(peer: str, address: str) -> None:
    assert peer_address(peer) == address
