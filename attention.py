"""Attention over packed rows: many episodes in one row of tokens, none of which sees another, and no padding computed."""

import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from batch import Keys
from parallel.context import CutRow

NAME = "packed"  # as transformers' `attn_implementation`

# Causal, with fewer key-value heads than query heads: asked for under other names from one torch to the next.
_options = inspect.signature(varlen_attn).parameters
CAUSAL_GQA: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _options else {"is_causal": True}
CAUSAL_GQA |= {"enable_gqa": True} if "enable_gqa" in _options else {}
SCORES_AT_ONCE = 2**25  # of all heads together, where they are written out: 128 MiB in fp32


@dataclass(frozen=True)
class Segments:
    """Where the segments of a packed row begin and end; handed through the model's forward to every attention layer."""

    cu_seqlens: Tensor  # [S + 1] int32
    max_seqlen: int
    row: CutRow | None = None  # where several ranks share the row
    keys: Keys | None = None  # where a segment sees more than itself

    @property
    def most_keys(self) -> int:
        """That a segment sees."""
        return self.max_seqlen if self.keys is None else self.keys.max_seqlen

    @functools.cached_property
    def by_length(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Token positions [n, L] of the n segments of each length L, and [n, K] of the K keys that each sees."""
        starts, lengths = self.cu_seqlens[:-1].long(), self.cu_seqlens.diff()
        if self.keys is None:
            found = [starts[lengths == n][:, None] + torch.arange(n, device=starts.device) for n in lengths.unique().tolist()]
            return tuple((at, at) for at in found)
        starts_of_keys, keys = self.keys.cu_seqlens[:-1].long(), self.keys.cu_seqlens.diff()
        pairs = []
        for n, m in torch.stack([lengths, keys], 1).unique(dim=0).tolist():
            alike = (lengths == n) & (keys == m)
            seen = self.keys.places[starts_of_keys[alike][:, None] + torch.arange(m, device=starts.device)]
            pairs.append((starts[alike][:, None] + torch.arange(n, device=starts.device), seen))
        return tuple(pairs)


@dataclass(frozen=True)
class Scores:
    """From queries and keys to what the softmax sees."""

    scaling: float | None = None  # None: 1 / sqrt(D)
    window: int | None = None  # a token sees as many, itself the last of them; None: all of its segment before it
    softcap: float | None = None  # scores are softcap * tanh(scores / softcap) (Gemma 2, 2408.00118)


def flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """The flash kernel for variable lengths; it caps no scores. [N, H, D] each. It lets the last query of a segment see the last key."""
    cu_q, cu_k = segments.cu_seqlens, segments.cu_seqlens
    if segments.keys is not None:
        cu_k = segments.keys.cu_seqlens
        k, v = (_Gathered.apply(t, segments.keys) for t in (k, v))
    options = CAUSAL_GQA if scores.window is None else CAUSAL_GQA | {"window_size": (scores.window - 1, 0)}
    out = varlen_attn(q, k, v, cu_q, cu_k, segments.max_seqlen, segments.most_keys, scale=scores.scaling, **options)
    assert isinstance(out, Tensor)
    return out


class _Gathered(torch.autograd.Function):
    """The keys or values [K, H, D] that the segments see, of a row's [N, H, D]. Of those that several see, gradients add up in fp32."""

    @staticmethod
    def forward(ctx: Any, of_row: Tensor, keys: Keys) -> Tensor:
        ctx.keys = keys
        return of_row.index_select(0, keys.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        keys: Keys = ctx.keys
        total = gradient.index_select(0, keys.first)
        sums = total[keys.shared].to(_wide(total)).index_add_(0, keys.of_shared, gradient[keys.again].to(_wide(total)))
        return total.index_copy_(0, keys.shared, sums.to(total.dtype)), None


def per_length(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """One SDPA call per distinct pair of lengths, or scores written out where they are capped or do not reach back to the start.

    [N, H, D] each.
    """
    parts = []
    for at, seen in segments.by_length:
        qs, ks, vs = (t[here].transpose(1, 2) for t, here in ((q, at), (k, seen), (v, seen)))  # [n, H, L, D]
        queries, keys = at.shape[1], seen.shape[1]
        if scores.softcap is None and (scores.window is None or scores.window >= keys):
            options: dict[str, Any] = {"is_causal": True}
            if queries != keys:  # `is_causal` would let the first query see the first key alone
                options = {"attn_mask": torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)}
            out = F.scaled_dot_product_attention(qs, ks, vs, scale=scores.scaling, enable_gqa=True, **options)
        else:
            out = _WrittenOut.apply(qs, ks, vs, scores)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    order = torch.cat([at.flatten() for at, _ in segments.by_length])
    return torch.empty_like(q).index_copy(0, order, torch.cat(parts))


def in_fp32(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores) -> Tensor:
    return per_length(q.float(), k.float(), v.float(), segments, scores).to(v.dtype)


class _WrittenOut(torch.autograd.Function):
    """Causal attention with its scores in memory, for a chunk of queries at a time and again in the backward pass.

    q [n, Hq, L, D]; k, v [n, Hkv, K, D], K >= L: the last query sees the last key. All that is computed is in fp32 at least: a score of
    40 in bf16 is off by an eighth.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        out, total = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_wide(q))
        for rows, keys in _chunks(q, k, scores):
            s, _ = _scores(q[:, :, rows], k[:, :, keys], rows, keys, scores)
            total[:, :, rows] = of_rows = s.logsumexp(-1)
            out[:, :, rows] = _per_query_head(s.sub_(of_rows[..., None]).exp_(), v[:, :, keys])
        ctx.scores = scores
        ctx.save_for_backward(q, k, v, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, total = ctx.saved_tensors
        scores: Scores = ctx.scores
        of_q, (of_k, of_v) = torch.empty_like(q), (torch.zeros_like(t, dtype=total.dtype) for t in (k, v))
        for rows, keys in _chunks(q, k, scores):
            s, bend = _scores(q[:, :, rows], k[:, :, keys], rows, keys, scores)
            p = s.sub_(total[:, :, rows, None]).exp_()
            outer = gradient[:, :, rows].to(total.dtype)
            of_v[:, :, keys] += _per_key_head(p, outer, v.shape[1])
            slopes = _per_query_head(outer, v[:, :, keys].transpose(2, 3))
            slopes.sub_((slopes * p).sum(-1, keepdim=True)).mul_(p).mul_(_scaling(q, scores))
            if bend is not None:
                slopes.mul_(bend)
            of_q[:, :, rows] = _per_query_head(slopes, k[:, :, keys])
            of_k[:, :, keys] += _per_key_head(slopes, q[:, :, rows].to(total.dtype), k.shape[1])
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _scaling(q: Tensor, scores: Scores) -> float:
    return q.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling


def _chunks(q: Tensor, k: Tensor, scores: Scores) -> Iterator[tuple[slice, slice]]:
    """Consecutive queries, and the keys that some of them see."""
    n, heads, length, _ = q.shape
    before = k.shape[2] - length
    reach = min(scores.window or k.shape[2], k.shape[2])
    # With c queries there are c (c + reach) scores of a head at most.
    most = max(SCORES_AT_ONCE // (n * heads), 1)
    count = max(min(int((math.sqrt(reach * reach + 4 * most) - reach) / 2), length), 1)
    for first in range(0, length, count):
        last = min(first + count, length)
        yield slice(first, last), slice(max(before + first - reach + 1, 0), before + last)


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """[n, Hq, queries, keys], -inf where a query does not see a key, and with a cap the slope of the capped scores in the raw ones."""
    s = _per_query_head(q.to(_wide(q)), k.transpose(2, 3)).mul_(_scaling(q, scores))
    bend = None
    if scores.softcap is not None:
        s.div_(scores.softcap).tanh_()
        bend = 1 - s.square()
        s.mul_(scores.softcap)
    at = torch.arange(rows.start, rows.stop, device=q.device) + (keys.stop - rows.stop)  # the last query is where the last key is
    back = at[:, None] - torch.arange(keys.start, keys.stop, device=q.device)
    unseen = back < 0 if scores.window is None else (back < 0) | (back >= scores.window)
    return s.masked_fill_(unseen, -math.inf), bend


def _per_query_head(left: Tensor, right: Tensor) -> Tensor:
    """[n, Hq, a, b] @ [n, Hkv, b, c] -> [n, Hq, a, c], consecutive query heads sharing a key-value head."""
    n, heads, a, b = left.shape
    grouped = left.reshape(n, right.shape[1], -1, b)
    return (grouped @ right.to(left.dtype)).view(n, heads, a, right.shape[3])


def _per_key_head(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """[n, Hq, a, b], [n, Hq, a, c] -> [n, Hkv, b, c]: left^T @ right, summed over the query heads that share a key-value head."""
    n, _, _, b = left.shape
    return left.reshape(n, kv_heads, -1, b).transpose(2, 3) @ right.reshape(n, kv_heads, -1, right.shape[3])


# By device and dtype: torch's flash kernel exists for these. Everything else, fp32 on CUDA too, goes by length.
KERNELS = {("cuda", torch.bfloat16): flash, ("cuda", torch.float16): flash}
# Those that compute as the sampler does there: vLLM's CPU kernel is in fp32 inside.
SAMPLERS = KERNELS | {("cpu", torch.bfloat16): in_fp32}


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

    sliding_window: tokens that a token sees, itself included. softcap: scores are softcap * tanh(scores / softcap).
    transformers calls it once per layer. ValueError where the model wants what is not done here, rather than other numbers.
    """
    if s_aux is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks, which packed attention does not support: take another model")
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{type(module).__name__} lets tokens see later ones, which packed attention does not: take a causal model")
    window = None if sliding_window is None or sliding_window >= segments.most_keys else sliding_window
    scores = Scores(scaling, window, softcap)
    kernels = KERNELS if query.dtype == value.dtype else SAMPLERS  # rotated in fp32: parallel/rounding.py
    q, k, v = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))  # [N, H, D]
    kernel = kernels.get((q.device.type, q.dtype), per_length)
    if softcap is not None or (window is not None and "window_size" not in CAUSAL_GQA):
        kernel = per_length  # flash cannot
    if segments.row is None:
        return kernel(q, k, v, segments, scores)[None], None
    q, k, v = (segments.row.heads_for_tokens(t) for t in (q, k, v))
    return segments.row.tokens_for_heads(kernel(q, k, v, segments, scores))[None], None


AttentionInterface.register(NAME, packed_attention)
