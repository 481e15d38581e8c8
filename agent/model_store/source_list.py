"""Which sources a model has, in the order in which they are asked.

The owner's own mirrors come first, then what the operator names, then the
origin that the signed manifest names. The first are the owner's choice and may
be anywhere; an operator may name public https addresses and repositories of
the Hugging Face Hub only.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
import structlog
from yarl import URL

from agent.model_store.http_source import Address, HttpSource, Locate, http_session
from agent.model_store.settings import StoreSettings
from agent.model_store.sources import DirectorySource, Source
from inference.manifest import Manifest

# A revision that is no commit may change under us: only whole hashes are taken.
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+)@([0-9a-f]{40})", re.ASCII)
# What an operator names at most; a fetch asks one after the other.
OPERATOR_SOURCES_MAX = 16
_PLACEHOLDERS = ("{name}", "{revision}", "{digest}")

log = structlog.get_logger()


@asynccontextmanager
async def open_sources(
    settings: StoreSettings, manifest: Manifest, operator_sources: Sequence[str]
) -> AsyncIterator[list[Source]]:
    """Yield the sources of a model, best first; each at most once."""
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(http_session(public_only=False))
        foreign = await stack.enter_async_context(http_session(public_only=True))
        found: dict[str, Source] = {}
        for mirror in settings.mirrors:
            source = _mirror(mirror_folder(mirror, manifest), own)
            found.setdefault(source.name, source)
        for url in (*operator_sources[:OPERATOR_SOURCES_MAX], manifest.origin):
            offered = _offered(url, settings, own, foreign)
            if offered is not None:
                found.setdefault(offered.name, offered)
        yield list(found.values())


def mirror_folder(mirror: str, manifest: Manifest) -> str:
    """Return the folder of one model on a mirror of many."""
    if not any(placeholder in mirror for placeholder in _PLACEHOLDERS):
        mirror = mirror.rstrip("/") + "/{name}"
    digest = manifest.digest.removeprefix("sha256:")
    # All three are made of characters that need no quoting.
    return mirror.replace("{name}", manifest.name).replace("{revision}", manifest.revision).replace("{digest}", digest)


def _mirror(folder: str, session: aiohttp.ClientSession) -> Source:
    parts = urlsplit(folder)
    if parts.scheme == "file":
        return DirectorySource(Path(unquote(parts.path)))
    return HttpSource(_shown(folder), session, _in_folder(folder), public_only=False)


def _offered(
    url: str, settings: StoreSettings, own: aiohttp.ClientSession, foreign: aiohttp.ClientSession
) -> Source | None:
    """Return a source that somebody else named; None for what is no address, or not allowed."""
    hub = _HUB.fullmatch(url)
    if hub is not None:
        # The Hub's address is fixed, or the owner's by HF_ENDPOINT, which may be a host of their own network.
        return HttpSource(url, own, _in_repository(hub[1], hub[2]), public_only=False) if settings.hub else None
    if url.startswith("https://"):
        return HttpSource(_shown(url), foreign, _in_folder(url), public_only=True)
    if url.startswith("hf://"):
        log.warning("not a source: hf://OWNER/REPOSITORY@ and the 40 digits of a commit are wanted", source=url[:200])
    return None


def _in_folder(folder: str) -> Locate:
    base = URL(folder)

    async def locate(file_name: str) -> Address:
        return Address(base.with_path(f"{base.path.rstrip('/')}/{file_name}", keep_query=True), {})

    return locate


def _in_repository(repository: str, commit: str) -> Locate:
    async def locate(file_name: str) -> Address:
        return await asyncio.to_thread(_hub_address, repository, commit, file_name)

    return locate


def _hub_address(repository: str, commit: str, file_name: str) -> Address:
    # Here, because loading it takes 0.2 s and 22 MB, which an agent that fetches nothing need not spend.
    from huggingface_hub import get_token, hf_hub_url

    token = get_token()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return Address(URL(hf_hub_url(repository, file_name, revision=commit)), headers)


def _shown(folder: str) -> str:
    """Return an address without what may be a secret in its query."""
    return str(URL(folder).with_query(None).with_user(None))
