import torch
from torch import Tensor

from losses import PolicyLoss


class SequenceRatio(PolicyLoss):
    averaging = "sequence"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
        mean = (logprobs - old_logprobs).detach().sum(1, keepdim=True) / padding_mask.sum(1, keepdim=True).clamp(min=1)
        return -torch.exp(mean + logprobs - logprobs.detach()) * advantages


class Undeclared(PolicyLoss):
    """No fault: it could declare elementwise."""

    averaging = "token"

    def per_token(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -logprobs * advantages
