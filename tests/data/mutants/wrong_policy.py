"""Classes that claim the golden values of the shipped one by deriving from it."""

import torch
from torch import Tensor

from losses import GRPOLoss


class AgainstTheSampler(GRPOLoss):
    def per_token(
        self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, gen_logprobs: Tensor
    ) -> Tensor:
        ratio = torch.exp(logprobs - gen_logprobs)
        return -torch.min(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)


class ByTokens(GRPOLoss):
    """Its averaging is another than GRPO's."""

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.28, beta: float = 0.0) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, beta=beta)
        self.averaging = "token"
