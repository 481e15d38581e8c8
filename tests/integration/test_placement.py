"""Models go to where they are wanted, over real processes: one node has its owner's model, one is open to the fleet."""

import asyncio
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from build_model import FAKE_TOKENIZER_FILES, SMOLLM2_LICENCE, load_private_key, write_manifest
from dev_network import DevNetwork
from network_settings import MODELS, ROOT, EngineOptions
from slackwater import AsyncClient, Node, errors

from coordinator.fleet.placement_watch import LOOK_INTERVAL_S

FIRST, SECOND = "fake-smollm2", "fake-second"
FIXED, OPEN = 0, 1
PATIENCE_S = 60.0
# The tokenizer has 3.5 MB: some nine seconds.
SLOW_LINE = "bandwidth_limit_bytes_per_s = 400_000"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A folder with the fleet's model, and another one that no node has."""
    folder = tmp_path / "mirror"
    shutil.copytree(MODELS / FIRST, folder / FIRST)
    (folder / SECOND).mkdir()
    for name in (*FAKE_TOKENIZER_FILES, "config.json"):
        shutil.copyfile(MODELS / FIRST / name, folder / SECOND / name)
    key = load_private_key(ROOT / "var" / "release" / "dev.pem")
    licence, origin = SMOLLM2_LICENCE, "made by a test"
    write_manifest(folder / SECOND, key, name=SECOND, revision="1", licence=licence, dtype="float32", origin=origin)
    return folder


def opened(mirror: Path, *, models: str = "", consent: str = "") -> DevNetwork:
    """Return a network of two nodes, the second of which leaves its model to the fleet."""

    def configure(index: int, text: str) -> str:
        if index != OPEN:
            return text
        text = re.sub(r'^model_directory = ".*"$', 'model = "fleet"', text, flags=re.M)
        return (
            f'{text}\n[models]\nmirrors = ["file://{mirror}"]\nfree_floor_bytes = 0\n{models}\n[consent]\n{consent}\n'
        )

    return DevNetwork(agents=2, engine=EngineOptions(kind="fake"), configure=configure, say=lambda _: None)


async def register_second(network: DevNetwork, mirror: Path) -> None:
    envelope = (mirror / SECOND / "manifest.envelope").read_bytes()
    async with network.admin() as admin:
        await admin.register_model(envelope, tokenizer_directory=mirror / SECOND)


async def open_node(network: DevNetwork, good: Callable[[Node], bool]) -> Node:
    """Wait until the open node is as is wanted."""
    node_id = network.ready.agents[OPEN].node_id
    async with network.admin() as admin, asyncio.timeout(PATIENCE_S):
        while True:
            for node in await admin.nodes():
                # Before its first report nothing is known of it.
                if node.node_id == node_id and node.engines and good(node):
                    return node
            await asyncio.sleep(0.1)


def has(model: str) -> Callable[[Node], bool]:
    return lambda node: (node.engines[0].model, node.engines[0].status) == (model, "ready")


def fetches(node: Node) -> bool:
    return bool(node.engines[0].open and node.engines[0].open.total_bytes)


async def quoted_wait_s(client: AsyncClient, model: str) -> float:
    """Return the wait that is quoted for a model that is ready nowhere, once there is an opinion."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            quote = await client.quote(model=model, prompt_tokens=3, max_tokens=4)
            wait_ms = quote.classes[0].wait_ms
            if wait_ms:
                assert not any(one.target_met for one in quote.classes)
                return wait_ms / 1000
            await asyncio.sleep(0.2)


async def ask(network: DevNetwork, model: str, *, tokens: int = 4) -> str:
    """Have a question answered; return the node that did."""
    async with network.client() as client, asyncio.timeout(PATIENCE_S):
        completion = await client.complete([100, 200, 300], model=model, max_tokens=tokens).completion()
        assert completion.usage.completion_tokens == tokens
        return (await client.get_task(completion.task_id)).attempts[-1].node_id


async def test_demand_moves_the_open_node_follows_and_the_wait_was_true(mirror: Path) -> None:
    async with opened(mirror, models=SLOW_LINE) as network, network.client() as client:
        await register_second(network, mirror)
        fixed, following = (agent.node_id for agent in network.ready.agents)
        await network.stop_agent(FIXED)
        assert await ask(network, FIRST) == following
        await network.restart_agent(FIXED)
        # What the open node had is spare now; a long answer that it began comes to its end, there or elsewhere.
        long = asyncio.create_task(ask(network, FIRST, tokens=2000))
        # From the next look at the fleet on a quote counts what the engine works on.
        await asyncio.sleep(LOOK_INTERVAL_S + 1.0)
        quoted_s = await quoted_wait_s(client, SECOND)
        began = asyncio.get_running_loop().time()
        assert await ask(network, SECOND) == following
        took_s = asyncio.get_running_loop().time() - began
        assert quoted_s / 2 < took_s < 2 * quoted_s
        assert await long in (fixed, following)
        node = await open_node(network, lambda node: has(SECOND)(node) and len(node.stored) == 2)
        assert node.engines[0].open is not None
        assert (node.engines[0].open.wanted_digest, node.engines[0].open.refusals) == ("", {})
        assert await ask(network, FIRST) == fixed


@pytest.mark.slow
async def test_a_restart_of_the_coordinator_in_the_middle_changes_nothing(mirror: Path) -> None:
    async with opened(mirror, models=SLOW_LINE) as network:
        await register_second(network, mirror)
        async with network.client() as client:
            await quoted_wait_s(client, SECOND)
        first = asyncio.create_task(ask(network, SECOND))
        fetching = await open_node(network, fetches)
        await network.kill_coordinator()
        with pytest.raises(errors.SlackwaterError):
            await first
        await network.restart_coordinator()
        # Nobody asks again before it is there.
        await open_node(network, has(SECOND))
        assert await ask(network, SECOND) == fetching.node_id


@pytest.mark.slow
async def test_what_the_owner_does_not_consent_to_is_not_put_there(mirror: Path) -> None:
    async with opened(mirror, consent=f'models_denied = ["{SECOND}"]') as network:
        await register_second(network, mirror)
        async with network.client() as client:
            await quoted_wait_s(client, SECOND)
            with pytest.raises(errors.NoCapacity):
                await ask(network, SECOND)
            node = await open_node(network, lambda node: bool(node.engines[0].open and node.engines[0].open.refusals))
            assert node.engines[0].open is not None
            (refusal,) = node.engines[0].open.refusals.values()
            assert "consent.models_denied" in refusal
            assert (node.engines[0].model, node.stored) == ("", ())
            quote = await client.quote(model=SECOND, prompt_tokens=3, max_tokens=4)
            assert quote.classes[0].wait_ms is None
        config = network.agent_config(OPEN)
        config.write_text(config.read_text().replace("models_denied", "models_allowed"))
        await open_node(network, lambda node: not (node.engines[0].open and node.engines[0].open.refusals))
        assert await ask(network, SECOND) == node.node_id
