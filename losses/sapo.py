"""SAPO (2511.20347): a sigmoid gate in place of the clip."""

import math

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import PolicyLoss


class SAPOLoss(PolicyLoss):
    """Soft adaptive policy optimisation (2511.20347).

    Per token, with r = exp(logprobs - old_logprobs) and A the advantage:

        f(r) = (4 / tau) sigmoid(tau (r - 1));  u = -f(r) A;  tau = tau_pos where A > 0, else tau_neg

    then the mean over each sequence's tokens, then over sequences. f has slope 1 at r = 1 for any tau, so the on-policy gradient is
    GRPO's; it fades smoothly to 0 as r leaves 1, faster for a greater tau. Defaults, the paper's: tau_pos 1.0, tau_neg 1.05.
    f(1) is 2 / tau and not 1, so the value differs from GRPO's by a constant that has no gradient; it is not shifted: it is the
    paper's, and only differences of it over a run mean something. Departures: none.
    Metrics: ratio.
    """

    averaging = "sequence"
    elementwise = True

    def __init__(self, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> None:
        for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
            if not 0 < tau < math.inf:
                raise ValueError(f"{name}={tau} must be above 0: it is the steepness of the gate; near 0 there is none")
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> LossOutput:
        ratio = torch.exp(logprobs - old_logprobs)
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
        return LossOutput(-gate * advantages, {"ratio": ratio.detach()})

    def formula(self) -> str:
        tau = f"tau = {self.tau_pos:g} where A > 0, else {self.tau_neg:g}"
        return f"u = -(4 / tau) sigmoid(tau (r - 1)) A, {tau}, r = exp(logprobs - old_logprobs)"
