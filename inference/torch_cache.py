"""Keys and values of the torch engine's sequences, in rows that a step reads without copying.

The running sequences fill the first rows, each from column 0 on; a mask hides
the columns that a row has not reached. A sequence that leaves is replaced by
the last one, so the rows of a step are always one slice. One more row, behind
them all, takes the sequence whose prompt is being read.
"""

from typing import Final

import torch

# Columns to begin with and to grow by: a growth copies everything, a column costs memory in every row.
GROWTH_TOKENS: Final = 512


class RowCache:
    """Stands in for a transformers cache: the model's attention layers call `update`."""

    def __init__(
        self, *, layers: int, rows: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (rows + 1, heads, head_size)
        self._dtype, self._device = dtype, device
        self.prompt_row: Final = rows
        self._capacity = 0
        # One tensor for keys and one for values per layer: row, head, column, channel.
        self._stores: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers = layers
        # Where the coming step writes (row and column of each new id), and what it reads.
        self._write_rows: torch.Tensor | int = 0
        self._write_columns: torch.Tensor | slice = slice(0)
        self._read_rows = slice(0)
        self._read_length = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, and give back what a long sequence took."""
        if self._capacity != GROWTH_TOKENS:
            self._stores = []
            self._capacity = GROWTH_TOKENS
            self._stores = [(self._allocate(), self._allocate()) for _ in range(self._layers)]

    def begin_prompt(self, start: int, count: int) -> None:
        """Have the coming step add `count` ids to the prompt row, from column `start` on."""
        self._reserve(start + count)
        self._write_rows, self._write_columns = self.prompt_row, slice(start, start + count)
        self._read_rows, self._read_length = slice(self.prompt_row, self.prompt_row + 1), start + count

    def begin_decode(self, columns: torch.Tensor, length: int) -> None:
        """Have the coming step add one id to each of the first rows, at the given columns, all below `length`."""
        self._reserve(length)
        count = len(columns)
        self._write_rows, self._write_columns = torch.arange(count, device=self._device), columns
        self._read_rows, self._read_length = slice(0, count), length

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence to another row."""
        for keys, values in self._stores:
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values; return all that its attention reads."""
        for store, states in zip(self._stores[layer_idx], (key_states, value_states), strict=True):
            if isinstance(self._write_columns, slice):
                store[self._write_rows, :, self._write_columns] = states[0]
            else:
                store[self._write_rows, :, self._write_columns] = states[:, :, 0]
        keys, values = self._stores[layer_idx]
        return keys[self._read_rows, :, : self._read_length], values[self._read_rows, :, : self._read_length]

    def _reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        # By half at least, so that a long sequence is copied a few times, not every 512 ids.
        grown = max(length, self._capacity * 3 // 2)
        old_capacity, self._capacity = self._capacity, -(-grown // GROWTH_TOKENS) * GROWTH_TOKENS
        for index, old in enumerate(self._stores):
            new = (self._allocate(), self._allocate())
            for old_store, new_store in zip(old, new, strict=True):
                new_store[:, :, :old_capacity] = old_store
            self._stores[index] = new

    def _allocate(self) -> torch.Tensor:
        rows, heads, head_size = self._shape
        # Zeros, as hidden columns are multiplied by a weight of 0, which does not undo a NaN.
        return torch.zeros((rows, heads, self._capacity, head_size), dtype=self._dtype, device=self._device)
