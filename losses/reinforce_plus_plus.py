"""REINFORCE++ (2501.03262): PPO's clip without a critic, its advantages whitened over all tokens of the step."""

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import PolicyLoss
from losses.grpo import checked_clips, clipped
from losses.kl import checked_beta, with_kl


class ReinforcePlusPlusLoss(PolicyLoss):
    """REINFORCE++ (2501.03262), which also works with one sample per prompt.

    Per token, with r = exp(logprobs - old_logprobs) and A = (reward - mean) / std over all tokens of the step:

        u = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    then the mean over all tokens of the step. Defaults: both clips 0.2.
    Departure: the paper takes beta k1 off the reward of each token, so that A differs along an answer; the loss has no KL.
    It takes advantages of each token as they come.
    Metrics: ratio; clip_low and clip_high, share of tokens whose gradient the clip removed.
    """

    averaging = "token"
    elementwise = True
    advantage = "token_whitened"

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self.clip_low, self.clip_high = checked_clips(clip_low, clip_high)

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> LossOutput:
        return clipped(torch.exp(logprobs - old_logprobs), advantages, self.clip_low, self.clip_high)

    def formula(self) -> str:
        return f"u = -min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A), r = exp(logprobs - old_logprobs)"


class ReinforcePlusPlusBaselineLoss(PolicyLoss):
    """The form of REINFORCE++ with the group's mean as baseline and the KL in the loss (2501.03262).

    Per token, with r = exp(logprobs - old_logprobs), A the reward minus its group's mean, then whitened over all tokens of the step:

        u = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta k2

    then the mean over all tokens of the step. k2's expected gradient is that of KL(pi || ref). Defaults: both clips 0.2; beta 0.
    Departure: the paper has a beta above 0 (1e-4 to 1e-3 for reasoning); 0 needs no reference model.
    Metrics: ratio; clip_low and clip_high, share of tokens whose gradient the clip removed; kl (k3), given a reference.
    """

    averaging = "token"
    elementwise = True
    advantage = "group_centred_token_whitened"

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0) -> None:
        self.clip_low, self.clip_high = checked_clips(clip_low, clip_high)
        self.beta = checked_beta(beta)

    @property
    def needs_reference(self) -> bool:
        return self.beta != 0

    def per_token(
        self, logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, *, old_logprobs: Tensor
    ) -> LossOutput:
        output = clipped(torch.exp(logprobs - old_logprobs), advantages, self.clip_low, self.clip_high)
        return with_kl(output, self.beta, "k2", logprobs, ref_logprobs, old_logprobs)

    def formula(self) -> str:
        penalty = f" + {self.beta:g} k2" if self.beta else ""
        return f"u = -min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A){penalty}, r = exp(logprobs - old_logprobs)"
