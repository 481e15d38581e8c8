"""A real coordinator whose database is changed behind its back, and who notices: the agent, and any client."""

import asyncio
import json
import os
import sqlite3
import sys
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slackwater
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from dev_network import DevNetwork
from network_settings import EngineOptions, NetworkError

from coordinator.ledger.entries import Entry, Kind, Leg, Transfer, entry_bytes
from coordinator.store.port import LedgerRow
from coordinator.store.sql import SqlStore
from protos.merkle import Frontier, extend

# A fleet that works, is stopped, has its books rewritten and comes back: twenty seconds.
pytestmark = pytest.mark.slow

TASK = "task-of-the-books-00"
# The agent looks at a new connection every two seconds; after a restart it comes back within a backoff.
PATIENCE_S = 60.0
POLL_S = 0.2


def row(sequence: int, tenant_id: str = "", node_id: str = "") -> LedgerRow:
    """Return an entry that moves nothing, so that it fits whatever balances there are."""
    legs = (Leg("platform:issue", 0), Leg("platform:revenue", 0))
    transfer = Transfer(
        transfer_id=f"t-{sequence}",
        kind=Kind.POST,
        at_ms=1,
        legs=legs,
        task_id=TASK,
        tenant_id=tenant_id,
        node_id=node_id,
    )
    return LedgerRow(
        sequence=sequence,
        transfer_id=transfer.transfer_id,
        task_id=TASK,
        tenant_id=tenant_id,
        node_id=node_id,
        body=entry_bytes(Entry(sequence, transfer)),
    )


class Books:
    """The coordinator's database, opened while the coordinator is down."""

    def __init__(self, network: DevNetwork) -> None:
        self._path = Path(network.ready.state_dir) / "coordinator" / "coordinator.db"

    def append(self, whom: Sequence[dict[str, str]]) -> int:
        """Add an entry for each; return how many the log has then."""
        store = SqlStore(f"sqlite:///{self._path}")
        rows = store.ledger_page(0, 10_000)
        fresh = [row(len(rows) + number, **one) for number, one in enumerate(whom)]
        frontier = extend(Frontier(), (one.body for one in rows)).frontier
        extension = extend(frontier, (one.body for one in fresh))
        store.append_ledger(fresh, [], [], extension.made)
        store.close()
        return extension.frontier.size

    def execute(self, statement: str, *values: object) -> None:
        with sqlite3.connect(self._path) as database:
            database.execute(statement, values)
        database.close()

    def body(self, sequence: int) -> bytes:
        store = SqlStore(f"sqlite:///{self._path}")
        [found] = store.ledger_page(sequence, 1)
        store.close()
        return found.body

    def rewrite(self, sequence: int) -> None:
        """Change one entry, and every hash that follows from it: all that a forger with the database can do."""
        store = SqlStore(f"sqlite:///{self._path}")
        bodies = [one.body for one in store.ledger_page(0, 10_000)]
        store.close()
        bodies[sequence] = bodies[sequence].replace(b'"at_ms":1', b'"at_ms":2')
        made = extend(Frontier(), bodies).made
        with sqlite3.connect(self._path) as database:
            database.execute("UPDATE ledger_entries SET body = ? WHERE sequence = ?", (bodies[sequence], sequence))
            database.executemany(
                "UPDATE log_hashes SET hash = ? WHERE level = ? AND place = ?",
                [(value, *position) for position, value in made.items()],
            )
        database.close()


