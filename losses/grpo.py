"""GRPO (2402.03300): a clipped policy gradient, group-relative; torchforge's form without a ratio; and Dr.GRPO (2503.20783)."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from batch import LossOutput
from losses.contract import Averaging, PolicyLoss
from losses.kl import Estimator, checked_beta, checked_kl, with_kl

Mean = Literal["sequence", "token", "prompt", "sum"]  # every averaging that needs no constant


class GRPOLoss(PolicyLoss):
    """Group-relative policy optimisation (2402.03300).

    Per token, with r = exp(logprobs - old_logprobs) and A the advantage:

        u = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL

    then the mean over each sequence's tokens, then over sequences. Defaults: clip_low 0.2, clip_high 0.28, beta 0.
    KL is k3, as in the paper: its gradient is that of KL(ref || pi). "k2" and "k3_ratio" have that of KL(pi || ref), which is
    what the value says; "k1" has an expected gradient of 0, so it penalises nothing here (see losses.kl).
    Departures: paper's beta is 0.04; 0 needs no reference model. Unequal clips are DAPO's clip-higher (2503.14476).
    `averaging` "token" is what many trainers call GRPO; "sequence" is the paper's.
    Metrics: ratio; clip_low and clip_high, share of tokens whose gradient the clip removed; kl (k3), given a reference.
    """

    averaging: Averaging = "sequence"  # the default
    elementwise = True

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        beta: float = 0.0,
        kl: Estimator = "k3",
        averaging: Mean = "sequence",
    ) -> None:
        self.clip_low, self.clip_high = checked_clips(clip_low, clip_high)
        self.beta, self.kl = checked_beta(beta), checked_kl(kl)
        self.averaging = checked_mean(averaging)
        # k1's gradient is beta at every token, also where policy and reference agree.
        self.centred = kl != "k1" or beta == 0

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
        output = clipped(torch.exp(logprobs - old_logprobs), advantages, self.clip_low, self.clip_high)
        return with_kl(output, self.beta, self.kl, logprobs, ref_logprobs, old_logprobs)

    def formula(self) -> str:
        penalty = f" + {self.beta:g} {'r k3' if self.kl == 'k3_ratio' else self.kl}" if self.beta else ""
        return f"u = -min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A){penalty}, r = exp(logprobs - old_logprobs)"


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
        frozen = logprobs.detach()
        loss = -torch.exp(logprobs - frozen) * advantages
        return with_kl(LossOutput(loss), self.beta, "k3", logprobs, ref_logprobs, frozen)

    def formula(self) -> str:
        return "u = -exp(logprobs - sg(logprobs)) A" + (f" + {self.beta:g} k3" if self.beta else "")


class DrGRPOLoss(PolicyLoss):
    """GRPO without the weighting by length and by difficulty (2503.20783).

    Per token, with r = exp(logprobs - old_logprobs) and A = reward - the group's mean, not divided by its deviation:

        u = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    then the sum over each sequence's tokens divided by max_tokens, then the mean over sequences. Defaults: both clips 0.2.
    max_tokens is the generation budget in tokens (the authors' code: 3000); it scales the gradient, so keep it when budgets change.
    A baseline that contains the sample makes A (G - 1) / G times the leave-one-out one. Departures: none.
    Metrics: ratio; clip_low and clip_high, share of tokens whose gradient the clip removed.
    """

    averaging = "constant"
    elementwise = True
    advantage = "group_centred"

    def __init__(self, *, max_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        if max_tokens < 1:
            raise ValueError(
                f"max_tokens={max_tokens} must be at least 1: every sequence's sum is divided by this generation budget"
            )
        self.max_tokens = max_tokens
        self.clip_low, self.clip_high = checked_clips(clip_low, clip_high)

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> LossOutput:
        return clipped(torch.exp(logprobs - old_logprobs), advantages, self.clip_low, self.clip_high)

    def formula(self) -> str:
        return f"u = -min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A), r = exp(logprobs - old_logprobs)"


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> LossOutput:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), PPO's surrogate (1707.06347) as a loss, [B, T].

    Metrics: ratio; clip_low and clip_high, 1 at tokens whose gradient the clip removed.

    >>> clipped(torch.tensor([[0.5, 0.5, 2.0]]), torch.tensor([[1.0, -1.0, 1.0]]), 0.2, 0.2).loss
    tensor([[-0.5000,  0.8000, -1.2000]])
    """
    low, high = 1 - clip_low, 1 + clip_high
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    metrics = {
        "ratio": ratio.detach(),
        "clip_low": ((advantages < 0) & (ratio < low)).to(ratio.dtype),
        "clip_high": ((advantages > 0) & (ratio > high)).to(ratio.dtype),
    }
    return LossOutput(loss, metrics)


def checked_clips(clip_low: float, clip_high: float) -> tuple[float, float]:
    if not 0 < clip_low <= 1:
        raise ValueError(
            f"clip_low={clip_low} must be above 0 and at most 1: ratios below 1 - clip_low are clipped"
        )
    if not 0 < clip_high < math.inf:
        raise ValueError(f"clip_high={clip_high} must be above 0: ratios above 1 + clip_high are clipped")
    return clip_low, clip_high


def checked_mean(averaging: Mean) -> Mean:
    if averaging not in get_args(Mean):
        raise ValueError(
            f'averaging="{averaging}" is not one of {", ".join(get_args(Mean))}; a constant divisor is DrGRPOLoss'
        )
    return averaging
