"""What nodes did with models when they were measured."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rates",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("manifest_digest", sa.Text, nullable=False),
        sa.Column("streams", sa.Integer, nullable=False),
        sa.Column("engine_build", sa.Text, nullable=False),
        sa.Column("tokens_per_second", sa.Double, nullable=False),
        sa.Column("first_token_ms", sa.BigInteger, nullable=False),
        sa.Column("joules_per_token", sa.Double, nullable=False),
        sa.Column("energy_method", sa.Text, nullable=False),
        sa.Column("measured_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("node_id", "manifest_digest", "streams", name="pk_rates"),
    )
