"""The tree of the ledger's log: known vectors, an independent implementation, and proofs that fail for every change."""

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.merkle import load_frontier, prove_consistency, prove_inclusion
from coordinator.ledger.port import HashStore
from coordinator.ledger.testing import MemoryHashStore, filled_store
from protos.merkle import (
    EMPTY_ROOT,
    Frontier,
    Position,
    ProofInvalid,
    extend,
    leaf_hash,
    node_hash,
    verify_consistency,
    verify_inclusion,
)

# Leaves, roots and proofs of Certificate Transparency's own test (merkletree's reference vectors).
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
# (index, size, proof)
INCLUSION_VECTORS = [
    (0, 1, []),
    (
        0,
        8,
        [
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
        ],
    ),
    (
        5,
        8,
        [
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ],
    ),
    (2, 3, ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"]),
    (
        1,
        5,
        [
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        ],
    ),
]
# (old size, new size, proof)
CONSISTENCY_VECTORS = [
    (1, 1, []),
    (
        1,
        8,
        [
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
        ],
    ),
    (
        6,
        8,
        [
            "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ],
    ),
    (
        2,
        5,
        [
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        ],
    ),
]


def root_at(store: HashStore, size: int) -> bytes:
    """Return the root that the log had when it had `size` entries."""
    return load_frontier(store, size).root()


def naive_root(entries: list[bytes]) -> bytes:
    """MTH of RFC 9162, section 2.1.1, word by word and with hashlib alone."""
    if not entries:
        return hashlib.sha256().digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    split = 1
    while split * 2 < len(entries):
        split *= 2
    return hashlib.sha256(b"\x01" + naive_root(entries[:split]) + naive_root(entries[split:])).digest()


def naive_inclusion(index: int, entries: list[bytes]) -> list[bytes]:
    """PATH of section 2.1.3.1."""
    if len(entries) == 1:
        return []
    split = 1
    while split * 2 < len(entries):
        split *= 2
    if index < split:
        return [*naive_inclusion(index, entries[:split]), naive_root(entries[split:])]
    return [*naive_inclusion(index - split, entries[split:]), naive_root(entries[:split])]


def naive_consistency(old_size: int, entries: list[bytes], whole: bool = True) -> list[bytes]:
    """SUBPROOF of section 2.1.4.1."""
    if old_size == len(entries):
        return [] if whole else [naive_root(entries)]
    split = 1
    while split * 2 < len(entries):
        split *= 2
    if old_size <= split:
        return [*naive_consistency(old_size, entries[:split], whole), naive_root(entries[split:])]
    return [*naive_consistency(old_size - split, entries[split:], False), naive_root(entries[:split])]


def numbered(size: int) -> list[bytes]:
    return [b"entry %d" % number for number in range(size)]


sizes = st.integers(1, 200)


@st.composite
def size_and_index(draw: Callable[..., int]) -> tuple[int, int]:
    size = draw(sizes)
    return size, draw(st.integers(0, size - 1))


@st.composite
def two_sizes(draw: Callable[..., int]) -> tuple[int, int]:
    new = draw(st.integers(2, 200))
    return draw(st.integers(1, new - 1)), new


def test_the_empty_tree_has_the_hash_of_nothing() -> None:
    assert Frontier().root() == EMPTY_ROOT == naive_root([])


@pytest.mark.parametrize("size", range(1, 9))
def test_roots_are_those_of_the_reference_vectors(size: int) -> None:
    # Mutation: leaf prefix 0x00 left out, every root differs.
    assert extend(Frontier(), LEAVES[:size]).frontier.root().hex() == ROOTS[size - 1]
    assert naive_root(LEAVES[:size]).hex() == ROOTS[size - 1]


@pytest.mark.parametrize(("index", "size", "proof"), INCLUSION_VECTORS)
def test_inclusion_proofs_are_those_of_the_reference_vectors(index: int, size: int, proof: list[str]) -> None:
    store, _ = filled_store(LEAVES)
    assert [one.hex() for one in prove_inclusion(store, index, size)] == proof
    verify_inclusion(
        leaf_hash(LEAVES[index]), index, size, [bytes.fromhex(one) for one in proof], bytes.fromhex(ROOTS[size - 1])
    )


@pytest.mark.parametrize(("old", "new", "proof"), CONSISTENCY_VECTORS)
def test_consistency_proofs_are_those_of_the_reference_vectors(old: int, new: int, proof: list[str]) -> None:
    store, _ = filled_store(LEAVES)
    assert [one.hex() for one in prove_consistency(store, old, new)] == proof
    roots = [bytes.fromhex(one) for one in ROOTS]
    verify_consistency(old, roots[old - 1], new, roots[new - 1], [bytes.fromhex(one) for one in proof])


def test_every_proof_of_every_small_tree_is_that_of_the_naive_implementation_and_verifies() -> None:
    entries = numbered(40)
    store, _ = filled_store(entries)
    for size in range(1, len(entries) + 1):
        root = naive_root(entries[:size])
        assert root_at(store, size) == root
        for index in range(size):
            proof = prove_inclusion(store, index, size)
            assert proof == naive_inclusion(index, entries[:size])
            verify_inclusion(leaf_hash(entries[index]), index, size, proof, root)
        for old in range(1, size + 1):
            proof = prove_consistency(store, old, size)
            assert proof == naive_consistency(old, entries[:size])
            verify_consistency(old, naive_root(entries[:old]), size, root, proof)


@given(st.lists(st.binary(max_size=40), max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_a_log_appended_in_batches_is_the_log_appended_at_once(entries: list[bytes], cuts: list[int]) -> None:
    frontier, store = Frontier(), MemoryHashStore()
    borders = sorted({min(cut, len(entries)) for cut in (0, *cuts, len(entries))})
    for start, end in itertools.pairwise(borders):
        extension = extend(frontier, entries[start:end])
        store.insert(extension.made)
        frontier = extension.frontier
        assert frontier == load_frontier(store, end)
    assert frontier.root() == naive_root(entries)
    assert extend(Frontier(), entries).frontier == frontier


def test_a_longer_log_changes_no_hash_that_is_stored() -> None:
    made = extend(Frontier(), numbered(100)).made
    longer = extend(Frontier(), numbered(101)).made
    assert made.items() <= longer.items()
    assert Position(7, 0) not in longer


@given(two_sizes(), st.data())
def test_a_proof_for_an_older_size_is_made_from_the_same_store(pair: tuple[int, int], data: st.DataObject) -> None:
    old, new = pair
    entries = numbered(new)
    store, _ = filled_store(entries)
    index = data.draw(st.integers(0, old - 1))
    verify_inclusion(
        leaf_hash(entries[index]), index, old, prove_inclusion(store, index, old), naive_root(entries[:old])
    )


def changes(proof: list[bytes], data: st.DataObject) -> list[list[bytes]]:
    """Return the proof with a byte flipped, two hashes swapped, one dropped, one too many, one cut, and none at all."""
    extra = data.draw(st.binary(min_size=32, max_size=32))
    found = [[*proof, extra], [extra, *proof], [*proof, *proof[-1:]]]
    if proof:
        place = data.draw(st.integers(0, len(proof) - 1))
        byte, bit = data.draw(st.integers(0, 31)), data.draw(st.integers(0, 7))
        flipped = bytearray(proof[place])
        flipped[byte] ^= 1 << bit
        found.append([*proof[:place], bytes(flipped), *proof[place + 1 :]])
        found.append(proof[:place] + proof[place + 1 :])
        found.append([*proof[:place], proof[place][:-1], *proof[place + 1 :]])
        found.append([*proof[:place], bytes(32), *proof[place + 1 :]])
        found.append([])
        other = data.draw(st.integers(0, len(proof) - 1))
        swapped = list(proof)
        swapped[place], swapped[other] = swapped[other], swapped[place]
        found.append(swapped)
    return [one for one in found if one != proof]


@given(size_and_index(), st.data())
def test_every_change_of_an_inclusion_proof_is_refused(pair: tuple[int, int], data: st.DataObject) -> None:
    size, index = pair
    entries = numbered(size)
    store, frontier = filled_store(entries)
    leaf, proof, root = leaf_hash(entries[index]), prove_inclusion(store, index, size), frontier.root()
    verify_inclusion(leaf, index, size, proof, root)
    for changed in changes(proof, data):
        with pytest.raises(ProofInvalid):
            verify_inclusion(leaf, index, size, changed, root)
    other = data.draw(st.integers(-1, size + 1).filter(lambda one: one != index))
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf, other, size, proof, root)
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf_hash(entries[index] + b"!"), index, size, proof, root)
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf, index, size, proof, leaf_hash(root))


@given(two_sizes(), st.data())
def test_every_change_of_a_consistency_proof_is_refused(pair: tuple[int, int], data: st.DataObject) -> None:
    # Mutation: comparison of the old root left out, a log whose first entries were replaced passes.
    old, new = pair
    store, frontier = filled_store(numbered(new))
    old_root, new_root, proof = root_at(store, old), frontier.root(), prove_consistency(store, old, new)
    verify_consistency(old, old_root, new, new_root, proof)
    for changed in changes(proof, data):
        with pytest.raises(ProofInvalid):
            verify_consistency(old, old_root, new, new_root, changed)
    for roots in ((leaf_hash(old_root), new_root), (old_root, leaf_hash(new_root)), (new_root, old_root)):
        with pytest.raises(ProofInvalid):
            verify_consistency(old, roots[0], new, roots[1], proof)


@given(two_sizes(), st.data())
def test_no_proof_shows_a_log_whose_past_was_changed(pair: tuple[int, int], data: st.DataObject) -> None:
    old, new = pair
    entries = numbered(new)
    honest, _ = filled_store(entries)
    entries[data.draw(st.integers(0, old - 1))] = b"another past"
    rewritten, frontier = filled_store(entries)
    for store in (honest, rewritten):
        with pytest.raises(ProofInvalid):
            verify_consistency(old, root_at(honest, old), new, frontier.root(), prove_consistency(store, old, new))


@pytest.mark.parametrize("proof", [[], [bytes(32)] * 64, [bytes(32)] * 100, [b""]])
def test_an_answer_without_work_shows_nothing(proof: list[bytes]) -> None:
    store, frontier = filled_store(numbered(9))
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf_hash(b"entry 3"), 3, 9, proof, frontier.root())
    with pytest.raises(ProofInvalid):
        verify_consistency(4, root_at(store, 4), 9, frontier.root(), proof)


