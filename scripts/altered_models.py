"""Make copies of a model that a cheating node might serve under the model's name: fewer bits, fewer layers.

    altered_models.py var/models/smollm2-135m-instruct int4 /tmp/int4

The copy is a model directory for an engine, without a manifest: no network
accepts it by itself. Runs in the torch environment (`.venv-torch`).
"""

import json
import shutil
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file, save_file

INT4_GROUP = 32
# Which of SmolLM2's 30 layers is left out. The middle ones are missed least, so that leaving one of them out is the
# cheat that is hardest to see.
DROPPED_LAYER = 14
WEIGHTS = "model.safetensors"
CONFIG = "config.json"

Tensors = dict[str, Any]


class Alteration(Enum):
    INT4 = "int4"
    INT8 = "int8"
    DROPPED_LAYER = "dropped-layer"


def int4_groups(weight: Any) -> Any:
    """Return a matrix as 4-bit numbers with a scale for each 32 columns would give it back.

    Without an offset: the weights of SmolLM2 that this project builds come from a 4-bit file with scale and offset for
    each 32 columns, so that rounding to that grid again gives the very same weights, which is no cheat.
    """
    groups = weight.reshape(weight.shape[0], -1, INT4_GROUP)
    step = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-12)
    return ((groups / step).round().clamp(-8, 7) * step).reshape(weight.shape)


def int8_channels(weight: Any) -> Any:
    """Return a matrix as 8-bit numbers with a scale for each output channel would give it back."""
    step = (weight.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return (weight / step).round().clamp(-127, 127) * step


def quantise(tensors: Tensors, rounded: Callable[[Any], Any]) -> Tensors:
    """Round the matrices of the layers; embeddings and norms stay, as in common quantisations.

    In float32, so that storing them rounds no further.
    """
    result = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.ndim == 2 and ".layers." in name
        result[name] = rounded(tensor.float()) if is_matrix else tensor.float()
    return result


def without_layer(tensors: Tensors, layer: int) -> Tensors:
    result = {}
    for name, tensor in tensors.items():
        head, found, tail = name.partition(".layers.")
        if found:
            number, _, rest = tail.partition(".")
            if int(number) == layer:
                continue
            name = f"{head}.layers.{int(number) - (int(number) > layer)}.{rest}"
        result[name] = tensor
    return result


def write_altered(source: Path, out: Path, alteration: Alteration) -> None:
    """Write the altered copy. Takes some seconds."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / WEIGHTS)
    config = json.loads((source / CONFIG).read_text())
    match alteration:
        case Alteration.INT4:
            tensors = quantise(tensors, int4_groups)
        case Alteration.INT8:
            tensors = quantise(tensors, int8_channels)
        case Alteration.DROPPED_LAYER:
            tensors = without_layer(tensors, DROPPED_LAYER)
            config["num_hidden_layers"] -= 1
    save_file(_contiguous(tensors.items()), out / WEIGHTS, metadata={"format": "pt"})
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for path in source.iterdir():
        if path.name not in {WEIGHTS, CONFIG, "manifest.envelope"}:
            shutil.copyfile(path, out / path.name)


def _contiguous(items: Iterable[tuple[str, Any]]) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in items}


def main(source: Path, alteration: Alteration, out: Path) -> None:
    """Write an altered copy of a model."""
    with torch.inference_mode():
        write_altered(source, out, alteration)


if __name__ == "__main__":
    typer.run(main)
