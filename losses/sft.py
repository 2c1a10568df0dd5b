"""Supervised fine-tuning as a policy loss, so that it shares trainer, token weights and head with all others."""

from torch import Tensor

from losses.contract import PolicyLoss


class NLLLoss(PolicyLoss):
    """Negative log-likelihood of the response tokens: u = -logprobs, averaged over all tokens of the step."""

    averaging = "token"
    elementwise = True
    centred = False  # it has no advantage: every token of the answer is made likelier

    def per_token(self, logprobs: Tensor) -> Tensor:
        return -logprobs

    def formula(self) -> str:
        return "u = -logprobs"
