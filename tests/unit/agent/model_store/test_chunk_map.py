"""The bitmap on the disk: what was added is there again, and nothing else is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model_store.chunk_map import ChunkMap

DIGEST = bytes(range(32))


def held(chunks: ChunkMap, count: int) -> set[int]:
    return {chunk for chunk in range(count) if chunk in chunks}


@given(count=st.integers(0, 70), data=st.data())
def test_what_was_added_and_not_discarded_is_there_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, count: int, data: st.DataObject
) -> None:
    # Mutation seen to fail: the whole byte written instead of one bit more.
    path = tmp_path_factory.mktemp("map") / "chunks"
    numbers = st.sets(st.integers(0, count - 1)) if count else st.just(set[int]())
    added, discarded = data.draw(numbers), data.draw(numbers)
    chunks = ChunkMap(path, DIGEST, count)
    for chunk in added:
        chunks.add(chunk)
    chunks.discard(discarded)
    chunks.close()
    again = ChunkMap(path, DIGEST, count)
    assert held(again, count) == added - discarded
    again.close()


@pytest.mark.parametrize("damage", ["digest", "count", "short", "long", "magic", "empty"])
def test_a_map_of_something_else_counts_for_nothing(tmp_path: Path, damage: str) -> None:
    """Mutation seen to fail: the header not compared."""
    path = tmp_path / "chunks"
    chunks = ChunkMap(path, DIGEST, 20)
    chunks.add(3)
    chunks.close()
    content = path.read_bytes()
    digest, count = (bytes(32), 20) if damage == "digest" else (DIGEST, 21 if damage == "count" else 20)
    damaged = {"short": content[:-1], "long": content + b"\xff", "magic": b"X" + content[1:], "empty": b""}
    path.write_bytes(damaged.get(damage, content))
    again = ChunkMap(path, digest, count)
    assert held(again, count) == set()
    again.close()


def test_filling_is_forgotten_at_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "chunks"
    chunks = ChunkMap(path, DIGEST, 9)
    chunks.fill()
    assert held(chunks, 9) == set(range(9))
    chunks.close()
    again = ChunkMap(path, DIGEST, 9)
    assert held(again, 9) == set()
    again.close()
