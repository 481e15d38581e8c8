"""A node that is quarantined, seen by its owner through a real coordinator: what is told, and what an appeal does."""

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest
from dev_network import DevNetwork
from network_settings import EngineOptions, NetworkError

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


async def test_an_owner_reads_why_and_appeals() -> None:
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake"), say=lambda _: None) as network:
        assert json.loads(await network.agent_command(0, "why", "--json")) == {"verdicts": []}
        database = Path(network.ready.state_dir) / "coordinator" / "coordinator.db"
        await network.kill_coordinator()
        await asyncio.to_thread(quarantine, database, NodeId(network.ready.agents[0].node_id))
        await network.restart_coordinator()

        newest, older = json.loads(await network.agent_command(0, "why", "--json"))["verdicts"]
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
        again = json.loads(await network.agent_command(0, "why", "--json"))["verdicts"]
        assert again == [newest, older]
