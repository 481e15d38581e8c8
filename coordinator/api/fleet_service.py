"""FleetService: owners, join strings, nodes, API keys and models, for administrators.

Who may call what is coordinator/access.py's decision. Each handler changes the
store first and tells the registry and the scheduler after it, so that a crash
in between is mended by the next start.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.access import CallerKind
from coordinator.api.conversion import api_key_to_wire, node_to_wire, owner_to_wire
from coordinator.api.identity import Context, caller, tenant
from coordinator.api.verdict_desk import VerdictDesk
from coordinator.api_keys import ApiKeys
from coordinator.clock import Clock
from coordinator.enrolment.service import TOKEN_LIFETIME_S_MAX, EnrolmentAuthority
from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.churn import Outlook
from coordinator.fleet.models import register_model
from coordinator.fleet.registry import FleetRegistry, NodeView
from coordinator.ledger.entries import AMOUNT_MICRO_MAX, TransferRefused, granted_account, tenant_account
from coordinator.ledger.service import Ledger
from coordinator.store.port import Conflict, ModelRow, OwnerRow, Store
from coordinator.verification.events import Mode
from inference.manifest import ManifestError
from inference.task import NodeId, OwnerId, TenantId
from protos.slackwater.fleet.v1 import fleet_service_pb2 as wire
from protos.slackwater.fleet.v1 import fleet_service_pb2_grpc

OWNER_NAME_CHARACTERS_MAX = 64
# A UUID, or a line of somebody's accounting.
GRANT_ID_CHARACTERS_MAX = 128
# Some 400 kB of journal in one answer.
PAGE_ENTRIES = 1_000
SEQUENCE_MAX = 2**63 - 1
# Shown to the owner in one line.
BAN_REASON_CHARACTERS_MAX = 512

_MODES = {wire.VERIFICATION_MODE_ACTIVE: Mode.ACTIVE, wire.VERIFICATION_MODE_SHADOW: Mode.SHADOW}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHooks:
    """Told after the store has been changed, on the event loop; none may block it."""

    on_ban: Callable[[NodeId, str], None]
    on_drain: Callable[[NodeId, bool], None]
    on_model: Callable[[ModelRow], Awaitable[None]]


class FleetServicer(fleet_service_pb2_grpc.FleetServiceServicer):
    """`public_address` is (host, port) of the public port, as it stands in join strings."""

    def __init__(
        self,
        store: Store,
        registry: FleetRegistry,
        authority: EnrolmentAuthority,
        api_keys: ApiKeys,
        clock: Clock,
        hooks: FleetHooks,
        ledger: Ledger,
        verdicts: VerdictDesk,
        outlook: Callable[[NodeId], Outlook],
        *,
        public_address: tuple[str, int],
        release_public_keys: Sequence[bytes],
    ) -> None:
        self._store = store
        self._registry = registry
        self._authority = authority
        self._api_keys = api_keys
        self._clock = clock
        self._hooks = hooks
        self._ledger = ledger
        self._verdicts = verdicts
        self._outlook = outlook
        self._public_address = public_address
        self._release_public_keys = tuple(release_public_keys)

    async def CreateOwner(self, request: wire.CreateOwnerRequest, context: Context) -> wire.CreateOwnerResponse:
        owner = new_owner(request.name, trusted=request.trusted, now_ms=self._clock.now_ms())
        await asyncio.to_thread(add_owner, self._store, owner)
        self._registry.put_owner(owner)
        _log.info("owner created", owner_id=owner.owner_id, by=caller().name)
        return wire.CreateOwnerResponse(owner=owner_to_wire(owner))

    async def ListOwners(self, request: wire.ListOwnersRequest, context: Context) -> wire.ListOwnersResponse:
        owners = await asyncio.to_thread(self._store.owners)
        return wire.ListOwnersResponse(owners=[owner_to_wire(owner) for owner in owners])

    async def CreateJoinString(
        self, request: wire.CreateJoinStringRequest, context: Context
    ) -> wire.CreateJoinStringResponse:
        owner = await asyncio.to_thread(self._store.find_owner, request.owner)
        if owner is None:
            raise SlackwaterError(
                Reason.OWNER_NOT_FOUND, f"there is no owner {request.owner[:64]!r}; create one first", param="owner"
            )
        host, port = self._public_address
        lifetime_s = request.lifetime_s or TOKEN_LIFETIME_S_MAX
        string, token = await asyncio.to_thread(
            self._authority.create_join_string, owner.owner_id, host, port, lifetime_s
        )
        _log.info("join string created", token_id=token.token_id, owner_id=owner.owner_id, by=caller().name)
        return wire.CreateJoinStringResponse(
            join_string=string.encode(), token_id=token.token_id, expires_at_ms=token.expires_at_ms
        )

    async def ListNodes(self, request: wire.ListNodesRequest, context: Context) -> wire.ListNodesResponse:
        return wire.ListNodesResponse(nodes=[self._to_wire(view) for view in self._registry.views()])

    async def WatchNodes(
        self, request: wire.WatchNodesRequest, context: Context
    ) -> AsyncIterator[wire.WatchNodesResponse]:
        with self._registry.watch() as watch:
            while True:
                for node_id in await watch.changed():
                    yield wire.WatchNodesResponse(node=self._to_wire(self._view(node_id)))

    async def DrainNode(self, request: wire.DrainNodeRequest, context: Context) -> wire.DrainNodeResponse:
        return wire.DrainNodeResponse(node=self._to_wire(await self._set_draining(NodeId(request.node_id), True)))

    async def ResumeNode(self, request: wire.ResumeNodeRequest, context: Context) -> wire.ResumeNodeResponse:
        return wire.ResumeNodeResponse(node=self._to_wire(await self._set_draining(NodeId(request.node_id), False)))

    async def BanNode(self, request: wire.BanNodeRequest, context: Context) -> wire.BanNodeResponse:
        node_id = NodeId(request.node_id)
        if not 1 <= len(request.reason) <= BAN_REASON_CHARACTERS_MAX or not request.reason.isprintable():
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"reason is required: one line of at most {BAN_REASON_CHARACTERS_MAX} characters; the owner reads it",
                param="reason",
            )
        if not await asyncio.to_thread(self._store.ban_node, node_id, request.reason, self._clock.now_ms()):
            raise _no_node(node_id)
        view = await self._refresh(node_id)
        # The first ban's reason stands, so the row's is passed on.
        self._hooks.on_ban(node_id, view.row.ban_reason or request.reason)
        await self._verdicts.ban(view.row)
        _log.warning("node banned", node_id=node_id, reason=view.row.ban_reason, by=caller().name)
        return wire.BanNodeResponse(node=self._to_wire(view))

    async def CreateApiKey(self, request: wire.CreateApiKeyRequest, context: Context) -> wire.CreateApiKeyResponse:
        row, secret = await self._api_keys.create(request.name, request.role or "tenant")
        _log.info("API key created", key_id=row.key_id, role=row.role, by=caller().name)
        return wire.CreateApiKeyResponse(key=api_key_to_wire(row), secret=secret)

    async def ListApiKeys(self, request: wire.ListApiKeysRequest, context: Context) -> wire.ListApiKeysResponse:
        rows = await asyncio.to_thread(self._store.api_keys)
        return wire.ListApiKeysResponse(keys=[api_key_to_wire(row) for row in rows])

    async def RevokeApiKey(self, request: wire.RevokeApiKeyRequest, context: Context) -> wire.RevokeApiKeyResponse:
        row = await self._api_keys.revoke(TenantId(request.key_id))
        _log.info("API key revoked", key_id=row.key_id, by=caller().name)
        return wire.RevokeApiKeyResponse(key=api_key_to_wire(row))

    async def RegisterModel(self, request: wire.RegisterModelRequest, context: Context) -> wire.RegisterModelResponse:
        directory = Path(request.tokenizer_directory)
        if not directory.is_absolute():
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                "tokenizer_directory must be an absolute path on the coordinator's machine",
                param="tokenizer_directory",
            )
        envelope = request.manifest.SerializeToString()
        try:
            row = await asyncio.to_thread(
                register_model, self._store, envelope, directory, self._release_public_keys, self._clock.now_ms()
            )
            await self._hooks.on_model(row)
        except ManifestError as error:
            raise SlackwaterError(Reason.INVALID_ARGUMENT, str(error), param="manifest") from error
        _log.info("model registered", name=row.name, manifest_digest=row.manifest_digest, by=caller().name)
        return wire.RegisterModelResponse(manifest_digest=row.manifest_digest)

    async def GrantCredit(self, request: wire.GrantCreditRequest, context: Context) -> wire.GrantCreditResponse:
        tenant_id = TenantId(request.tenant_id)
        if all(row.key_id != tenant_id for row in await asyncio.to_thread(self._store.api_keys)):
            raise SlackwaterError(
                Reason.KEY_NOT_FOUND, f"there is no API key {request.tenant_id[:64]!r}", param="tenant_id"
            )
        if not 1 <= request.amount_micro <= AMOUNT_MICRO_MAX:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT, f"amount_micro must lie in [1, {AMOUNT_MICRO_MAX}]", param="amount_micro"
            )
        if not 1 <= len(request.grant_id) <= GRANT_ID_CHARACTERS_MAX or not request.grant_id.isprintable():
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"grant_id is required: at most {GRANT_ID_CHARACTERS_MAX} printable characters, new for each grant",
                param="grant_id",
            )
        try:
            await self._ledger.grant(request.grant_id, tenant_id, request.amount_micro)
        except TransferRefused as refused:
            raise SlackwaterError(Reason.ALREADY_EXISTS, str(refused), param="grant_id") from refused
        _log.info("credit granted", key_id=tenant_id, amount_micro=request.amount_micro, by=caller().name)
        return wire.GrantCreditResponse(balance_micro=self._ledger.books.balance_micro(tenant_account(tenant_id)))

    async def ListAccounts(self, request: wire.ListAccountsRequest, context: Context) -> wire.ListAccountsResponse:
        of_tenant = _tenant_only()
        own = None if of_tenant is None else {tenant_account(of_tenant), granted_account(of_tenant)}
        return wire.ListAccountsResponse(
            accounts=[
                wire.LedgerAccount(account=name, balance_micro=balance_micro)
                for name, balance_micro in self._ledger.summary()
                if own is None or name in own
            ]
        )

    async def ListEntries(self, request: wire.ListEntriesRequest, context: Context) -> wire.ListEntriesResponse:
        await self._ledger.flush()
        start = min(request.from_sequence, SEQUENCE_MAX)
        rows = await asyncio.to_thread(self._store.ledger_page, start, PAGE_ENTRIES, _tenant_only())
        return wire.ListEntriesResponse(
            entries=[wire.LedgerEntry(sequence=row.sequence, entry=row.body) for row in rows]
        )

    async def ListVerdicts(self, request: wire.ListVerdictsRequest, context: Context) -> wire.ListVerdictsResponse:
        return wire.ListVerdictsResponse(verdicts=await self._verdicts.in_full(NodeId(request.node_id)))

    async def AppealVerdict(self, request: wire.AppealVerdictRequest, context: Context) -> wire.AppealVerdictResponse:
        return wire.AppealVerdictResponse(verdict=await self._verdicts.appeal(request.verdict_id))

    async def ReleaseVerdict(
        self, request: wire.ReleaseVerdictRequest, context: Context
    ) -> wire.ReleaseVerdictResponse:
        verdict = await self._verdicts.release(request.verdict_id, request.reason)
        _log.info("node released", node_id=verdict.node_id, verdict_id=request.verdict_id, by=caller().name)
        return wire.ReleaseVerdictResponse(verdict=verdict)

    async def SetVerificationMode(
        self, request: wire.SetVerificationModeRequest, context: Context
    ) -> wire.SetVerificationModeResponse:
        mode = _MODES.get(request.mode)
        if mode is None:
            raise SlackwaterError(Reason.INVALID_ARGUMENT, "mode is required: active or shadow", param="mode")
        shadow_rules = await self._verdicts.set_mode(request.rule, mode)
        _log.info("verification mode set", rule=request.rule, mode=mode.value, by=caller().name)
        return wire.SetVerificationModeResponse(shadow_rules=shadow_rules)

    async def _set_draining(self, node_id: NodeId, draining: bool) -> NodeView:
        if not await asyncio.to_thread(self._store.set_draining, node_id, draining):
            raise _no_node(node_id)
        view = await self._refresh(node_id)
        self._hooks.on_drain(node_id, draining)
        _log.info("node draining" if draining else "node resumed", node_id=node_id, by=caller().name)
        return view

    async def _refresh(self, node_id: NodeId) -> NodeView:
        row = await asyncio.to_thread(self._store.find_node, node_id)
        if row is None:
            raise _no_node(node_id)
        self._registry.put_node(row)
        return self._view(node_id)

    def _to_wire(self, view: NodeView) -> wire.Node:
        return node_to_wire(view, self._outlook(view.row.node_id))

    def _view(self, node_id: NodeId) -> NodeView:
        view = self._registry.find(node_id)
        if view is None:
            raise _no_node(node_id)
        return view


def _tenant_only() -> TenantId | None:
    """Return the calling tenant, which sees only what is its own; None for an administrator."""
    return None if caller().kind is CallerKind.ADMIN else tenant()


def new_owner(name: str, *, trusted: bool, now_ms: int) -> OwnerRow:
    """Return a new owner with an id of its own.

    Raises:
        SlackwaterError: the name is not allowed.
    """
    if not 1 <= len(name) <= OWNER_NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
        raise SlackwaterError(
            Reason.INVALID_ARGUMENT,
            f"name must have 1 to {OWNER_NAME_CHARACTERS_MAX} printable characters, no space around it",
            param="name",
        )
    return OwnerRow(owner_id=OwnerId(f"owner-{secrets.token_hex(8)}"), name=name, trusted=trusted, created_at_ms=now_ms)


def add_owner(store: Store, owner: OwnerRow) -> None:
    """Store an owner. Blocks.

    Raises:
        SlackwaterError: ALREADY_EXISTS for a name that is taken.
    """
    try:
        store.add_owner(owner)
    except Conflict as conflict:
        raise SlackwaterError(Reason.ALREADY_EXISTS, str(conflict), param="name") from conflict


def _no_node(node_id: NodeId) -> SlackwaterError:
    return SlackwaterError(Reason.NODE_NOT_FOUND, f"there is no node {node_id[:64]!r}", param="node_id")
