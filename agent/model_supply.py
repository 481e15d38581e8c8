"""The model of each engine, checked: from a directory of the owner's, or from the store, which fetches it first."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import msgspec
import structlog

from agent import events as e
from agent.clock import until_next_s, wall_ms
from agent.config import AgentConfig, EngineSettings
from agent.errors import ModelRefused
from agent.identity import Identity
from agent.model_store.progress import FetchProgress
from agent.model_store.provider import ModelProvider
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore
from agent.models import load_model
from agent.owner.policy import DownloadDecision
from inference.manifest import Manifest

# A model takes minutes to fetch; a look costs a few dozen system calls.
STORE_LOOK_S = 5.0

log = structlog.get_logger()


def open_store(config: AgentConfig, identity: Identity) -> ModelStore:
    """Return the store of this agent, made where it is not there yet. Blocks on the disk."""
    directory = config.models.directory or config.state_dir / "models"
    return ModelStore(directory, config.models, identity.release_keys, wall_ms)


class ModelSupply:
    """Supplies the engines of one agent.

    Args:
        identity: returns the node's identity of the moment.
        channel: the connection to the coordinator's node port, where there is one.
        downloads: whether the owner lets the network be used now.
        stopping: whether nobody waits for a model any more.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        identity: Callable[[], Identity],
        channel: Callable[[], grpc.aio.Channel | None],
        downloads: Callable[[], DownloadDecision],
        stopping: Callable[[], bool],
    ) -> None:
        self._identity = identity
        self._stopping = stopping
        self._provider: ModelProvider | None = None
        # Without such an engine nobody needs the folder of a store.
        if any(engine.model for engine in config.engines):
            self._provider = ModelProvider(
                open_store(config, identity()),
                config.models,
                release_keys=identity().release_keys,
                channel=channel,
                allowed=lambda: _objection(downloads(), config.models),
            )

    @property
    def fetches(self) -> list[FetchProgress]:
        """How far each model is that is not ready yet."""
        return [] if self._provider is None else self._provider.fetches

    async def find(self, settings: EngineSettings) -> Manifest:
        """Return the manifest of the model that an engine's settings name.

        Raises:
            ModelRefused: no release key that is pinned has signed it, or the coordinator has none.
        """
        assert self._provider is not None, "made where an engine names a model"
        return await self._provider.find(settings.engine_id, settings.model)

    async def watch(self, feed: Callable[[e.Event], None]) -> None:
        """Tell what lies in the store and how far fetches are, for ever, where there is a store."""
        while self._provider is not None:
            try:
                seen = await self._provider.seen()
            except OSError as error:
                log.error("cannot look into the model store", error=str(error))
            else:
                fetched = {one.digest: one.bytes_done for one in self._provider.fetches}
                feed(e.ModelsSeen(seen, fetched))
            await asyncio.sleep(until_next_s(STORE_LOOK_S))

    @asynccontextmanager
    async def provided(self, settings: EngineSettings) -> AsyncIterator[tuple[EngineSettings, Manifest]]:
        """Yield the settings with the directory of the checked model, which stays there meanwhile.

        Raises:
            ModelRefused: no such model may be loaded; names the engine, what is wrong and what to do.
        """
        if not settings.model:
            keys = self._identity().release_keys
            yield settings, await asyncio.to_thread(load_model, settings, keys, self._check_wanted)
            return
        assert self._provider is not None, "made where an engine names a model"
        async with self._provider.provided(settings.engine_id, settings.model) as ready:
            yield msgspec.structs.replace(settings, model_directory=ready.directory), ready.manifest

    def _check_wanted(self, bytes_done: int, bytes_total: int) -> None:
        # Runs in the thread that hashes: without this, a stop would wait for the last of many gigabytes.
        if self._stopping():
            raise ModelRefused(f"stopped after {bytes_done} of {bytes_total} bytes")


def _objection(decision: DownloadDecision, settings: StoreSettings) -> str | None:
    if decision.allowed or (decision.metered and not settings.pause_on_metered):
        return None
    return decision.reason
