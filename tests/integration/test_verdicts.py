"""Verdicts seen by an owner through a real coordinator: what is told, and what an appeal, a release and a ban do."""

import asyncio
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from dev_network import DevNetwork
from network_settings import EngineOptions, NetworkError, clean_environment

from coordinator.store.sql import SqlStore
from coordinator.verification.stored import batch_of
from coordinator.verification.testing import Court
from inference.task import NodeId, OwnerId

# A fleet that works, is stopped, and comes back with a verdict: fifteen seconds.
pytestmark = pytest.mark.slow


def quarantine(database: Path, node_id: NodeId) -> None:
    """Have two verifiers find a hard failure of this node, while the coordinator is down."""
    store = SqlStore(f"sqlite:///{database}")
    node = store.find_node(node_id)
    assert node is not None
    court = Court()
    court.quarantine(node_id=node_id, owner_id=OwnerId(node.owner_id), detail={"mean_margin": 0.2})
    store.record_verification(batch_of(court.commands))
    store.close()


def audits(database: Path) -> list[tuple[str, str]]:
    """Return kind and reason of every audit that could not be measured."""
    with sqlite3.connect(database) as connection:
        found = connection.execute(
            "SELECT confirms, not_measured FROM audits WHERE not_measured IS NOT NULL"
        ).fetchall()
    connection.close()
    return found


def forget_bans(database: Path) -> None:
    """Leave of a ban what a coordinator does that is killed before its verdict is stored."""
    with sqlite3.connect(database) as connection:
        for table in ("verdicts", "standing"):
            connection.execute(f"DELETE FROM {table} WHERE state = 'banned'")
    connection.close()


def database_of(network: DevNetwork) -> Path:
    return Path(network.ready.state_dir) / "coordinator" / "coordinator.db"


async def restart_quarantined(network: DevNetwork) -> None:
    await network.kill_coordinator()
    await asyncio.to_thread(quarantine, database_of(network), NodeId(network.ready.agents[0].node_id))
    await network.restart_coordinator()


async def why(network: DevNetwork) -> list[dict[str, Any]]:
    """Return the verdicts as the owner of the first agent sees them, newest first."""
    verdicts: list[dict[str, Any]] = json.loads(await network.agent_command(0, "why", "--json"))["verdicts"]
    return verdicts


async def administer(network: DevNetwork, *arguments: str) -> tuple[int | None, str, str]:
    """Run a command of `slackwater` as an administrator; return its status, and what it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from slackwater.cli import main; main()", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **clean_environment(),
            "SLACKWATER_ADDRESS": network.ready.grpc_address,
            "SLACKWATER_CA_FILE": network.ready.ca_file,
            "SLACKWATER_API_KEY": network.ready.admin_key,
        },
    )
    out, err = await process.communicate()
    return process.returncode, out.decode().strip(), err.decode().strip()


async def test_an_administrator_releases_a_node_and_bans_it() -> None:
    """Mutations seen to fail here: the log without who asked; a ban without a verdict; a ban that lost its verdict in a
    crash left without one; GetVerdicts refused to a banned node.
    """
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake"), say=lambda _: None) as network:
        node_id = network.ready.agents[0].node_id
        await restart_quarantined(network)
        quarantined = (await why(network))[0]

        release = ("release", quarantined["verdict_id"], "--reason", "the bank was wrong")
        status, out, err = await administer(network, *release)
        assert (status, err) == (0, "")
        released = (await why(network))[0]
        assert out == f"released: {released['verdict_id']} puts the node in probation"
        assert (released["state"], released["previous"]) == ("probation", "quarantined")
        assert released["reason"] == "released by an administrator: the bank was wrong"
        async with network.admin() as admin:
            (key,) = (key for key in await admin.api_keys() if key.role == "admin")
        log = network.coordinator_log()
        (line,) = (json.loads(line) for line in log.splitlines() if '"node released"' in line)
        assert (line["by"], line["node_id"]) == (f"key {key.key_id}", node_id)
        assert network.ready.admin_key not in log
        status, _, err = await administer(network, *release)
        assert status == 3
        assert "not the one in force" in err

        status, out, err = await administer(network, "ban", node_id, "--yes", "--reason", "lies")
        assert (status, out, err) == (0, f"{node_id} is banned", "")
        banned, *older = await why(network)
        assert (banned["state"], banned["manifest_digest"]) == ("banned", "")
        assert banned["reason"] == "banned by an administrator: lies"
        assert released in older
        assert "banned by an administrator: lies" in await network.agent_command(0, "why")
        status, _, err = await administer(network, "release", banned["verdict_id"], "--reason", "a mistake")
        assert status == 5
        assert "the node is banned, which is for good" in err

        for forget in (False, True):
            await network.kill_coordinator()
            if forget:
                await asyncio.to_thread(forget_bans, database_of(network))
            await network.restart_coordinator()
            assert (await why(network))[0] == banned


async def test_an_owner_reads_why_and_appeals() -> None:
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake"), say=lambda _: None) as network:
        assert await why(network) == []
        database = database_of(network)
        await restart_quarantined(network)

        newest, older = await why(network)
        assert (older["state"], newest["state"], newest["previous"]) == ("watch", "quarantined", "watch")
        (evidence,) = newest["evidence"]
        assert (evidence["hard"], evidence["detail"], evidence["verifier"]) == ("rank", {"mean_margin": 0.2}, "")
        with pytest.raises(NetworkError, match="not the one in force"):
            await network.agent_command(0, "appeal", older["verdict_id"])
        await network.agent_command(0, "appeal", newest["verdict_id"])

        # There is no other owner's node to measure: that is nobody's fault, so the appeal is neither won nor lost.
        async with asyncio.timeout(30):
            while len(await asyncio.to_thread(audits, database)) < 5:
                await asyncio.sleep(0.2)
        assert await why(network) == [newest, older]
