"""Context parallelism: the ranks of a replica cut a packed row's tokens among them and exchange tokens for heads in attention.

Each rank has consecutive tokens of the row, and computes on them all that is done token by token. For attention it gives every other
rank that rank's part of the heads and gets its own part of the heads for all tokens (DeepSpeed-Ulysses, 2309.14509): so the attention
kernels see whole rows, and segments need no thought. Exact; a rank's heads must be divisible by the number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.placement import Grid


@dataclass(frozen=True)
class Context:
    group: dist.ProcessGroup
    size: int
    index: int

    @classmethod
    def of(cls, grid: Grid, axis: str) -> "Context":
        """This rank's, along an axis of a role's ranks."""
        return cls(grid.group(axis), dist.get_world_size(grid.group(axis)), grid.index(axis))

    def row(self, tokens: int) -> "CutRow":
        """How a row of `tokens` is cut: parts that differ by one token at most, some of them empty where there are too few."""
        bounds = [(tokens * r // self.size, tokens * (r + 1) // self.size) for r in range(self.size)]
        return CutRow(self, bounds)


@dataclass(frozen=True)
class CutRow:
    context: Context
    bounds: list[tuple[int, int]]  # [first, last) of each rank

    @property
    def own(self) -> slice:
        return slice(*self.bounds[self.context.index])

    @property
    def lengths(self) -> list[int]:
        return [last - first for first, last in self.bounds]

    def deal(self, places: Tensor) -> tuple[Tensor, list[int]]:
        """Which of the ascending `places` [M] in the row lie in this rank's part, counted from its first; how many lie in each part."""
        first = torch.tensor([first for first, _ in self.bounds] + [self.bounds[-1][1]], device=places.device)
        at = torch.searchsorted(places, first).tolist()
        index = self.context.index
        return places[at[index] : at[index + 1]] - self.own.start, [b - a for a, b in zip(at, at[1:], strict=False)]

    def heads_for_tokens(self, own: Tensor) -> Tensor:
        """[n, H, D], this rank's tokens with all heads -> [N, H / size, D], all tokens with this rank's heads.

        Of fewer heads than ranks each is repeated.
        """
        repeat = -(-self.context.size // own.shape[1]) if own.shape[1] < self.context.size else 1
        return _Exchange.apply(own.repeat_interleave(repeat, 1) if repeat > 1 else own, self, _to_heads, _to_tokens)

    def tokens_for_heads(self, part: Tensor) -> Tensor:
        """The way back: [N, H / size, D] -> [n, H, D]."""
        return _Exchange.apply(part, self, _to_tokens, _to_heads)


def _to_heads(own: Tensor, row: CutRow) -> Tensor:
    n, heads, width = own.shape
    size, part = row.context.size, heads // row.context.size
    sent = own.view(n, size, part, width).transpose(0, 1).contiguous()
    got = own.new_empty(sum(row.lengths) * part * width)
    dist.all_to_all_single(
        got, sent.flatten(), [m * part * width for m in row.lengths], [n * part * width] * size, group=row.context.group
    )
    return got.view(-1, part, width)


def _to_tokens(whole: Tensor, row: CutRow) -> Tensor:
    _, part, width = whole.shape
    size, n = row.context.size, row.lengths[row.context.index]
    got = whole.new_empty(size * n * part * width)
    dist.all_to_all_single(
        got, whole.contiguous().flatten(), [n * part * width] * size, [m * part * width for m in row.lengths], group=row.context.group
    )
    return got.view(size, n, part, width).transpose(0, 1).reshape(n, size * part, width)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: CutRow, there: Callable, back: Callable) -> Tensor:
        ctx.row, ctx.back = row, back
        return there(tensor, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.row), None, None, None


def from_all_ranks(own: Tensor, counts: list[int], context: Context) -> Tensor:
    """The concatenation of every rank's [m, ...], of which counts says the lengths; the gradient of a rank's part is its own slice.

    All ranks must have the same gradient of the result.
    """
    return _FromAll.apply(own, counts, context)


class _FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], context: Context) -> Tensor:
        first = sum(counts[: context.index])
        ctx.own = slice(first, first + len(own))
        padded = own.new_zeros(max(*counts, 1), *own.shape[1:])
        parts = [torch.empty_like(padded) for _ in counts]
        padded[: len(own)] = own
        dist.all_gather(parts, padded, group=context.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.own], None, None
