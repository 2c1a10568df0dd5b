"""Estimators of KL(pi || ref) from tokens that pi sampled, and what each one teaches when it is differentiated as a loss.

In expectation over pi, an estimator's value and its gradient as a loss are two different things (2506.09477, 2512.21852):

    k1        value KL(pi || ref)              gradient 0: noise only
    k2        value KL(pi || ref) to 2nd order gradient of KL(pi || ref)
    k3        value KL(pi || ref)              gradient of KL(ref || pi), the other direction
    r k3      value KL(pi || ref)              gradient of KL(pi || ref)
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from batch import LossOutput

Estimator = Literal["k1", "k2", "k3", "k3_ratio"]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token d = pi - ref, whose expectation is KL(pi || ref); negative where ref likes the token more. [B, T], [B, T] -> [B, T].

    As a loss its expected gradient is 0, for the probabilities sum to 1: it pulls nothing towards the reference and adds noise.
    It belongs in the reward.

    >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))
    tensor([ 1., -1.])
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token d^2 / 2 with d = pi - ref; never negative. [B, T], [B, T] -> [B, T].

    Its expectation is KL(pi || ref) only to second order in d. As a loss its expected gradient is exactly that of KL(pi || ref).

    >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))
    tensor([0.5000, 0.5000])
    """
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token KL(pi || ref), exp(d) - d - 1 with d = ref - pi; never negative. [B, T], [B, T] -> [B, T].

    Its expectation is KL(pi || ref). Differentiated as a loss, the expected gradient is that of the *other* direction,
    KL(ref || pi) (2512.21852): that is GRPO as printed (2402.03300). Written with expm1, exact where d is small.

    >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))
    tensor([0.3679, 0.7183])
    """
    d = ref_logprobs - logprobs
    return torch.expm1(d) - d


def ratio_to_sampled(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r = exp(logprobs - sg(old_logprobs)), 1 on-policy but with a gradient: the factor of r k3 (2512.02556). [B, T], [B, T] -> [B, T].

    As a loss, the expected gradient of r k3 is that of KL(pi || ref), and r also corrects for tokens that an older policy sampled.

    >>> ratio_to_sampled(torch.tensor([0.0]), torch.tensor([0.0]))
    tensor([1.])
    """
    return torch.exp(logprobs - old_logprobs.detach())


def estimate(kl: Estimator, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """The estimator of that name at every token, [B, T]; `old_logprobs` matter to "k3_ratio" alone.

    >>> estimate("k2", torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-1.0]))
    tensor([0.5000])
    """
    if kl == "k3_ratio":
        return ratio_to_sampled(logprobs, old_logprobs) * k3(logprobs, ref_logprobs)
    return {"k1": k1, "k2": k2, "k3": k3}[kl](logprobs, ref_logprobs)


def checked_kl(kl: Estimator) -> Estimator:
    if kl not in get_args(Estimator):
        raise ValueError(f'kl="{kl}" is not one of {", ".join(get_args(Estimator))}')
    return kl


def checked_beta(beta: float) -> float:
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta={beta} must be 0 (no KL penalty) or above: it multiplies the KL to the reference")
    return beta


def with_kl(
    output: LossOutput, beta: float, kl: Estimator, logprobs: Tensor, ref_logprobs: Tensor | None, old_logprobs: Tensor
) -> LossOutput:
    """The loss with beta times the estimator added, and k3 as the metric `kl`, also when beta is 0, if there is a reference.

    The metric is k3 whatever is added: it is never negative and its mean is KL(pi || ref).
    """
    if ref_logprobs is None:
        if beta != 0:
            raise ValueError(
                f"beta={beta} needs a reference, and there are no ref_logprobs: give the run one (services.ref_model), "
                f"or set beta to 0"
            )
        return output
    loss = output.loss + beta * estimate(kl, logprobs, ref_logprobs, old_logprobs) if beta != 0 else output.loss
    return LossOutput(loss, {**output.metrics, "kl": k3(logprobs, ref_logprobs).detach()})
