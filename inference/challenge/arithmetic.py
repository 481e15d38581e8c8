"""Products of matrices mod 251: what a prover needs of a tensor library, and numpy's answer to it.

Every implementation gives identical bytes, because every sum is exact:

    int8 products into int32   exact while the sum has at most 137,438 terms of 125 * 125 (below 2^31)
    float32 products           exact while a sum has at most 1,024 such terms (below 2^24); longer ones are cut

The right factor of a product is given by rows, as it lies in memory on both sides (`left @ right.T`): the layout that
int8 tensor cores want.
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference.challenge.context import Key
from inference.challenge.expansion import CENTRE, MODULUS, Residues, expand

Matrix = TypeVar("Matrix")

# 2^31 / 125^2 and 2^24 / 125^2, the latter rounded down to a power of two.
INT32_TERMS_MAX: Final = 137_438
FLOAT32_TERMS_MAX: Final = 1_024


class Arithmetic(Protocol[Matrix]):
    """Matrices of centred residues (int8, -125 to 125), wherever they lie."""

    def expand(self, key: Key, first_row: int, rows: int, columns: int) -> Matrix:
        """Return rows of a key's matrix (inference/challenge/expansion.py)."""
        ...

    def multiply(self, left: Matrix, right: Matrix) -> Matrix:
        """Return left @ right.T mod 251."""
        ...

    def multiply_sum(self, left: Matrix, rights: Sequence[Matrix]) -> Matrix:
        """Return the sum of left @ right.T over the right factors, mod 251."""
        ...

    def scale_columns(self, matrix: Matrix, scales: Matrix, row: int) -> Matrix:
        """Return the matrix with its i-th column times scales[row, i], mod 251; a scale of 0 counts as 1."""
        ...

    def cube(self, matrix: Matrix) -> Matrix:
        """Return every entry's third power mod 251, which is a permutation of the residues."""
        ...

    def plus_one(self, matrix: Matrix) -> Matrix:
        """Return every entry and 1, mod 251."""
        ...

    def to_bytes(self, matrix: Matrix) -> bytes:
        """Return the entries row by row, one signed byte each."""
        ...


class NumpyArithmetic:
    """numpy's float32 products, for a machine without torch."""

    def expand(self, key: Key, first_row: int, rows: int, columns: int) -> Residues:
        return expand(key, first_row, rows, columns)

    def multiply(self, left: Residues, right: Residues) -> Residues:
        return reduced(self._products(left, right))

    def multiply_sum(self, left: Residues, rights: Sequence[Residues]) -> Residues:
        total = self._products(left, rights[0])
        for right in rights[1:]:
            total += self._products(left, right)
        return reduced(total)

    def scale_columns(self, matrix: Residues, scales: Residues, row: int) -> Residues:
        return reduced(matrix.astype(np.int32) * nonzero(scales[row]))

    def cube(self, matrix: Residues) -> Residues:
        wide = matrix.astype(np.int32)
        return reduced(wide * wide * wide)

    def plus_one(self, matrix: Residues) -> Residues:
        return np.where(matrix == CENTRE, np.int8(-CENTRE), matrix + np.int8(1))

    def to_bytes(self, matrix: Residues) -> bytes:
        return matrix.tobytes()

    @staticmethod
    def _products(left: Residues, right: Residues) -> NDArray[np.int32]:
        total = np.zeros((left.shape[0], right.shape[0]), dtype=np.int32)
        for start in range(0, left.shape[1], FLOAT32_TERMS_MAX):
            end = start + FLOAT32_TERMS_MAX
            part = left[:, start:end].astype(np.float32) @ right[:, start:end].astype(np.float32).T
            total += part.astype(np.int32)
        return total


def nonzero(scales: Residues) -> Residues:
    """Return the scales with 1 for 0, so that no column is wiped out."""
    return np.where(scales == 0, np.int8(1), scales)


def reduced(sums: NDArray[np.int32]) -> Residues:
    """Return sums as centred residues; the sums are overwritten."""
    sums += CENTRE
    # numpy divides by a constant with vector instructions, but takes remainders one by one.
    sums -= sums // MODULUS * MODULUS
    sums -= CENTRE
    return sums.astype(np.int8)
