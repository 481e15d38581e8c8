"""What the order of an attempt paid. The release before writes rows without it."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("ask_prompt_micro", sa.BigInteger))
    op.add_column("attempts", sa.Column("ask_completion_micro", sa.BigInteger))
