"""Chunks over HTTP: mirrors, and whatever else answers requests for ranges.

Redirects are followed by hand, since each hop must be judged: a token goes to
the host it is for and no further, https never becomes http, and an address
that others named never leads into the owner's own network.
"""

import errno
import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from urllib.request import getproxies

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from agent.clock import monotonic_s
from agent.model_store.fetch_events import FailureKind
from agent.model_store.plan import ChunkRange
from agent.model_store.sources import STALL_BYTES_MIN, STALL_S, SourceFailed

CONNECT_TIMEOUT_S = 15.0
REDIRECTS_MAX = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Each piece costs a turn of the event loop; twice this is copied in one, which takes about a millisecond.
READ_BUFFER_BYTES = 512 * 1024
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
# What of an answer's text is worth a line.
_DETAIL_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class Address:
    """Where one file is asked for."""

    url: URL
    # Sent to this URL's origin only.
    headers: Mapping[str, str]


# Returns where a source has a file of this name.
Locate = Callable[[str], Awaitable[Address]]


class PrivateAddress(OSError):
    """A name that others chose leads into the owner's own network."""

    def __init__(self, host: str) -> None:
        # With a number and a text of its own, which aiohttp passes on.
        super().__init__(errno.EACCES, f"{host} is in a private network: name it in your own mirrors if that is meant")


class PublicResolver(AbstractResolver):
    """Resolves names, and refuses those of private networks."""

    def __init__(self) -> None:
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for one in found:
            if not ipaddress.ip_address(one["host"].partition("%")[0]).is_global:
                raise PrivateAddress(host)
        return found

    async def close(self) -> None:
        await self._resolver.close()


@asynccontextmanager
async def http_session(*, public_only: bool) -> AsyncIterator[aiohttp.ClientSession]:
    """Open what HTTP sources share. With `public_only` no private address is connected to.

    Proxies of the environment are used; names are then the proxy's business.
    """
    guarded = public_only and not getproxies()
    connector = aiohttp.TCPConnector(resolver=PublicResolver() if guarded else None)
    session = aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=STALL_S),
        auto_decompress=False,
        trust_env=True,
        read_bufsize=READ_BUFFER_BYTES,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    async with session:
        yield session


