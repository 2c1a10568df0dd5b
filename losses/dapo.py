"""DAPO (2503.14476): GRPO's clipped surrogate with a wider upper clip and a mean over tokens."""

import math
from typing import Literal

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import Averaging, PolicyLoss
from losses.grpo import checked_clips, clipped


class DAPOLoss(PolicyLoss):
    """Decoupled clip and a token-level loss (2503.14476).

    Per token, with r = exp(logprobs - old_logprobs) and A the group's z-score:

        u = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    and, with dual_clip c, at most -c A where A < 0 (1912.09729): a token that got much likelier though it is punished cannot
    outweigh the rest. For c >= 1 + clip_high this is min(r, c) in place of r, the bound of INTELLECT-2 (2505.07291).
    Averaging "token": over all tokens of the step, as its code does; "prompt": over the tokens of each prompt's answers, then over
    prompts, as the formula is printed. They differ where prompts have answers of different total length.
    Defaults: clip_low 0.2, clip_high 0.28 as in the paper; dual_clip None, for the paper has none (1912.09729: 3; 2505.07291: 4).
    Departures: none in the loss. Resampling of groups without contrast and the overlong punishment are not the loss's part.
    Metrics: ratio; clip_low, clip_high and, with a dual_clip, dual_clip: share of tokens whose gradient each removed.
    """

    averaging: Averaging = "token"  # the default
    elementwise = True

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = None,
        averaging: Literal["token", "prompt"] = "token",
    ) -> None:
        self.clip_low, self.clip_high = checked_clips(clip_low, clip_high)
        if dual_clip is not None and not 1 < dual_clip < math.inf:
            raise ValueError(
                f"dual_clip={dual_clip} must be above 1, or null: it bounds the ratio of tokens with a negative advantage, "
                f"which is 1 on-policy"
            )
        if averaging not in ("token", "prompt"):
            raise ValueError(f'averaging="{averaging}" is not one of token, prompt; a mean per sequence is GRPOLoss')
        self.dual_clip, self.averaging = dual_clip, averaging

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> LossOutput:
        ratio = torch.exp(logprobs - old_logprobs)
        output = clipped(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is None:
            return output
        bounded = (advantages < 0) & (ratio > self.dual_clip)
        loss = torch.where(bounded, -self.dual_clip * advantages, output.loss)
        return LossOutput(loss, {**output.metrics, "dual_clip": bounded.to(ratio.dtype)})

    def formula(self) -> str:
        bound = "" if self.dual_clip is None else f", at most {self.dual_clip:g} |A| where A < 0"
        return f"u = -min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A){bound}, r = exp(logprobs - old_logprobs)"
