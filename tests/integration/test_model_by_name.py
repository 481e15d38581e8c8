"""A node gets a model by its name: manifest from a real coordinator, files from a mirror, and then it serves it."""

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from dev_network import DevNetwork
from network_settings import EngineOptions
from rich.console import Console

from agent.clock import wall_ms
from agent.identity import Identity, load_identity
from agent.model_store.cli import fetch_model, models_json, models_table, removed_text
from agent.model_store.manifests import resolve_model
from agent.model_store.provider import ModelProvider
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore
from agent.testing_mirror import Mirror
from inference.manifest import ManifestError, verify_directory

MODEL = "fake-smollm2"
MODELS = Path(__file__).resolve().parents[2] / "var" / "models"


@pytest.fixture
async def network() -> AsyncIterator[DevNetwork]:
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake"), say=lambda _: None) as network:
        yield network


def identity_of(network: DevNetwork) -> Identity:
    return load_identity(Path(network.ready.state_dir) / "agent-1")


async def test_an_agent_fetches_a_model_by_name_and_serves_it(network: DevNetwork, tmp_path: Path) -> None:
    identity = identity_of(network)
    async with Mirror(MODELS).serving() as mirror:
        settings = StoreSettings(mirrors=(mirror.url,), free_floor_bytes=0)
        store = ModelStore(tmp_path / "store", settings, identity.release_keys, wall_ms)
        credentials = grpc.ssl_channel_credentials(
            identity.ca_certificate, identity.tls_key, identity.certificate_chain
        )
        async with grpc.aio.secure_channel(identity.node_address, credentials) as channel:
            provider = ModelProvider(
                store,
                settings,
                release_keys=identity.release_keys,
                channel=lambda: channel,
                allowed=lambda: None,
            )
            async with provider.provided("engine", MODEL) as ready:
                verify_directory(ready.manifest, ready.directory)
                assert [model["in_use"] for model in models_json(store.models())] == [True]
                assert provider.fetches == []
                await network.stop_agent(0)
                config = network.agent_config(0)
                text = re.sub(
                    r'^model_directory = ".*"$',
                    f'model_directory = "{ready.directory}"',
                    config.read_text(),
                    flags=re.M,
                )
                config.write_text(text)
                await network.restart_agent(0)
                async with network.client() as client:
                    answer = await client.complete("hello", model=MODEL, max_tokens=4)
                assert answer.usage.completion_tokens == 4


async def test_models_are_fetched_listed_and_removed_by_command(network: DevNetwork, tmp_path: Path) -> None:
    identity = identity_of(network)
    settings = StoreSettings(mirrors=(f"file://{MODELS}",), free_floor_bytes=0)
    store = ModelStore(tmp_path / "store", settings, identity.release_keys, wall_ms)
    console = Console(record=True, width=200)
    await fetch_model(MODEL, store, settings, identity, console)
    (model,) = models_json(store.models())
    assert (model["name"], model["state"], model["in_use"]) == (MODEL, "whole", False)
    console.print(models_table(store.models(), wall_ms()))
    shown = console.export_text()
    assert f"{MODEL} 2025-02-07 is in {store.directory}" in shown
    assert "0 min ago" in shown
    assert removed_text(store.remove(MODEL)).startswith(f"removed {MODEL} 2025-02-07: 0.0")
    assert store.models() == []


async def test_only_nodes_of_the_fleet_are_told_and_only_what_is_there(network: DevNetwork, tmp_path: Path) -> None:
    identity = identity_of(network)
    store = ModelStore(tmp_path / "store", StoreSettings(), identity.release_keys, wall_ms)
    with pytest.raises(ManifestError, match="has no model nothing"):
        await fetch_model("nothing", store, StoreSettings(), identity, Console(quiet=True))
    async with grpc.aio.secure_channel(
        identity.node_address, grpc.ssl_channel_credentials(identity.ca_certificate)
    ) as stranger:
        with pytest.raises(ManifestError, match="sends no manifest: UNAVAILABLE"):
            await resolve_model(
                MODEL,
                channel=lambda: stranger,
                store=store,
                release_keys=identity.release_keys,
                jitter=random.Random(),
                patient=False,
            )
