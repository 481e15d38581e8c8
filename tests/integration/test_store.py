"""The store's promises, on SQLite and on PostgreSQL alike."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.store import queries
from coordinator.store.churn_port import ChurnRow
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
from coordinator.store.sql import SqlStore
from coordinator.store.testing import postgres_server
from coordinator.store.verification_port import AuditRow, ModeRow, RateRow, StandingRow, VerdictRow, VerificationBatch
from inference.task import ManifestDigest, NodeId, OwnerId, TaskId, TenantId
from protos.merkle import Position

OWNER = OwnerRow(owner_id=OwnerId("owner-1"), name="alice", trusted=True, created_at_ms=1)
TOKEN = JoinTokenRow(
    token_id="token-1",
    secret_sha256=b"s" * 32,
    owner_id=OWNER.owner_id,
    created_at_ms=1,
    expires_at_ms=1000,
    used_at_ms=None,
    used_by=None,
)
NODE = NodeRow(
    node_id=NodeId("node-1"),
    owner_id=OWNER.owner_id,
    label="attic",
    signing_public_key=b"k" * 32,
    key_epoch=1,
    certificate_serial="ff",
    certificate_not_after_ms=2**41,
    enrolled_at_ms=500,
    banned_at_ms=None,
    ban_reason=None,
    draining=False,
)
KEY = ApiKeyRow(
    key_id=TenantId("key-1"),
    name="app",
    role="tenant",
    secret_sha256=b"h" * 32,
    created_at_ms=1,
    revoked_at_ms=None,
)
MODEL = ModelRow(
    manifest_digest=ManifestDigest("sha256:" + "0" * 64),
    name="smollm2",
    envelope=b"\x00\xff",
    tokenizer_directory="/models/a",
    created_at_ms=1,
)
TASK = TaskRow(
    task_id=TaskId("task-1"),
    tenant_id=KEY.key_id,
    manifest_digest=MODEL.manifest_digest,
    outcome="stop",
    prompt_tokens=10,
    completion_tokens=20,
    submitted_at_ms=2**41,
    ended_at_ms=2**41 + 5,
)
ATTEMPT = AttemptRow(
    task_id=TASK.task_id,
    attempt=1,
    node_id=NODE.node_id,
    lease_epoch=2**40,
    first_index=0,
    delivered_tokens=20,
    outcome="finished",
    statement=b"signed",
    energy_mj=12_345,
    energy_method="counter",
    started_at_ms=1,
    ended_at_ms=2,
    engine_id="engine",
    why="meets_target",
    cost_micro=2**40,
    expected_first_token_ms=60.25,
    expected_token_ms=10.5,
    tail=1.5,
    first_token_ms=0.125,
)
AUDIT = AuditRow(
    audit_id="audit-1",
    node_id=NODE.node_id,
    manifest_digest=MODEL.manifest_digest,
    kind="rescore",
    verifier="coordinator",
    counted=True,
    tokens=120,
    log_evidence=-0.123456789012345,
    hard=None,
    not_measured=None,
    confirms=None,
    detail='{"mean_margin": 0.001}',
    at_ms=2**41,
)
VERDICT = VerdictRow(
    verdict_id="verdict-1",
    node_id=NODE.node_id,
    owner_id=OWNER.owner_id,
    manifest_digest=MODEL.manifest_digest,
    state="watch",
    previous="probation",
    reason="the evidence of 2 audits is 7.0 nats",
    audit_ids='["audit-1"]',
    log_evidence=7.0,
    shadow=False,
    at_ms=2**41,
)
MODE = ModeRow(rule="rescore.rank", mode="shadow")

_database_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the back-end, or the URL of its server."""
    if request.param == "sqlite":
        yield "sqlite"
        return
    with postgres_server() as url:
        yield url


