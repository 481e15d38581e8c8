"""The hashes of the ledger's log in the coordinator's database."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from coordinator.store import queries
from protos.merkle import Position

_SIZE = sa.select(sa.func.coalesce(sa.func.max(queries.log_hashes.c.place) + 1, 0)).where(
    queries.log_hashes.c.level == 0
)
_SELECT = sa.select(queries.log_hashes).where(
    sa.tuple_(queries.log_hashes.c.level, queries.log_hashes.c.place).in_(sa.bindparam("positions", expanding=True))
)


def insert_hashes(connection: sa.Connection, hashes: Mapping[Position, bytes]) -> None:
    """Add hashes, in the transaction that adds the entries below them.

    A hash that is there already is an IntegrityError: somebody else has
    appended to this log meanwhile, and the transaction must not be committed.
    """
    rows = [{"level": level, "place": place, "hash": value} for (level, place), value in hashes.items()]
    if rows:
        connection.execute(queries.log_hashes.insert(), rows)


def count_entries(connection: sa.Connection) -> int:
    """Return the number of entries whose hashes are stored."""
    return int(connection.execute(_SIZE).scalar_one())


def select_hashes(connection: sa.Connection, positions: Sequence[Position]) -> list[bytes]:
    """Return the hashes at these positions, in this order, with one query.

    Raises:
        KeyError: one of them is not stored.
    """
    if not positions:
        return []
    rows = connection.execute(_SELECT, {"positions": [tuple(position) for position in positions]})
    found = {Position(row.level, row.place): row.hash for row in rows}
    return [found[position] for position in positions]
