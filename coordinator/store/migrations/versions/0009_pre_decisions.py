"""Why an attempt went where it went, what was expected and what came. The release before writes rows without it."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("engine_id", sa.Text))
    op.add_column("attempts", sa.Column("why", sa.Text))
    op.add_column("attempts", sa.Column("cost_micro", sa.BigInteger))
    op.add_column("attempts", sa.Column("expected_first_token_ms", sa.Double))
    op.add_column("attempts", sa.Column("expected_token_ms", sa.Double))
    op.add_column("attempts", sa.Column("tail", sa.Double))
    op.add_column("attempts", sa.Column("first_token_ms", sa.Double))
