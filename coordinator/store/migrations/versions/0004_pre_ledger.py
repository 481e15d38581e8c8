"""The journal of the ledger, and the balances that follow from it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ledger_entries",
        sa.Column("sequence", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("transfer_id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_ledger_entries"),
        sa.UniqueConstraint("transfer_id", name="uq_ledger_entries_transfer_id"),
    )
    op.create_index("ix_ledger_entries_task_id", "ledger_entries", ["task_id"])
    op.create_index("ix_ledger_entries_tenant_id_sequence", "ledger_entries", ["tenant_id", "sequence"])
    op.create_table(
        "ledger_accounts",
        sa.Column("account", sa.Text, nullable=False),
        sa.Column("balance_micro", sa.BigInteger, nullable=False),
        sa.Column("opened_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("account", name="pk_ledger_accounts"),
    )
