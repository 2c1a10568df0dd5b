"""No fault in any: to derive from a shipped class is not to declare its golden values."""

from typing import Any

import torch
from torch import Tensor

from losses import GRPOLoss, PolicyLoss


class AgainstTheSampler(GRPOLoss):
    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, gen_logprobs: Tensor) -> Tensor:
        ratio = torch.exp(logprobs - gen_logprobs)
        return -torch.min(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)


class ByTokens(GRPOLoss):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.averaging = "token"


class OtherOptions(GRPOLoss):
    def __init__(self, *, clip: float = 0.2) -> None:
        super().__init__(clip_low=clip, clip_high=clip)


class Detached(PolicyLoss):
    """A weight under torch.detach, as .detach() writes it."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        return -torch.exp(torch.detach(logprobs) - old_logprobs).clamp(max=5) * advantages * logprobs
