"""Audits, verdicts, the standing of nodes that follows from them, and the modes of the rules."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audits",
        sa.Column("audit_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("manifest_digest", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("verifier", sa.Text, nullable=False),
        sa.Column("counted", sa.Boolean, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("log_evidence", sa.Double, nullable=False),
        sa.Column("hard", sa.Text),
        sa.Column("not_measured", sa.Text),
        sa.Column("confirms", sa.Text),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name="pk_audits"),
    )
    op.create_table(
        "verdicts",
        sa.Column("verdict_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("owner_id", sa.Text, nullable=False),
        sa.Column("manifest_digest", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("previous", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("audit_ids", sa.Text, nullable=False),
        sa.Column("log_evidence", sa.Double, nullable=False),
        sa.Column("shadow", sa.Boolean, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("verdict_id", name="pk_verdicts"),
    )
    op.create_index("ix_verdicts_node_id_at_ms", "verdicts", ["node_id", "at_ms"])
    op.create_table(
        "standing",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("manifest_digest", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node_id", "manifest_digest", name="pk_standing"),
    )
    op.create_table(
        "verification_modes",
        sa.Column("rule", sa.Text, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("rule", name="pk_verification_modes"),
    )
