"""What a node says that an attempt drew. The release before writes rows without it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("energy_mj", sa.BigInteger))
    op.add_column("attempts", sa.Column("energy_method", sa.Text))