@given(st.integers(2, 100), st.data())
def test_a_proof_for_a_smaller_tree_shows_nothing_about_a_tree_with_more_levels(size: int, data: st.DataObject) -> None:
    # Mutation: `last != 0` after either loop ignored, each passes for the root of the smaller tree.
    store, frontier = filled_store(numbered(size))
    larger = 1 << data.draw(st.integers(size.bit_length(), 40))
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size - 1))
    inclusion, consistency = prove_inclusion(store, index, size), prove_consistency(store, old, size)
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf_hash(b"entry %d" % index), index, 2 * larger, inclusion, frontier.root())
    with pytest.raises(ProofInvalid):
        verify_consistency(old, root_at(store, old), 2 * larger, frontier.root(), consistency)


def test_an_inner_node_does_not_pass_as_an_entry() -> None:
    # Mutation: leaves and nodes hashed with the same prefix, this passes for a tree of two.
    store, frontier = filled_store(numbered(2))
    forged = b"".join(store.log_hashes([Position(0, 0), Position(0, 1)]))
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf_hash(forged), 0, 1, [], frontier.root())


def test_every_tree_extends_the_empty_one_and_itself() -> None:
    store, frontier = filled_store(numbered(5))
    root = frontier.root()
    assert prove_consistency(store, 0, 5) == prove_consistency(store, 5, 5) == []
    verify_consistency(0, EMPTY_ROOT, 5, root, [])
    verify_consistency(5, root, 5, root, [])
    verify_consistency(0, EMPTY_ROOT, 0, EMPTY_ROOT, [])
    for sizes_and_roots in ((0, root, 5, root), (5, EMPTY_ROOT, 5, root), (0, EMPTY_ROOT, 0, root), (0, root, 0, root)):
        with pytest.raises(ProofInvalid):
            verify_consistency(*sizes_and_roots, [])
    with pytest.raises(ProofInvalid):
        verify_consistency(0, EMPTY_ROOT, 5, root, [bytes(32)])


