"""What must last, as the drivers see it.

Synchronous on purpose: a call may touch a disk or a network, so drivers run
them in threads (`asyncio.to_thread`), never on the event loop. Times are Unix
milliseconds given by the caller. Both implementations (SQLite, PostgreSQL)
are one: store/sql.py, and one test suite runs on both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.store.churn_port import ChurnStore
from coordinator.store.verification_port import VerificationStore
from inference.task import ManifestDigest, NodeId, OwnerId, TaskId, TenantId
from protos.merkle import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRow:
    owner_id: OwnerId
    name: str
    trusted: bool
    created_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTokenRow:
    """A one-use token. Only the hash of its secret is kept."""

    token_id: str
    secret_sha256: bytes
    owner_id: OwnerId
    created_at_ms: int
    expires_at_ms: int
    used_at_ms: int | None
    used_by: NodeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    node_id: NodeId
    owner_id: OwnerId
    label: str
    signing_public_key: bytes
    key_epoch: int
    certificate_serial: str  # hex, of the newest certificate
    certificate_not_after_ms: int
    enrolled_at_ms: int
    banned_at_ms: int | None
    ban_reason: str | None
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyRow:
    """`key_id` is also the tenant's id. Only the hash of the secret is kept."""

    key_id: TenantId
    name: str
    role: str  # "tenant" or "admin"
    secret_sha256: bytes
    created_at_ms: int
    revoked_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    manifest_digest: ManifestDigest
    name: str
    envelope: bytes  # serialised SignedEnvelope, as registered
    tokenizer_directory: str
    created_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """How a task ended, for accounting: counts, never ids or text."""

    task_id: TaskId
    tenant_id: TenantId
    manifest_digest: ManifestDigest
    outcome: str  # "stop", "length", or the failure's reason in lower case
    prompt_tokens: int
    completion_tokens: int
    submitted_at_ms: int
    ended_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """What one attempt did, as the coordinator saw it; the statement is the node's word."""

    task_id: TaskId
    attempt: int
    node_id: NodeId
    lease_epoch: int
    first_index: int
    delivered_tokens: int
    outcome: str  # "finished", or why it broke
    statement: bytes | None  # serialised SignedEnvelope
    # As the statement says; None without one, or where an older release wrote the row.
    energy_mj: int | None
    energy_method: str | None  # as `StatedEnergy.method`
    started_at_ms: int
    ended_at_ms: int
    # What the order paid per 1,000 tokens; None where the node asked for nothing, or an older release wrote the row.
    ask_prompt_micro: int | None = None
    ask_completion_micro: int | None = None
    # Why its engine was chosen (as `scheduler.records.Why`), what its owner asked for all that was left, and what was
    # expected, in milliseconds; as `scheduler.records.Choice`. None where an older release wrote the row.
    engine_id: str | None = None
    why: str | None = None
    cost_micro: int | None = None
    expected_first_token_ms: float | None = None
    expected_token_ms: float | None = None
    tail: float | None = None
    # From the order to the first token on the coordinator's clock; None too where none came.
    first_token_ms: float | None = None


@dataclass(frozen=True, slots=True)
class LateStatementRow:
    """A node's word on an attempt that had ended for us before it came; fields as of `AttemptRow`."""

    task_id: TaskId
    attempt: int
    node_id: NodeId
    statement: bytes
    energy_mj: int | None
    energy_method: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    tasks: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """An entry of the ledger's journal: never changed, never deleted. Ids are empty where it concerns nobody."""

    sequence: int
    transfer_id: str
    task_id: str
    tenant_id: str
    node_id: str
    body: bytes  # coordinator.ledger.entries.entry_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    account: str
    balance_micro: int
    opened_at_ms: int


class Conflict(Exception):
    """A name or id is taken already; the message names it."""


class StoreError(Exception):
    """The database cannot be opened, read or written; the message is one line that says why and what to do."""


class Store(VerificationStore, ChurnStore, Protocol):
    def open_boot(self, now_ms: int) -> int:
        """Record a start of the coordinator; return its number, from 1."""
        ...

    def cluster_id(self) -> str:
        """Return the id made when the database was made."""
        ...

    def add_owner(self, owner: OwnerRow) -> None:
        """Raises Conflict where the name is taken."""
        ...

    def owners(self) -> list[OwnerRow]: ...

    def find_owner(self, name_or_id: str) -> OwnerRow | None: ...

    def add_join_token(self, token: JoinTokenRow) -> None: ...

    def find_join_token(self, token_id: str) -> JoinTokenRow | None: ...

    def enrol_node(self, node: NodeRow, token_id: str, now_ms: int) -> bool:
        """In one transaction consume an unused, unexpired token and add the node.

        Returns False, and changes nothing, where the token was not there to
        be consumed any more. Consuming is one statement, so that of two
        racing calls exactly one wins.
        """
        ...

    def nodes(self) -> list[NodeRow]: ...

    def find_node(self, node_id: NodeId) -> NodeRow | None: ...

    def renew_certificate(self, node_id: NodeId, serial: str, not_after_ms: int) -> bool:
        """Returns False for a node that is unknown or banned."""
        ...

    def ban_node(self, node_id: NodeId, reason: str, now_ms: int) -> bool: ...

    def set_draining(self, node_id: NodeId, draining: bool) -> bool: ...

    def add_api_key(self, key: ApiKeyRow) -> None: ...

    def api_keys(self) -> list[ApiKeyRow]: ...

    def find_api_key(self, secret_sha256: bytes) -> ApiKeyRow | None:
        """Revoked keys are found too; the caller decides."""
        ...

    def revoke_api_key(self, key_id: TenantId, now_ms: int) -> ApiKeyRow | None: ...

    def add_model(self, model: ModelRow) -> None:
        """Adding the same digest again replaces the tokenizer directory."""
        ...

    def models(self) -> list[ModelRow]: ...

    def record(self, tasks: Sequence[TaskRow], attempts: Sequence[AttemptRow]) -> None:
        """Add ended tasks and attempts in one transaction; repeated rows are ignored."""
        ...

    def add_late_statements(self, rows: Sequence[LateStatementRow]) -> None:
        """Add statements to attempts that are recorded without one; of any other attempt there is nothing to add to."""
        ...

    def attempts(self, task_id: TaskId) -> list[AttemptRow]: ...

    def find_task(self, task_id: TaskId) -> TaskRow | None: ...

    def usage(self, tenant_id: TenantId) -> Usage: ...

    def append_ledger(
        self,
        entries: Sequence[LedgerRow],
        accounts: Sequence[AccountRow],
        closed: Sequence[str],
        hashes: Mapping[Position, bytes],
    ) -> None:
        """In one transaction add entries and their hashes, set balances, and forget the `closed` accounts.

        Raises:
            Conflict: the journal has one of these numbers or ids already; nothing was written.
        """
        ...

    def ledger_accounts(self) -> list[AccountRow]: ...

    def ledger_page(self, from_sequence: int, limit: int, tenant_id: TenantId | None = None) -> list[LedgerRow]:
        """Return entries in their order, of one tenant or of all."""
        ...

    def ledger_of_task(self, task_id: TaskId) -> list[LedgerRow]: ...

    def find_transfer(self, transfer_id: str) -> LedgerRow | None: ...

    def log_size(self) -> int:
        """Return the number of entries whose hashes the ledger's log holds."""
        ...

    def log_hashes(self, positions: Sequence[Position]) -> list[bytes]:
        """Return the hashes of the log's complete subtrees at these positions, in this order, with one query.

        Raises:
            KeyError: one of them is not stored.
        """
        ...

    def close(self) -> None: ...
