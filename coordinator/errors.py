"""What can go wrong at the coordinator, for whom, and how each edge says it.

SlackwaterError carries a machine-readable reason; two tables below map the
reason to a gRPC status and to an HTTP status with OpenAI's error type. No
handler builds a status of its own.

Who must act:
  CALLER    change the request
  OPERATOR  the coordinator or a node needs a person
  RETRY     nobody: the same call may succeed later
"""

from dataclasses import dataclass
from enum import Enum

import grpc

from protos.slackwater.common.v1 import error_pb2


class Actor(Enum):
    CALLER = error_pb2.ERROR_ACTOR_CALLER
    OPERATOR = error_pb2.ERROR_ACTOR_OPERATOR
    RETRY = error_pb2.ERROR_ACTOR_RETRY


class Reason(Enum):
    """Names as in slackwater.common.v1.ErrorReason, without the prefix."""

    INVALID_ARGUMENT = error_pb2.ERROR_REASON_INVALID_ARGUMENT
    UNAUTHENTICATED = error_pb2.ERROR_REASON_UNAUTHENTICATED
    PERMISSION_DENIED = error_pb2.ERROR_REASON_PERMISSION_DENIED
    RATE_LIMITED = error_pb2.ERROR_REASON_RATE_LIMITED
    MODEL_NOT_FOUND = error_pb2.ERROR_REASON_MODEL_NOT_FOUND
    CONTEXT_EXCEEDED = error_pb2.ERROR_REASON_CONTEXT_EXCEEDED
    TASK_NOT_FOUND = error_pb2.ERROR_REASON_TASK_NOT_FOUND
    NODE_NOT_FOUND = error_pb2.ERROR_REASON_NODE_NOT_FOUND
    OWNER_NOT_FOUND = error_pb2.ERROR_REASON_OWNER_NOT_FOUND
    KEY_NOT_FOUND = error_pb2.ERROR_REASON_KEY_NOT_FOUND
    ALREADY_EXISTS = error_pb2.ERROR_REASON_ALREADY_EXISTS
    PAYLOAD_TOO_LARGE = error_pb2.ERROR_REASON_PAYLOAD_TOO_LARGE
    UNSUPPORTED = error_pb2.ERROR_REASON_UNSUPPORTED
    BUDGET_EXCEEDED = error_pb2.ERROR_REASON_BUDGET_EXCEEDED
    VERDICT_NOT_FOUND = error_pb2.ERROR_REASON_VERDICT_NOT_FOUND
    PRICE_EXCEEDED = error_pb2.ERROR_REASON_PRICE_EXCEEDED
    TOKEN_INVALID = error_pb2.ERROR_REASON_TOKEN_INVALID
    TOKEN_USED = error_pb2.ERROR_REASON_TOKEN_USED
    TOKEN_EXPIRED = error_pb2.ERROR_REASON_TOKEN_EXPIRED
    NODE_BANNED = error_pb2.ERROR_REASON_NODE_BANNED
    CERTIFICATE_UNKNOWN = error_pb2.ERROR_REASON_CERTIFICATE_UNKNOWN
    SIGNATURE_INVALID = error_pb2.ERROR_REASON_SIGNATURE_INVALID
    PROTOCOL_VIOLATION = error_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    NO_CAPACITY = error_pb2.ERROR_REASON_NO_CAPACITY
    QUEUE_FULL = error_pb2.ERROR_REASON_QUEUE_FULL
    QUEUE_TIMEOUT = error_pb2.ERROR_REASON_QUEUE_TIMEOUT
    MIGRATION_IMPOSSIBLE = error_pb2.ERROR_REASON_MIGRATION_IMPOSSIBLE
    ATTEMPTS_EXHAUSTED = error_pb2.ERROR_REASON_ATTEMPTS_EXHAUSTED
    TASK_CANCELLED = error_pb2.ERROR_REASON_TASK_CANCELLED
    DEADLINE_EXCEEDED = error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    COORDINATOR_RESTARTED = error_pb2.ERROR_REASON_COORDINATOR_RESTARTED
    COORDINATOR_STOPPING = error_pb2.ERROR_REASON_COORDINATOR_STOPPING
    CLIENT_TOO_SLOW = error_pb2.ERROR_REASON_CLIENT_TOO_SLOW
    STORE_UNAVAILABLE = error_pb2.ERROR_REASON_STORE_UNAVAILABLE
    INTERNAL = error_pb2.ERROR_REASON_INTERNAL


@dataclass(frozen=True, slots=True)
class Presentation:
    """How the two edges show a reason. `type` and `code` are OpenAI's fields."""

    grpc_status: grpc.StatusCode
    http_status: int
    type: str
    code: str
    actor: Actor


def _caller(status: grpc.StatusCode, http_status: int, code: str, type_: str = "invalid_request_error") -> Presentation:
    return Presentation(status, http_status, type_, code, Actor.CALLER)


def _retry(status: grpc.StatusCode, http_status: int, code: str) -> Presentation:
    return Presentation(status, http_status, "server_error", code, Actor.RETRY)