@pytest.fixture
def url(backend: str, tmp_path: Path) -> str:
    """A database of the test's own."""
    if backend == "sqlite":
        return f"sqlite:///{tmp_path / 'coordinator.db'}"
    name = f"test_{next(_database_numbers)}"
    engine = sa.create_engine(backend.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return backend.replace("/postgres?", f"/{name}?")


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    store = SqlStore(url)
    yield store
    store.close()


class TestStore:
    def test_boots_are_counted_over_restarts_and_the_cluster_keeps_its_id(self, store: SqlStore, url: str) -> None:
        # Mutation seen to fail: NEXT_BOOT without the + 1.
        assert [store.open_boot(5), store.open_boot(6)] == [1, 2]
        again = SqlStore(url)
        assert again.open_boot(7) == 3
        assert again.cluster_id() == store.cluster_id() != ""
        again.close()

    def test_the_migrated_schema_is_the_one_that_the_queries_mean(self, store: SqlStore, url: str) -> None:
        # Mutation seen to fail: a column of queries.py left out of the migration.
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        inspector = sa.inspect(engine)
        for table in queries.metadata.sorted_tables:
            found = {column["name"]: bool(column["nullable"]) for column in inspector.get_columns(table.name)}
            assert found == {column.name: column.nullable for column in table.columns}, table.name
            primary_key = inspector.get_pk_constraint(table.name)["constrained_columns"]
            assert primary_key == [column.name for column in table.primary_key.columns], table.name
            unique = {str(constraint["name"]) for constraint in inspector.get_unique_constraints(table.name)}
            expected = {str(one.name) for one in table.constraints if isinstance(one, sa.UniqueConstraint)}
            assert unique == expected, table.name
        engine.dispose()

    def test_a_release_that_knows_no_energy_still_writes_and_is_read(self, store: SqlStore, url: str) -> None:
        # Mutation seen to fail: nullable=False for one of the columns.
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        row = {name: value for name, value in asdict(ATTEMPT).items() if not name.startswith("energy")}
        with engine.begin() as connection:
            connection.execute(queries.attempts.insert(), row)
        engine.dispose()
        assert store.attempts(TASK.task_id) == [replace(ATTEMPT, energy_mj=None, energy_method=None)]

    def test_a_batch_of_the_ledger_is_written_whole_or_not_at_all(self, store: SqlStore) -> None:
        # Mutation seen to fail: the balances written before, in a transaction of their own.
        def row(sequence: int, transfer_id: str, tenant_id: str = "") -> LedgerRow:
            return LedgerRow(
                sequence=sequence,
                transfer_id=transfer_id,
                task_id="task",
                tenant_id=tenant_id,
                node_id="",
                body=b"body",
            )

        def account(name: str, balance_micro: int) -> AccountRow:
            return AccountRow(account=name, balance_micro=balance_micro, opened_at_ms=2**41)

        first, second = row(0, "a", "key-1"), row(1, "b")
        hashes = {Position(0, 0): b"h" * 32, Position(0, 1): b"i" * 32}
        store.append_ledger([first, second], [account("x", -(2**52)), account("y", 2**52)], [], hashes)
        for again in (row(2, "b"), row(1, "c")):
            with pytest.raises(Conflict):
                store.append_ledger([again], [account("x", 0)], ["y"], {})
        assert {one.account: one.balance_micro for one in store.ledger_accounts()} == {"x": -(2**52), "y": 2**52}
        store.append_ledger([row(2, "c", "key-1")], [account("x", 5)], ["y"], {Position(0, 2): b"j" * 32})
        assert store.ledger_accounts() == [account("x", 5)]
        assert [one.sequence for one in store.ledger_page(1, 10)] == [1, 2]
        assert [one.sequence for one in store.ledger_page(0, 1, TenantId("key-1"))] == [0]
        assert [one.sequence for one in store.ledger_page(1, 10, TenantId("key-1"))] == [2]
        assert store.ledger_of_task(TaskId("task")) == [first, second, row(2, "c", "key-1")]
        assert (store.find_transfer("b"), store.find_transfer("z")) == (second, None)
        assert store.log_size() == 3

    def test_verdicts_and_what_they_stand_on_are_written_once_and_standings_replaced(self, store: SqlStore) -> None:
        # Mutation seen to fail: `record_once` for standings; `record_verification` with a transaction for each table.
        standing = StandingRow(node_id=NODE.node_id, manifest_digest=MODEL.manifest_digest, state="watch", body="{}")
        batch = VerificationBatch(audits=[AUDIT], verdicts=[VERDICT], standings=[standing], modes=[MODE])
        store.record_verification(batch)
        changed = VerificationBatch(
            audits=[replace(AUDIT, tokens=1), replace(AUDIT, audit_id="audit-2", at_ms=1)],
            verdicts=[replace(VERDICT, reason="other"), replace(VERDICT, verdict_id="verdict-2", at_ms=2**41 + 9)],
            standings=[replace(standing, state="ok"), replace(standing, manifest_digest=ManifestDigest(""))],
            modes=[replace(MODE, mode="active")],
        )
        store.record_verification(changed)
        store.record_verification(changed)
        store.record_verification(VerificationBatch())
        assert [row.verdict_id for row in store.verdicts_of(NODE.node_id)] == ["verdict-2", "verdict-1"]
        assert (store.find_verdict("verdict-1"), store.find_verdict("verdict-9")) == (VERDICT, None)
        assert store.verdicts_of(NodeId("nobody")) == []
        assert store.audits_of(["audit-1", "audit-2", "audit-9"]) == [
            replace(AUDIT, audit_id="audit-2", at_ms=1),
            AUDIT,
        ]
        assert store.audits_of([]) == []
        assert {row.manifest_digest: row.state for row in store.standings()} == {
            MODEL.manifest_digest: "ok",
            "": "watch",
        }
        assert store.verification_modes() == [replace(MODE, mode="active")]

    def test_a_batch_of_verification_is_written_whole_or_not_at_all(self, store: SqlStore) -> None:
        bad = replace(VERDICT, log_evidence=None)  # type: ignore[arg-type]
        with pytest.raises(Conflict):
            store.record_verification(VerificationBatch(audits=[AUDIT], verdicts=[bad]))
        assert store.audits_of([AUDIT.audit_id]) == []

    def test_of_what_was_measured_of_a_node_the_newest_is_kept(self, store: SqlStore) -> None:
        # Mutations seen to fail: `record_once` for rates; a primary key without the streams.
        first = RateRow(
            node_id=NODE.node_id,
            manifest_digest=MODEL.manifest_digest,
            streams=1,
            engine_build="vllm 0.11.0",
            tokens_per_second=104.123456789,
            first_token_ms=41,
            joules_per_token=1.25,
            energy_method="counter",
            measured_at_ms=2**41,
        )
        at_eight = replace(first, streams=8, tokens_per_second=700.5)
        again = replace(first, engine_build="vllm 0.12.0", tokens_per_second=99.0, measured_at_ms=2**41 + 5)
        for rate in (first, at_eight, again):
            store.put_rate(rate)
        assert store.rates() == [at_eight, again]

    def test_of_how_long_nodes_were_lent_the_newest_is_kept(self, store: SqlStore) -> None:
        # Mutation seen to fail: `record_once` for histories.
        first = ChurnRow(node_id=NODE.node_id, lent_h=b"\x00\xff" * 168, lost=b"\x01" * 336, as_of_ms=2**41)
        other = replace(first, node_id=NodeId("node-2"))
        again = replace(first, lost=b"\x02" * 336, as_of_ms=2**41 + 5)
        store.put_churn_histories([first, other])
        store.put_churn_histories([again])
        assert store.churn_histories() == [again, other]

    def test_an_owner_is_found_by_name_and_by_id(self, store: SqlStore) -> None:
        store.add_owner(OWNER)
        assert store.find_owner("alice") == store.find_owner("owner-1") == OWNER
        assert store.find_owner("bob") is None
        assert store.owners() == [OWNER]

    def test_an_owner_named_after_anothers_id_does_not_hide_it(self, store: SqlStore) -> None:
        # Mutation seen to fail: FIND_OWNER without its order.
        store.add_owner(replace(OWNER, owner_id=OwnerId("owner-0"), name="owner-1"))
        store.add_owner(OWNER)
        assert store.find_owner("owner-1") == OWNER

    def test_a_taken_name_is_a_conflict_that_says_so(self, store: SqlStore) -> None:
        # Mutation seen to fail: "uq_owners_name" taken out of CONFLICTS.
        store.add_owner(OWNER)
        with pytest.raises(Conflict, match="owner of this name exists"):
            store.add_owner(replace(OWNER, owner_id=OwnerId("owner-2")))
        with pytest.raises(Conflict, match="owner of this id exists"):
            store.add_owner(replace(OWNER, name="bob"))

    def test_a_token_needs_an_owner(self, store: SqlStore) -> None:
        # Mutation seen to fail: PRAGMA foreign_keys = OFF.
        with pytest.raises(Conflict, match="does not exist"):
            store.add_join_token(TOKEN)

    def test_a_role_is_checked_by_the_database(self, store: SqlStore) -> None:
        with pytest.raises(Conflict, match="role of an API key"):
            store.add_api_key(replace(KEY, role="root"))

    def test_enrolling_consumes_the_token(self, store: SqlStore) -> None:
        store.add_owner(OWNER)
        store.add_join_token(TOKEN)
        assert store.find_join_token("token-1") == TOKEN
        assert store.enrol_node(NODE, "token-1", 500)
        assert store.find_node(NODE.node_id) == NODE
        assert store.nodes() == [NODE]
        assert store.find_join_token("token-1") == replace(TOKEN, used_at_ms=500, used_by=NODE.node_id)
        assert not store.enrol_node(
            replace(NODE, node_id=NodeId("node-2"), signing_public_key=b"l" * 32), "token-1", 501
        )
        assert store.find_node(NodeId("node-2")) is None

    @pytest.mark.parametrize("now_ms", [1000, 5000])
    def test_an_expired_token_is_not_consumed(self, store: SqlStore, now_ms: int) -> None:
        # Mutation seen to fail: CONSUME_TOKEN with >= for the expiry.
        store.add_owner(OWNER)
        store.add_join_token(TOKEN)
        assert not store.enrol_node(NODE, "token-1", now_ms)
        assert store.nodes() == []
        assert store.find_join_token("token-1") == TOKEN

    def test_of_racing_machines_exactly_one_consumes_the_token(self, store: SqlStore) -> None:
        # Mutation seen to fail: CONSUME_TOKEN without `used_at_ms IS NULL`.
        store.add_owner(OWNER)
        store.add_join_token(TOKEN)
        machines = [
            replace(NODE, node_id=NodeId(f"node-{number}"), signing_public_key=bytes([number]) * 32)
            for number in range(8)
        ]
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda node: store.enrol_node(node, "token-1", 500), machines))
        assert won.count(True) == 1
        assert [node.node_id for node in store.nodes()] == [machines[won.index(True)].node_id]

    def test_a_failed_enrolment_gives_the_token_back(self, store: SqlStore) -> None:
        """The node's key is listed already: token and node change together or not at all."""
        # Mutation seen to fail: `_write` with a commit after each statement.
        store.add_owner(OWNER)
        store.add_join_token(TOKEN)
        store.add_join_token(replace(TOKEN, token_id="token-2"))
        assert store.enrol_node(NODE, "token-1", 500)
        with pytest.raises(Conflict, match="signing key is enrolled already"):
            store.enrol_node(replace(NODE, node_id=NodeId("node-2")), "token-2", 500)
        token = store.find_join_token("token-2")
        assert token is not None
        assert token.used_at_ms is None

    def test_a_banned_node_gets_no_certificate_and_the_first_reason_stands(self, store: SqlStore) -> None:
        # Mutation seen to fail: RENEW_CERTIFICATE without `banned_at_ms IS NULL`.
        store.add_owner(OWNER)
        store.add_join_token(TOKEN)
        store.enrol_node(NODE, "token-1", 500)
        assert store.renew_certificate(NODE.node_id, "ee", 7)
        assert store.ban_node(NODE.node_id, "lied", 600)
        assert store.ban_node(NODE.node_id, "again", 700)
        assert not store.renew_certificate(NODE.node_id, "dd", 8)
        assert store.find_node(NODE.node_id) == replace(
            NODE, certificate_serial="ee", certificate_not_after_ms=7, banned_at_ms=600, ban_reason="lied"
        )
        assert not store.ban_node(NodeId("nobody"), "x", 1)
        assert not store.renew_certificate(NodeId("nobody"), "x", 1)

    def test_draining_is_kept(self, store: SqlStore) -> None:
        store.add_owner(OWNER)
        store.add_join_token(TOKEN)
        store.enrol_node(NODE, "token-1", 500)
        assert store.set_draining(NODE.node_id, True)
        assert store.nodes() == [replace(NODE, draining=True)]
        assert store.set_draining(NODE.node_id, False)
        assert store.nodes() == [NODE]
        assert not store.set_draining(NodeId("nobody"), True)

    def test_a_revoked_key_is_found_with_its_first_time(self, store: SqlStore) -> None:
        # Mutation seen to fail: REVOKE_KEY without coalesce.
        store.add_api_key(KEY)
        assert store.find_api_key(b"h" * 32) == KEY
        assert store.revoke_api_key(KEY.key_id, 9) == replace(KEY, revoked_at_ms=9)
        assert store.revoke_api_key(KEY.key_id, 10) == replace(KEY, revoked_at_ms=9)
        assert store.find_api_key(b"h" * 32) == replace(KEY, revoked_at_ms=9)
        assert store.api_keys() == [replace(KEY, revoked_at_ms=9)]
        assert store.find_api_key(b"x" * 32) is None
        assert store.revoke_api_key(TenantId("nobody"), 1) is None

    def test_a_model_added_again_moves_and_stays_one(self, store: SqlStore) -> None:
        store.add_model(MODEL)
        store.add_model(replace(MODEL, tokenizer_directory="/models/b", created_at_ms=2))
        assert store.models() == [replace(MODEL, tokenizer_directory="/models/b")]

    def test_accounting_is_written_once_and_summed_by_tenant(self, store: SqlStore) -> None:
        # Mutation seen to fail: `record_once` without on_conflict_do_nothing.
        other = replace(TASK, task_id=TaskId("task-2"), completion_tokens=2**40)
        foreign = replace(TASK, task_id=TaskId("task-3"), tenant_id=TenantId("key-2"))
        second = replace(ATTEMPT, attempt=2, statement=None)
        store.record([TASK, foreign], [second, ATTEMPT])
        store.record([replace(TASK, completion_tokens=99), other], [replace(ATTEMPT, outcome="changed")])
        store.record([], [])
        assert store.usage(KEY.key_id) == Usage(2, 20, 20 + 2**40)
        assert store.usage(TenantId("nobody")) == Usage(0, 0, 0)
        assert store.attempts(TASK.task_id) == [ATTEMPT, second]
        assert store.find_task(TASK.task_id) == TASK
        assert store.find_task(TaskId("none")) is None

    def test_a_late_statement_is_added_where_one_is_missing_and_nowhere_else(self, store: SqlStore) -> None:
        # Mutations seen to fail: the update without node_id; without `statement IS NULL`.
        lost = replace(ATTEMPT, outcome="node_lost", statement=None, energy_mj=None, energy_method=None)
        signed = replace(ATTEMPT, attempt=2)
        store.record([TASK], [lost, signed])
        proof = LateStatementRow(
            task_id=TASK.task_id,
            attempt=1,
            node_id=NODE.node_id,
            statement=b"late",
            energy_mj=7,
            energy_method="counter",
        )
        store.add_late_statements(
            [
                replace(proof, node_id=NodeId("another"), statement=b"false"),
                replace(proof, attempt=2, statement=b"second word"),
                replace(proof, task_id=TaskId("unknown")),
                proof,
                replace(proof, statement=b"again"),
            ]
        )
        assert store.attempts(TASK.task_id) == [
            replace(lost, statement=b"late", energy_mj=7, energy_method="counter"),
            signed,
        ]

    def test_an_id_with_a_nul_is_nobodys(self, store: SqlStore) -> None:
        """A stranger sends it; PostgreSQL would answer with an error instead of no row."""
        # Mutation seen to fail: `_storable` returning True.
        bad = "node\0"
        assert store.find_join_token(bad) is None
        assert store.find_owner(bad) is None
        assert store.find_node(NodeId(bad)) is None
        assert store.find_task(TaskId(bad)) is None
        assert store.attempts(TaskId(bad)) == []
        assert not store.ban_node(NodeId(bad), "x", 1)
        assert not store.set_draining(NodeId(bad), True)
        assert store.revoke_api_key(TenantId(bad), 1) is None

    def test_everything_is_there_after_a_restart(self, store: SqlStore, url: str) -> None:
        store.add_owner(OWNER)
        store.add_join_token(TOKEN)
        store.enrol_node(NODE, "token-1", 500)
        store.record([TASK], [ATTEMPT])
        store.close()
        again = SqlStore(url)
        assert again.nodes() == [NODE]
        assert again.usage(KEY.key_id) == Usage(1, 10, 20)
        again.close()

    def test_a_newer_schema_is_refused_in_one_line(self, store: SqlStore, url: str) -> None:
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        engine.dispose()
        with pytest.raises(StoreError, match="newer release wrote it") as refusal:
            SqlStore(url)
        assert "\n" not in str(refusal.value)


