"""Attention over packed rows: many episodes in one row of tokens, none of which sees another, and no padding computed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

NAME = "packed"  # as transformers' `attn_implementation`


@dataclass(frozen=True)
class Segments:
    """Where the episodes of a packed row begin and end; handed through the model's forward to every attention layer."""

    cu_seqlens: Tensor  # [B + 1] int32
    max_seqlen: int
    by_length: tuple[Tensor, ...]  # for the CPU: token positions [n, L] of the n segments of each length L

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_seqlen: int) -> "Segments":
        if cu_seqlens.device.type != "cpu":
            return cls(cu_seqlens, max_seqlen, ())
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
        grids = (starts[lengths == n][:, None] + torch.arange(int(n)) for n in lengths.unique())
        return cls(cu_seqlens, max_seqlen, tuple(grids))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    segments: Segments,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment. query [1, Hq, N, D]; key, value [1, Hkv, N, D] -> [1, N, Hq, D].

    transformers calls it once per layer. On CUDA the flash kernel for variable lengths; on a CPU one SDPA call per distinct length.
    """
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, H, D]
    if q.device.type != "cpu":
        out = varlen_attn(
            q,
            k,
            v,
            segments.cu_seqlens,
            segments.cu_seqlens,
            segments.max_seqlen,
            segments.max_seqlen,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        assert isinstance(out, Tensor)
        return out.unsqueeze(0), None
    parts = []
    for at in segments.by_length:
        qs, ks, vs = (t[at].transpose(1, 2) for t in (q, k, v))  # [n, H, L, D]
        out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    order = torch.cat([at.flatten() for at in segments.by_length])
    return torch.empty_like(q).index_copy(0, order, torch.cat(parts))[None], None


AttentionInterface.register(NAME, packed_attention)
