import torch
from torch import Tensor

from losses import PolicyLoss


class SequenceRatio(PolicyLoss):
    averaging = "sequence"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
        mean = (logprobs - old_logprobs).detach().sum(1, keepdim=True) / padding_mask.sum(1, keepdim=True).clamp(min=1)
        return -torch.exp(mean + logprobs - logprobs.detach()) * advantages


class GapToTheSampler(PolicyLoss):
    """Scales a token by the mean over its sequence of another policy's log-ratios: no log-prob of its own is in it."""

    averaging = "token"
    elementwise = True

    def per_token(
        self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor, gen_logprobs: Tensor
    ) -> Tensor:
        gap = ((old_logprobs - gen_logprobs) * padding_mask).sum(1, keepdim=True) / padding_mask.sum(1, keepdim=True).clamp(min=1)
        return -torch.exp(logprobs - old_logprobs) * advantages * gap.exp().clamp(max=2)


class ClipByLength(PolicyLoss):
    """Its clip is narrower the more tokens are in the row: a sequence's on the grid, a slice's on the fast path."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
        width = 1 / padding_mask.sum(1, keepdim=True).clamp(min=1).sqrt()
        ratio = torch.exp(logprobs - old_logprobs)
        return -torch.min(ratio * advantages, ratio.clamp(1 - width, 1 + width) * advantages)


class AdvantagesToGo(PolicyLoss):
    """Sums the advantages of the tokens that follow, where each token has its own."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        later = advantages.flip(1).cumsum(1).flip(1) if advantages.shape[1] > 1 else advantages
        return -later * logprobs


class ByWidth(PolicyLoss):
    """Lowers its clip on wide grids: nothing of another token is in it, only the shape."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        ratio = torch.exp(logprobs - old_logprobs)
        return -torch.min(ratio * advantages, ratio.clamp(max=1.5 if logprobs.shape[1] > 8 else 2.0) * advantages)


class Undeclared(PolicyLoss):
    """No fault: it could declare elementwise."""

    averaging = "token"

    def per_token(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -logprobs * advantages
