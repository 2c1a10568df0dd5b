"""What is done with a block of logits where it need not be done step by step: the product in fp32, and rows in one go under torch.compile.

Operation by operation (head.py), a row's scores travel some twenty times between memory and processor, in fp32. Compiled, each function
here reads the raw logits once a reduction, and what the softmax sees is never in memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor


def wide(tensor: Tensor) -> torch.dtype:
    """In which softmaxes are computed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def product_in_fp32(hidden: Tensor, weight: Tensor) -> Tensor:
    """[m, V] in fp32 from hidden [m, H] and weight [V, H], which may be narrower and stay so where the device can."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T


def operand(weight: Tensor) -> Tensor:
    """A narrower weight as `product_in_fp32` can take it again and again without a cast."""
    return weight if weight.is_cuda else weight.float()


def row_sums(
    logits: Tensor, bias: Tensor | None, places: Tensor, held: Tensor, temperature: float, softcap: float | None, entropy: bool
) -> Tensor:
    """[3 or 4, m] of logits [m, V], V > 0: see head._sums, whose numbers these are but for the order of sums."""
    scores, _ = _scores(logits, bias, temperature, softcap)
    largest = scores.amax(-1).clamp(min=torch.finfo(scores.dtype).min)
    target = scores.gather(-1, places[:, None])[:, 0].masked_fill(~held, -torch.inf)
    below = scores - largest[:, None]
    e = below.exp()
    sums = [largest, e.sum(-1), target]
    return torch.stack([*sums, torch.where(e > 0, e * below, 0).sum(-1)] if entropy else sums)


def row_gradients(
    logits: Tensor, bias: Tensor | None, places: Tensor, held: Tensor, temperature: float, softcap: float | None, largest: Tensor,
    total: Tensor, slopes: Tensor, entropy: Tensor | None, entropy_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """[m, V], with respect to the raw logits and in their dtype: see head._Gradients."""
    scores, bend = _scores(logits, bias, temperature, softcap)
    below, slopes = scores - largest[:, None], (slopes / temperature)[:, None]
    if entropy_slopes is None or entropy is None:
        gradient = below.exp() * (-slopes / total[:, None])
    else:
        log_p = below - total.log()[:, None]
        gradient = log_p.exp() * ((log_p + entropy[:, None]) * (-entropy_slopes / temperature)[:, None] - slopes)
    is_target = (torch.arange(logits.shape[1], device=logits.device) == places[:, None]) & held[:, None]
    gradient = gradient + torch.where(is_target, slopes, 0)
    return (gradient if bend is None else gradient * bend).to(logits.dtype)


def _scores(logits: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """What the softmax sees, and with a cap its slope in the raw logits, times the temperature."""
    scores, bend = logits.to(wide(logits)), None
    if bias is not None:
        scores = scores + bias
    if softcap is not None:
        bounded = (scores / softcap).tanh()
        scores, bend = bounded * softcap, 1 - bounded * bounded
    return scores / temperature, bend


def in_one_go(function: Callable[..., Tensor], logits: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """`function`, compiled, of logits [m, V], a bias [V] and arguments that have m rows where they are tensors. One graph serves all m."""
    given = [argument.contiguous() if isinstance(argument, Tensor) else argument for argument in (logits, *arguments)]
    for tensor in given:
        if isinstance(tensor, Tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(given[0], bias, *given[1:])


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)
