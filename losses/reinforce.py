"""REINFORCE (Williams 1992) with an importance weight from the sampler to the policy."""

import math

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import Averaging, PolicyLoss
from losses.grpo import Mean, checked_mean


class ReinforceLoss(PolicyLoss):
    """Policy gradient, weighted by how much likelier the policy finds a token than its sampler did.

    Per token, with w = sg(exp(logprobs - gen_logprobs)) and A the advantage:

        u = -clip(w, ratio_min, ratio_max) A logprobs

    then the mean over all tokens of the step. Defaults: ratio_min 0 and ratio_max None, w as it is; [0, 2] and torchforge's
    [0.1, 10] are usual. clip_ratio c is short for 1 - c .. 1 + c and excludes the other two; from a c of 1 on there is no lower
    bound. Truncating w trades bias for variance (1606.02647). Unlike GRPO's clip, this one bounds a token's weight and never
    zeroes its gradient (but for a w of 0). Departure: w is the token's own ratio, not a product over its sequence.
    Metrics: ratio (w before the clip); with a bound also clip_low and clip_high, the share of tokens it changed.
    """

    averaging: Averaging = "token"  # the default
    elementwise = True

    def __init__(
        self,
        *,
        clip_ratio: float | None = None,
        ratio_min: float = 0.0,
        ratio_max: float | None = None,
        averaging: Mean = "token",
    ) -> None:
        if clip_ratio is not None:
            if ratio_min != 0 or ratio_max is not None:
                raise ValueError(
                    f"clip_ratio={clip_ratio} and ratio_min={ratio_min}, ratio_max={ratio_max} both bound w: remove clip_ratio, "
                    f"or leave ratio_min at 0 and ratio_max at null"
                )
            if not 0 < clip_ratio < math.inf:
                raise ValueError(
                    f"clip_ratio={clip_ratio} must be above 0, or null: w is clipped to 1 - clip_ratio .. 1 + clip_ratio"
                )
            ratio_min, ratio_max = max(1 - clip_ratio, 0.0), 1 + clip_ratio
        if not 0 <= ratio_min <= 1:
            raise ValueError(f"ratio_min={ratio_min} must be 0 (no lower bound) to 1: w, which is 1 on-policy, is raised to it")
        if ratio_max is not None and not 1 <= ratio_max < math.inf:
            raise ValueError(f"ratio_max={ratio_max} must be at least 1, or null: w, which is 1 on-policy, is cut down to it")
        self.ratio_min, self.ratio_max = ratio_min, ratio_max
        self.averaging = checked_mean(averaging)

    def per_token(
        self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, gen_logprobs: Tensor
    ) -> LossOutput:
        ratio = torch.exp(logprobs.detach() - gen_logprobs)  # [B, T]
        high = math.inf if self.ratio_max is None else self.ratio_max
        weight = ratio.clamp(self.ratio_min, high)
        metrics = {"ratio": ratio}
        if self.ratio_min > 0 or self.ratio_max is not None:
            metrics["clip_low"] = (ratio < self.ratio_min).to(ratio.dtype)
            metrics["clip_high"] = (ratio > high).to(ratio.dtype)
        return LossOutput(-weight * advantages * logprobs, metrics)

    def formula(self) -> str:
        weight = "w"
        if self.ratio_min > 0 or self.ratio_max is not None:
            weight = f"clip(w, {self.ratio_min:g}, {'inf' if self.ratio_max is None else format(self.ratio_max, 'g')})"
        return f"u = -sg({weight}) A logprobs, w = exp(logprobs - gen_logprobs)"
