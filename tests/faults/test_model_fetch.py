"""Fetching by real processes: killed at any point, and on a disk that fills up."""

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from agent.model_store.chunk_map import ChunkMap
from agent.model_store.fetch_state import STREAMS_MAX
from agent.model_store.plan import ChunkPlan
from agent.testing_mirror import MadeModel, Mirror, make_model
from inference.manifest import verify_directory
from inference.model_chunks import CHUNK_BYTES

# Real processes that are killed twenty times, and a disk that fills up: forty seconds.
pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("fetch_program.py")
KILLS = 20
SEED = 20261202


def fetch_command(store: Path, made: MadeModel, mirror: str) -> list[str]:
    return [sys.executable, str(PROGRAM), str(store), str(made.directory), mirror]


async def start(command: list[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)


async def lines(process: asyncio.subprocess.Process) -> AsyncGenerator[str, None]:
    assert process.stdout is not None, "it was asked for"
    while line := await process.stdout.readline():
        yield line.decode().strip()


def stored_chunks(store: Path, made: MadeModel) -> set[int]:
    """What the bitmap on the disk says, read as any next process reads it."""
    digest = made.manifest.digest.removeprefix("sha256:")
    path = store / f"{digest}.chunks"
    if not path.exists():
        return set()
    copy = shutil.copy(path, store.parent / "copied.chunks")
    count = ChunkPlan(made.manifest.files).count
    chunks = ChunkMap(Path(copy), bytes.fromhex(digest), count)
    found = {chunk for chunk in range(count) if chunk in chunks}
    chunks.close()
    return found


def asked_chunks(mirror: Mirror, made: MadeModel) -> list[int]:
    """Every chunk that the mirror was asked for, once for each time."""
    plan = ChunkPlan(made.manifest.files)
    by_path = {file.path: plan.chunks_of(index).start for index, file in enumerate(plan.files)}
    found: list[int] = []
    for asked in mirror.asked:
        assert asked.first is not None, "a range was asked for"
        assert asked.last is not None, "a range was asked for"
        first = by_path[asked.path.rpartition("/")[2]] + asked.first // CHUNK_BYTES
        found.extend(range(first, first + 1 + (asked.last - asked.first) // CHUNK_BYTES))
    return found


async def test_a_fetch_killed_twenty_times_ends_with_the_right_bytes_and_fetches_no_finished_chunk_again(
    tmp_path: Path,
) -> None:
    """Mutations seen to fail: the bit set before the bytes are synced and written; the map not read at the start."""
    made = make_model(tmp_path / "mirror" / "tiny", [30 * CHUNK_BYTES + 1, 12 * CHUNK_BYTES - 1])
    store = tmp_path / "store"
    dice = random.Random(SEED)
    sent_bytes = 0
    async with Mirror(tmp_path / "mirror").serving() as mirror:
        # Per connection; slow enough that a kill at a random moment finds a fetch in every state.
        mirror.bytes_per_s = 12e6
        for _ in range(KILLS):
            before = stored_chunks(store, made)
            mirror.asked.clear()
            process = await start(fetch_command(store, made, mirror.url))
            async with aclosing(lines(process)) as told:
                async for line in told:
                    if line.startswith("fetching") or line == "whole":
                        break
            # A chunk takes 0.7 s: about every third of these lives ends with some chunks more, most amid them.
            await asyncio.sleep(dice.uniform(0, 0.8))
            process.kill()
            await process.wait()
            assert not before & set(asked_chunks(mirror, made)), "a finished chunk was asked for again"
            assert before <= stored_chunks(store, made) or (store / made.manifest.digest[7:]).is_dir()
            sent_bytes += mirror.sent_bytes
            mirror.sent_bytes = 0
        mirror.bytes_per_s = None
        left = set(range(ChunkPlan(made.manifest.files).count)) - stored_chunks(store, made)
        mirror.asked.clear()
        process = await start(fetch_command(store, made, mirror.url))
        assert [line async for line in lines(process)][-1] == "whole"
        assert await process.wait() == 0
        assert sorted(asked_chunks(mirror, made)) == sorted(left), "exactly what was missing, once"
        sent_bytes += mirror.sent_bytes
    verify_directory(made.manifest, store / made.manifest.digest.removeprefix("sha256:"))
    assert 0 < len(left) < ChunkPlan(made.manifest.files).count, "some came before the last kill, and not all"
    wasted_bytes = sent_bytes - made.manifest.size_bytes
    # One chunk for each stream, and what stood in the sockets' buffers of the dead.
    assert wasted_bytes <= KILLS * STREAMS_MAX * (CHUNK_BYTES + 4 * 1024 * 1024)


async def test_a_kill_at_95_percent_goes_on_at_95_percent(tmp_path: Path) -> None:
    made = make_model(tmp_path / "mirror" / "tiny", [40 * CHUNK_BYTES])
    plan = ChunkPlan(made.manifest.files)
    store = tmp_path / "store"
    async with Mirror(tmp_path / "mirror").serving() as mirror:
        gone = asyncio.Event()

        async def gate(position: int) -> None:
            # The last two chunks are not given until the process is dead.
            if position >= 38 * CHUNK_BYTES:
                await gone.wait()

        mirror.gate = gate
        process = await start(fetch_command(store, made, mirror.url))
        while len(stored_chunks(store, made)) < 0.95 * plan.count:
            await asyncio.sleep(0.02)
        process.kill()
        await process.wait()
        gone.set()
        stored = stored_chunks(store, made)
        missing_bytes = sum(plan.chunk_bytes(chunk) for chunk in range(plan.count) if chunk not in stored)
        arrived_bytes = mirror.sent_bytes
        mirror.gate, mirror.sent_bytes = None, 0
        process = await start(fetch_command(store, made, mirror.url))
        assert [line async for line in lines(process)][-1] == "whole"
        assert mirror.sent_bytes == missing_bytes
        again_bytes = arrived_bytes + mirror.sent_bytes - made.manifest.size_bytes
        assert again_bytes <= STREAMS_MAX * (CHUNK_BYTES + 4 * 1024 * 1024)
    verify_directory(made.manifest, store / made.manifest.digest.removeprefix("sha256:"))


def small_disks_possible() -> bool:
    if shutil.which("unshare") is None:
        return False
    mounted = subprocess.run(
        ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"], capture_output=True, check=False
    )
    return mounted.returncode == 0


@pytest.mark.skipif(not small_disks_possible(), reason="a small disk needs unshare -rm and tmpfs")
async def test_a_disk_that_fills_up_is_a_state_with_one_line_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    """The disk has room at the start and none later: something else writes beside the fetch.

    Mutation seen to fail: ENOSPC not told apart from a broken disk.
    """
    made = make_model(tmp_path / "mirror" / "tiny", [10 * CHUNK_BYTES])
    store, release = tmp_path / "disk" / "store", tmp_path / "release"
    (tmp_path / "disk").mkdir()
    async with Mirror(tmp_path / "mirror").serving() as mirror:
        command = " ".join(f"'{word}'" for word in fetch_command(store, made, mirror.url))
        # 84 MB are needed, 110 there are, of which another takes 60 a moment after the fetch has begun.
        disk = tmp_path / "disk"
        script = f"""
            mount -t tmpfs -o size=110m none '{disk}' || exit 9
            {command} & fetch=$!
            while [ ! -e '{tmp_path}/fill' ]; do sleep 0.02; done
            dd if=/dev/zero of='{disk}/other' bs=1M count=60 2>/dev/null; touch '{tmp_path}/filled'
            while [ ! -e '{release}' ]; do sleep 0.05; done
            rm -f '{disk}/other'
            wait $fetch
            sha256sum '{store}'/*/model-00000.safetensors
        """

        async def gate(_: int) -> None:
            # Not a byte comes before the other has filled the disk.
            while not (tmp_path / "filled").exists():
                (tmp_path / "fill").touch()
                await asyncio.sleep(0.02)

        mirror.gate = gate
        process = await start(["unshare", "-rm", "sh", "-c", script])
        seen: list[str] = []
        async with aclosing(lines(process)) as told:
            async for line in told:
                seen.append(line)
                if line.startswith("disk_full"):
                    asked = len(mirror.asked)
                    await asyncio.sleep(1)
                    assert len(mirror.asked) == asked, "nothing is fetched while there is no room"
                    release.touch()
        assert await process.wait() == 0
    reports = [line for line in seen if "disk full" in line]
    assert len(reports) == 1, f"one line, not {reports}"
    assert "whole" in seen
    (weights,) = (file for file in made.manifest.files if file.path == "model-00000.safetensors")
    assert seen[-1].startswith(weights.sha256.hex()), seen[-1]
