"""The names that weights have in a checkpoint, where transformers keeps them otherwise in memory.

transformers 5 holds the experts of a layer in two parameters; the checkpoint, and vLLM's loader, have three matrices of every expert:

    mlp.experts.gate_up_proj [E, 2 I, H] = mlp.experts.<e>.gate_proj.weight [I, H], then mlp.experts.<e>.up_proj.weight [I, H]
    mlp.experts.down_proj [E, H, I]      = mlp.experts.<e>.down_proj.weight [H, I]

So a parameter's elements, in order, are those of its parts in the checkpoint, in order.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

Shape = tuple[int, ...]
PARTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}


def checkpoint_shapes(name: str, shape: Shape) -> list[tuple[str, Shape]]:
    """Names and shapes that a parameter has in the checkpoint; its elements in order are theirs in order.

    >>> checkpoint_shapes("model.layers.0.mlp.experts.gate_up_proj", (1, 6, 4))
    [('model.layers.0.mlp.experts.0.gate_proj.weight', (3, 4)), ('model.layers.0.mlp.experts.0.up_proj.weight', (3, 4))]
    >>> checkpoint_shapes("model.norm.weight", (4,))
    [('model.norm.weight', (4,))]
    """
    for ending, parts in PARTS.items():
        if name.endswith(ending):
            experts, rows, columns = shape
            path = name.rpartition(".")[0]
            return [(f"{path}.{e}.{part}.weight", (rows // len(parts), columns)) for e in range(experts) for part in parts]
    return [(name, tuple(shape))]


def to_checkpoint(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """What a whole parameter is in the checkpoint: views of its elements."""
    parts = checkpoint_shapes(name, tuple(tensor.shape))
    if parts[0][0] == name:
        return [(name, tensor)]
    pieces = tensor.reshape(-1).split([torch.Size(shape).numel() for _, shape in parts])
    return [(part, piece.view(shape)) for (part, shape), piece in zip(parts, pieces, strict=True)]


def checkpoint_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole parameters as a checkpoint's tensors, no two of which share their memory, as a file wants them."""
    parts = [to_checkpoint(name, tensor) for name, tensor in weights.items()]
    return {name: tensor.clone() if len(of_one) > 1 else tensor for of_one in parts for name, tensor in of_one}


def check_names(model: Any) -> None:
    """ValueError where transformers renames weights of the family in a way that `to_checkpoint` does not undo."""
    known = {ending.removeprefix(".") for ending in PARTS}
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        if not known.issuperset(conversion.target_patterns) or not all("mlp.experts.*." in p for p in conversion.source_patterns):
            raise ValueError(
                f"model family {model.config.model_type!r} ({type(model).__name__}) has {conversion.source_patterns[0]!r} in a checkpoint "
                f"and {conversion.target_patterns[0]!r} in memory: weights could not leave the trainer under the checkpoint's names. Take "
                f"another model, or teach parallel/names.py this one"
            )