class HttpSource:
    """Files that a web server gives by ranges."""

    def __init__(self, name: str, session: aiohttp.ClientSession, locate: Locate, *, public_only: bool) -> None:
        self._name = name
        self._session = session
        self._locate = locate
        self._public_only = public_only

    @property
    def name(self) -> str:
        return self._name

    async def fetch(self, wanted: ChunkRange, *, whole_file: bool) -> AsyncGenerator[bytes | memoryview, None]:
        try:
            address = await self._locate(wanted.file.path)
            async with self._ask(address, wanted) as response:
                skip_bytes = self._check(response, wanted, whole_file=whole_file)
                left = wanted.length_bytes
                async for block in _lively(response):
                    dropped_bytes = min(skip_bytes, len(block))
                    skip_bytes -= dropped_bytes
                    piece = memoryview(block)[dropped_bytes:][:left]
                    if len(piece):
                        left -= len(piece)
                        yield piece
                    if not left:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SourceFailed(FailureKind.BROKEN, _shortened(str(error) or type(error).__name__)) from error
        raise SourceFailed(FailureKind.BROKEN, f"the answer ended {left} bytes early")

    @asynccontextmanager
    async def _ask(self, address: Address, wanted: ChunkRange) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer behind all redirects; leaving closes its connection unless it was read to its end."""
        last = wanted.offset_bytes + wanted.length_bytes - 1
        headers = {"Range": f"bytes={wanted.offset_bytes}-{last}", "Accept-Encoding": "identity"}
        url = address.url
        for _ in range(REDIRECTS_MAX + 1):
            self._check_host(url)
            own = address.headers if url.origin() == address.url.origin() else {}
            async with self._session.get(url, headers={**headers, **own}, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    yield response
                    return
                url = _next_hop(url, response.headers.get("Location"))
        raise SourceFailed(FailureKind.BROKEN, f"more than {REDIRECTS_MAX} redirects from {address.url.host}")

    def _check_host(self, url: URL) -> None:
        """Refuse numbers of private networks, which no resolver sees."""
        if not self._public_only or url.host is None:
            return
        try:
            number = ipaddress.ip_address(url.host.partition("%")[0])
        except ValueError:
            return
        if not number.is_global:
            raise PrivateAddress(url.host)

    def _check(self, response: aiohttp.ClientResponse, wanted: ChunkRange, *, whole_file: bool) -> int:
        """Return how many bytes come before the wanted ones.

        Raises:
            SourceFailed: the answer is not one to read.
        """
        status = response.status
        where = f"{response.url.host} answers {status}"
        if status == HTTPStatus.PARTIAL_CONTENT:
            self._check_encoding(response)
            self._check_range(response, wanted)
            return 0
        if status == HTTPStatus.OK:
            self._check_encoding(response)
            if response.content_length not in (None, wanted.file.size_bytes):
                detail = f"{where} with {response.content_length} bytes, the file has {wanted.file.size_bytes}"
                raise SourceFailed(FailureKind.BROKEN, detail)
            if wanted.offset_bytes and not whole_file:
                raise SourceFailed(FailureKind.NO_RANGES, f"{where} to a request for a range")
            return wanted.offset_bytes
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise SourceFailed(FailureKind.WRONG, f"{where}: its {wanted.file.path} is shorter")
        retry_after_s = _retry_after_s(response)
        if status == HTTPStatus.TOO_MANY_REQUESTS or (status >= 500 and retry_after_s is not None):
            raise SourceFailed(FailureKind.BUSY, where, retry_after_s)
        if status >= 500:
            raise SourceFailed(FailureKind.BROKEN, where)
        raise SourceFailed(FailureKind.MISSING, f"{where} for {wanted.file.path}")

    def _check_encoding(self, response: aiohttp.ClientResponse) -> None:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise SourceFailed(FailureKind.BROKEN, f"{response.url.host} encodes the file ({encoding[:20]})")

    def _check_range(self, response: aiohttp.ClientResponse, wanted: ChunkRange) -> None:
        said = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(said.strip())
        if match is None:
            raise SourceFailed(FailureKind.BROKEN, f"{response.url.host} sends no Content-Range that can be read")
        first, last, total = match.groups()
        if total != "*" and int(total) != wanted.file.size_bytes:
            detail = f"its {wanted.file.path} has {total} bytes, not {wanted.file.size_bytes}"
            raise SourceFailed(FailureKind.WRONG, detail)
        if int(first) != wanted.offset_bytes or int(last) >= wanted.file.size_bytes:
            raise SourceFailed(FailureKind.BROKEN, f"{response.url.host} sends another range than was asked: {said}")


async def _lively(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield a body as it arrives; give up where it only trickles. Time in which nobody reads does not count."""
    waited_s, arrived_bytes = 0.0, 0
    blocks = response.content.iter_any()
    while True:
        asked_at = monotonic_s()
        block = await anext(blocks, b"")
        if not block:
            return
        waited_s += monotonic_s() - asked_at
        arrived_bytes += len(block)
        if waited_s >= STALL_S:
            if arrived_bytes < STALL_BYTES_MIN:
                raise SourceFailed(FailureKind.BROKEN, f"only {arrived_bytes} bytes in {waited_s:.0f} s")
            waited_s, arrived_bytes = 0.0, 0
        yield block


def _next_hop(url: URL, location: str | None) -> URL:
    if location is None:
        raise SourceFailed(FailureKind.BROKEN, f"{url.host} redirects to nowhere")
    try:
        hop = url.join(URL(location))
    except ValueError as error:
        raise SourceFailed(FailureKind.BROKEN, f"{url.host} redirects to what is no address") from error
    if hop.scheme not in ("https", "http") or (url.scheme == "https" and hop.scheme != "https"):
        raise SourceFailed(FailureKind.BROKEN, f"{url.host} redirects from {url.scheme} to {hop.scheme}")
    return hop


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """Return how long the server asks to be left alone; dates are judged by its own clock."""
    said = response.headers.get("Retry-After", "").strip()
    if said.isascii() and said.isdigit():
        return float(said[:9])
    try:
        until = parsedate_to_datetime(said)
        return (until - parsedate_to_datetime(response.headers.get("Date", ""))).total_seconds()
    except (ValueError, TypeError):
        return None


def _shortened(text: str) -> str:
    return " ".join(text.split())[:_DETAIL_CHARACTERS_MAX]
