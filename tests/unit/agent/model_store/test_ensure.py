"""Having a model, from a server that misbehaves, over pauses and damages: the right bytes in the end."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.model_store import fetch_state
from agent.model_store.bandwidth import Bandwidth
from agent.model_store.ensure import FetchContext, ensure_model
from agent.model_store.fetch import FetchFailed
from agent.model_store.progress import FetchPhase, FetchProgress
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore
from agent.testing_mirror import RELEASE_PUBLIC, Asked, Behaviour, MadeModel, Mirror, make_model
from inference.manifest import ManifestError, verify_directory
from inference.model_chunks import CHUNK_BYTES

WEIGHTS = "model-00000.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mirror")


@pytest.fixture(scope="module")
def made(root: Path) -> MadeModel:
    return make_model(root / "tiny", [5 * CHUNK_BYTES + 77])


@dataclass
class Rig:
    store: ModelStore
    made: MadeModel
    mirror: Mirror
    mirrors: list[str]
    seen: list[FetchProgress] = field(default_factory=list)
    veto: str | None = None
    notice: Callable[[FetchProgress], None] = lambda _: None

    async def ensure(self) -> Path:
        settings = StoreSettings(mirrors=tuple(self.mirrors), free_floor_bytes=0)
        context = FetchContext(
            settings=settings,
            bandwidth=Bandwidth(None),
            allowed=lambda: self.veto,
            on_progress=self.take,
            jitter=random.Random(0),
        )
        async with asyncio.timeout(60):
            return await ensure_model(self.store, self.made.manifest, self.made.envelope, (), context)

    def take(self, progress: FetchProgress) -> None:
        self.seen.append(progress)
        self.notice(progress)

    @property
    def phases(self) -> set[FetchPhase]:
        return {progress.phase for progress in self.seen}

    def asked_bytes(self, name: str = WEIGHTS) -> int:
        return sum(
            (asked.last or 0) - (asked.first or 0) + 1 for asked in self.mirror.asked if asked.path.endswith(name)
        )


@pytest.fixture
async def rig(tmp_path: Path, root: Path, made: MadeModel, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    # The decisions about back-off have tests with a clock of their own; here nobody should wait for them.
    monkeypatch.setattr(fetch_state, "BACKOFF_S_MIN", 0.01)
    monkeypatch.setattr(fetch_state, "MISSING_RETRY_S", 0.01)
    store = ModelStore(tmp_path / "store", StoreSettings(free_floor_bytes=0), (RELEASE_PUBLIC,), lambda: 1)
    async with Mirror(root).serving() as mirror:
        yield Rig(store, made, mirror, [mirror.url])


async def test_a_model_is_fetched_whole_and_not_again(rig: Rig) -> None:
    directory = await rig.ensure()
    verify_directory(rig.made.manifest, directory)
    assert rig.asked_bytes() == 5 * CHUNK_BYTES + 77, "each byte was asked for once"
    asked = len(rig.mirror.asked)
    assert await rig.ensure() == directory
    assert len(rig.mirror.asked) == asked, "what is there is only checked"
    assert {FetchPhase.VERIFYING, FetchPhase.DONE} <= rig.phases
    assert rig.seen[-1].bytes_done == rig.made.manifest.size_bytes


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(status=404),
        Behaviour(status=429, headers={"Retry-After": "0"}),
        Behaviour(status=500),
        Behaviour(truncate_after=CHUNK_BYTES // 2),
        Behaviour(raw=b"\0garbage"),
        Behaviour(content_range="bytes 1-2/3"),
        Behaviour(flip_at=70_000),
        Behaviour(status=200, body=b"<html>"),
    ],
)
async def test_what_one_source_fails_to_give_comes_from_the_next(rig: Rig, root: Path, behaviour: Behaviour) -> None:
    """Mutations seen to fail: chunks not checked; a failed run's chunks not asked for again."""
    rig.mirrors.append(f"file://{root}")
    rig.mirror.behave = lambda _: behaviour
    verify_directory(rig.made.manifest, await rig.ensure())


async def test_faults_now_and_then_only_delay(rig: Rig) -> None:
    dice = random.Random(7)
    faults = [
        Behaviour(status=503),
        Behaviour(truncate_after=CHUNK_BYTES + 5),
        Behaviour(truncate_after=1),
        Behaviour(status=429, headers={"Retry-After": "0"}),
        Behaviour(status=404),
        Behaviour(piece_bytes=1777),
    ]

    def behave(_: Asked) -> Behaviour:
        return dice.choice(faults) if dice.random() < 0.6 else Behaviour()

    rig.mirror.behave = behave
    verify_directory(rig.made.manifest, await rig.ensure())


async def test_a_server_without_ranges_is_enough(rig: Rig) -> None:
    rig.mirror.behave = lambda _: Behaviour(ignore_range=True)
    verify_directory(rig.made.manifest, await rig.ensure())


