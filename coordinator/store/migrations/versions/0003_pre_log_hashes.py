"""The hashes of the ledger's log."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "log_hashes",
        sa.Column("level", sa.SmallInteger, autoincrement=False, nullable=False),
        sa.Column("place", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("level", "place", name="pk_log_hashes"),
    )
