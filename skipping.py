"""Which episodes an optimizer step may leave out of its passes because they have no part in the gradient, and for which losses."""

from typing import Any

import torch

from batch import Episode
from losses.contract import is_whole_batch
from losses.laws import example

LENGTHS = [3, 2, 4, 1, 3]  # of an example's sequences, every other of which has no advantage


def with_advantage(episodes: list[Episode]) -> list[Episode]:
    """Those with a token that counts and whose advantage is not 0."""
    return [e for e in episodes if (e.advantages * e.loss_mask).any()]


def check_skips(loss: Any, *, entropy_coef: float, top_entropy: float) -> None:
    """ValueError where an answer without any advantage has a part in the gradient of what is trained."""
    key = "training.skip_zero_advantages=true"
    if entropy_coef:
        raise ValueError(
            f"{key} with training.entropy_coef={entropy_coef}: the bonus trains every token; set skip_zero_advantages to false, or "
            f"entropy_coef to 0"
        )
    if top_entropy < 1:
        raise ValueError(
            f"{key} with grpo.top_entropy={top_entropy}: which tokens are kept, all of the step's decide; set skip_zero_advantages to "
            f"false, or top_entropy to 1"
        )
    if is_whole_batch(loss):
        raise ValueError(
            f"{key} with a loss that returns one scalar, of which no part can be left out: set skip_zero_advantages to false, or derive "
            f"the loss from losses.PolicyLoss"
        )
    if (found := largest_gradient(loss)) != 0:
        raise ValueError(
            f"{key} with {type(loss).__name__}: in an example it has a gradient of {found:.3g} at tokens whose advantage is 0, as a KL "
            f"term has, or a likelihood. Set skip_zero_advantages to false, or grpo.beta (or the loss's own term) to 0"
        )


def largest_gradient(loss: Any) -> float:
    """Of a PolicyLoss in the log-probs and entropies of sequences whose advantages are all 0, over a few examples; NaN counts."""
    most = 0.0
    for seed, own in ((0, False), (1, False), (2, True)):
        tensors = example(LENGTHS, own=own, seed=seed, dtype=torch.float32)
        idle = torch.arange(len(LENGTHS)) % 2 == 0
        tensors["advantages"] = tensors["advantages"].masked_fill(idle[:, None], 0).expand_as(tensors["logprobs"]).clone()
        leaves = [tensors[name].detach().clone().requires_grad_() for name in ("logprobs", "entropy")]
        tensors |= dict(zip(("logprobs", "entropy"), leaves, strict=True))
        total = loss.evaluate(**tensors).loss.sum()
        slopes = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
        for slope in slopes:
            if slope is not None:
                worst = float(slope[idle].abs().max())
                most = worst if not worst <= most else most
    return most
