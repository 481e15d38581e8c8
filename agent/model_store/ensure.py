"""Having a model: what is there is checked, what is missing or damaged is fetched."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from agent.model_store.bandwidth import Bandwidth
from agent.model_store.fetch import TICK_S, Allowed, Fetch, FetchFailed
from agent.model_store.in_thread import to_its_end
from agent.model_store.progress import FetchPhase, FetchProgress
from agent.model_store.settings import StoreSettings
from agent.model_store.source_list import open_sources
from agent.model_store.store import FetchUnderWay, ModelStore
from inference.manifest import Manifest, ManifestError, verify_directory

# How often another process is asked whether it is done.
OTHER_PROCESS_POLL_S = 0.5
# A disk that gives other bytes than were written to it does so again.
REPAIRS_MAX = 2

OnProgress = Callable[[FetchProgress], None]

log = structlog.get_logger()


class VerificationStopped(Exception):
    """Nobody waits for the result any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchContext:
    """What all fetches of a process share."""

    settings: StoreSettings
    bandwidth: Bandwidth
    # Returns why fetching is not allowed now, or None.
    allowed: Allowed
    on_progress: OnProgress
    jitter: random.Random = field(default_factory=random.Random)


async def ensure_model(
    store: ModelStore,
    manifest: Manifest,
    envelope: bytes,
    operator_sources: Sequence[str],
    context: FetchContext,
) -> Path:
    """Return the directory of a model whose every byte was checked just now; fetch what is missing first.

    Takes as long as it takes: while the disk is full, the owner forbids it or
    no source answers, it waits. May be cancelled; what was fetched stays. The
    caller holds the model (`ModelStore.holding`) before and for as long as it
    uses the directory.

    Raises:
        FetchFailed: no source is left, or the disk does not keep what is written.
        ManifestError: the manifest is too old for fetching, or something beside the model's files lies there.
        OSError: the disk is broken or not writable.
    """
    for _ in range(REPAIRS_MAX + 1):
        if not store.is_whole(manifest.digest):
            manifest.check_fetchable()
            await _fetch(store, manifest, envelope, operator_sources, context)
        try:
            await _verify(store, manifest, context.on_progress)
        except ManifestError as error:
            log.warning("a model on the disk is damaged: fetching it anew", model=manifest.name, detail=str(error))
            await to_its_end(partial(_reopen, store, manifest, envelope, error))
        else:
            return store.model_directory(manifest.digest)
    raise FetchFailed(
        f"{store.directory} does not keep what is written to it: {manifest.name} was wrong {REPAIRS_MAX + 1} times "
        "in a row; check the disk"
    )


async def _fetch(
    store: ModelStore, manifest: Manifest, envelope: bytes, operator_sources: Sequence[str], context: FetchContext
) -> None:
    while not store.is_whole(manifest.digest):
        with ExitStack() as stack:
            try:
                growing = await to_its_end(lambda: stack.enter_context(store.fetching(manifest, envelope)))
            except FetchUnderWay:
                context.on_progress(_progress(manifest, FetchPhase.WAITING_FOR_OTHER, 0))
                await asyncio.sleep(OTHER_PROCESS_POLL_S)
                continue
            if store.is_whole(manifest.digest):
                # Another one finished between our look and our lock.
                return
            async with open_sources(context.settings, manifest, operator_sources) as sources:
                await Fetch(
                    growing,
                    sources,
                    find_space=partial(store.make_room, manifest),
                    allowed=context.allowed,
                    bandwidth=context.bandwidth,
                    on_progress=context.on_progress,
                    jitter=context.jitter,
                ).run()
            await to_its_end(partial(store.finish, manifest))
            log.info("model fetched", model=manifest.name, revision=manifest.revision, size_bytes=manifest.size_bytes)


async def _verify(store: ModelStore, manifest: Manifest, on_progress: OnProgress) -> None:
    """Hash every byte of a whole model; about a second per gigabyte, in a thread that ends with the caller."""
    stop = threading.Event()
    done_bytes = 0

    def on_bytes(bytes_done: int, _bytes_total: int) -> None:
        nonlocal done_bytes
        done_bytes = bytes_done
        if stop.is_set():
            raise VerificationStopped

    directory = store.model_directory(manifest.digest)
    hashing = asyncio.ensure_future(asyncio.to_thread(verify_directory, manifest, directory, on_bytes))
    try:
        while not hashing.done():
            on_progress(_progress(manifest, FetchPhase.VERIFYING, done_bytes))
            await asyncio.wait([hashing], timeout=TICK_S)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([hashing])
        hashing.exception()
        raise
    hashing.result()
    on_progress(_progress(manifest, FetchPhase.DONE, manifest.size_bytes))


def _reopen(store: ModelStore, manifest: Manifest, envelope: bytes, error: ManifestError) -> None:
    """Make a damaged model one to be fetched, of which only the right chunks count.

    Raises:
        ManifestError: `error` itself, where every chunk is right and something else is wrong.
    """
    manifest.check_fetchable()
    store.reopen(manifest)
    with store.fetching(manifest, envelope) as growing:
        if not growing.check_chunks():
            store.finish(manifest)
            raise error


def _progress(manifest: Manifest, phase: FetchPhase, bytes_done: int) -> FetchProgress:
    return FetchProgress(
        name=manifest.name,
        digest=manifest.digest,
        phase=phase,
        bytes_done=bytes_done,
        bytes_total=manifest.size_bytes,
        rate_bytes_per_s=0.0,
        eta_s=None,
    )
