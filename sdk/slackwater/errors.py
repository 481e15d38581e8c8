"""What can go wrong, sorted by who must act.

    SlackwaterError
    ├── CallerError                   change the request (or the settings)
    │   ├── InvalidArgument
    │   │   ├── ContextExceeded       prompt and answer do not fit the model's context
    │   │   └── PayloadTooLarge
    │   ├── Unauthenticated           no key, a wrong key, a revoked key
    │   ├── PermissionDenied          the key is good, but not for this
    │   ├── NotFound
    │   │   ├── ModelNotFound
    │   │   ├── TaskNotFound
    │   │   ├── NodeNotFound
    │   │   ├── OwnerNotFound
    │   │   ├── KeyNotFound
    │   │   └── VerdictNotFound
    │   ├── AlreadyExists
    │   ├── Unsupported
    │   ├── BudgetExceeded            the task may cost more than is left to this API key
    │   ├── PriceExceeded             the task may cost more than the limit that came with it
    │   ├── TaskCancelled
    │   ├── ClientTooSlow             events were read more slowly than the coordinator may hold them
    │   └── CertificateUntrusted      the address answers with a certificate of another CA
    ├── OperatorError                 a person at the coordinator or at a node must act
    │   ├── InternalError
    │   ├── NodeBanned
    │   └── MalformedAnswer           the coordinator broke the protocol
    ├── RetryableError                nobody: the same call may succeed later, see retry_after_s
    │   ├── RateLimited
    │   ├── NoCapacity                no node can take the task now
    │   ├── QueueFull
    │   ├── QueueTimeout
    │   ├── AttemptsExhausted         several nodes failed one after the other
    │   ├── MigrationImpossible       a node failed, and going on elsewhere would change the answer
    │   ├── DeadlineExceeded
    │   ├── CoordinatorRestarted      the task is gone; the text that has arrived is all there is
    │   ├── CoordinatorStopping
    │   ├── StoreUnavailable          the coordinator has no database now
    │   └── CoordinatorUnavailable    no connection, or no answer in time
    └── VerificationError             a signed statement does not hold; nobody's word settles who is at fault

A reason that this version does not know falls back to the branch that the
coordinator names, so that `except RetryableError` keeps its meaning.
"""


