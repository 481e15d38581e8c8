"""How long nodes were lent, and how often they were lost meanwhile."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "churn",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("lent_h", sa.LargeBinary, nullable=False),
        sa.Column("lost", sa.LargeBinary, nullable=False),
        sa.Column("as_of_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("node_id", name="pk_churn"),
    )
