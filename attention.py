"""Attention over packed rows: many episodes in one row of tokens, none of which sees another, and no padding computed."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from parallel.context import CutRow

NAME = "packed"  # as transformers' `attn_implementation`

# Causal, with fewer key-value heads than query heads: asked for under other names from one torch to the next.
_options = inspect.signature(varlen_attn).parameters
CAUSAL_GQA: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _options else {"is_causal": True}
CAUSAL_GQA |= {"enable_gqa": True} if "enable_gqa" in _options else {}


@dataclass(frozen=True)
class Segments:
    """Where the episodes of a packed row begin and end; handed through the model's forward to every attention layer."""

    cu_seqlens: Tensor  # [B + 1] int32
    max_seqlen: int
    row: CutRow | None = None  # where several ranks share the row

    @functools.cached_property
    def by_length(self) -> tuple[Tensor, ...]:
        """Token positions [n, L] of the n segments of each length L."""
        starts, lengths = self.cu_seqlens[:-1].long(), self.cu_seqlens.diff()
        return tuple(
            starts[lengths == n][:, None] + torch.arange(n, device=starts.device) for n in lengths.unique().tolist()
        )


def flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """The flash kernel for variable lengths. [N, H, D] each."""
    cu, longest = segments.cu_seqlens, segments.max_seqlen
    out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, **CAUSAL_GQA)
    assert isinstance(out, Tensor)
    return out


def per_length(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """One SDPA call per distinct length. [N, H, D] each."""
    parts = []
    for at in segments.by_length:
        qs, ks, vs = (t[at].transpose(1, 2) for t in (q, k, v))  # [n, H, L, D]
        out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    order = torch.cat([at.flatten() for at in segments.by_length])
    return torch.empty_like(q).index_copy(0, order, torch.cat(parts))


# By device and dtype: torch's flash kernel exists for these. Everything else, fp32 on CUDA too, goes by length.
KERNELS = {("cuda", torch.bfloat16): flash, ("cuda", torch.float16): flash}


@torch.compiler.disable  # kernels take lengths from the host; the rest of a block is compiled around it
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment. query [1, Hq, N, D]; key, value [1, Hkv, N, D] -> [1, N, Hq, D].

    transformers calls it once per layer. ValueError where the model wants what the kernels here do not do, rather than other numbers.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__} caps its attention scores or has attention sinks: packed attention does neither")
    if sliding_window is not None and sliding_window < segments.max_seqlen:
        raise ValueError(
            f"a sequence of {segments.max_seqlen} tokens exceeds the model's sliding window of {sliding_window}, which packed attention "
            f"does not support: lower training.seq_len to {sliding_window}"
        )
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, H, D]
    kernel = KERNELS.get((q.device.type, q.dtype), per_length)
    if segments.row is None:
        return kernel(q, k, v, segments, scaling)[None], None
    q, k, v = (segments.row.heads_for_tokens(t) for t in (q, k, v))
    return segments.row.tokens_for_heads(kernel(q, k, v, segments, scaling))[None], None


AttentionInterface.register(NAME, packed_attention)
