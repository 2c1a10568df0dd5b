import torch
from torch import Tensor

from losses import PolicyLoss


class Needed(PolicyLoss):
    """Its annotation says that it works without a reference."""

    averaging = "token"
    elementwise = True
    centred = False

    def per_token(self, logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor) -> Tensor:
        return -logprobs * advantages + 0.1 * (logprobs - ref_logprobs)


class NotNeeded(PolicyLoss):
    averaging = "token"
    elementwise = True
    needs_reference = True

    def per_token(self, logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor) -> Tensor:
        return -torch.exp(logprobs - logprobs.detach()) * advantages
