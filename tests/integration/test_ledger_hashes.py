"""The log's hashes on SQLite and on PostgreSQL: what is committed is proven, what is not is gone."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.exc import IntegrityError

from coordinator.ledger.hash_table import insert_hashes, select_hashes
from coordinator.ledger.log import TransparencyLog
from coordinator.store.sql import SqlStore
from coordinator.store.testing import postgres_server
from protos.checkpoint import open_checkpoint, verify_growth
from protos.merkle import Position
from protos.receipt import open_receipt

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = [KEY.public_key().public_bytes_raw()]
ENTRIES = [b"entry %d" % number for number in range(1000)]


class Hashes:
    """Reads as the coordinator's store does: a connection of its own for each call."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def get(self, positions: Sequence[Position]) -> list[bytes]:
        with self._engine.connect() as connection:
            return select_hashes(connection, positions)


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    if request.param == "sqlite":
        yield from migrated(f"sqlite:///{tmp_path / 'coordinator.db'}")
        return
    with postgres_server() as url:
        yield from migrated(url)


def migrated(url: str) -> Iterator[sa.Engine]:
    SqlStore(url).close()
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


def append(engine: sa.Engine, log: TransparencyLog, entries: Sequence[bytes]) -> None:
    extension = log.extended_by(entries)
    with engine.begin() as connection:
        insert_hashes(connection, extension.made)
    log.committed(extension)


def test_receipts_and_proofs_from_the_database_hold_before_and_after_a_restart(engine: sa.Engine) -> None:
    log = TransparencyLog("cluster-1", KEY, Hashes(engine), 0)
    append(engine, log, ENTRIES[:700])
    seen = open_checkpoint(log.checkpoint, KEYS)
    append(engine, log, ENTRIES[700:])
    for one in (log, TransparencyLog("cluster-1", KEY, Hashes(engine), len(ENTRIES))):
        for index in (0, 699, 700, 999):
            assert open_receipt(one.receipt(index, ENTRIES[index]), KEYS).index == index
        update = one.update(seen.size)
        verify_growth(seen, open_checkpoint(update.checkpoint, KEYS), update.consistency_proof)


def test_a_transaction_that_is_rolled_back_leaves_no_hash(engine: sa.Engine) -> None:
    log = TransparencyLog("cluster-1", KEY, Hashes(engine), 0)
    with engine.connect() as connection:
        insert_hashes(connection, log.extended_by([b"a"]).made)
        connection.rollback()
    append(engine, log, [b"b"])
    assert open_receipt(log.receipt(0, b"b"), KEYS).entry == b"b"


def test_two_writers_of_one_log_cannot_both_commit(engine: sa.Engine) -> None:
    # Mutation: ON CONFLICT DO NOTHING, the second writer signs a log that the database does not hold.
    first = TransparencyLog("cluster-1", KEY, Hashes(engine), 0)
    second = TransparencyLog("cluster-1", KEY, Hashes(engine), 0)
    append(engine, first, [b"a"])
    with pytest.raises(IntegrityError):
        append(engine, second, [b"b"])
    assert second.size == 0


def test_what_is_not_stored_is_a_key_error_and_nothing_is_nothing(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        insert_hashes(connection, {})
        assert select_hashes(connection, []) == []
        with pytest.raises(KeyError):
            select_hashes(connection, [Position(0, 0)])


def test_a_group_commit_of_hashes_takes_a_small_part_of_its_five_milliseconds(engine: sa.Engine) -> None:
    # 5,000 entries a second in commits of 5 ms are 25 entries each; the bound leaves room for a busy machine.
    log = TransparencyLog("cluster-1", KEY, Hashes(engine), 0)
    began = time.process_time()
    for start in range(0, 1000, 25):
        append(engine, log, ENTRIES[start : start + 25])
    assert (time.process_time() - began) / 40 < 0.005
