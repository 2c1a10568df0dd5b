"""DPPO (2602.04879): the trust region is a distance of probabilities, not a ratio of them."""

import math

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import PolicyLoss


class DPPOLoss(PolicyLoss):
    """Divergence proximal policy optimisation with the binary total variation (2602.04879).

    Per token, with p and q its probability under policy and sampler, w = p / q with gradient, and A the advantage:

        u = -m w A + penalty log(w)^2
        m = 0 where A > 0 and p - q > threshold, or A < 0 and q - p > threshold; else 1

    then the mean over all tokens of the step, the masked ones included. A ratio's clip stops rare tokens early and common ones late;
    a difference of probabilities treats both alike. The region lies around the sampler, so no old_logprobs are needed.
    Defaults: threshold 0.2, a difference of probabilities in 0 .. 1; penalty 1e-3; both as in prime-rl.
    Departures: the penalty, at all tokens and without a factor 1/2, is prime-rl's; 0 is the paper. Of the paper's divergences
    (total variation or KL, of two outcomes or of the likeliest tokens) this is the first.
    Rare tokens stay unmasked at any w, as in the paper: nothing bounds their loss.
    Metrics: ratio (w); masked, share of tokens with m = 0.
    """

    averaging = "token"
    elementwise = True

    def __init__(self, *, threshold: float = 0.2, penalty: float = 1e-3) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(
                f"threshold={threshold} must be above 0 and at most 1: it is a difference of probabilities; 1 masks nothing"
            )
        if not 0 <= penalty < math.inf:
            raise ValueError(f"penalty={penalty} must be 0 (none) or above: it multiplies the squared log-ratio to the sampler")
        self.threshold, self.penalty = threshold, penalty

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, gen_logprobs: Tensor) -> LossOutput:
        log_ratio = logprobs - gen_logprobs
        ratio = torch.exp(log_ratio)
        rise = torch.exp(logprobs.detach()) - torch.exp(gen_logprobs)  # p - q, [B, T]
        masked = ((advantages > 0) & (rise > self.threshold)) | ((advantages < 0) & (rise < -self.threshold))
        loss = -(ratio * advantages).masked_fill(masked, 0) + self.penalty * log_ratio.square()
        return LossOutput(loss, {"ratio": ratio.detach(), "masked": masked.to(ratio.dtype)})

    def formula(self) -> str:
        penalty = f" + {self.penalty:g} log(w)^2" if self.penalty else ""
        masked = f"m = 0 where (p - q) sign(A) > {self.threshold:g}, else 1"
        return f"u = -m w A{penalty}, w = p / q = exp(logprobs - gen_logprobs), {masked}"
