"""The first tables, and the id of the cluster.

Written out instead of taken from queries.py, since a migration never changes
while the tables do. Files are named NNNN_{pre|post}_slug: a `pre` migration
runs before the code that needs it, and the release before must still work on
the new schema.
"""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    cluster = op.create_table(
        "cluster",
        sa.Column("cluster_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("cluster_id", name="pk_cluster"),
    )
    # Lower case and digits: it is the trust domain of the nodes' SPIFFE ids.
    op.bulk_insert(cluster, [{"cluster_id": f"slackwater-{secrets.token_hex(6)}"}])
    op.create_table(
        "boots",
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("started_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_boots"),
    )
    _create_identities()
    _create_accounting()


def _create_identities() -> None:
    op.create_table(
        "owners",
        sa.Column("owner_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("trusted", sa.Boolean, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("owner_id", name="pk_owners"),
        sa.UniqueConstraint("name", name="uq_owners_name"),
    )
    op.create_table(
        "join_tokens",
        sa.Column("token_id", sa.Text, nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary, nullable=False),
        sa.Column("owner_id", sa.Text, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger, nullable=False),
        sa.Column("used_at_ms", sa.BigInteger),
        sa.Column("used_by", sa.Text),
        sa.PrimaryKeyConstraint("token_id", name="pk_join_tokens"),
        sa.ForeignKeyConstraint(["owner_id"], ["owners.owner_id"], name="fk_join_tokens_owner_id"),
    )
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("owner_id", sa.Text, nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("signing_public_key", sa.LargeBinary, nullable=False),
        sa.Column("key_epoch", sa.Integer, nullable=False),
        sa.Column("certificate_serial", sa.Text, nullable=False),
        sa.Column("certificate_not_after_ms", sa.BigInteger, nullable=False),
        sa.Column("enrolled_at_ms", sa.BigInteger, nullable=False),
        sa.Column("banned_at_ms", sa.BigInteger),
        sa.Column("ban_reason", sa.Text),
        sa.Column("draining", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("node_id", name="pk_nodes"),
        sa.ForeignKeyConstraint(["owner_id"], ["owners.owner_id"], name="fk_nodes_owner_id"),
        sa.UniqueConstraint("signing_public_key", name="uq_nodes_signing_public_key"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("revoked_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.UniqueConstraint("secret_sha256", name="uq_api_keys_secret_sha256"),
        sa.CheckConstraint("role IN ('tenant', 'admin')", name="ck_api_keys_role"),
    )


def _create_accounting() -> None:
    op.create_table(
        "models",
        sa.Column("manifest_digest", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("envelope", sa.LargeBinary, nullable=False),
        sa.Column("tokenizer_directory", sa.Text, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("manifest_digest", name="pk_models"),
    )
    op.create_table(
        "tasks",
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("manifest_digest", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("submitted_at_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("task_id", name="pk_tasks"),
    )
    op.create_index("ix_tasks_tenant_id", "tasks", ["tenant_id"])
    op.create_table(
        "attempts",
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("lease_epoch", sa.BigInteger, nullable=False),
        sa.Column("first_index", sa.BigInteger, nullable=False),
        sa.Column("delivered_tokens", sa.BigInteger, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("statement", sa.LargeBinary),
        sa.Column("started_at_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("task_id", "attempt", name="pk_attempts"),
    )
