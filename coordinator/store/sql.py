"""The store on SQLite and PostgreSQL: one code, SQLAlchemy Core, no ORM.

SQLite runs in WAL mode with synchronous=FULL: a row that says "this token is
used" or "this node is banned" must survive a power cut, and commits are few,
since accounting comes in batches. A write begins with BEGIN IMMEDIATE, so that
two writers wait for each other (BUSY_TIMEOUT_MS) instead of failing half-way.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util.exc import CommandError
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from coordinator.store import ledger_tables, queries
from coordinator.store.churn_tables import ChurnTables
from coordinator.store.log_hashes import count_entries, select_hashes
from coordinator.store.port import (
    AccountRow,
    ApiKeyRow,
    AttemptRow,
    Conflict,
    JoinTokenRow,
    LateStatementRow,
    LedgerRow,
    ModelRow,
    NodeRow,
    OwnerRow,
    StoreError,
    TaskRow,
    Usage,
)
from coordinator.store.verification_tables import VerificationTables
from inference.task import NodeId, TaskId, TenantId
from protos.merkle import Position

MIGRATIONS = Path(__file__).parent / "migrations"
# A write takes milliseconds; whoever waits longer than this waits for a backup or a stuck process.
BUSY_TIMEOUT_MS = 5_000

_SQLITE_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check that its directory exists and who owns it",
    sqlite3.SQLITE_READONLY: "the file cannot be written; check owner and mode of the file and its directory",
    sqlite3.SQLITE_BUSY: "another process holds it; stop that process, or wait",
    sqlite3.SQLITE_IOERR: "the disk fails to read or write; check the disk and its free space",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore it from a backup",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database; check the path",
}

_RowType = TypeVar("_RowType")


class SqlStore(VerificationTables, ChurnTables):
    """Keeps to `coordinator.store.port.Store`; safe to call from several threads."""

    def __init__(self, url: str) -> None:
        """Open the database and bring its schema up to date.

        Raises:
            StoreError: it cannot be opened or written, or a newer release wrote it.
        """
        self._url = _parse_url(url)
        self._where = self._url.render_as_string(hide_password=True)
        self._engine = _make_engine(self._url)
        # The same pool; the mark makes SQLite begin a read instead of a write.
        self._reader = self._engine.execution_options(slackwater_reads=True)
        try:
            self._migrate()
        except BaseException:
            self._engine.dispose()
            raise

    def close(self) -> None:
        self._engine.dispose()

    def open_boot(self, now_ms: int) -> int:
        with self._write() as connection:
            return int(connection.execute(queries.NEXT_BOOT, {"now_ms": now_ms}).scalar_one())

    def cluster_id(self) -> str:
        with self._read() as connection:
            return str(connection.execute(sa.select(queries.cluster.c.cluster_id)).scalar_one())

    def add_owner(self, owner: OwnerRow) -> None:
        self._insert(queries.owners, owner)

    def owners(self) -> list[OwnerRow]:
        return self._select(OwnerRow, sa.select(queries.owners).order_by(queries.owners.c.created_at_ms))

    def find_owner(self, name_or_id: str) -> OwnerRow | None:
        return self._find(OwnerRow, queries.FIND_OWNER, name_or_id=name_or_id)

    def add_join_token(self, token: JoinTokenRow) -> None:
        self._insert(queries.join_tokens, token)

    def find_join_token(self, token_id: str) -> JoinTokenRow | None:
        return self._find(JoinTokenRow, queries.FIND_TOKEN, token=token_id)

    def enrol_node(self, node: NodeRow, token_id: str, now_ms: int) -> bool:
        with self._write() as connection:
            consumed = connection.execute(
                queries.CONSUME_TOKEN, {"token": token_id, "now_ms": now_ms, "node": node.node_id}
            )
            if consumed.rowcount != 1:
                return False
            connection.execute(queries.nodes.insert(), asdict(node))
            return True

    def nodes(self) -> list[NodeRow]:
        return self._select(NodeRow, sa.select(queries.nodes).order_by(queries.nodes.c.enrolled_at_ms))

    def find_node(self, node_id: NodeId) -> NodeRow | None:
        return self._find(NodeRow, queries.FIND_NODE, node=node_id)

    def renew_certificate(self, node_id: NodeId, serial: str, not_after_ms: int) -> bool:
        return self._update(queries.RENEW_CERTIFICATE, node=node_id, serial=serial, not_after_ms=not_after_ms)

    def ban_node(self, node_id: NodeId, reason: str, now_ms: int) -> bool:
        if self._update(queries.BAN_NODE, node=node_id, reason=reason, now_ms=now_ms):
            return True
        return self.find_node(node_id) is not None

    def set_draining(self, node_id: NodeId, draining: bool) -> bool:
        return self._update(queries.SET_DRAINING, node=node_id, is_draining=draining)

    def add_api_key(self, key: ApiKeyRow) -> None:
        self._insert(queries.api_keys, key)

    def api_keys(self) -> list[ApiKeyRow]:
        return self._select(ApiKeyRow, sa.select(queries.api_keys).order_by(queries.api_keys.c.created_at_ms))

    def find_api_key(self, secret_sha256: bytes) -> ApiKeyRow | None:
        return self._find(ApiKeyRow, queries.FIND_KEY, secret_sha256=secret_sha256)

    def revoke_api_key(self, key_id: TenantId, now_ms: int) -> ApiKeyRow | None:
        if not _storable(key_id):
            return None
        with self._write() as connection:
            row = connection.execute(queries.REVOKE_KEY, {"key": key_id, "now_ms": now_ms}).mappings().one_or_none()
            return None if row is None else ApiKeyRow(**row)

    def add_model(self, model: ModelRow) -> None:
        with self._write() as connection:
            connection.execute(queries.upsert_model(connection.dialect.name), asdict(model))

    def models(self) -> list[ModelRow]:
        return self._select(ModelRow, sa.select(queries.models).order_by(queries.models.c.created_at_ms))

    def record(self, tasks: Sequence[TaskRow], attempts: Sequence[AttemptRow]) -> None:
        with self._write() as connection:
            dialect = connection.dialect.name
            if tasks:
                connection.execute(queries.record_once(dialect, queries.tasks), [asdict(row) for row in tasks])
            if attempts:
                connection.execute(queries.record_once(dialect, queries.attempts), [asdict(row) for row in attempts])

    def add_late_statements(self, rows: Sequence[LateStatementRow]) -> None:
        with self._write() as connection:
            # An update binds its values and its conditions in one namespace.
            bound = [{f"late_{name}": value for name, value in asdict(row).items()} for row in rows]
            connection.execute(queries.ADD_LATE_STATEMENT, bound)

    def attempts(self, task_id: TaskId) -> list[AttemptRow]:
        return self._select(AttemptRow, queries.FIND_ATTEMPTS, task=task_id)

    def find_task(self, task_id: TaskId) -> TaskRow | None:
        return self._find(TaskRow, queries.FIND_TASK, task=task_id)

    def usage(self, tenant_id: TenantId) -> Usage:
        with self._read() as connection:
            tasks, prompt_tokens, completion_tokens = connection.execute(queries.USAGE, {"tenant": tenant_id}).one()
            # PostgreSQL sums 64-bit integers as decimals.
            return Usage(int(tasks), int(prompt_tokens), int(completion_tokens))

    def append_ledger(
        self,
        entries: Sequence[LedgerRow],
        accounts: Sequence[AccountRow],
        closed: Sequence[str],
        hashes: Mapping[Position, bytes],
    ) -> None:
        with self._write() as connection:
            ledger_tables.append(connection, entries, accounts, closed, hashes)

    def ledger_accounts(self) -> list[AccountRow]:
        return self._select(AccountRow, sa.select(queries.ledger_accounts))

    def ledger_page(self, from_sequence: int, limit: int, tenant_id: TenantId | None = None) -> list[LedgerRow]:
        return self._select(LedgerRow, ledger_tables.page(from_sequence, limit, tenant_id))

    def ledger_of_task(self, task_id: TaskId) -> list[LedgerRow]:
        return self._select(LedgerRow, queries.LEDGER_OF_TASK, task=task_id)

    def find_transfer(self, transfer_id: str) -> LedgerRow | None:
        return self._find(LedgerRow, queries.FIND_TRANSFER, transfer=transfer_id)

    def log_size(self) -> int:
        with self._read() as connection:
            return count_entries(connection)

    def log_hashes(self, positions: Sequence[Position]) -> list[bytes]:
        with self._read() as connection:
            return select_hashes(connection, positions)

    def _insert(self, table: sa.Table, row: OwnerRow | JoinTokenRow | ApiKeyRow) -> None:
        with self._write() as connection:
            connection.execute(table.insert(), asdict(row))

    def _update(self, statement: sa.Update, **parameters: object) -> bool:
        if not _storable(*parameters.values()):
            return False
        with self._write() as connection:
            return connection.execute(statement, parameters).rowcount == 1

    def _select(self, kind: type[_RowType], statement: sa.Select[Any], **parameters: object) -> list[_RowType]:
        if not _storable(*parameters.values()):
            return []
        with self._read() as connection:
            return [kind(**row) for row in connection.execute(statement, parameters).mappings()]

    def _find(self, kind: type[_RowType], statement: sa.Select[Any], **parameters: object) -> _RowType | None:
        if not _storable(*parameters.values()):
            return None
        with self._read() as connection:
            row = connection.execute(statement, parameters).mappings().one_or_none()
            return None if row is None else kind(**row)

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        with self._translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        with self._translated(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError as error:
            raise Conflict(_conflict(error)) from error
        except DBAPIError as error:
            raise StoreError(f"cannot use the database {self._where}: {_advice(error)}") from error

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with self._write() as connection:
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except (CommandError, ResolutionError) as error:
                known = ScriptDirectory.from_config(config).get_current_head()
                raise StoreError(
                    f"the database {self._where} has a schema that this release does not know "
                    f"(it knows up to {known}): a newer release wrote it; start that release, or restore a backup"
                ) from error


def _storable(*values: object) -> bool:
    """Return whether the values can stand in a row; PostgreSQL's text has no NUL, so no row has such an id."""
    return not any(isinstance(value, str) and "\0" in value for value in values)


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError("the database URL cannot be read; use sqlite:////path/file.db or postgresql://...") from error
    match parsed.get_backend_name():
        case "sqlite":
            if not parsed.database or parsed.database == ":memory:":
                raise StoreError("an SQLite URL must name a file: sqlite:////var/lib/slackwater/coordinator.db")
            return parsed.set(drivername="sqlite+pysqlite")
        case "postgresql" | "postgres":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise StoreError(f"the database URL names {other!r}; sqlite and postgresql are supported")


