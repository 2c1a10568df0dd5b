"""What a sampled token's gradient is multiplied by where another policy, or another engine, sampled it.

With r = pi / pi_sampler at each token, an unbiased estimate multiplies by r (over the whole sequence, by the product of its r), at a
variance that grows with the gap. These functions trade bias for variance: each takes r and returns the weight that replaces it. Nothing
here changes a denominator: a masked token stays in the count that its sequence or step is divided by, else masking would raise the
step size of the rest.

    grpo: {correction: {fn: losses.correction.Truncated, cap: 2.0}}
"""

import math
from typing import Literal

import torch
from torch import Tensor


class Uncorrected:
    """Nothing is weighed: data is taken as if the policy itself had sampled it, and a loss's own ratio stays as it is."""

    def __call__(self, ratio: Tensor, mask: Tensor) -> Tensor:
        """ratio, mask -> weight, all [B, T]; ratio is pi / pi_sampler, detached, 1 where the mask is 0."""
        return torch.ones_like(ratio)


class Truncated:
    """min(r, cap) at each token (truncated importance sampling, 1606.02647; between sampler and trainer: Yao et al. 2025).

    cap: above 0, usually 2. Tokens that the sampler liked too much are weighed down, those it liked too little up to `cap`.
    """

    def __init__(self, *, cap: float = 2.0):
        if not 0 < cap < math.inf:
            raise ValueError(f"cap={cap} must be above 0: the largest weight pi / pi_sampler of a token, usually 2")
        self.cap = cap

    def __call__(self, ratio: Tensor, mask: Tensor) -> Tensor:
        return ratio.clamp(max=self.cap)


class Masked:
    """r where low <= r <= high, else 0, at each token (IcePop, 2510.18855: low 0.5, high 5)."""

    def __init__(self, *, low: float = 0.5, high: float = 5.0):
        self.low, self.high = _band(low, high)

    def __call__(self, ratio: Tensor, mask: Tensor) -> Tensor:
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


class SequenceMasked:
    """r at every token of a sequence whose statistic of r lies in low .. high; 0 at every token of the others.

    statistic: "geometric" mean exp(mean log r) (usual band 0.999 .. 1.002), "arithmetic" mean of r, or the "product" exp(sum log r),
    whose spread grows with the length: an upper bound alone then drops long answers by chance.
    """

    def __init__(
        self, *, statistic: Literal["geometric", "arithmetic", "product"] = "geometric", low: float = 0.999, high: float = 1.002
    ):
        if statistic not in ("geometric", "arithmetic", "product"):
            raise ValueError(f"statistic={statistic} must be geometric, arithmetic or product")
        self.statistic = statistic
        self.low, self.high = _band(low, high)

    def __call__(self, ratio: Tensor, mask: Tensor) -> Tensor:
        counts = mask.sum(-1, keepdim=True).clamp(min=1)
        total = (ratio.log() * mask).sum(-1, keepdim=True)
        if self.statistic == "arithmetic":
            value = (ratio * mask).sum(-1, keepdim=True) / counts
        else:
            value = (total / counts if self.statistic == "geometric" else total).exp()
        return torch.where((value >= self.low) & (value <= self.high), ratio, 0.0)


def _band(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"low={low}, high={high}: a band of pi / pi_sampler must hold 1, where the two agree, and start at 0 or above")
    return low, high
