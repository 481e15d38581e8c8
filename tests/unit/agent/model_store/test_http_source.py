"""A source over HTTP, against a server that misbehaves: each fault has its own answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from yarl import URL

from agent.model_store import http_source
from agent.model_store.fetch_events import FailureKind
from agent.model_store.http_source import Address, HttpSource, http_session
from agent.model_store.plan import ChunkRange
from agent.model_store.sources import DirectorySource, SourceFailed
from agent.testing_mirror import Behaviour, Mirror
from inference.model_chunks import CHUNK_BYTES, ManifestFile

SIZE = CHUNK_BYTES + 1000
CONTENT = bytes(range(250)) * (SIZE // 250 + 1)
CONTENT = CONTENT[:SIZE]
FILE = ManifestFile("a.safetensors", SIZE, b"", (b"", b""))
TAIL = ChunkRange(FILE, 1, 1)
ALL = ChunkRange(FILE, 0, 2)
TAIL_BYTES = CONTENT[CHUNK_BYTES:]


@dataclass
class Rig:
    mirror: Mirror
    source: HttpSource

    async def get(self, wanted: ChunkRange, *, whole_file: bool = False) -> bytes:
        content = b""
        async with aclosing(self.source.fetch(wanted, whole_file=whole_file)) as blocks:
            async for block in blocks:
                content += block
        return content

    async def fails(self, behaviour: Behaviour, *, wanted: ChunkRange = TAIL) -> SourceFailed:
        self.mirror.script.append(behaviour)
        with pytest.raises(SourceFailed) as failed:
            await self.get(wanted)
        return failed.value


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    (tmp_path / "a.safetensors").write_bytes(CONTENT)
    async with Mirror(tmp_path).serving() as mirror, http_session(public_only=False) as session:

        async def locate(name: str) -> Address:
            return Address(URL(f"{mirror.url}/{name}"), {"Authorization": "Bearer secret"})

        yield Rig(mirror, HttpSource("mirror", session, locate, public_only=False))


async def test_a_range_comes_whole_and_only_the_range(rig: Rig) -> None:
    assert await rig.get(TAIL) == TAIL_BYTES
    assert await rig.get(ALL) == CONTENT
    assert [(asked.first, asked.last) for asked in rig.mirror.asked] == [(CHUNK_BYTES, SIZE - 1), (0, SIZE - 1)]
    assert rig.mirror.asked[0].headers["Accept-Encoding"] == "identity"


async def test_byte_by_byte_is_the_same(rig: Rig) -> None:
    rig.mirror.script.append(Behaviour(piece_bytes=1))
    assert await rig.get(TAIL) == TAIL_BYTES


@pytest.mark.parametrize(
    ("behaviour", "kind", "said"),
    [
        (Behaviour(status=404), FailureKind.MISSING, "404"),
        (Behaviour(status=403), FailureKind.MISSING, "403"),
        (Behaviour(status=401), FailureKind.MISSING, "401"),
        (Behaviour(status=204), FailureKind.MISSING, "204"),
        (Behaviour(status=500), FailureKind.BROKEN, "500"),
        (Behaviour(status=503), FailureKind.BROKEN, "503"),
        (Behaviour(status=416), FailureKind.WRONG, "shorter"),
        (Behaviour(status=302), FailureKind.BROKEN, "redirects to nowhere"),
        (Behaviour(status=302, headers={"Location": "ftp://a/"}), FailureKind.BROKEN, "to ftp"),
        (Behaviour(status=302, headers={"Location": "http://[bad"}), FailureKind.BROKEN, "no address"),
        (Behaviour(ignore_range=True), FailureKind.NO_RANGES, "200"),
        (Behaviour(content_range="bytes 0-999/9"), FailureKind.WRONG, "9 bytes"),
        (Behaviour(content_range=f"bytes 0-999/{SIZE}"), FailureKind.BROKEN, "another range"),
        (Behaviour(content_range="nonsense"), FailureKind.BROKEN, "no Content-Range"),
        (Behaviour(content_range="bytes \u0663-\u0664/\u0665"), FailureKind.BROKEN, "no Content-Range"),
        (Behaviour(headers={"Content-Encoding": "gzip"}), FailureKind.BROKEN, "encodes"),
        (Behaviour(truncate_after=10), FailureKind.BROKEN, ""),
        (Behaviour(raw=b"\0\xff\x16garbage\r\n\r\n"), FailureKind.BROKEN, ""),
        (Behaviour(raw=b"HTTP/1.1 206 OK\r\nContent-Length: -5\r\n\r\n"), FailureKind.BROKEN, ""),
        (Behaviour(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), FailureKind.BROKEN, ""),
    ],
)
async def test_each_fault_is_told_apart(rig: Rig, behaviour: Behaviour, kind: FailureKind, said: str) -> None:
    """Mutations seen to fail: Content-Range not compared; a truncated body taken for the end."""
    failed = await rig.fails(behaviour)
    assert failed.kind is kind
    assert said in failed.detail
    assert "\n" not in failed.detail
    assert "secret" not in failed.detail
    assert await rig.get(TAIL) == TAIL_BYTES, "the next request is none the worse"


async def test_a_connection_that_closes_without_a_word_is_a_failure(rig: Rig) -> None:
    rig.mirror.behave = lambda _: Behaviour(raw=b"")
    with pytest.raises(SourceFailed) as failed:
        await rig.get(TAIL)
    assert failed.value.kind is FailureKind.BROKEN


async def test_a_short_answer_is_no_answer(rig: Rig) -> None:
    failed = await rig.fails(Behaviour(content_length=999))
    assert failed.kind is FailureKind.BROKEN


@pytest.mark.parametrize(
    ("headers", "wish"),
    [
        ({"Retry-After": "17"}, 17.0),
        ({"Retry-After": "Wed, 02 Dec 2026 10:00:30 GMT", "Date": "Wed, 02 Dec 2026 10:00:00 GMT"}, 30.0),
        ({"Retry-After": "9" * 400}, 999_999_999.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "²"}, None),
        ({}, None),
    ],
)
async def test_429_tells_how_long_to_wait(rig: Rig, headers: dict[str, str], wish: float | None) -> None:
    failed = await rig.fails(Behaviour(status=429, headers=headers))
    assert (failed.kind, failed.retry_after_s) == (FailureKind.BUSY, wish)


async def test_503_with_a_wish_is_busy(rig: Rig) -> None:
    failed = await rig.fails(Behaviour(status=503, headers={"Retry-After": "3"}))
    assert (failed.kind, failed.retry_after_s) == (FailureKind.BUSY, 3.0)


async def test_whole_files_are_read_over_where_that_is_wanted(rig: Rig) -> None:
    # Mutation seen to fail: nothing dropped.
    rig.mirror.script.append(Behaviour(ignore_range=True))
    assert await rig.get(TAIL, whole_file=True) == TAIL_BYTES
    rig.mirror.script.append(Behaviour(ignore_range=True))
    assert await rig.get(ChunkRange(FILE, 0, 1)) == CONTENT[:CHUNK_BYTES], "from the start on no range is needed"


async def test_a_page_of_a_login_is_not_the_file(rig: Rig) -> None:
    failed = await rig.fails(Behaviour(status=200, body=b"<html>Welcome to Hotel Wi-Fi</html>"))
    assert failed.kind is FailureKind.BROKEN
    assert "has" in failed.detail


async def test_silence_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation seen to fail: no timeout between two reads.
    monkeypatch.setattr(http_source, "STALL_S", 0.2)
    async with http_session(public_only=False) as session:

        async def locate(name: str) -> Address:
            return Address(URL(f"{rig.mirror.url}/{name}"), {})

        rig.source = HttpSource("mirror", session, locate, public_only=False)
        async with asyncio.timeout(10):
            failed = await rig.fails(Behaviour(stall_after=100))
    assert failed.kind is FailureKind.BROKEN


async def test_nobody_there_is_a_failure(rig: Rig) -> None:
    async with http_session(public_only=False) as session:

        async def locate(_: str) -> Address:
            return Address(URL("http://127.0.0.1:1/a"), {})

        rig.source = HttpSource("mirror", session, locate, public_only=False)
        failed = await rig.fails(Behaviour())
    assert failed.kind is FailureKind.BROKEN


# --- redirects


async def test_redirects_are_followed_and_the_token_stays_with_its_host(rig: Rig) -> None:
    # Mutation seen to fail: the headers sent to every host.
    port = URL(rig.mirror.url).port
    there = Behaviour(status=302, headers={"Location": f"http://localhost:{port}/a.safetensors"})
    rig.mirror.script.append(there)
    assert await rig.get(TAIL) == TAIL_BYTES
    own, foreign = rig.mirror.asked
    assert own.headers["Authorization"] == "Bearer secret"
    assert "Authorization" not in foreign.headers
    assert foreign.headers["Range"] == own.headers["Range"]


async def test_relative_redirects_keep_the_token(rig: Rig) -> None:
    rig.mirror.script.append(Behaviour(status=307, headers={"Location": "/a.safetensors?again"}))
    assert await rig.get(TAIL) == TAIL_BYTES
    assert rig.mirror.asked[1].headers["Authorization"] == "Bearer secret"


async def test_a_circle_of_redirects_ends(rig: Rig) -> None:
    rig.mirror.behave = lambda _: Behaviour(status=301, headers={"Location": "/a.safetensors"})
    failed = await rig.fails(Behaviour(status=301, headers={"Location": "/a.safetensors"}))
    assert "redirects" in failed.detail
    assert len(rig.mirror.asked) == http_source.REDIRECTS_MAX + 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "192.168.1.1", "169.254.169.254", "10.0.0.1"])
async def test_what_others_name_does_not_lead_into_the_own_network(
    rig: Rig, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation seen to fail: numbers not looked at (no resolver sees them)."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    port = URL(rig.mirror.url).port
    async with http_session(public_only=True) as session:

        async def locate(_: str) -> Address:
            return Address(URL(f"http://{host}:{port}/a.safetensors"), {})

        rig.source = HttpSource("mirror", session, locate, public_only=True)
        failed = await rig.fails(Behaviour())
    assert "private network" in failed.detail
    assert not rig.mirror.asked


# --- a directory


async def collect(source: DirectorySource, wanted: ChunkRange) -> bytes:
    return b"".join([bytes(block) async for block in source.fetch(wanted, whole_file=False)])


async def test_a_directory_gives_ranges(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(CONTENT)
    source = DirectorySource(tmp_path)
    assert await collect(source, TAIL) == TAIL_BYTES
    assert await collect(source, ALL) == CONTENT


async def test_a_directory_says_what_it_lacks(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    with pytest.raises(SourceFailed, match="does not exist") as missing:
        await collect(source, TAIL)
    assert missing.value.kind is FailureKind.MISSING
    (tmp_path / "a.safetensors").write_bytes(CONTENT[:-1])
    with pytest.raises(SourceFailed, match="bytes, not") as wrong:
        await collect(source, TAIL)
    assert wrong.value.kind is FailureKind.WRONG
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(SourceFailed, match="cannot be read") as broken:
        await collect(source, TAIL)
    assert broken.value.kind is FailureKind.BROKEN
