from torch import Tensor

from losses import PolicyLoss


class OutOfBudget(Exception):
    """Derives from no error of Python's own."""


class Always(PolicyLoss):
    averaging = "token"

    def per_token(self, logprobs: Tensor) -> Tensor:
        raise OutOfBudget("no tokens left")


class OnWideGrids(PolicyLoss):
    """Raises only in the line of all sequences' tokens."""

    averaging = "token"
    elementwise = True

    def per_token(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        if logprobs.shape[1] > 10:
            raise OutOfBudget
        return -logprobs * advantages


class Built(PolicyLoss):
    averaging = "token"

    def __init__(self) -> None:
        raise OutOfBudget("none to begin with")

    def per_token(self, logprobs: Tensor) -> Tensor:
        return -logprobs
