import torch
from torch import Tensor, nn

from losses import PolicyLoss


class SequenceRatio(PolicyLoss):
    """The mean log-ratio of a row, its padding included."""

    averaging = "sequence"

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
        ratio = torch.exp((logprobs - old_logprobs).mean(1, keepdim=True)).expand_as(logprobs)
        return -ratio * advantages


class Scalar(nn.Module):
    """A mean over [B, T]: the longer the longest answer, the smaller every token's gradient."""

    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        return (-torch.exp(logprobs - logprobs.detach()) * advantages * padding_mask).mean()


class Whitened(nn.Module):
    """Whitens advantages over the grid: what lies in its padding are zeros, and they count."""

    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        whitened = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        return -(logprobs * whitened * padding_mask).sum() / padding_mask.sum().clamp(min=1)
