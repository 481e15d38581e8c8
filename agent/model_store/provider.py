"""Gets the models that engines name: what a name stands for, its files, and a hold on them while they are used."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from agent.errors import ModelRefused
from agent.model_store.bandwidth import Bandwidth
from agent.model_store.ensure import FetchContext, ensure_model
from agent.model_store.fetch import FetchFailed
from agent.model_store.in_thread import to_its_end
from agent.model_store.manifests import resolve_model
from agent.model_store.progress import FetchPhase, FetchProgress
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore
from inference.manifest import Manifest, ManifestError

# Models that are fetched at once, each with its own connections and 50 MB of buffers; further ones wait.
FETCHES_MAX = 3


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that was checked just now."""

    manifest: Manifest
    directory: Path


class ModelProvider:
    """Gets the models of all engines of one agent.

    Args:
        channel: the connection to the coordinator's node port, where there is one.
        allowed: why fetching is not allowed now, or None; asked four times a second while something is fetched.
    """

    def __init__(
        self,
        store: ModelStore,
        settings: StoreSettings,
        *,
        release_keys: tuple[bytes, ...],
        channel: Callable[[], grpc.aio.Channel | None],
        allowed: Callable[[], str | None],
    ) -> None:
        self._store = store
        self._release_keys = release_keys
        self._channel = channel
        self._jitter = random.Random()
        self._fetches: dict[str, FetchProgress] = {}
        self._context = FetchContext(
            settings=settings,
            bandwidth=Bandwidth(settings.bandwidth_limit_bytes_per_s),
            allowed=allowed,
            on_progress=self._note,
            jitter=self._jitter,
        )
        self._places = asyncio.Semaphore(FETCHES_MAX)

    @property
    def fetches(self) -> list[FetchProgress]:
        """How far each model is that is not ready yet."""
        return list(self._fetches.values())

    def _note(self, progress: FetchProgress) -> None:
        if progress.phase is FetchPhase.DONE:
            self._fetches.pop(progress.digest, None)
        else:
            self._fetches[progress.digest] = progress

    @asynccontextmanager
    async def provided(self, engine_id: str, name_or_digest: str) -> AsyncIterator[ReadyModel]:
        """Yield a model that the store holds, fetched first where it must be; it is not evicted meanwhile.

        Raises:
            ModelRefused: names the engine, the model, what is wrong with it and what to do.
        """
        async with AsyncExitStack() as stack:
            try:
                ready = await self._prepare(stack, name_or_digest)
            except (ManifestError, FetchFailed) as error:
                raise ModelRefused(f"engine {engine_id}: model {name_or_digest}: {error}") from error
            except OSError as error:
                raise ModelRefused(
                    f"engine {engine_id}: model {name_or_digest}: {self._store.directory} cannot be used "
                    f"({error.strerror}: {error.filename}); check the disk and its permissions"
                ) from error
            yield ready

    async def _prepare(self, stack: AsyncExitStack, name_or_digest: str) -> ReadyModel:
        named = await resolve_model(
            name_or_digest,
            channel=self._channel,
            store=self._store,
            release_keys=self._release_keys,
            jitter=self._jitter,
            patient=True,
        )
        # In a thread: it waits while an eviction that has begun ends.
        await to_its_end(partial(stack.enter_context, self._store.holding(named.manifest.digest)))
        try:
            async with self._places:
                directory = await ensure_model(
                    self._store, named.manifest, named.envelope, named.sources, self._context
                )
        finally:
            self._fetches.pop(named.manifest.digest, None)
        return ReadyModel(named.manifest, directory)