_Status = grpc.StatusCode
PRESENTATION: dict[Reason, Presentation] = {
    Reason.INVALID_ARGUMENT: _caller(_Status.INVALID_ARGUMENT, 400, "invalid_value"),
    Reason.UNAUTHENTICATED: _caller(_Status.UNAUTHENTICATED, 401, "invalid_api_key", "authentication_error"),
    Reason.PERMISSION_DENIED: _caller(_Status.PERMISSION_DENIED, 403, "permission_denied", "permission_error"),
    Reason.RATE_LIMITED: Presentation(
        _Status.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_exceeded", Actor.RETRY
    ),
    Reason.MODEL_NOT_FOUND: _caller(_Status.NOT_FOUND, 404, "model_not_found"),
    Reason.CONTEXT_EXCEEDED: _caller(_Status.INVALID_ARGUMENT, 400, "context_length_exceeded"),
    Reason.TASK_NOT_FOUND: _caller(_Status.NOT_FOUND, 404, "task_not_found"),
    Reason.NODE_NOT_FOUND: _caller(_Status.NOT_FOUND, 404, "node_not_found"),
    Reason.OWNER_NOT_FOUND: _caller(_Status.NOT_FOUND, 404, "owner_not_found"),
    Reason.KEY_NOT_FOUND: _caller(_Status.NOT_FOUND, 404, "key_not_found"),
    Reason.ALREADY_EXISTS: _caller(_Status.ALREADY_EXISTS, 409, "already_exists"),
    Reason.PAYLOAD_TOO_LARGE: _caller(_Status.RESOURCE_EXHAUSTED, 413, "payload_too_large"),
    Reason.UNSUPPORTED: _caller(_Status.UNIMPLEMENTED, 400, "unsupported"),
    Reason.BUDGET_EXCEEDED: _caller(_Status.RESOURCE_EXHAUSTED, 429, "insufficient_quota", type_="insufficient_quota"),
    Reason.VERDICT_NOT_FOUND: _caller(_Status.NOT_FOUND, 404, "verdict_not_found"),
    Reason.PRICE_EXCEEDED: _caller(_Status.FAILED_PRECONDITION, 400, "price_exceeded"),
    Reason.TOKEN_INVALID: _caller(_Status.UNAUTHENTICATED, 401, "token_invalid", "authentication_error"),
    Reason.TOKEN_USED: _caller(_Status.UNAUTHENTICATED, 401, "token_used", "authentication_error"),
    Reason.TOKEN_EXPIRED: _caller(_Status.UNAUTHENTICATED, 401, "token_expired", "authentication_error"),
    Reason.NODE_BANNED: Presentation(_Status.PERMISSION_DENIED, 403, "permission_error", "node_banned", Actor.OPERATOR),
    Reason.CERTIFICATE_UNKNOWN: _caller(_Status.UNAUTHENTICATED, 401, "certificate_unknown", "authentication_error"),
    Reason.SIGNATURE_INVALID: _caller(_Status.UNAUTHENTICATED, 401, "signature_invalid", "authentication_error"),
    Reason.PROTOCOL_VIOLATION: _caller(_Status.INVALID_ARGUMENT, 400, "protocol_violation"),
    Reason.NO_CAPACITY: _retry(_Status.UNAVAILABLE, 503, "no_capacity"),
    Reason.QUEUE_FULL: Presentation(_Status.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "queue_full", Actor.RETRY),
    Reason.QUEUE_TIMEOUT: _retry(_Status.UNAVAILABLE, 503, "queue_timeout"),
    Reason.MIGRATION_IMPOSSIBLE: _retry(_Status.ABORTED, 503, "migration_impossible"),
    Reason.ATTEMPTS_EXHAUSTED: _retry(_Status.UNAVAILABLE, 503, "attempts_exhausted"),
    Reason.TASK_CANCELLED: _caller(_Status.CANCELLED, 499, "task_cancelled"),
    Reason.DEADLINE_EXCEEDED: _retry(_Status.DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
    Reason.COORDINATOR_RESTARTED: _retry(_Status.ABORTED, 503, "coordinator_restarted"),
    Reason.COORDINATOR_STOPPING: _retry(_Status.UNAVAILABLE, 503, "coordinator_stopping"),
    Reason.CLIENT_TOO_SLOW: _caller(_Status.RESOURCE_EXHAUSTED, 429, "client_too_slow"),
    Reason.STORE_UNAVAILABLE: _retry(_Status.UNAVAILABLE, 503, "store_unavailable"),
    Reason.INTERNAL: Presentation(_Status.INTERNAL, 500, "server_error", "internal_error", Actor.OPERATOR),
}


# Full disks and restarted database servers take an operator some time.
STORE_RETRY_S = 5.0


class SlackwaterError(Exception):
    """A failure with a reason; the message says what, where, and what to do."""

    def __init__(
        self, reason: Reason, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def presentation(self) -> Presentation:
        return PRESENTATION[self.reason]

    def to_proto(self) -> error_pb2.ErrorDetail:
        return error_pb2.ErrorDetail(
            reason=self.reason.value,
            message=self.message,
            param=self.param or "",
            retry_after_ms=round((self.retry_after_s or 0) * 1000),
            actor=self.presentation.actor.value,
        )


def store_unavailable() -> SlackwaterError:
    """Return what a caller is told of a StoreError; where the database lies and what it said is for the log alone."""
    message = "the coordinator's database cannot be used now; its log says why; send the request again"
    return SlackwaterError(Reason.STORE_UNAVAILABLE, message, retry_after_s=STORE_RETRY_S)