class SlackwaterError(Exception):
    """Any failure of this package; the message says what, where, and what to do.

    Attributes:
        reason: machine-readable, for example "QUEUE_FULL"; "GRPC_UNAVAILABLE" and the like where only the
            connection spoke; empty where the failure was found on this side.
        param: the request parameter at fault, for example "messages[2].content".
        retry_after_s: when the same call can succeed, in seconds; None where no time is known.
    """

    def __init__(
        self, message: str, *, reason: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.param = param
        self.retry_after_s = retry_after_s


class CallerError(SlackwaterError):
    """The caller must change the request or the settings."""


class OperatorError(SlackwaterError):
    """A person at the coordinator or at a node must act."""


class RetryableError(SlackwaterError):
    """Nobody must act: the same call may succeed later."""


class InvalidArgument(CallerError):
    """A parameter is wrong; `param` names it."""


class ContextExceeded(InvalidArgument):
    """Prompt and answer together do not fit the model's context."""


class PayloadTooLarge(InvalidArgument):
    """The request has more bytes than the coordinator reads."""


class Unauthenticated(CallerError):
    """The API key is missing, unknown or revoked."""


class PermissionDenied(CallerError):
    """The API key is valid, but may not do this."""


class NotFound(CallerError):
    """What the request names does not exist."""


class ModelNotFound(NotFound):
    """No model of that name is registered; `models()` lists them."""


class TaskNotFound(NotFound):
    """No task of that id belongs to this key, or it ended too long ago."""


class NodeNotFound(NotFound):
    """No node of that id is enrolled."""


class OwnerNotFound(NotFound):
    """No owner of that name or id exists."""


class KeyNotFound(NotFound):
    """No API key of that id exists."""


class VerdictNotFound(NotFound):
    """No verdict of that id was given on this node."""


class AlreadyExists(CallerError):
    """The name is taken."""


class Unsupported(CallerError):
    """This release does not do that."""


class BudgetExceeded(CallerError):
    """The task may cost more than is left of this API key's budget; ask for fewer tokens, or the operator for more."""


class PriceExceeded(CallerError):
    """The task may cost more than its `max_price_micro`."""


class TaskCancelled(CallerError):
    """The task was cancelled by its caller."""


class ClientTooSlow(CallerError):
    """The coordinator dropped the task because its events were not read in time."""


class CertificateUntrusted(CallerError):
    """The server's certificate is not signed by the given CA, or is for another name."""


class InternalError(OperatorError):
    """A fault of the coordinator."""


class NodeBanned(OperatorError):
    """The node is shut out of the fleet."""


class MalformedAnswer(OperatorError):
    """The coordinator sent something that the protocol does not allow."""


class RateLimited(RetryableError):
    """Too many calls with this key."""


class NoCapacity(RetryableError):
    """No node of the fleet can take the task now."""


class QueueFull(RetryableError):
    """Too many tasks wait already."""


class QueueTimeout(RetryableError):
    """The task waited for a node as long as a task may."""


class AttemptsExhausted(RetryableError):
    """Several nodes failed one after the other."""


class MigrationImpossible(RetryableError):
    """A node failed in mid-answer, and going on elsewhere would change the answer."""


class DeadlineExceeded(RetryableError):
    """The task's deadline passed."""


class CoordinatorRestarted(RetryableError):
    """The coordinator no longer knows the task; what has arrived is all there is."""


class CoordinatorStopping(RetryableError):
    """The coordinator is being stopped."""


class StoreUnavailable(RetryableError):
    """The coordinator's database cannot be used now."""


class CoordinatorUnavailable(RetryableError):
    """No connection to the coordinator, or no answer in time."""


class VerificationError(SlackwaterError):
    """A signed statement, receipt or checkpoint does not hold: `step` is the number in the function that checked."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step}: {why}", reason="VERIFICATION_FAILED")
        self.step = step
        self.why = why


# One row per slackwater.common.v1.ErrorReason, without the prefix.
ERROR_BY_REASON: dict[str, type[SlackwaterError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "RATE_LIMITED": RateLimited,
    "MODEL_NOT_FOUND": ModelNotFound,
    "CONTEXT_EXCEEDED": ContextExceeded,
    "TASK_NOT_FOUND": TaskNotFound,
    "NODE_NOT_FOUND": NodeNotFound,
    "OWNER_NOT_FOUND": OwnerNotFound,
    "KEY_NOT_FOUND": KeyNotFound,
    "VERDICT_NOT_FOUND": VerdictNotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "PAYLOAD_TOO_LARGE": PayloadTooLarge,
    "UNSUPPORTED": Unsupported,
    "BUDGET_EXCEEDED": BudgetExceeded,
    "PRICE_EXCEEDED": PriceExceeded,
    "TOKEN_INVALID": Unauthenticated,
    "TOKEN_USED": Unauthenticated,
    "TOKEN_EXPIRED": Unauthenticated,
    "NODE_BANNED": NodeBanned,
    "CERTIFICATE_UNKNOWN": Unauthenticated,
    "SIGNATURE_INVALID": Unauthenticated,
    "PROTOCOL_VIOLATION": InvalidArgument,
    "NO_CAPACITY": NoCapacity,
    "QUEUE_FULL": QueueFull,
    "QUEUE_TIMEOUT": QueueTimeout,
    "MIGRATION_IMPOSSIBLE": MigrationImpossible,
    "ATTEMPTS_EXHAUSTED": AttemptsExhausted,
    "TASK_CANCELLED": TaskCancelled,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "COORDINATOR_RESTARTED": CoordinatorRestarted,
    "COORDINATOR_STOPPING": CoordinatorStopping,
    "STORE_UNAVAILABLE": StoreUnavailable,
    "CLIENT_TOO_SLOW": ClientTooSlow,
    "INTERNAL": InternalError,
}

# One row per slackwater.common.v1.ErrorActor, for reasons of a newer coordinator.
ERROR_BY_ACTOR: dict[str, type[SlackwaterError]] = {
    "CALLER": CallerError,
    "OPERATOR": OperatorError,
    "RETRY": RetryableError,
}
