"""The log's hashes on SQLite and on PostgreSQL: what is committed is proven, what is not is gone."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.exc import IntegrityError

from coordinator.ledger.log import TransparencyLog
from coordinator.store.log_hashes import insert_hashes, select_hashes
from coordinator.store.sql import SqlStore
from coordinator.store.testing import postgres_server
from protos.checkpoint import open_checkpoint, verify_growth
from protos.merkle import Position
from protos.receipt import open_receipt

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = [KEY.public_key().public_bytes_raw()]
ENTRIES = [b"entry %d" % number for number in range(1000)]


@dataclass(frozen=True)
class Database:
    url: str
    store: SqlStore
    # Of one's own, to write with: nothing but the ledger's service appends in the coordinator.
    engine: sa.Engine


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        yield from opened(f"sqlite:///{tmp_path / 'coordinator.db'}")
        return
    with postgres_server() as url:
        yield from opened(url)


def opened(url: str) -> Iterator[Database]:
    store = SqlStore(url)
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    yield Database(url, store, engine)
    engine.dispose()
    store.close()


def append(database: Database, log: TransparencyLog, entries: Sequence[bytes]) -> None:
    extension = log.extended_by(entries)
    with database.engine.begin() as connection:
        insert_hashes(connection, extension.made)
    log.committed(extension)


def test_receipts_and_proofs_from_the_database_hold_before_and_after_a_restart(database: Database) -> None:
    log = TransparencyLog("cluster-1", KEY, database.store)
    append(database, log, ENTRIES[:700])
    seen = open_checkpoint(log.checkpoint, KEYS)
    append(database, log, ENTRIES[700:])
    for one in (log, TransparencyLog("cluster-1", KEY, database.store)):
        wanted = [(index, ENTRIES[index]) for index in (0, 699, 700, 999)]
        proven = [open_receipt(receipt, KEYS) for receipt in one.receipts(wanted)]
        assert [(entry.index, entry.entry) for entry in proven] == wanted
        update = one.update(seen.size)
        verify_growth(seen, open_checkpoint(update.checkpoint, KEYS), update.consistency_proof)


def test_a_transaction_that_is_rolled_back_leaves_no_hash(database: Database) -> None:
    log = TransparencyLog("cluster-1", KEY, database.store)
    with database.engine.connect() as connection:
        insert_hashes(connection, log.extended_by([b"a"]).made)
        connection.rollback()
    append(database, log, [b"b"])
    [receipt] = log.receipts([(0, b"b")])
    assert open_receipt(receipt, KEYS).entry == b"b"


def test_two_writers_of_one_log_cannot_both_commit(database: Database) -> None:
    # Mutation: ON CONFLICT DO NOTHING, the second writer signs a log that the database does not hold.
    first = TransparencyLog("cluster-1", KEY, database.store)
    second = TransparencyLog("cluster-1", KEY, database.store)
    append(database, first, [b"a"])
    with pytest.raises(IntegrityError):
        append(database, second, [b"b"])
    assert second.size == 0


def test_what_is_not_stored_is_a_key_error_and_nothing_is_nothing(database: Database) -> None:
    with database.engine.begin() as connection:
        insert_hashes(connection, {})
        assert select_hashes(connection, []) == []
        with pytest.raises(KeyError):
            select_hashes(connection, [Position(0, 0)])


def test_a_group_commit_of_hashes_takes_a_small_part_of_its_five_milliseconds(database: Database) -> None:
    # 5,000 entries a second in commits of 5 ms are 25 entries each; the bound leaves room for a busy machine.
    log = TransparencyLog("cluster-1", KEY, database.store)
    began = time.process_time()
    for start in range(0, 1000, 25):
        append(database, log, ENTRIES[start : start + 25])
    assert (time.process_time() - began) / 40 < 0.005
