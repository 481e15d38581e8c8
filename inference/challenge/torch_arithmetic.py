"""Products of matrices mod 251 in torch, on a card or a processor; the port is in inference/challenge/arithmetic.py.

Imported in an engine's environment only: neither daemon has torch.
"""

from collections.abc import Sequence
from typing import Final

import torch

from inference.challenge.arithmetic import FLOAT32_TERMS_MAX
from inference.challenge.context import Key
from inference.challenge.expansion import BYTES_PER_WORD, CENTRE, MODULUS
from inference.sampling import LAST_SHIFT, MIX

# cuBLASLt takes no int8 product whose left factor has 16 rows or fewer.
_LEFT_ROWS_MIN: Final = 17
# 64 MiB of words at a time: the passes over them need three such arrays, beside memory that a fill has taken.
_WORDS_AT_A_TIME: Final = 1 << 23


class TorchArithmetic:
    """Matrices as int8 tensors on one device.

    Args:
        device: "cpu", "cuda", "cuda:1".
        integer: products by int8 tensor cores (torch._int_mm); otherwise by float32, cut where sums stay exact.
    """

    def __init__(self, device: str, *, integer: bool) -> None:
        self.device = torch.device(device)
        self.integer = integer
        # TensorFloat-32 rounds products; its inputs are exact here, its sums are not promised to be.
        torch.backends.cuda.matmul.allow_tf32 = False

    def expand(self, key: Key, first_row: int, rows: int, columns: int) -> torch.Tensor:
        words = columns // BYTES_PER_WORD
        first, total = first_row * words, rows * words
        out = torch.empty(rows * columns, dtype=torch.int8, device=self.device)
        for done in range(0, total, _WORDS_AT_A_TIME):
            end = min(done + _WORDS_AT_A_TIME, total)
            entries = self._words(key, first + done, first + end).view(torch.uint8)
            # On uint8 both lines wrap around, as they do in numpy.
            entries -= (entries >= MODULUS).to(torch.uint8) * MODULUS
            entries -= CENTRE
            out[done * BYTES_PER_WORD : end * BYTES_PER_WORD] = entries.view(torch.int8)
        return out.view(rows, columns)

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.multiply_sum(left, [right])

    def multiply_sum(self, left: torch.Tensor, rights: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._swapped(left):
            # Turned around once at the end, and not after each product: a walk's steps are short.
            turned = left.t()
            total = torch._int_mm(rights[0], turned)
            for right in rights[1:]:
                total += torch._int_mm(right, turned)
            return _reduced(total.t().contiguous())
        total = self._products(left, rights[0])
        for right in rights[1:]:
            total += self._products(left, right)
        return _reduced(total)

    def scale_columns(self, matrix: torch.Tensor, scales: torch.Tensor, row: int) -> torch.Tensor:
        # 125 * 125 fits an int16.
        chosen = scales[row].to(torch.int16)
        return _reduced(matrix * torch.where(chosen == 0, 1, chosen))

    def cube(self, matrix: torch.Tensor) -> torch.Tensor:
        wide = matrix.to(torch.int32)
        return _reduced((wide * wide).mul_(wide))

    def plus_one(self, matrix: torch.Tensor) -> torch.Tensor:
        return torch.where(matrix == CENTRE, -CENTRE, matrix + 1)

    def to_bytes(self, matrix: torch.Tensor) -> bytes:
        return bytes(matrix.contiguous().cpu().numpy().tobytes())

    def _swapped(self, left: torch.Tensor) -> bool:
        return self.integer and left.shape[0] < _LEFT_ROWS_MIN

    def _products(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if self.integer:
            return torch._int_mm(left, right.t())
        total = torch.zeros((left.shape[0], right.shape[0]), dtype=torch.int32, device=self.device)
        for start in range(0, left.shape[1], FLOAT32_TERMS_MAX):
            end = start + FLOAT32_TERMS_MAX
            total += (left[:, start:end].float() @ right[:, start:end].float().t()).to(torch.int32)
        return total

    def _words(self, key: Key, first: int, end: int) -> torch.Tensor:
        value = torch.arange(first, end, dtype=torch.int64, device=self.device)
        value.mul_(_signed(key.increment)).add_(_signed(key.start))
        for shift, multiplier in MIX:
            value ^= _shifted(value, shift)
            value *= _signed(multiplier)
        value ^= _shifted(value, LAST_SHIFT)
        return value


def fastest(device: str) -> TorchArithmetic:
    """Return the arithmetic for a device: int8 products where this build of torch has them right, else float32.

    torch._int_mm is a private name: it may be gone, or refuse this card.
    """
    exact = TorchArithmetic(device, integer=False)
    integer = TorchArithmetic(device, integer=True)
    left = exact.expand(Key(1, 0x9E3779B97F4A7C15), 0, 32, 64)
    right = exact.expand(Key(2, 0x9E3779B97F4A7C15), 0, 64, 64)
    try:
        found = integer.multiply(left, right)
    except (AttributeError, RuntimeError, NotImplementedError):
        return exact
    return integer if torch.equal(found, exact.multiply(left, right)) else exact


def _reduced(sums: torch.Tensor) -> torch.Tensor:
    """Return integer sums as centred residues; the sums are overwritten."""
    # The centring runs on bytes, a quarter of the traffic; what is above the centre wraps around to below zero.
    residues = sums.remainder_(MODULUS).to(torch.uint8)
    residues -= (residues > CENTRE).to(torch.uint8) * MODULUS
    return residues.view(torch.int8)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as unsigned numbers are: torch brings the sign bit in."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
