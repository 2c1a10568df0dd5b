"""Hidden states and the LM head's weight to log-probs (and entropy), differentiable for any loss, without the logits.

Logits of a step would be the largest tensor of a run (4,096 tokens x 152k words = 2.5 GB in fp32, several times over).
Here they exist for a chunk of tokens at a time, in the forward and once more in the backward, which recomputes them.
Between the two passes only a number or two per token are kept.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` [M] and, when asked, the exact entropy [M] of softmax(logits / temperature), both in fp32.

    hidden [M, H], weight [V, H], targets [M] int64, bias [V]; M may be 0. With a softcap (Gemma, 2408.00118) the logits
    are softcap * tanh(logits / softcap). Matrix products run in the dtype of `hidden`, everything after in fp32; fp64
    stays fp64. Gradients reach hidden, weight and bias, from log-probs and entropy alike.

    Peak memory beside inputs and gradients: one fp32 block [chunk_tokens, V] (and its copy in the dtype of `hidden`, if
    that is narrower), and an fp32 [V, H] for the gradient of a narrower weight if M > chunk_tokens. By default a block
    has about 2**27 logits.

    >>> logprobs_from_hidden(torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0]), temperature=0.5)[0]
    tensor([-0.0181])
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: log-probs are those of logits / temperature")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be above 0, or None")
    if chunk_tokens is None:
        chunk_tokens = min(max(2**27 // len(weight), 256), 4096)
    return _Head.apply(hidden, weight, bias, targets, temperature, softcap, entropy, chunk_tokens)


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> Tensor:
    """Logits as the softmax sees them, [rows, V] fp32: a fresh block, which the caller may overwrite."""
    block = F.linear(hidden, weight).to(_wide(hidden))
    if bias is not None:
        block.add_(bias)
    if softcap is not None:
        block.div_(softcap).tanh_().mul_(softcap)
    return block if temperature == 1 else block.div_(temperature)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        want_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        lse = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if want_entropy else None
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            block = _scores(hidden[rows], weight, bias, temperature, softcap)
            largest = block.amax(-1, keepdim=True)
            block.sub_(largest)
            chosen = block.gather(-1, targets[rows, None])[:, 0]
            total = block.exp_().sum(-1)
            logprobs[rows] = chosen - total.log()
            lse[rows] = largest[:, 0] + total.log()
            if entropy is not None:
                block.div_(total[:, None])
                entropy[rows] = torch.special.entr(block, out=block).sum(-1)
            del block  # before the next one is made, else two are alive
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.options = (temperature, softcap, chunk_tokens)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        temperature, softcap, chunk_tokens = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_bias = torch.zeros_like(bias, dtype=_wide(bias)) if need_bias else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        if grad_entropy is not None or softcap is not None:
            chunk_tokens = max(chunk_tokens // 3, 1)  # up to three blocks at once: a third of the rows, the same memory
        # Summed over several chunks in bf16, the weight's gradient would lose its last bits to every addition.
        sum_dtype = _wide(weight) if len(hidden) > chunk_tokens else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight else None
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            grad = _scores_gradient(
                _scores(hidden[rows], weight, bias, temperature, softcap),
                lse[rows],
                targets[rows],
                grad_logprobs[rows],
                None if grad_entropy is None else (grad_entropy[rows], entropy[rows]),
                temperature,
                softcap,
            )
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden[rows])
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
            del grad
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _scores_gradient(
    block: Tensor,
    lse: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Gradient with respect to the raw logits, [rows, V]; consumes `block`, the scores. `entropy`: gradient and value.

    With y = log p: d logprob / d score_j = [j is the target] - p_j, and d entropy / d score_j = -p_j (y_j + entropy).
    """
    log_p = block.sub_(lse[:, None])
    slope = grad_logprobs / temperature
    if entropy is None and softcap is None:
        grad = log_p.exp_().mul_(-slope[:, None])
    elif entropy is None:
        grad = log_p.exp().mul_(-slope[:, None])
    else:
        entropy_slope, value = entropy[0] / temperature, entropy[1]
        bracket = (log_p + value[:, None]).mul_(-entropy_slope[:, None]).sub_(slope[:, None])
        grad = log_p.exp().mul_(bracket)
    grad[torch.arange(len(targets), device=targets.device), targets] += slope
    if softcap is not None:
        tanh = log_p.add_(lse[:, None]).mul_(temperature / softcap)
        grad.mul_(tanh.square_().neg_().add_(1))
    return grad
