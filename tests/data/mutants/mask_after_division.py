import torch
from torch import Tensor, nn

from losses import PolicyLoss


class Scalar(nn.Module):
    """0 / 0 for a sequence without tokens, and 0 times that is NaN."""

    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        loss = -torch.exp(logprobs - logprobs.detach()) * advantages
        per_sequence = (loss * padding_mask).sum(1) / padding_mask.sum(1)
        return (per_sequence * padding_mask.amax(1)).mean()


class Width(PolicyLoss):
    """Divides by the columns of the grid, and masks what comes out."""

    averaging = "sequence"

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
        mean = (logprobs - old_logprobs).sum(1, keepdim=True) / padding_mask.shape[1]
        return -torch.exp(mean) * advantages * padding_mask


class Guarded(PolicyLoss):
    """No fault: the same 0 / 0 in a value per token, which the contract sets to 0 in the padding, its gradient too."""

    averaging = "sequence"

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
        mean = ((logprobs - old_logprobs) * padding_mask).sum(1, keepdim=True) / padding_mask.sum(1, keepdim=True)
        return -torch.exp(mean) * advantages * padding_mask
