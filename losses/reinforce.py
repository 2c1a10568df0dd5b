"""REINFORCE (Williams 1992) with an importance weight from the sampler to the policy."""

import math

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import PolicyLoss


class ReinforceLoss(PolicyLoss):
    """Policy gradient, weighted by how much likelier the policy finds a token than its sampler did.

    Per token, with w = sg(exp(logprobs - gen_logprobs)) and A the advantage:

        u = -clip(w, 1 - clip_ratio, 1 + clip_ratio) A logprobs

    then the mean over all tokens of the step. Default: clip_ratio None, w as it is. Truncating w trades bias for
    variance (1606.02647). Unlike GRPO's clip, this one bounds a token's weight and never zeroes its gradient; from a
    clip_ratio of 1 on there is no lower bound. Departure: w is the token's own ratio, not a product over its sequence.
    Metrics: ratio (w before the clip); with a clip_ratio also clip_low and clip_high, the share of tokens it changed.
    """

    averaging = "token"
    elementwise = True

    def __init__(self, *, clip_ratio: float | None = None) -> None:
        if clip_ratio is not None and not 0 < clip_ratio < math.inf:
            raise ValueError(
                f"clip_ratio={clip_ratio} must be above 0, or null: w is clipped to 1 - clip_ratio .. 1 + clip_ratio"
            )
        self.clip_ratio = clip_ratio

    def per_token(
        self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, gen_logprobs: Tensor
    ) -> LossOutput:
        ratio = weight = torch.exp(logprobs.detach() - gen_logprobs)  # [B, T]
        metrics = {"ratio": ratio}
        if self.clip_ratio is not None:
            low, high = 1 - self.clip_ratio, 1 + self.clip_ratio
            weight = ratio.clamp(low, high)
            metrics |= {"clip_low": (ratio < low).to(ratio.dtype), "clip_high": (ratio > high).to(ratio.dtype)}
        return LossOutput(-weight * advantages * logprobs, metrics)
