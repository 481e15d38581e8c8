"""What is known of cards and models before anything is measured: limits and starting points of the curves. Pure.

Cards: the makers' data sheets (NVIDIA H100 PCIe product brief PB-11133-001; Ada architecture white paper for the
RTX 4090), memory as `nvidia-smi` shows it. Models: the `config.json` and the weights' size that each publishes.
"""

from dataclasses import dataclass
from typing import Final

# The share of a card's memory that vLLM takes unless told otherwise (`--gpu-memory-utilization`).
MEMORY_SHARE: Final = 0.9
# What activations and CUDA graphs take of it, per card; about what vLLM 0.8 logs for models of this size.
WORKSPACE_BYTES: Final = 1.5 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A kind of card.

    Args:
        memory_bytes: of one card.
        bytes_per_second: how fast it reads its memory.
        operations_per_second: peak of its tensor cores, dense FP16 with FP32 accumulation.
    """

    memory_bytes: float
    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model's sizes.

    Args:
        weight_bytes: as loaded.
        layers, kv_heads, head_size: one token's keys and values take 2 * layers * kv_heads * head_size numbers.
    """

    parameters: float
    weight_bytes: float
    layers: int
    kv_heads: int
    head_size: int

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, in FP16."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


def _fp16(parameters: float, layers: int, kv_heads: int, head_size: int = 128) -> ModelShape:
    return ModelShape(
        parameters=parameters, weight_bytes=2 * parameters, layers=layers, kv_heads=kv_heads, head_size=head_size
    )


CARDS: Final = {
    "H100-PCIe": Card(memory_bytes=81_559 * 2**20, bytes_per_second=2.0e12, operations_per_second=756e12),
    "RTX-4090": Card(memory_bytes=24_564 * 2**20, bytes_per_second=1.008e12, operations_per_second=165e12),
}

MODELS: Final = {
    "AceMath-7B-Instruct": _fp16(7.62e9, 28, 4),
    "DeepSeek-R1-Distill-Llama-70B": _fp16(70.55e9, 80, 8),
    "DeepSeek-R1-Distill-Llama-8B": _fp16(8.03e9, 32, 8),
    "DeepSeek-R1-Distill-Qwen-1.5B": _fp16(1.78e9, 28, 2),
    "DeepSeek-R1-Distill-Qwen-14B": _fp16(14.77e9, 48, 8),
    "DeepSeek-R1-Distill-Qwen-32B": _fp16(32.76e9, 64, 8),
    "DeepSeek-R1-Distill-Qwen-7B": _fp16(7.62e9, 28, 4),
    # 8 bits but for the embeddings.
    "Llama-3.1-Nemotron-70B-Instruct-HF-FP8-dynamic": ModelShape(
        parameters=70.55e9, weight_bytes=72.6e9, layers=80, kv_heads=8, head_size=128
    ),
    "Meta-Llama-3-70B-Instruct": _fp16(70.55e9, 80, 8),
    "Meta-Llama-3-8B-Instruct": _fp16(8.03e9, 32, 8),
    "QwQ-32B-Preview": _fp16(32.76e9, 64, 8),
    "gemma-2-9b-it": _fp16(9.24e9, 42, 8, 256),
    "phi-4": _fp16(14.66e9, 40, 10),
}


def kv_tokens_estimate(model: ModelShape, card: Card, cards: int) -> float:
    """Return how many tokens' keys and values fit beside the weights.

    (cards * (share * memory - workspace) - weights) / bytes per token; zero or less where the model does not fit.
    """
    free_bytes = cards * (MEMORY_SHARE * card.memory_bytes - WORKSPACE_BYTES) - model.weight_bytes
    return free_bytes / model.kv_token_bytes


def kv_token_read_ms(model: ModelShape, card: Card, cards: int) -> float:
    """Return what one more token of context adds to a decode step: its keys and values are read once."""
    return 1000.0 * model.kv_token_bytes / (cards * card.bytes_per_second)


def prefill_token_estimate_ms(model: ModelShape, card: Card, cards: int) -> float:
    """Return what a token of a prompt takes at the cards' peak: two operations per parameter."""
    return 1000.0 * 2.0 * model.parameters / (cards * card.operations_per_second)
