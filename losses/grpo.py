"""GRPO (2402.03300): a clipped policy gradient, group-relative; and torchforge's form without a ratio."""

import math

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import PolicyLoss
from losses.kl import k3


class GRPOLoss(PolicyLoss):
    """Group-relative policy optimisation (2402.03300).

    Per token, with r = exp(logprobs - old_logprobs) and A the advantage:

        u = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta k3

    then the mean over each sequence's tokens, then over sequences. Defaults: clip_low 0.2, clip_high 0.28, beta 0.
    Departures: paper's beta is 0.04; 0 needs no reference model. Unequal clips are DAPO's clip-higher (2503.14476).
    Metrics: ratio; clip_low and clip_high, share of tokens whose gradient the clip removed; kl (k3), given a reference.
    """

    averaging = "sequence"
    elementwise = True

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.28, beta: float = 0.0) -> None:
        if not 0 < clip_low <= 1:
            raise ValueError(
                f"clip_low={clip_low} must be above 0 and at most 1: ratios below 1 - clip_low are clipped"
            )
        if not 0 < clip_high < math.inf:
            raise ValueError(f"clip_high={clip_high} must be above 0: ratios above 1 + clip_high are clipped")
        self.clip_low, self.clip_high, self.beta = clip_low, clip_high, checked_beta(beta)

    @property
    def needs_reference(self) -> bool:
        return self.beta != 0

    def per_token(
        self,
        logprobs: Tensor,  # [B, T], as all others but advantages [B, 1] or [B, T]
        ref_logprobs: Tensor | None,
        advantages: Tensor,
        padding_mask: Tensor,
        *,
        old_logprobs: Tensor,
    ) -> LossOutput:
        ratio = torch.exp(logprobs - old_logprobs)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        metrics = {
            "ratio": ratio.detach(),
            "clip_low": ((advantages < 0) & (ratio < low)).to(ratio.dtype),
            "clip_high": ((advantages > 0) & (ratio > high)).to(ratio.dtype),
        }
        return with_kl(LossOutput(loss, metrics), self.beta, logprobs, ref_logprobs)


class SimpleGRPOLoss(PolicyLoss):
    """GRPO for one update per rollout, as in torchforge: the ratio is exp(logprobs - sg(logprobs)), which is 1.

        u = -exp(logprobs - sg(logprobs)) A + beta k3

    averaged like GRPO (2402.03300), whose on-policy gradient it has. Default: beta 0.1, as in torchforge (paper: 0.04).
    Departure: there is no clip and no correction for data of an older policy; use GRPOLoss for that.
    Metrics: kl (k3) where there is a reference.
    """

    averaging = "sequence"
    elementwise = True

    def __init__(self, *, beta: float = 0.1) -> None:
        self.beta = checked_beta(beta)

    @property
    def needs_reference(self) -> bool:
        return self.beta != 0

    def per_token(
        self, logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, padding_mask: Tensor
    ) -> LossOutput:
        loss = -torch.exp(logprobs - logprobs.detach()) * advantages
        return with_kl(LossOutput(loss), self.beta, logprobs, ref_logprobs)


def checked_beta(beta: float) -> float:
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta={beta} must be 0 (no KL penalty) or above: it multiplies the KL to the reference")
    return beta


def with_kl(output: LossOutput, beta: float, logprobs: Tensor, ref_logprobs: Tensor | None) -> LossOutput:
    """The loss with beta k3 added, and k3 as the metric `kl`: also when beta is 0, if there is a reference."""
    if ref_logprobs is None:
        if beta != 0:
            raise ValueError(
                f"beta={beta} needs a reference, and there are no ref_logprobs: give the run one (services.ref_model), "
                f"or set beta to 0"
            )
        return output
    kl = k3(logprobs, ref_logprobs)
    loss = output.loss + beta * kl if beta != 0 else output.loss
    return LossOutput(loss, {**output.metrics, "kl": kl.detach()})
