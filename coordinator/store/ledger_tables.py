"""The journal and the balances in the coordinator's database: what the ledger's methods of the store execute."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from coordinator.store import queries
from coordinator.store.log_hashes import insert_hashes
from coordinator.store.port import AccountRow, LedgerRow
from protos.merkle import Position


def append(
    connection: sa.Connection,
    entries: Sequence[LedgerRow],
    accounts: Sequence[AccountRow],
    closed: Sequence[str],
    hashes: Mapping[Position, bytes],
) -> None:
    """Write entries, the balances after them, and their hashes; for one transaction.

    A number or an id that is there already is an IntegrityError: the journal is never changed.
    """
    table = queries.ledger_accounts
    if entries:
        connection.execute(queries.ledger_entries.insert(), [asdict(row) for row in entries])
    if accounts:
        connection.execute(queries.upsert_account(connection.dialect.name), [asdict(row) for row in accounts])
    if closed:
        delete = table.delete().where(table.c.account == sa.bindparam("closed"))
        connection.execute(delete, [{"closed": name} for name in closed])
    insert_hashes(connection, hashes)


def page(from_sequence: int, limit: int, tenant_id: str | None) -> sa.Select[Any]:
    """Return the query for entries in their order, of one tenant or of all."""
    table = queries.ledger_entries
    statement = sa.select(table).where(table.c.sequence >= from_sequence).order_by(table.c.sequence).limit(limit)
    return statement if tenant_id is None else statement.where(table.c.tenant_id == tenant_id)
