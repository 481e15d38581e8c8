"""Who may call which RPC, on which port, how often: one row for each.

The only place that decides it. A method without a row is refused, and a test
walks the descriptors of all services and compares. The same test reads the
comment of each RPC in the .proto, which must name the same caller.
"""

from dataclasses import dataclass
from enum import Enum


class CallerKind(Enum):
    """Who calls, as the edge has established it."""

    ANYONE = "anyone"  # nothing is known but an address
    NODE = "node"  # a client certificate of this fleet
    BANNED_NODE = "banned node"  # one of a node that was shut out
    TENANT = "tenant"  # an API key
    ADMIN = "admin"  # an admin key


class Caller(Enum):
    """Who may call: the kinds that a row lets through."""

    ANYONE = frozenset(CallerKind)
    NODE = frozenset({CallerKind.NODE})
    NODE_EVEN_BANNED = frozenset({CallerKind.NODE, CallerKind.BANNED_NODE})
    TENANT = frozenset({CallerKind.TENANT})
    ADMIN = frozenset({CallerKind.ADMIN})
    TENANT_OR_ADMIN = frozenset({CallerKind.TENANT, CallerKind.ADMIN})

    def admits(self, kind: CallerKind) -> bool:
        return kind in self.value


class Port(Enum):
    PUBLIC = "public"  # server-side TLS
    NODE = "node"  # mutual TLS


@dataclass(frozen=True, slots=True)
class Row:
    """`calls_per_minute` counts per caller: per key, per node, or per address of a stranger."""

    caller: Caller
    port: Port
    calls_per_minute: int | None


# A whole lab may join at once from behind one address; more than ten a second is a flood.
_STRANGER = 600
# An administrator's scripts; a loop that has run wild stays harmless to the database.
_ADMIN = 600
# A node connects once, and after a failure with back-off; a minute of constant reconnecting is a fault.
_CONNECT = 60
# Once in a day and a half.
_RENEW = 10
# One for each engine of a large node at its start, twice over.
_MANIFEST = 128
# At each connect and once an hour; as often as a node may connect.
_CHECKPOINT = 60
# By hand, once a day for each model.
_APPEAL = 10
# Once a boot for each card, and again after a failure.
_CHALLENGE = 128
# Watching is for streams; whoever polls gets ten a second.
_LISTING = 600
# Work is limited where it costs, by the scheduler's queue and the tenant's share, not by counting calls.
_WORK = None

_ENROLMENT = "/slackwater.node.v1.EnrolmentService/"
_NODE = "/slackwater.node.v1.NodeService/"
_TASK = "/slackwater.task.v1.TaskService/"
_FLEET = "/slackwater.fleet.v1.FleetService/"

ACCESS: dict[str, Row] = {
    _ENROLMENT + "StartEnrolment": Row(Caller.ANYONE, Port.PUBLIC, _STRANGER),
    _ENROLMENT + "CompleteEnrolment": Row(Caller.ANYONE, Port.PUBLIC, _STRANGER),
    _ENROLMENT + "StartRenewal": Row(Caller.ANYONE, Port.PUBLIC, _STRANGER),
    _ENROLMENT + "CompleteRenewal": Row(Caller.ANYONE, Port.PUBLIC, _STRANGER),
    _NODE + "Connect": Row(Caller.NODE, Port.NODE, _CONNECT),
    _NODE + "RenewCertificate": Row(Caller.NODE, Port.NODE, _RENEW),
    _NODE + "GetManifest": Row(Caller.NODE, Port.NODE, _MANIFEST),
    _NODE + "GetCheckpoint": Row(Caller.NODE, Port.NODE, _CHECKPOINT),
    _NODE + "GetReceipt": Row(Caller.NODE, Port.NODE, _LISTING),
    _NODE + "GetVerdicts": Row(Caller.NODE_EVEN_BANNED, Port.NODE, _LISTING),
    _NODE + "AppealVerdict": Row(Caller.NODE, Port.NODE, _APPEAL),
    _NODE + "AnswerChallenge": Row(Caller.NODE, Port.NODE, _CHALLENGE),
    _TASK + "SubmitTask": Row(Caller.TENANT, Port.PUBLIC, _WORK),
    _TASK + "AttachTask": Row(Caller.TENANT, Port.PUBLIC, _WORK),
    _TASK + "CancelTask": Row(Caller.TENANT, Port.PUBLIC, _WORK),
    _TASK + "GetTask": Row(Caller.TENANT, Port.PUBLIC, _LISTING),
    _TASK + "GetCheckpoint": Row(Caller.TENANT_OR_ADMIN, Port.PUBLIC, _LISTING),
    _TASK + "GetReceipt": Row(Caller.TENANT, Port.PUBLIC, _LISTING),
    _TASK + "Quote": Row(Caller.TENANT, Port.PUBLIC, _LISTING),
    _TASK + "ListModels": Row(Caller.TENANT, Port.PUBLIC, _LISTING),
    _TASK + "OpenSession": Row(Caller.TENANT, Port.PUBLIC, _LISTING),
    _FLEET + "CreateOwner": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "ListOwners": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "CreateJoinString": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "ListNodes": Row(Caller.TENANT_OR_ADMIN, Port.PUBLIC, _LISTING),
    _FLEET + "WatchNodes": Row(Caller.TENANT_OR_ADMIN, Port.PUBLIC, _LISTING),
    _FLEET + "DrainNode": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "ResumeNode": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "BanNode": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "CreateApiKey": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "ListApiKeys": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "RevokeApiKey": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "RegisterModel": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "GrantCredit": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "ListAccounts": Row(Caller.TENANT_OR_ADMIN, Port.PUBLIC, _LISTING),
    _FLEET + "ListEntries": Row(Caller.TENANT_OR_ADMIN, Port.PUBLIC, _LISTING),
    _FLEET + "ListVerdicts": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "AppealVerdict": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "ReleaseVerdict": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
    _FLEET + "SetVerificationMode": Row(Caller.ADMIN, Port.PUBLIC, _ADMIN),
}
