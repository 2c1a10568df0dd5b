import torch
from torch import Tensor, nn

from losses import PolicyLoss


class Declared(PolicyLoss):
    """Declares the mean over tokens, and divides by the length of the sequence as well."""

    averaging = "token"

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
        ratio = torch.exp(logprobs - old_logprobs)
        return -ratio * advantages / padding_mask.sum(1, keepdim=True).clamp(min=1)


class OfItsMicroBatch(PolicyLoss):
    """Scales by the tokens of the micro-batch that it happens to see."""

    averaging = "token"

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        return -torch.exp(logprobs - logprobs.detach()) * advantages * 12 / padding_mask.sum().clamp(min=1)


class Scalar(nn.Module):
    """The mean over sequences of the means over their tokens: a scalar declares nothing, the checker says which mean it is."""

    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        loss = -torch.exp(logprobs - logprobs.detach()) * advantages * padding_mask
        return (loss.sum(1) / padding_mask.sum(1).clamp(min=1)).mean()
