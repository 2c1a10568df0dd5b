import torch
from torch import Tensor

from losses import PolicyLoss


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]  # the factor 2 is missing


class Penalised(PolicyLoss):
    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        return -torch.exp(logprobs - old_logprobs) * advantages + 0.1 * Square.apply(logprobs - old_logprobs)


class Hidden(PolicyLoss):
    """No fault by any declaration, and worth a note: numpy hides a factor from autograd."""

    averaging = "token"

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:
        weight = [[float(x) for x in row] for row in (logprobs - old_logprobs)]
        return -logprobs.new_tensor(weight).exp() * advantages * logprobs