async def verify(network: DevNetwork, api_key: str, *arguments: str) -> tuple[int, dict[str, str]]:
    """Run `slackwater ledger verify`; return its exit status and the outcome of each check."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from slackwater.cli import main; main()", "ledger", "verify", "--json", *arguments),
        env={
            **os.environ,
            "SLACKWATER_ADDRESS": network.ready.grpc_address,
            "SLACKWATER_CA_FILE": network.ready.ca_file,
            "SLACKWATER_API_KEY": api_key,
        },
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, {one["name"]: one["outcome"] for one in json.loads(out)["checks"]}


async def ledger_status(network: DevNetwork) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(await network.agent_command(0, "status", "--json"))
    return {**status["ledger"], "draining": status["draining"]}


async def until(network: DevNetwork, **wanted: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await ledger_status(network)
            if all(found[key] == value for key, value in wanted.items()):
                return
            await asyncio.sleep(POLL_S)


def public_key(network: DevNetwork) -> bytes:
    pem = (Path(network.ready.state_dir) / "coordinator" / "keys" / "signing.key").read_bytes()
    return load_pem_private_key(pem, None).public_key().public_bytes_raw()  # type: ignore[union-attr]


async def test_a_task_leaves_receipts_with_its_tenant_and_with_its_node() -> None:
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake"), say=lambda _: None) as network:
        keys = [await asyncio.to_thread(public_key, network)]
        async with network.client() as client:
            answer = client.complete("hello", model=network.ready.model, max_tokens=4)
            await answer
            assert answer.accepted is not None
            task_id = answer.accepted.task_id
            async with asyncio.timeout(PATIENCE_S):
                # The ledger settles after the answer has ended.
                while True:
                    receipts = await client.receipts(task_id)
                    proven = [slackwater.verify_receipt(one, coordinator_public_keys=keys) for one in receipts]
                    kinds = [json.loads(one.entry)["kind"] for one in proven]
                    if "post" in kinds:
                        break
                    await asyncio.sleep(POLL_S)
        assert kinds[0] == "reserve"
        shown = json.loads(await network.agent_command(0, "receipts", task_id, "--json"))
        [earned] = shown["receipts"]
        # What the node shows around, its tenant checks with the SDK as its own.
        receipt = slackwater.Receipt.from_bytes(b64decode(earned["receipt"]))
        checked = slackwater.verify_receipt(receipt, coordinator_public_keys=keys)
        assert checked.entry.decode() == earned["entry"]
        assert (json.loads(checked.entry)["kind"], json.loads(checked.entry)["task_id"]) == ("earn", task_id)
        forged = replace(receipt, entry=receipt.entry.replace(b'"earn"', b'"Earn"'))
        with pytest.raises(slackwater.VerificationError):
            slackwater.verify_receipt(forged, coordinator_public_keys=keys)
        await until(network, refused="")


async def test_a_log_that_is_rewritten_is_noticed_by_its_agent_and_by_its_client() -> None:
    """Mutation seen to fail here: GetCheckpoint answered without looking at old_size, honest growth is refused."""
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake"), say=lambda _: None) as network:
        keys = [await asyncio.to_thread(public_key, network)]
        async with network.admin() as admin:
            [tenant_id] = [key.key_id for key in await admin.api_keys() if key.name == "dev"]
        node_id = network.ready.agents[0].node_id
        await network.kill_coordinator()
        whom = [{"tenant_id": tenant_id}, {"node_id": node_id}, {"tenant_id": "another", "node_id": "another"}]
        size = await asyncio.to_thread(Books(network).append, whom)
        await network.restart_coordinator()

        async with network.client() as client:
            [receipt] = await client.receipts(TASK)
            entry = slackwater.verify_receipt(receipt, coordinator_public_keys=keys)
            assert json.loads(entry.entry)["tenant_id"] == tenant_id
            seen = await client.checkpoint(None, coordinator_public_keys=keys)
            assert seen == entry.checkpoint
            with pytest.raises(slackwater.CallerError):
                await client.receipts("task-of-nobody-00")
        shown = json.loads(await network.agent_command(0, "receipts", TASK, "--json"))
        assert [json.loads(one["entry"])["node_id"] for one in shown["receipts"]] == [node_id]
        with pytest.raises(NetworkError, match="no entry of yours"):
            await network.agent_command(0, "receipts", "task-of-nobody-00")
        await until(network, entries_seen=size, refused="", draining=False)

        # It grows, as it should; nobody minds.
        await network.kill_coordinator()
        grown = await asyncio.to_thread(Books(network).append, [{"tenant_id": tenant_id}])
        await network.restart_coordinator()
        async with network.client() as client:
            seen = await client.checkpoint(seen, coordinator_public_keys=keys)
            assert seen.size == grown
            before = await client.receipts(TASK)
        await until(network, entries_seen=grown, refused="", draining=False)

        # One entry is changed, with every hash above it.
        await network.kill_coordinator()
        await asyncio.to_thread(Books(network).rewrite, 0)
        await network.restart_coordinator()
        await until(network, entries_seen=grown, refused="same_size_other_root", draining=True)
        async with network.client() as client:
            with pytest.raises(slackwater.VerificationError, match="two roots"):
                await client.checkpoint(seen, coordinator_public_keys=keys)
            # What was handed out before convicts the coordinator: it still holds, and is no longer what it says.
            after = await client.receipts(TASK)
            assert after != before
            for one in (*before, *after):
                slackwater.verify_receipt(one, coordinator_public_keys=keys)
        told = await network.agent_command(0, "status")
        assert "ledger was rewritten" in " ".join(told.split())


async def test_the_command_that_checks_the_books_finds_what_is_changed_missing_or_rewritten(tmp_path: Path) -> None:
    """By a tenant and by an administrator, each with a state of its own."""
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake"), say=lambda _: None) as network:
        key = (await asyncio.to_thread(public_key, network)).hex()
        async with network.client() as client:
            answer = await client.complete("hello", model=network.ready.model, max_tokens=4)
            async with asyncio.timeout(PATIENCE_S):
                # Reserve, post and earn: the ledger settles after the answer has ended.
                async with network.admin() as admin:
                    while len(await admin.ledger_entries()) < 3:
                        await asyncio.sleep(POLL_S)
        counts = tmp_path / "counts"
        readers = {"tenant": network.ready.api_key, "admin": network.ready.admin_key}

        async def failures(*arguments: str) -> dict[str, set[str]]:
            found = {}
            for reader, api_key in readers.items():
                state = ("--state", str(tmp_path / f"{reader}.json"))
                status, outcomes = await verify(network, api_key, *state, *arguments)
                found[reader] = {name for name, outcome in outcomes.items() if outcome == "fails"}
                assert status == (6 if found[reader] else 0)
            return found

        nothing: dict[str, set[str]] = {"tenant": set(), "admin": set()}
        assert await failures("--key", key) == nothing
        for tokens, wrong in ((len(answer.token_ids), set()), (99, {"charges"})):
            counts.write_text(json.dumps({"task_id": answer.task_id, "completion_tokens": tokens}) + "\n")
            assert await failures("--counted", str(counts)) == {"tenant": wrong, "admin": wrong}

        books = Books(network)
        await network.kill_coordinator()
        true_body = await asyncio.to_thread(books.body, 1)
        changed = true_body.replace(b'"at_ms":1', b'"at_ms":2')
        assert changed != true_body
        await asyncio.to_thread(books.execute, "UPDATE ledger_entries SET body = ? WHERE sequence = 1", changed)
        await network.restart_coordinator()
        wrong = {"history", "inclusion"}
        assert await failures() == {"tenant": wrong, "admin": wrong}

        await network.kill_coordinator()
        await asyncio.to_thread(books.execute, "UPDATE ledger_entries SET body = ? WHERE sequence = 1", true_body)
        await network.restart_coordinator()
        assert await failures() == nothing

        await network.kill_coordinator()
        await asyncio.to_thread(books.rewrite, 1)
        await network.restart_coordinator()
        assert await failures() == {"tenant": {"growth"}, "admin": {"growth"}}

        await network.kill_coordinator()
        await asyncio.to_thread(books.execute, "DELETE FROM ledger_entries WHERE sequence = 0")
        await network.restart_coordinator()
        for reader in readers:
            (tmp_path / f"{reader}.json").unlink()
        found = await failures("--key", key)
        assert found == {
            "tenant": {"sums", "balances", "charges"},
            "admin": {"inclusion", "sums", "balances", "charges"},
        }
