"""Estimators of KL(pi || ref) from tokens that pi sampled."""

import torch
from torch import Tensor


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token KL(pi || ref), exp(d) - d - 1 with d = ref - pi; never negative. [B, T], [B, T] -> [B, T].

    Its expectation is KL(pi || ref). Differentiated as a loss, the expected gradient is that of the *other* direction,
    KL(ref || pi) (2512.21852): that is GRPO as printed (2402.03300). Written with expm1, exact where d is small.

    >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))
    tensor([0.3679, 0.7183])
    """
    d = ref_logprobs - logprobs
    return torch.expm1(d) - d
