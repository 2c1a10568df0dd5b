"""Blocks that round where vLLM's do, so that log-probs in bfloat16 come nearer to the sampler's (docs/mismatch.md).

transformers rounds after every operation. vLLM adds to the residual stream inside the norm that follows, which sees the sum before it is
rounded, and rotates queries and keys in fp32. In fp32 there is no difference.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # by `model_type`: a dense block of two norms without an offset, and nothing scaled


def check_family(config: Any) -> None:
    """ValueError where a model's blocks are not those that are rewritten here."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"training.match_sampler=true: model family {config.model_type!r} adds and norms in another way than {', '.join(FAMILIES)}; "
            f"set it to false"
        )


def match_sampler(model: nn.Module, compute: torch.dtype) -> None:
    """Change the forward of a causal LM's blocks, norms and rotary embedding, in place."""
    check_family(model.config)
    norm_sums_unrounded(model)
    rotate_in_fp32(model, compute)


def norm_sums_unrounded(model: nn.Module) -> None:
    """Between blocks the residual stream is then in fp32, not rounded yet."""
    for block in model.model.layers:
        block.forward = MethodType(_block, block)
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.forward = MethodType(_norm, norm)
    model.model.norm.forward = MethodType(_norm, model.model.norm)


def rotate_in_fp32(model: nn.Module, compute: torch.dtype) -> None:
    """compute: the dtype that cosines, sines and what was rotated are rounded to. Queries and keys come to packed attention in fp32."""
    model.model.rotary_emb.register_forward_hook(partial(_widened, compute))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _block(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    """hidden_states: the residual stream before it is rounded; the same is returned. [1, N, H] each"""
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **given)
    total = _wide(hidden_states.to(normed.dtype)) + attended
    normed = self.post_attention_layernorm(total)
    return _wide(total.to(normed.dtype)) + self.mlp(normed)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """In the dtype of the weight, whatever that of the stream is."""
    wide = _wide(hidden_states)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * wide.to(self.weight.dtype)


def _widened(compute: torch.dtype, _module: nn.Module, _args: Any, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Cosines and sines as vLLM caches them, in a type in which nothing is rounded once more; packed attention rounds what was rotated."""
    return tuple(_wide(part.to(compute)) for part in cos_sin)
