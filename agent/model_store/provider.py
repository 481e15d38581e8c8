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
from agent.model_store.manifests import NamedModel, resolve_model
from agent.model_store.progress import FetchPhase, FetchProgress
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore, StoredState
from inference.manifest import Manifest, ManifestError
from protos.slackwater.common.v1 import capability_pb2

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
        self._line_bytes_per_s = 0.0
        self._places = asyncio.Semaphore(FETCHES_MAX)

    @property
    def fetches(self) -> list[FetchProgress]:
        """How far each model is that is not ready yet."""
        return list(self._fetches.values())

    @property
    def line_bytes_per_s(self) -> int:
        """What fetching made of the line when something was last fetched, or may make; 0 where neither is known."""
        return round(self._line_bytes_per_s) or self._context.settings.bandwidth_limit_bytes_per_s or 0

    def _note(self, progress: FetchProgress) -> None:
        if progress.phase is FetchPhase.FETCHING and progress.rate_bytes_per_s > 0:
            self._line_bytes_per_s = progress.rate_bytes_per_s
        if progress.phase is FetchPhase.DONE:
            self._fetches.pop(progress.digest, None)
        else:
            self._fetches[progress.digest] = progress

    async def find(self, engine_id: str, name_or_digest: str) -> Manifest:
        """Return the manifest of a model, which a pinned release key has signed.

        Raises:
            ModelRefused: as `provided`.
        """
        try:
            return (await self._resolve(name_or_digest)).manifest
        except (ManifestError, OSError) as error:
            raise ModelRefused(f"engine {engine_id}: model {name_or_digest}: {error}") from error

    async def seen(self) -> capability_pb2.ModelStore:
        """Return what the fleet is told of the store; `paused` is what the owner says of the network now."""

        def look() -> tuple[list[str], int]:
            whole = [model.digest for model in self._store.models() if model.state is StoredState.WHOLE]
            return sorted(whole), self._store.room_bytes()

        digests, room_bytes = await asyncio.to_thread(look)
        return capability_pb2.ModelStore(
            manifest_digests=digests,
            room_bytes=room_bytes,
            line_bytes_per_s=self.line_bytes_per_s,
            paused=self._context.allowed() or "",
        )

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

    async def _resolve(self, name_or_digest: str) -> NamedModel:
        return await resolve_model(
            name_or_digest,
            channel=self._channel,
            store=self._store,
            release_keys=self._release_keys,
            jitter=self._jitter,
            patient=True,
        )

    async def _prepare(self, stack: AsyncExitStack, name_or_digest: str) -> ReadyModel:
        named = await self._resolve(name_or_digest)
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