def test_a_shorter_log_extends_nothing() -> None:
    store, frontier = filled_store(numbered(5))
    with pytest.raises(ProofInvalid):
        verify_consistency(5, frontier.root(), 4, root_at(store, 4), [])


def test_no_proof_is_made_of_what_is_not_there() -> None:
    store, _ = filled_store(numbered(3))
    for index, size in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="entry"):
            prove_inclusion(store, index, size)
    with pytest.raises(ValueError, match="does not begin"):
        prove_consistency(store, 4, 3)
    with pytest.raises(KeyError):
        prove_inclusion(store, 0, 4)


def test_a_second_appends_fifty_thousand_entries() -> None:
    entries = numbered(100_000)
    began = time.process_time()
    extend(Frontier(), entries)
    assert len(entries) / (time.process_time() - began) > 50_000


class EqualEntriesStore:
    """The hashes of a log whose entries are all the same: one for each level, however long it is."""

    def __init__(self, entry: bytes) -> None:
        self._levels = [leaf_hash(entry)]
        for _ in range(40):
            self._levels.append(node_hash(self._levels[-1], self._levels[-1]))
        self.hashes_read = 0

    def log_size(self) -> int:
        return 999_983

    def log_hashes(self, positions: Sequence[Position]) -> list[bytes]:
        self.hashes_read += len(positions)
        return [self._levels[position.level] for position in positions]


def test_a_proof_about_a_million_entries_takes_less_than_a_millisecond_and_some_twenty_reads() -> None:
    size, rounds = 999_983, 200
    store = EqualEntriesStore(b"the same")
    began = time.process_time()
    proofs = [
        (old, prove_inclusion(store, old - 1, size), prove_consistency(store, old, size))
        for old in (1 + number * 4_999 for number in range(rounds))
    ]
    took_s = time.process_time() - began
    assert took_s / (2 * rounds) < 0.001
    # Twenty levels, and as many subtrees at the right edge at most.
    assert store.hashes_read / (2 * rounds) <= 40
    for old, inclusion, consistency in proofs:
        verify_inclusion(leaf_hash(b"the same"), old - 1, size, inclusion, root_at(store, size))
        verify_consistency(old, root_at(store, old), size, root_at(store, size), consistency)