class TestSqliteFile:
    """What can be wrong with a file: one line each."""

    def test_the_file_is_private_and_in_wal_mode(self, tmp_path: Path) -> None:
        path = tmp_path / "a.db"
        SqlStore(f"sqlite:///{path}").close()
        assert path.stat().st_mode & 0o777 == 0o600
        # Bytes 18 and 19 of the header are 2 in WAL mode.
        assert path.read_bytes()[18:20] == b"\x02\x02"

    def test_a_missing_directory_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="No such file or directory"):
            SqlStore(f"sqlite:///{tmp_path}/missing/a.db")

    def test_a_file_of_another_kind_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.db").write_bytes(b"hello" * 1000)
        with pytest.raises(StoreError, match="no SQLite database"):
            SqlStore(f"sqlite:///{tmp_path}/a.db")

    @pytest.mark.parametrize("url", ["sqlite://", "mysql://host/x", "nonsense"])
    def test_a_url_that_cannot_work_is_refused(self, url: str) -> None:
        with pytest.raises(StoreError):
            SqlStore(url)

    def test_a_full_disk_is_one_line_and_the_store_goes_on_when_there_is_space(self, tmp_path: Path) -> None:
        """The limit on the size of files stands for the disk: SQLite sees its write fail half-way."""
        # Mutation seen to fail: SQLITE_FULL and SQLITE_IOERR taken out of the advice.
        program = f"""
import resource, signal
from coordinator.store.port import OwnerRow, StoreError
from coordinator.store.sql import SqlStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SqlStore("sqlite:///{tmp_path}/a.db")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
written = 0
try:
    for written in range(10_000):
        store.add_owner(OwnerRow(owner_id=str(written), name=f"{{written}}" * 500, trusted=False, created_at_ms=1))
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.add_owner(OwnerRow(owner_id="after", name="after", trusted=False, created_at_ms=1))
print(len(store.owners()) == written + 1)
"""
        root = Path(__file__).parents[2]
        done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
        line, complete = done.stdout.splitlines()
        assert "disk" in line
        assert "free" in line
        assert complete == "True"
