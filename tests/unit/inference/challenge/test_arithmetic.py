"""Matrices and products mod 251: expansion, exactness at the limits, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.challenge.arithmetic import INT32_TERMS_MAX, NumpyArithmetic
from inference.challenge.context import ChallengeContext, Key, key_from
from inference.challenge.expansion import CENTRE, MODULUS, Residues, expand, expand_rows
from inference.challenge.testing import CONTEXT, OTHERS

KEY = key_from(bytes(32), "test")


def python_row(key: Key, row: int, columns: int) -> list[int]:
    """The definition in Python's own integers."""
    mask, entries = (1 << 64) - 1, []
    for counter in range(row * columns // 8, (row + 1) * columns // 8):
        word = (counter * key.increment + key.start) & mask
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        word ^= word >> 31
        entries += [byte % MODULUS - CENTRE for byte in word.to_bytes(8, "little")]
    return entries


@given(st.binary(min_size=32, max_size=32), st.integers(0, 1 << 40), st.sampled_from([8, 64, 40_000]))
def test_a_matrix_is_what_its_definition_says_at_any_row(seed: bytes, row: int, columns: int) -> None:
    # Mutation seen to fail: the first row left out of the counters.
    key = key_from(seed, "a")
    [first, second] = expand(key, row, 2, columns).tolist()
    assert first == python_row(key, row, columns)
    assert second == python_row(key, row + 1, columns)
    assert expand_rows(key, np.array([row + 1, row], dtype=np.uint64), columns).tolist() == [second, first]


def test_every_residue_comes_and_none_much_oftener_than_the_doubled_five() -> None:
    counts = np.bincount(expand(KEY, 0, 256, 4096).reshape(-1).astype(np.int64) + CENTRE, minlength=MODULUS)
    expected = 256 * 4096 / 256
    assert np.all(np.abs(counts[:5] / expected - 2) < 0.15)
    assert np.all(np.abs(counts[5:] / expected - 1) < 0.15)


def exact(left: Residues, right: Residues) -> list[list[int]]:
    sums = left.astype(np.int64) @ right.astype(np.int64).T
    centred: list[list[int]] = ((sums + CENTRE) % MODULUS - CENTRE).tolist()
    return centred


@given(st.integers(0, 1 << 30), st.integers(1, 30), st.integers(1, 400), st.integers(1, 30))
def test_a_product_is_that_of_whole_numbers(seed: int, rows: int, terms: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    left = random.integers(-CENTRE, CENTRE + 1, (rows, terms * 8)).astype(np.int8)
    right = random.integers(-CENTRE, CENTRE + 1, (columns, terms * 8)).astype(np.int8)
    assert NumpyArithmetic().multiply(left, right).tolist() == exact(left, right)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sum_of_the_largest_products_is_exact(sign: int) -> None:
    # Mutation seen to fail: float32 sums of 2,048 terms.
    left = np.full((2, INT32_TERMS_MAX), CENTRE, dtype=np.int8)
    right = np.full((2, INT32_TERMS_MAX), sign * CENTRE, dtype=np.int8)
    left[1, ::2] = 124
    assert NumpyArithmetic().multiply(left, right).tolist() == exact(left, right)
    parts = np.split(left[:, : INT32_TERMS_MAX // 2 * 2], 2, axis=1)
    assert NumpyArithmetic().multiply_sum(parts[0], [right[:, : parts[0].shape[1]]] * 2).tolist() == exact(
        np.concatenate([parts[0]] * 2, axis=1), right[:, : 2 * parts[0].shape[1]]
    )


def test_cubing_is_a_permutation_and_no_scale_wipes_a_column_out() -> None:
    arithmetic = NumpyArithmetic()
    residues = np.arange(-CENTRE, CENTRE + 1, dtype=np.int8)[None, :]
    assert sorted(arithmetic.cube(residues).reshape(-1).tolist()) == residues.reshape(-1).tolist()
    assert arithmetic.plus_one(residues).tolist() == [[*range(-CENTRE + 1, CENTRE + 1), -CENTRE]]
    scaled = arithmetic.scale_columns(np.full((2, MODULUS), 7, dtype=np.int8), residues, 0)
    assert scaled[0].tolist() == [(7 * (scale or 1) + CENTRE) % MODULUS - CENTRE for scale in residues[0].tolist()]
    assert 0 not in scaled


def test_every_part_of_the_context_changes_the_seed() -> None:
    # Mutation seen to fail: the fields hashed without their lengths.
    seeds = {CONTEXT.seed("a"), CONTEXT.seed("b"), CONTEXT.seed("a", b""), CONTEXT.seed("a", b"b", b"c")}
    seeds |= {CONTEXT.seed("a", b"bc"), *(other.seed("a") for other in OTHERS.values())}
    seeds.add(ChallengeContext(CONTEXT.nonce, "node-1b", "oot-1", CONTEXT.certificate_sha256).seed("a"))
    assert len(seeds) == 6 + len(OTHERS)


@pytest.mark.parametrize(
    ("nonce", "certificate", "reason"),
    [(b"short", bytes(32), "nonce"), (bytes(65), bytes(32), "nonce"), (bytes(16), b"", "certificate")],
)
def test_a_context_that_binds_to_little_is_refused(nonce: bytes, certificate: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ChallengeContext(nonce, "node", "boot", certificate)


def test_a_verifier_needs_no_torch() -> None:
    modules = "compute, memory, memory_check, schedule, wire"
    check = f"import sys\nfrom inference.challenge import {modules}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
