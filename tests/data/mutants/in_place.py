import torch
from torch import Tensor

from losses import PolicyLoss


class Advantages(PolicyLoss):
    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        advantages.clamp_(-1, 1)
        return -torch.exp(logprobs - old_logprobs) * advantages


class Logprobs(PolicyLoss):
    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        return -logprobs.sub_(old_logprobs).exp() * advantages


class Data(PolicyLoss):
    """An edit of .data, which autograd's version counter does not see."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        loss = -torch.exp(logprobs - old_logprobs) * advantages
        old_logprobs.data.mul_(0.5)
        return loss
