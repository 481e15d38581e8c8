"""The tables of verification in the coordinator's database, and the methods of the store on them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, TypeVar

import sqlalchemy as sa

from coordinator.store import queries
from coordinator.store.verification_port import (
    VERDICTS_MAX,
    AuditRow,
    ModeRow,
    RateRow,
    StandingRow,
    VerdictRow,
    VerificationBatch,
)
from inference.task import NodeId

audits = sa.Table(
    "audits",
    queries.metadata,
    sa.Column("audit_id", sa.Text, primary_key=True),
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
)

verdicts = sa.Table(
    "verdicts",
    queries.metadata,
    sa.Column("verdict_id", sa.Text, primary_key=True),
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
    sa.Index(None, "node_id", "at_ms"),
)

standing = sa.Table(
    "standing",
    queries.metadata,
    sa.Column("node_id", sa.Text, primary_key=True),
    # Empty for the node as a whole.
    sa.Column("manifest_digest", sa.Text, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)

verification_modes = sa.Table(
    "verification_modes",
    queries.metadata,
    sa.Column("rule", sa.Text, primary_key=True),
    sa.Column("mode", sa.Text, nullable=False),
)

rates = sa.Table(
    "rates",
    queries.metadata,
    sa.Column("node_id", sa.Text, primary_key=True),
    sa.Column("manifest_digest", sa.Text, primary_key=True),
    sa.Column("streams", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("engine_build", sa.Text, nullable=False),
    sa.Column("tokens_per_second", sa.Double, nullable=False),
    sa.Column("first_token_ms", sa.BigInteger, nullable=False),
    sa.Column("joules_per_token", sa.Double, nullable=False),
    sa.Column("energy_method", sa.Text, nullable=False),
    sa.Column("measured_at_ms", sa.BigInteger, nullable=False),
)

_VERDICTS_OF = (
    sa.select(verdicts)
    .where(verdicts.c.node_id == sa.bindparam("node"))
    # Verdicts of one moment in an order that stays.
    .order_by(verdicts.c.at_ms.desc(), verdicts.c.verdict_id)
    .limit(VERDICTS_MAX)
)
_FIND_VERDICT = sa.select(verdicts).where(verdicts.c.verdict_id == sa.bindparam("verdict"))
_CHALLENGE_FINDINGS = (
    sa.select(audits)
    .where(
        audits.c.kind == "challenge",
        audits.c.hard.is_(None),
        # What takes a figure away names the card behind the challenge.
        audits.c.not_measured.is_(None) | audits.c.audit_id.like("challenge.%.%.%"),
        audits.c.at_ms >= sa.bindparam("since"),
    )
    .order_by(audits.c.at_ms, audits.c.audit_id)
)
_AUDITS_OF = (
    sa.select(audits)
    .where(audits.c.audit_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(audits.c.at_ms, audits.c.audit_id)
)

_RowType = TypeVar("_RowType")


class VerificationTables(ABC):
    """Keeps to `coordinator.store.verification_port.VerificationStore`; a part of `SqlStore`."""

    @abstractmethod
    def _write(self) -> AbstractContextManager[sa.Connection]: ...

    @abstractmethod
    def _select(self, kind: type[_RowType], statement: sa.Select[Any], **parameters: object) -> list[_RowType]: ...

    @abstractmethod
    def _find(self, kind: type[_RowType], statement: sa.Select[Any], **parameters: object) -> _RowType | None: ...

    def record_verification(self, batch: VerificationBatch) -> None:
        with self._write() as connection:
            dialect = connection.dialect.name
            for statement, rows in (
                (queries.record_once(dialect, audits), batch.audits),
                (queries.record_once(dialect, verdicts), batch.verdicts),
                (queries.replace(dialect, standing, "state", "body"), batch.standings),
                (queries.replace(dialect, verification_modes, "mode"), batch.modes),
            ):
                if rows:
                    connection.execute(statement, [asdict(row) for row in rows])

    def standings(self) -> list[StandingRow]:
        return self._select(StandingRow, sa.select(standing))

    def verification_modes(self) -> list[ModeRow]:
        return self._select(ModeRow, sa.select(verification_modes))

    def verdicts_of(self, node_id: NodeId) -> list[VerdictRow]:
        return self._select(VerdictRow, _VERDICTS_OF, node=node_id)

    def find_verdict(self, verdict_id: str) -> VerdictRow | None:
        return self._find(VerdictRow, _FIND_VERDICT, verdict=verdict_id)

    def challenge_findings(self, since_ms: int) -> list[AuditRow]:
        return self._select(AuditRow, _CHALLENGE_FINDINGS, since=since_ms)

    def put_rate(self, rate: RateRow) -> None:
        with self._write() as connection:
            measured = [column.name for column in rates.columns if not column.primary_key]
            connection.execute(queries.replace(connection.dialect.name, rates, *measured), asdict(rate))

    def rates(self) -> list[RateRow]:
        return self._select(RateRow, sa.select(rates).order_by(rates.c.measured_at_ms))

    def audits_of(self, audit_ids: Sequence[str]) -> list[AuditRow]:
        return self._select(AuditRow, _AUDITS_OF, ids=list(audit_ids)) if audit_ids else []
