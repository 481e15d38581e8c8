"""Chunks by number: every byte of every file in exactly one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model_store.plan import ChunkPlan
from inference.model_chunks import CHUNK_BYTES, ManifestFile, chunk_count

SIZES = st.lists(
    st.one_of(st.integers(0, 3), st.integers(CHUNK_BYTES - 1, CHUNK_BYTES + 1), st.integers(0, 5 * CHUNK_BYTES)),
    min_size=1,
    max_size=6,
)


def plan_of(sizes: list[int]) -> ChunkPlan:
    files = [
        ManifestFile(f"{i}", size, b"", tuple(bytes([i, c]) for c in range(chunk_count(size))))
        for i, size in enumerate(sizes)
    ]
    return ChunkPlan(files)


@given(sizes=SIZES)
def test_every_byte_is_in_exactly_one_chunk(sizes: list[int]) -> None:
    # Mutation seen to fail: the last chunk of a file always of full size.
    plan = plan_of(sizes)
    covered = dict.fromkeys(range(len(sizes)), 0)
    for chunk in range(plan.count):
        index = plan.file_index(chunk)
        one = plan.chunk_range(chunk)
        assert one.offset_bytes == covered[index]
        assert 0 < one.length_bytes <= CHUNK_BYTES
        assert plan.chunk_sha256(chunk) == bytes([index, one.first])
        assert chunk in plan.chunks_of(index)
        covered[index] += one.length_bytes
    assert list(covered.values()) == sizes
    assert plan.size_bytes == sum(sizes)


@given(sizes=SIZES, data=st.data())
def test_a_range_has_the_bytes_of_its_chunks(sizes: list[int], data: st.DataObject) -> None:
    plan = plan_of(sizes)
    if plan.count == 0:
        return
    chunk = data.draw(st.integers(0, plan.count - 1))
    left = plan.chunks_of(plan.file_index(chunk)).stop - chunk
    count = data.draw(st.integers(1, left))
    assert plan.chunk_range(chunk, count).length_bytes == sum(plan.chunk_bytes(chunk + i) for i in range(count))
    with pytest.raises(IndexError, match="not of one file"):
        plan.chunk_range(chunk, left + 1)


def test_numbers_outside_are_refused() -> None:
    plan = plan_of([1])
    for chunk in (-1, 1):
        with pytest.raises(IndexError):
            plan.chunk_range(chunk)