def _make_engine(url: URL) -> sa.Engine:
    if url.get_backend_name() == "postgresql":
        try:
            # A connection that the server has closed meanwhile is replaced, not reported.
            return sa.create_engine(url, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise StoreError("PostgreSQL needs psycopg: pip install 'slackwater-network[postgres]'") from error
    assert url.database is not None  # _parse_url
    _create_private(Path(url.database))
    engine = sa.create_engine(url)
    sa.event.listen(engine, "connect", _configure_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _create_private(path: Path) -> None:
    """Create the file as 0600 where it is missing; SQLite would follow the umask."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreError(f"cannot open the database {path}: {error.strerror}; check its directory and owner") from error


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # Transactions begin where _begin_sqlite says, schema changes included.
    connection.isolation_level = None
    cursor = connection.cursor()
    # First: switching to WAL may have to wait for another process.
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    reads = connection.get_execution_options().get("slackwater_reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _conflict(error: IntegrityError) -> str:
    name = _constraint_name(error.orig)
    return queries.CONFLICTS.get(name, f"the change breaks a rule of the database ({name})")


def _constraint_name(cause: object) -> str:
    """Return the name of the violated constraint; SQLite names columns instead, which the tables translate."""
    diagnostics = getattr(cause, "diag", None)
    if diagnostics is not None:
        return str(diagnostics.constraint_name)
    text = str(cause)
    kind, _, what = text.partition(" constraint failed: ")
    if kind == "CHECK":
        return what
    columns = [part.strip().rpartition(".") for part in what.split(",")]
    table = queries.metadata.tables.get(columns[0][0])
    if table is None:
        return text
    names = {column for _, _, column in columns}
    for constraint in table.constraints:
        if (
            isinstance(constraint, sa.UniqueConstraint | sa.PrimaryKeyConstraint)
            and set(constraint.columns.keys()) == names
        ):
            return str(constraint.name)
    return text


def _advice(error: DBAPIError) -> str:
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        # The low byte is the primary code, the rest says more than an operator needs.
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        return f"{cause}: {_SQLITE_ADVICE.get(code, 'see the message')}"
    first_line = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return f"{first_line}: check that the server runs, has disk space, and that the URL is right"
