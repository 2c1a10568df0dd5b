"""CISPO (MiniMax-M1, 2506.13585): the importance weight is capped, and no token loses its gradient."""

import math

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import Averaging, PolicyLoss
from losses.grpo import Mean, checked_mean


class CISPOLoss(PolicyLoss):
    """REINFORCE with a capped importance weight (2506.13585).

    Per token, with r = exp(logprobs - old_logprobs) and A the advantage:

        u = -sg(min(r, ratio_cap)) A logprobs

    then the mean over all tokens of the step. Default: ratio_cap 5, of ScaleRL (2510.13786: 4 to 8), whose averaging is "prompt".
    ratio_cap is the greatest weight itself, the paper's 1 + epsilon_high, never epsilon.
    Departures: the paper's formula has a lower bound too, but its runs set that so low that it never acts; here there is none.
    Metrics: ratio (before the cap); clip_high, share of tokens at the cap.
    """

    averaging: Averaging = "token"  # the default
    elementwise = True

    def __init__(self, *, ratio_cap: float = 5.0, averaging: Mean = "token") -> None:
        if not 1 <= ratio_cap < math.inf:
            raise ValueError(
                f"ratio_cap={ratio_cap} must be at least 1: it caps the ratio itself, which is about 1, so that a cap at an epsilon "
                f"would make every token's weight the cap; for an epsilon give 1 + epsilon"
            )
        self.ratio_cap, self.averaging = ratio_cap, checked_mean(averaging)

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> LossOutput:
        ratio = torch.exp(logprobs.detach() - old_logprobs)
        loss = -ratio.clamp(max=self.ratio_cap) * advantages * logprobs
        return LossOutput(loss, {"ratio": ratio, "clip_high": (ratio > self.ratio_cap).to(ratio.dtype)})

    def formula(self) -> str:
        return f"u = -sg(min(r, {self.ratio_cap:g})) A logprobs, r = exp(logprobs - old_logprobs)"
