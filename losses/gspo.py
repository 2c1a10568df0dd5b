"""GSPO (2507.18071): one importance ratio per sequence, the geometric mean of its tokens' ratios."""

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import PolicyLoss
from losses.grpo import checked_clips, clipped


class GSPOLoss(PolicyLoss):
    """Group sequence policy optimisation (2507.18071).

    With s = exp(mean over the sequence's n tokens of logprobs - old_logprobs) and A its advantage, at every token

        u = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    whose mean over the sequence's tokens is the paper's one term per sequence; then the mean over sequences. The gradient of
    an unclipped sequence is -A s / n at each of its tokens. Defaults, the paper's: clip_low 3e-4, clip_high 4e-4; s is an average,
    so clips of a token's ratio (0.2) would never act. No KL. Departures: none.
    For one advantage per sequence: tokens with advantages of their own would all get the gradient of their mean; see GSPOTokenLoss.
    Metrics: ratio (s); clip_low and clip_high, share of tokens in sequences whose gradient the clip removed.
    """

    averaging = "sequence"

    def __init__(self, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> None:
        self.clip_low, self.clip_high = checked_clips(clip_low, clip_high)

    def per_token(
        self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor
    ) -> LossOutput:
        ratio = torch.exp(mean_log_ratio(logprobs, old_logprobs, padding_mask)).expand_as(logprobs)
        return clipped(ratio, advantages, self.clip_low, self.clip_high)

    def formula(self) -> str:
        clip = f"clip(s, {1 - self.clip_low:g}, {1 + self.clip_high:g})"
        return f"u = -min(s A, {clip} A), s = exp(mean over the sequence of logprobs - old_logprobs)"


class GSPOTokenLoss(PolicyLoss):
    """GSPO with a gradient, and if need be an advantage, of each token's own (GSPO-token, 2507.18071).

    Per token t of sequence i, with s_i as in GSPOLoss:

        s_t = sg(s_i) exp(logprobs - sg(logprobs));  u = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)

    then the mean over each sequence's tokens, then over sequences. Value and gradient are GSPOLoss's where A is the same all along
    a sequence. Defaults, the paper's: clip_low 3e-4, clip_high 4e-4. No KL. Departures: none.
    Metrics: as GSPOLoss, with each token's own advantage deciding.
    """

    averaging = "sequence"

    def __init__(self, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> None:
        self.clip_low, self.clip_high = checked_clips(clip_low, clip_high)

    def per_token(
        self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor
    ) -> LossOutput:
        frozen = logprobs.detach()
        ratio = torch.exp(mean_log_ratio(frozen, old_logprobs, padding_mask)) * torch.exp(logprobs - frozen)
        return clipped(ratio, advantages, self.clip_low, self.clip_high)

    def formula(self) -> str:
        clip = f"clip(s, {1 - self.clip_low:g}, {1 + self.clip_high:g})"
        return f"u = -min(s A, {clip} A), s = sg(exp(mean over the sequence of logprobs - old_logprobs)) exp(logprobs - sg(logprobs))"


def mean_log_ratio(logprobs: Tensor, old_logprobs: Tensor, padding_mask: Tensor) -> Tensor:
    """The mean of logprobs - old_logprobs over each row's loss tokens; 0 for a row without any. [B, T], 0 in the padding -> [B, 1].

    >>> mean_log_ratio(torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-2.0, -4.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([[2.]])
    """
    tokens = (padding_mask != 0).sum(1, keepdim=True)
    return (logprobs - old_logprobs).sum(1, keepdim=True) / tokens.clamp(min=1)
