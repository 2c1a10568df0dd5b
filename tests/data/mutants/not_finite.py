import torch
from torch import Tensor

from losses import PolicyLoss


class Overflow(PolicyLoss):
    """exp(4 x 30) is beyond float32."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        ratio = torch.exp(logprobs - old_logprobs)
        return -advantages * (ratio + (ratio**4 - ratio).clamp(0, 0))


class LogOfZero(PolicyLoss):
    """log(1 - p) of a token of probability 1."""

    averaging = "token"
    elementwise = True
    centred = False

    def per_token(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return advantages * torch.log(1 - logprobs.exp())


class LogOfEntropy(PolicyLoss):
    """A token that was certain has entropy 0."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, entropy: Tensor) -> Tensor:
        return -advantages * logprobs - 0.01 * entropy.log()


class RootOfEntropy(PolicyLoss):
    """Its value is finite at entropy 0, its slope there is not."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, entropy: Tensor) -> Tensor:
        return -advantages * logprobs - 0.01 * entropy.sqrt()


class Product(torch.nn.Module):
    """A product of ratios over a sequence."""

    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, old_logprobs: Tensor) -> Tensor:
        ratio = torch.exp((logprobs - old_logprobs).sum(1, keepdim=True))
        return -(ratio * advantages * padding_mask).sum() / padding_mask.sum().clamp(min=1)
