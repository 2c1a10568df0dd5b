"""RLOO (2402.14740): REINFORCE on whole answers, each compared with the mean of the others."""

from torch import Tensor

from losses.contract import PolicyLoss


class RLOOLoss(PolicyLoss):
    """REINFORCE with a leave-one-out baseline (2402.14740).

        u = -A logprobs,  A = reward - mean reward of the prompt's other samples

    summed over each sequence's tokens, for the answer as a whole is one action; then the mean over sequences. The gradient grows
    with the length of the answers. No ratio and no clip: for one update per rollout. There are no options.
    Departure: the paper takes beta (0.03 to 0.05) times the sequence's k1 off the reward; the loss has no KL.
    """

    averaging = "sum"
    elementwise = True
    advantage = "leave_one_out"

    def per_token(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -advantages * logprobs

    def formula(self) -> str:
        return "u = -A logprobs"
