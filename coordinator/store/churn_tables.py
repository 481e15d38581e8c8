"""The table of the churn model in the coordinator's database, and the methods of the store on it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, TypeVar

import sqlalchemy as sa

from coordinator.store import queries
from coordinator.store.churn_port import ChurnRow

churn = sa.Table(
    "churn",
    queries.metadata,
    sa.Column("node_id", sa.Text, primary_key=True),
    sa.Column("lent_h", sa.LargeBinary, nullable=False),
    sa.Column("lost", sa.LargeBinary, nullable=False),
    sa.Column("as_of_ms", sa.BigInteger, nullable=False),
)

_RowType = TypeVar("_RowType")


class ChurnTables(ABC):
    """Keeps to `coordinator.store.churn_port.ChurnStore`; a part of `SqlStore`."""

    @abstractmethod
    def _write(self) -> AbstractContextManager[sa.Connection]: ...

    @abstractmethod
    def _select(self, kind: type[_RowType], statement: sa.Select[Any], **parameters: object) -> list[_RowType]: ...

    def put_churn_histories(self, rows: Sequence[ChurnRow]) -> None:
        with self._write() as connection:
            statement = queries.replace(connection.dialect.name, churn, "lent_h", "lost", "as_of_ms")
            connection.execute(statement, [asdict(row) for row in rows])

    def churn_histories(self) -> list[ChurnRow]:
        return self._select(ChurnRow, sa.select(churn).order_by(churn.c.node_id))
