"""Tables and named statements; nothing here talks to a database.

Every decision that two callers may race for is one statement. Times are Unix
milliseconds, secrets are SHA-256 digests. Accounting rows (tasks, attempts)
are history: they refer to keys, models and nodes by value, without foreign
keys, so that no later change can touch them.
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

# Every constraint has a name, since a violation is told by its name (CONFLICTS).
metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

cluster = sa.Table("cluster", metadata, sa.Column("cluster_id", sa.Text, primary_key=True))

boots = sa.Table(
    "boots",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("started_at_ms", sa.BigInteger, nullable=False),
)

owners = sa.Table(
    "owners",
    metadata,
    sa.Column("owner_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("trusted", sa.Boolean, nullable=False),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("name"),
)

join_tokens = sa.Table(
    "join_tokens",
    metadata,
    sa.Column("token_id", sa.Text, primary_key=True),
    sa.Column("secret_sha256", sa.LargeBinary, nullable=False),
    sa.Column("owner_id", sa.Text, sa.ForeignKey("owners.owner_id"), nullable=False),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_at_ms", sa.BigInteger, nullable=False),
    sa.Column("used_at_ms", sa.BigInteger),
    sa.Column("used_by", sa.Text),
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("node_id", sa.Text, primary_key=True),
    sa.Column("owner_id", sa.Text, sa.ForeignKey("owners.owner_id"), nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("signing_public_key", sa.LargeBinary, nullable=False),
    sa.Column("key_epoch", sa.Integer, nullable=False),
    sa.Column("certificate_serial", sa.Text, nullable=False),
    sa.Column("certificate_not_after_ms", sa.BigInteger, nullable=False),
    sa.Column("enrolled_at_ms", sa.BigInteger, nullable=False),
    sa.Column("banned_at_ms", sa.BigInteger),
    sa.Column("ban_reason", sa.Text),
    sa.Column("draining", sa.Boolean, nullable=False),
    # A banned node cannot come back under a new name with the key it was banned for.
    sa.UniqueConstraint("signing_public_key"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("secret_sha256", sa.LargeBinary, nullable=False),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("revoked_at_ms", sa.BigInteger),
    sa.UniqueConstraint("secret_sha256"),
    sa.CheckConstraint("role IN ('tenant', 'admin')", name="role"),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("manifest_digest", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
    sa.Column("tokenizer_directory", sa.Text, nullable=False),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
)

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("task_id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("manifest_digest", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("submitted_at_ms", sa.BigInteger, nullable=False),
    sa.Column("ended_at_ms", sa.BigInteger, nullable=False),
    sa.Index(None, "tenant_id"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("task_id", sa.Text, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("node_id", sa.Text, nullable=False),
    sa.Column("lease_epoch", sa.BigInteger, nullable=False),
    sa.Column("first_index", sa.BigInteger, nullable=False),
    sa.Column("delivered_tokens", sa.BigInteger, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("statement", sa.LargeBinary),
    sa.Column("energy_mj", sa.BigInteger),
    sa.Column("energy_method", sa.Text),
    sa.Column("started_at_ms", sa.BigInteger, nullable=False),
    sa.Column("ended_at_ms", sa.BigInteger, nullable=False),
    sa.Column("ask_prompt_micro", sa.BigInteger),
    sa.Column("ask_completion_micro", sa.BigInteger),
    sa.Column("engine_id", sa.Text),
    sa.Column("why", sa.Text),
    sa.Column("cost_micro", sa.BigInteger),
    sa.Column("expected_first_token_ms", sa.Double),
    sa.Column("expected_token_ms", sa.Double),
    sa.Column("tail", sa.Double),
    sa.Column("first_token_ms", sa.Double),
)

# The Merkle log over the ledger's entries: the hash of each complete subtree, at its level and place in it.
log_hashes = sa.Table(
    "log_hashes",
    metadata,
    sa.Column("level", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("place", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
)

ledger_entries = sa.Table(
    "ledger_entries",
    metadata,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("transfer_id", sa.Text, nullable=False),
    # Whom the entry concerns; empty for nobody.
    sa.Column("task_id", sa.Text, nullable=False),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("node_id", sa.Text, nullable=False),
    # Canonical bytes: what is hashed into the log.
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("transfer_id"),
    sa.Index(None, "task_id"),
    sa.Index(None, "tenant_id", "sequence"),
)

# Follows from the entries; kept, so that a start need not add them all up.
ledger_accounts = sa.Table(
    "ledger_accounts",
    metadata,
    sa.Column("account", sa.Text, primary_key=True),
    sa.Column("balance_micro", sa.BigInteger, nullable=False),
    sa.Column("opened_at_ms", sa.BigInteger, nullable=False),
)

# What a violated constraint means to a caller, by its name.
CONFLICTS = {
    "pk_owners": "an owner of this id exists already",
    "uq_owners_name": "an owner of this name exists already; choose another name",
    "pk_join_tokens": "a join token of this id exists already",
    "fk_join_tokens_owner_id": "the owner of this join token does not exist",
    "pk_nodes": "a node of this id exists already",
    "uq_nodes_signing_public_key": "a node with this signing key is enrolled already; renew it, or make a new key",
    "fk_nodes_owner_id": "the owner of this node does not exist",
    "pk_api_keys": "an API key of this id exists already",
    "uq_api_keys_secret_sha256": "this API key exists already",
    "pk_ledger_entries": "an entry of this number stands in the journal already",
    "uq_ledger_entries_transfer_id": "a transfer of this id stands in the journal already",
    # SQLite does not say which.
    "FOREIGN KEY constraint failed": "what the row refers to does not exist",
    "ck_api_keys_role": "the role of an API key is tenant or admin",
}

NEXT_BOOT = (
    boots.insert()
    .from_select(
        ["number", "started_at_ms"],
        sa.select(sa.func.coalesce(sa.func.max(boots.c.number), 0) + 1, sa.bindparam("now_ms", type_=sa.BigInteger)),
    )
    .returning(boots.c.number)
)

# An id wins over a name, so that an owner cannot name itself after another's id.
FIND_OWNER = (
    sa.select(owners)
    .where(sa.or_(owners.c.owner_id == sa.bindparam("name_or_id"), owners.c.name == sa.bindparam("name_or_id")))
    .order_by(sa.case((owners.c.owner_id == sa.bindparam("name_or_id"), 0), else_=1))
    .limit(1)
)

FIND_TOKEN = sa.select(join_tokens).where(join_tokens.c.token_id == sa.bindparam("token"))

FIND_NODE = sa.select(nodes).where(nodes.c.node_id == sa.bindparam("node"))

FIND_KEY = sa.select(api_keys).where(api_keys.c.secret_sha256 == sa.bindparam("secret_sha256"))

FIND_TASK = sa.select(tasks).where(tasks.c.task_id == sa.bindparam("task"))

# The node is the one whose attempt it was, and what it said first stands.
ADD_LATE_STATEMENT = (
    sa.update(attempts)
    .where(
        attempts.c.task_id == sa.bindparam("late_task_id"),
        attempts.c.attempt == sa.bindparam("late_attempt"),
        attempts.c.node_id == sa.bindparam("late_node_id"),
        attempts.c.statement.is_(None),
    )
    .values(
        statement=sa.bindparam("late_statement"),
        energy_mj=sa.bindparam("late_energy_mj"),
        energy_method=sa.bindparam("late_energy_method"),
    )
)
FIND_ATTEMPTS = sa.select(attempts).where(attempts.c.task_id == sa.bindparam("task")).order_by(attempts.c.attempt)

FIND_TRANSFER = sa.select(ledger_entries).where(ledger_entries.c.transfer_id == sa.bindparam("transfer"))

LEDGER_OF_TASK = (
    sa.select(ledger_entries)
    .where(ledger_entries.c.task_id == sa.bindparam("task"))
    .order_by(ledger_entries.c.sequence)
)

# The race for a token is decided here: whoever's UPDATE finds it unused has consumed it.
CONSUME_TOKEN = (
    join_tokens.update()
    .where(
        join_tokens.c.token_id == sa.bindparam("token"),
        join_tokens.c.used_at_ms.is_(None),
        join_tokens.c.expires_at_ms > sa.bindparam("now_ms"),
    )
    .values(used_at_ms=sa.bindparam("now_ms"), used_by=sa.bindparam("node"))
)

RENEW_CERTIFICATE = (
    nodes.update()
    .where(nodes.c.node_id == sa.bindparam("node"), nodes.c.banned_at_ms.is_(None))
    .values(certificate_serial=sa.bindparam("serial"), certificate_not_after_ms=sa.bindparam("not_after_ms"))
)

# The first ban stands: its time and reason are evidence.
BAN_NODE = (
    nodes.update()
    .where(nodes.c.node_id == sa.bindparam("node"), nodes.c.banned_at_ms.is_(None))
    .values(banned_at_ms=sa.bindparam("now_ms"), ban_reason=sa.bindparam("reason"))
)

SET_DRAINING = (
    nodes.update().where(nodes.c.node_id == sa.bindparam("node")).values(draining=sa.bindparam("is_draining"))
)

REVOKE_KEY = (
    api_keys.update()
    .where(api_keys.c.key_id == sa.bindparam("key"))
    # Revoking twice keeps the first time.
    .values(revoked_at_ms=sa.func.coalesce(api_keys.c.revoked_at_ms, sa.bindparam("now_ms", type_=sa.BigInteger)))
    .returning(*api_keys.c)
)

USAGE = sa.select(
    sa.func.count(),
    sa.func.coalesce(sa.func.sum(tasks.c.prompt_tokens), 0),
    sa.func.coalesce(sa.func.sum(tasks.c.completion_tokens), 0),
).where(tasks.c.tenant_id == sa.bindparam("tenant"))

Insert = sqlite.Insert | postgresql.Insert


def insert(dialect: str, table: sa.Table) -> Insert:
    """Return an INSERT that knows ON CONFLICT, which both dialects spell alike."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def upsert_model(dialect: str) -> Insert:
    statement = insert(dialect, models)
    return statement.on_conflict_do_update(
        index_elements=["manifest_digest"], set_={"tokenizer_directory": statement.excluded.tokenizer_directory}
    )


def upsert_account(dialect: str) -> Insert:
    statement = insert(dialect, ledger_accounts)
    return statement.on_conflict_do_update(
        index_elements=["account"],
        set_={"balance_micro": statement.excluded.balance_micro, "opened_at_ms": statement.excluded.opened_at_ms},
    )


def record_once(dialect: str, table: sa.Table) -> Insert:
    """Return an INSERT that leaves a row alone which is there already."""
    return insert(dialect, table).on_conflict_do_nothing()


def replace(dialect: str, table: sa.Table, *columns: str) -> Insert:
    """Return an INSERT that sets these columns of a row that is there already."""
    statement = insert(dialect, table)
    return statement.on_conflict_do_update(
        index_elements=[column.name for column in table.primary_key.columns],
        set_={name: statement.excluded[name] for name in columns},
    )
