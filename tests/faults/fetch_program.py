"""Fetches one model into a store, as the agent does; a process of its own, so that tests can kill it.

Arguments: store directory, directory with the model's manifest, mirror. Prints "whole" at the end, and each change of
phase before.
"""

import asyncio
import sys
from pathlib import Path

from agent.clock import wall_ms
from agent.model_store.bandwidth import Bandwidth
from agent.model_store.ensure import FetchContext, ensure_model
from agent.model_store.progress import FetchPhase, FetchProgress
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore
from agent.testing_mirror import RELEASE_PUBLIC
from inference.manifest import MANIFEST_FILE, load_manifest


async def main(directory: Path, made: Path, mirror: str) -> None:
    settings = StoreSettings(mirrors=(mirror,), free_floor_bytes=0)
    store = ModelStore(directory, settings, (RELEASE_PUBLIC,), wall_ms)
    envelope = (made / MANIFEST_FILE).read_bytes()
    told: FetchPhase | None = None

    def tell(progress: FetchProgress) -> None:
        nonlocal told
        if progress.phase is not told:
            told = progress.phase
            sys.stdout.write(f"{progress.phase.value} {progress.bytes_done}\n")
            sys.stdout.flush()

    context = FetchContext(settings=settings, bandwidth=Bandwidth(None), allowed=lambda: None, on_progress=tell)
    await ensure_model(store, load_manifest(envelope, [RELEASE_PUBLIC]), envelope, (), context)
    sys.stdout.write("whole\n")


asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
