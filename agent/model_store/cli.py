"""What `slackwater-agent models` does: list, fetch, remove, evict. Plain functions; the command line calls them."""

import random
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from agent.connection import MESSAGE_BYTES_MAX
from agent.enrolment import node_channel
from agent.identity import Identity
from agent.model_store.bandwidth import Bandwidth
from agent.model_store.ensure import FetchContext, ensure_model
from agent.model_store.manifests import resolve_model
from agent.model_store.progress import FetchPhase, FetchProgress
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore, StoredModel

_MS_PER_MINUTE = 60_000


def models_json(models: Sequence[StoredModel]) -> list[dict[str, Any]]:
    """Return what `models --json` prints: one object for each model; names are stable."""
    return [
        {
            "name": model.name,
            "revision": model.revision,
            "digest": model.digest,
            "state": model.state.value,
            "in_use": model.in_use,
            "size_bytes": model.size_bytes,
            "disk_bytes": model.disk_bytes,
            "last_used_ms": model.last_used_ms,
        }
        for model in models
    ]


def models_table(models: Sequence[StoredModel], now_ms: int) -> Table:
    """Return what `models` shows a person."""
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "revision", "is", "size", "on disk", "used", "digest"):
        table.add_column(heading)
    for model in models:
        used = "now" if model.in_use else _ago(now_ms - model.last_used_ms) if model.last_used_ms else "never"
        table.add_row(
            Text(model.name),
            Text(model.revision),
            model.state.value,
            f"{model.size_bytes / 1e9:.2f} GB",
            f"{model.disk_bytes / 1e9:.2f} GB",
            used,
            model.digest[:19],
        )
    return table


async def fetch_model(
    name_or_digest: str, store: ModelStore, settings: StoreSettings, identity: Identity, console: Console
) -> None:
    """Fetch a model into the store, with a progress bar. The command itself is the owner's permission.

    Raises:
        ManifestError: nobody knows the model, or its manifest is not signed as it must be.
        FetchFailed: no source is left.
        OSError: the disk is broken or not writable.
    """
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
    jitter = random.Random()
    async with node_channel(identity, options) as channel:
        named = await resolve_model(
            name_or_digest,
            channel=lambda: channel,
            store=store,
            release_keys=identity.release_keys,
            jitter=jitter,
            patient=False,
        )
    with _FetchBar(console) as bar, store.holding(named.manifest.digest):
        context = FetchContext(
            settings=settings,
            bandwidth=Bandwidth(settings.bandwidth_limit_bytes_per_s),
            allowed=lambda: None,
            on_progress=bar.show,
            jitter=jitter,
        )
        directory = await ensure_model(store, named.manifest, named.envelope, named.sources, context)
    console.print(f"{named.manifest.name} {named.manifest.revision} is in {directory}", highlight=False)


def removed_text(removed: Sequence[StoredModel]) -> str:
    """Return what `models remove` and `models evict` print."""
    if not removed:
        return "no model was unused"
    names = ", ".join(f"{model.name} {model.revision}".strip() for model in removed)
    return f"removed {names}: {sum(model.disk_bytes for model in removed) / 1e9:.2f} GB"


class _FetchBar:
    """One line on a terminal that follows a fetch."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, note="")

    def __enter__(self) -> "_FetchBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: FetchProgress) -> None:
        fetching = progress.phase is FetchPhase.FETCHING
        self._bar.update(
            self._task,
            description=f"{progress.name}: {progress.phase.value.replace('_', ' ')}",
            completed=progress.bytes_done,
            total=progress.bytes_total,
            note=", ".join(progress.sources) if fetching else progress.detail,
        )


def _ago(span_ms: int) -> str:
    minutes = max(0, span_ms) // _MS_PER_MINUTE
    if minutes < 60:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // (24 * 60)} days ago"
