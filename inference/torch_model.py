"""A transformers model behind three calls: read a prompt, make a step for a batch, embed.

The caller keeps torch in inference mode around them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM

from inference.task import TaskKind
from inference.torch_cache import RowCache

_ATTENTION: Final = "slackwater_rows"

# Rows of input that packed weights are laid out for. Measured from 1 to 128 rows, only a layout
# for 1 row was slower for the others; the rest differ by less than the noise.
_PACKED_FOR_ROWS: Final = 8


class UnsupportedModel(ValueError):
    """The folder holds a model that this engine would compute wrongly or not at all."""


class CausalModel:
    """A decoder and its cache.

    Args:
        rows: sequences that a step can hold.
    """

    def __init__(self, directory: Path, *, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        AttentionInterface.register(_ATTENTION, _grouped_attention)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, trust_remote_code=False, attn_implementation=_ATTENTION
        )
        self._model.to(device).eval()
        _pack(self._model, dtype, device)
        config = self._model.config
        _refuse_unlike_attention(config)
        self.vocabulary_size: Final[int] = config.vocab_size
        self.context_tokens: Final[int] = config.max_position_embeddings
        heads = config.num_key_value_heads
        self._groups = config.num_attention_heads // heads
        self._dtype, self._device = dtype, device
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache: Final = RowCache(
            layers=config.num_hidden_layers, rows=rows, heads=heads, head_size=head_size, dtype=dtype, device=device
        )

    def read_prompt(self, token_ids: Sequence[int], start: int, keep: int) -> torch.Tensor:
        """Take in a piece of the prompt that fills the prompt row; return the logits after its last `keep` ids."""
        count = len(token_ids)
        self.cache.begin_prompt(start, count)
        columns = torch.arange(start + count, device=self._device)
        hidden = columns[None, :] > columns[start:, None]
        mask = self._mask(hidden).repeat(self._groups, 1)[None, None]
        return self._forward(torch.tensor([token_ids], device=self._device), columns[None, start:], mask, keep)[0]

    def step(self, last_ids: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Take in one id for each row, whose lengths do not count it yet; return logits, one line a row."""
        columns = torch.tensor(lengths, device=self._device)
        length = max(lengths) + 1
        self.cache.begin_decode(columns, length)
        hidden = torch.arange(length, device=self._device)[None, :] > columns[:, None]
        ids = torch.tensor(last_ids, device=self._device)
        return self._forward(ids[:, None], columns[:, None], self._mask(hidden)[:, None, None], 1)[:, 0]

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = output.logits.float()
        return logits


class EncoderModel:
    """An embedding model: mean of the last hidden states, at unit length."""

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self._model: Any = AutoModel.from_pretrained(
            directory, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        self._model.to(device).eval()
        _pack(self._model, dtype, device)
        self._device = device
        self.vocabulary_size: Final[int] = self._model.config.vocab_size
        self.context_tokens: Final[int] = self._model.config.max_position_embeddings

    def embed(self, token_ids: Sequence[int]) -> list[float]:
        hidden = self._model(input_ids=torch.tensor([token_ids], device=self._device)).last_hidden_state[0]
        mean = hidden.float().mean(dim=0)
        vector: list[float] = torch.nn.functional.normalize(mean, dim=0).tolist()
        return vector


def read_kind(directory: Path) -> TaskKind:
    """Return whether a folder's model generates or embeds, by the architecture its config names."""
    config = json.loads((directory / "config.json").read_bytes())
    if "auto_map" in config:
        raise UnsupportedModel(f"{directory}/config.json names code of its own (auto_map), which is never run")
    architectures = config.get("architectures") or []
    if not architectures:
        raise UnsupportedModel(f"{directory}/config.json names no architecture")
    return TaskKind.GENERATE if architectures[0].endswith("ForCausalLM") else TaskKind.EMBED


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch has no types in the environment of the checks
    """A linear layer whose weights lie in the order in which oneDNN's kernels read them."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _PACKED_FOR_ROWS)
        self._weight: Final = packed
        self._bias: Final = None if plain.bias is None else plain.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")
        return result


def _pack(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Pack a model's linear layers where that helps: in float32 on a CPU.

    A step of a few sequences is mostly matrices times a few rows. MKL, which torch takes for them, reads
    the weights of SmolLM2-135M at 8 GB/s then (AMD EPYC, two cores), oneDNN reads packed ones at 30: 18 ms
    a step of eight instead of 54. Nor does a row's result change with the number of other rows, but for
    a row alone.
    """
    if device.type != "cpu" or dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # The type itself: a class made from it may compute something else.
            if type(child) is torch.nn.Linear:
                setattr(parent, name, PackedLinear(child))


def _refuse_unlike_attention(config: Any) -> None:
    """Refuse models whose layers do not all attend to everything before: the rows' mask knows no window."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UnsupportedModel(f"model type {config.model_type} has attention layers of types {sorted(layer_types)}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(f"model type {config.model_type} attends to a sliding window")
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModel(f"model type {config.model_type} caps its attention logits")


def _grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with several query heads to one key head, without copying keys and values for each of them.

    The query heads of a group become further query positions; the mask has been repeated for them.
    """
    batch, heads, count, size = query.shape
    folded = query.reshape(batch, key.shape[1], -1, size)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(batch, heads, count, size).transpose(1, 2), None
