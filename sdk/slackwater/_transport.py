"""The connection to a coordinator: TLS, the API key, and status codes turned into exceptions."""

from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from slackwater import errors
from slackwater._protos.slackwater.common.v1 import error_pb2
from slackwater._protos.slackwater.fleet.v1 import fleet_service_pb2_grpc
from slackwater._protos.slackwater.task.v1 import task_service_pb2_grpc
from slackwater._task_messages import error_from_proto

Request = TypeVar("Request")
Response = TypeVar("Response")

ERROR_DETAIL_KEY = "slackwater-error-bin"

# A listing of ten thousand nodes with eight cards each is about 20 MB; gRPC's own default of 4 MB would cut it off.
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A coordinator that froze, or a NAT that forgot the connection, is noticed after 40 s of silence.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC waits 1 s, growing to 120 s, before it dials again; a stream has only the detach grace to come back in.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

# What a call without an ErrorDetail means: nobody of ours answered, only gRPC, a proxy, or a dying process.
ERROR_BY_STATUS: dict[grpc.StatusCode, type[errors.SlackwaterError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.FAILED_PRECONDITION: errors.CallerError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.RateLimited,
    grpc.StatusCode.DATA_LOSS: errors.OperatorError,
    grpc.StatusCode.UNKNOWN: errors.InternalError,
    grpc.StatusCode.INTERNAL: errors.InternalError,
    grpc.StatusCode.UNAVAILABLE: errors.CoordinatorUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.CoordinatorUnavailable,
    grpc.StatusCode.CANCELLED: errors.CoordinatorUnavailable,
    grpc.StatusCode.ABORTED: errors.CoordinatorUnavailable,
}

# How a cut connection shows, depending on what was in flight: a reset stream is INTERNAL or UNKNOWN.
CUT_REASONS = ("GRPC_UNAVAILABLE", "GRPC_CANCELLED", "GRPC_ABORTED", "GRPC_INTERNAL", "GRPC_UNKNOWN")


class Transport:
    """One channel, opened at the first call so that a client can be made outside an event loop.

    Raises:
        CallerError: address, key or CA file cannot be used; `param` names it.
    """

    def __init__(self, address: str, *, api_key: str | None, ca: str | Path | bytes | None, timeout_s: float) -> None:
        if not address or "://" in address:
            raise errors.InvalidArgument(f'address is {address!r}, expected "host:port"', param="address")
        self.address = address
        self.timeout_s = timeout_s
        self._metadata = _metadata(api_key)
        self._ca_certificate = _read_ca(ca)
        self._channel: grpc.aio.Channel | None = None

    @property
    def tasks(self) -> "task_service_pb2_grpc.TaskServiceAsyncStub":
        return task_service_pb2_grpc.TaskServiceStub(self._open_channel())

    @property
    def fleet(self) -> "fleet_service_pb2_grpc.FleetServiceAsyncStub":
        return fleet_service_pb2_grpc.FleetServiceStub(self._open_channel())

    async def call(self, method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]", request: Request) -> Response:
        """Make one call.

        Raises:
            SlackwaterError: the kind says who must act.
        """
        call = method(request, timeout=self.timeout_s, metadata=self._metadata)
        return await self.checked(call)

    def stream(
        self, method: "grpc.aio.UnaryStreamMultiCallable[Request, Response]", request: Request
    ) -> "grpc.aio.UnaryStreamCall[Request, Response]":
        """Open a stream, which has no deadline of its own; read it through `read`."""
        return method(request, metadata=self._metadata)

    async def read(self, call: "grpc.aio.UnaryStreamCall[Request, Response]") -> Response | None:
        """Return the next message, None at the end.

        Raises:
            SlackwaterError: the stream broke or the coordinator refused; the kind says who must act.
        """
        message = await self.checked(call.read())
        # gRPC's EOF object is not typed as a value of its own kind; it is the only false message.
        return None if message is grpc.aio.EOF else message  # type: ignore[return-value]

    async def checked(self, awaitable: Awaitable[Response]) -> Response:
        try:
            message = await awaitable
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        if message is None:
            # What gRPC returns for bytes that are not the expected message.
            raise errors.MalformedAnswer(f"{self.address} answered with bytes that are no message of this protocol")
        return message

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            credentials = grpc.ssl_channel_credentials(root_certificates=self._ca_certificate)
            self._channel = grpc.aio.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)
        return self._channel

    def _error(self, error: grpc.aio.AioRpcError) -> errors.SlackwaterError:
        detail = _detail(error)
        if detail is not None:
            return error_from_proto(detail)
        what = error.details() or error.code().name
        # A peer that vanished during the handshake reads differently, and is worth another try.
        if "SSL_ERROR_SSL" in what or "Hostname Verification Check failed" in what:
            return errors.CertificateUntrusted(
                f"no TLS with {self.address}: its certificate is not signed by the given CA or is for another name, or "
                f"the port speaks no TLS; pass the fleet's own CA certificate as ca_file ({what})",
                param="ca_file",
            )
        kind = ERROR_BY_STATUS.get(error.code(), errors.OperatorError)
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in what:
            kind = errors.PayloadTooLarge
        return kind(f"{self.address}: {error.code().name}: {what}", reason=f"GRPC_{error.code().name}")


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    if api_key is None:
        return ()
    key = api_key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        # The value stays out of the message: it may be most of a secret.
        raise errors.InvalidArgument("api_key is empty or not a single printable ASCII word", param="api_key")
    return (("authorization", f"Bearer {key}"),)


def _read_ca(ca: str | Path | bytes | None) -> bytes | None:
    if ca is None or isinstance(ca, bytes):
        certificate = ca
    else:
        try:
            certificate = Path(ca).read_bytes()
        except OSError as error:
            raise errors.CallerError(f"CA file {ca} cannot be read: {error.strerror}", param="ca_file") from error
    if certificate is not None and b"-----BEGIN CERTIFICATE-----" not in certificate:
        raise errors.CallerError("the CA certificate is not in PEM form", param="ca_file")
    return certificate


def _detail(error: grpc.aio.AioRpcError) -> error_pb2.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_DETAIL_KEY and isinstance(value, bytes):
            try:
                return error_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                # The status code still says what kind of failure it is.
                return None
    return None
