"""One access row per RPC: complete, said in the .proto, and enforced."""

import re
from pathlib import Path
from typing import cast

import pytest

from coordinator.access import ACCESS, Caller, CallerKind, Port, Row
from coordinator.api.gate import Call, check_access
from coordinator.api.identity import CallerIdentity, Context
from coordinator.errors import Reason, SlackwaterError
from coordinator.store.testing import node_row
from protos.slackwater.fleet.v1 import fleet_service_pb2
from protos.slackwater.node.v1 import enrolment_service_pb2, node_service_pb2
from protos.slackwater.task.v1 import task_service_pb2

PROTOS = Path(__file__).parents[3] / "protos" / "slackwater"
FILES = (
    enrolment_service_pb2.DESCRIPTOR,
    node_service_pb2.DESCRIPTOR,
    task_service_pb2.DESCRIPTOR,
    fleet_service_pb2.DESCRIPTOR,
)
# How a comment in a .proto begins to name the callers of a row.
WORDS = {
    Caller.ANYONE: ("anyone", "whoever"),
    Caller.NODE: ("an enrolled, unbanned node",),
    Caller.NODE_EVEN_BANNED: ("an enrolled node, a banned one too",),
    Caller.TENANT: ("a tenant (", "the tenant that"),
    Caller.ADMIN: ("an administrator",),
    Caller.TENANT_OR_ADMIN: ("a tenant or an administrator",),
}
RPC = re.compile(r"((?:^ *//.*\n)+)^ *rpc (\w+)\(", re.MULTILINE)


def methods() -> dict[str, str]:
    """Every RPC of every service with the callers that its comment names."""
    found = {}
    for file in FILES:
        text = (PROTOS.parent / file.name).read_text()
        comments = {match[2]: " ".join(match[1].replace("//", " ").split()) for match in RPC.finditer(text)}
        for service in file.services_by_name.values():
            for method in service.methods:
                found[f"/{service.full_name}/{method.name}"] = comments[method.name].partition("Caller: ")[2]
    return found


def test_there_is_one_row_for_each_rpc_and_none_besides() -> None:
    # Mutation seen to fail: the row of RevokeApiKey deleted.
    assert ACCESS.keys() == methods().keys()
    assert {path.name for path in PROTOS.glob("*/v1/*_service.proto")} == {Path(file.name).name for file in FILES}


@pytest.mark.parametrize("method", ACCESS)
def test_the_comment_of_each_rpc_names_the_caller_of_its_row(method: str) -> None:
    # Mutation seen to fail: ListNodes opened to ANYONE.
    said = methods()[method]
    assert said.startswith(WORDS[ACCESS[method].caller]), f"{method} says: Caller: {said!r}"


async def ask(method: str, port: Port, kind: CallerKind) -> Reason | None:
    node = node_row("node-1", "owner-1") if kind in Caller.NODE_EVEN_BANNED.value else None
    caller = CallerIdentity(kind=kind, address="ipv4:127.0.0.1", node=node)
    call = Call(method, port, cast(Context, None), caller)
    try:
        await check_access(call)
    except SlackwaterError as refusal:
        return refusal.reason
    return None


@pytest.mark.parametrize(("method", "row"), ACCESS.items())
async def test_each_row_is_enforced(method: str, row: Row) -> None:
    # Mutations seen to fail: `admits` returning True; a banned node not told that it is banned.
    refusals = {CallerKind.ANYONE: Reason.UNAUTHENTICATED, CallerKind.BANNED_NODE: Reason.NODE_BANNED}
    for kind in CallerKind:
        expected = None if row.caller.admits(kind) else refusals.get(kind, Reason.PERMISSION_DENIED)
        assert await ask(method, row.port, kind) is expected
    other = Port.NODE if row.port is Port.PUBLIC else Port.PUBLIC
    for kind in CallerKind:
        assert await ask(method, other, kind) is Reason.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("caller", "kinds"),
    [
        (Caller.ANYONE, set(CallerKind)),
        (Caller.NODE, {CallerKind.NODE}),
        (Caller.NODE_EVEN_BANNED, {CallerKind.NODE, CallerKind.BANNED_NODE}),
        (Caller.TENANT, {CallerKind.TENANT}),
        (Caller.ADMIN, {CallerKind.ADMIN}),
        (Caller.TENANT_OR_ADMIN, {CallerKind.TENANT, CallerKind.ADMIN}),
    ],
)
def test_a_caller_admits_its_kinds_only(caller: Caller, kinds: set[CallerKind]) -> None:
    assert {kind for kind in CallerKind if caller.admits(kind)} == kinds


async def test_a_method_without_a_row_is_refused_to_everybody() -> None:
    # Mutation seen to fail: a missing row treated as ANYONE.
    for kind in CallerKind:
        assert await ask("/slackwater.fleet.v1.FleetService/DropAll", Port.PUBLIC, kind) is Reason.PERMISSION_DENIED