async def test_wrong_bytes_from_every_source_end_with_each_named(rig: Rig) -> None:
    # Mutation seen to fail: the source only backed off, so that it went on for ever.
    rig.mirror.behave = lambda _: Behaviour(flip_at=0)
    with pytest.raises(FetchFailed, match=r"every source of tiny gave wrong bytes: http://127\.0\.0\.1"):
        await rig.ensure()
    assert not rig.store.is_whole(rig.made.manifest.digest)


async def test_no_source_says_what_to_do(rig: Rig) -> None:
    rig.mirrors.clear()
    with pytest.raises(FetchFailed, match=r"name a mirror in \[models\]"):
        await rig.ensure()


async def test_a_cancelled_fetch_goes_on_where_it_was(rig: Rig) -> None:
    """Mutation seen to fail: the bit of a chunk not written."""
    work = asyncio.ensure_future(rig.ensure())

    async def gate(position: int) -> None:
        # What comes behind the second chunk is never given.
        if position >= 2 * CHUNK_BYTES:
            await asyncio.Event().wait()

    def notice(progress: FetchProgress) -> None:
        if progress.bytes_done >= 2 * CHUNK_BYTES:
            work.cancel()

    rig.mirror.gate, rig.notice = gate, notice
    with pytest.raises(asyncio.CancelledError):
        await work
    with rig.store.fetching(rig.made.manifest, rig.made.envelope) as partial:
        missing_bytes = sum(partial.plan.chunk_bytes(chunk) for chunk in partial.missing())
    assert missing_bytes < 4 * CHUNK_BYTES
    rig.mirror.gate, rig.notice = None, lambda _: None
    rig.mirror.asked.clear()
    verify_directory(rig.made.manifest, await rig.ensure())
    assert rig.asked_bytes("") == missing_bytes


async def test_a_veto_pauses_and_its_end_resumes_by_itself(rig: Rig) -> None:
    # Mutation seen to fail: the running requests not stopped.
    rig.veto = "the network is metered"

    def notice(progress: FetchProgress) -> None:
        if progress.phase is FetchPhase.PAUSED:
            assert progress.detail == "the network is metered"
            assert not rig.mirror.asked
            rig.veto = None

    rig.notice = notice
    verify_directory(rig.made.manifest, await rig.ensure())
    assert FetchPhase.PAUSED in rig.phases


async def test_too_little_quota_waits_and_goes_on_when_there_is_room(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_state, "SPACE_RETRY_S", 0.01)
    rig.store = ModelStore(
        tmp_path / "small", StoreSettings(free_floor_bytes=0, quota_bytes=50_000_000), (RELEASE_PUBLIC,), lambda: 1
    )
    other = make_model(tmp_path / "other", [20_000_000], name="other")
    rig.store.adopt(other.directory, other.manifest, other.envelope, move=True)
    in_use = ExitStack()
    in_use.enter_context(rig.store.holding(other.manifest.digest))

    def notice(progress: FetchProgress) -> None:
        if progress.phase is FetchPhase.DISK_FULL:
            assert "quota" in progress.detail
            assert not rig.mirror.asked, "not a byte before there is room for all of them"
            in_use.close()

    rig.notice = notice
    verify_directory(rig.made.manifest, await rig.ensure())
    assert FetchPhase.DISK_FULL in rig.phases


async def test_two_engines_with_one_model_fetch_it_once(rig: Rig) -> None:
    first, second = await asyncio.gather(rig.ensure(), rig.ensure())
    assert first == second
    assert rig.asked_bytes() == 5 * CHUNK_BYTES + 77
    assert FetchPhase.WAITING_FOR_OTHER in rig.phases


# --- damage to what was whole


async def test_only_the_damaged_chunk_is_fetched_again(rig: Rig) -> None:
    """Mutation seen to fail: the whole model thrown away."""
    directory = await rig.ensure()
    with (directory / WEIGHTS).open("r+b") as stream:
        stream.seek(2 * CHUNK_BYTES + 5)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    rig.mirror.asked.clear()
    verify_directory(rig.made.manifest, await rig.ensure())
    assert rig.asked_bytes() == CHUNK_BYTES
    assert len(rig.mirror.asked) == 1


async def test_a_missing_or_cut_file_is_mended(rig: Rig) -> None:
    directory = await rig.ensure()
    (directory / "config.json").unlink()
    (directory / "tokenizer.json").write_bytes(b"")
    verify_directory(rig.made.manifest, await rig.ensure())


async def test_a_file_that_does_not_belong_there_is_named_and_nothing_fetched(rig: Rig) -> None:
    directory = await rig.ensure()
    (directory / "modeling.py").write_text("import os")
    rig.mirror.asked.clear()
    for _ in range(2):
        with pytest.raises(ManifestError, match=r"modeling\.py is not in the manifest; remove it"):
            await rig.ensure()
    assert not rig.mirror.asked
    (directory / "modeling.py").unlink()
    assert await rig.ensure() == directory
