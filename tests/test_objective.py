"""What a step's loss is made of besides the loss file: corrections for the sampler, kept tokens, and averaging over prompts."""

import copy
import math

import numpy as np
import pytest
import torch

from losses import (
    CISPOLoss,
    DAPOLoss,
    DPPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
    ReinforceLoss,
    ReinforcePlusPlusBaselineLoss,
    RLOOLoss,
    SAPOLoss,
)
from losses.correction import Masked, SequenceMasked, Truncated, Uncorrected
from tests.steps import (
    assert_same_gradient,
    column,
    gradient,
    place,
    plain,
    plain_gradient,
    plain_scores,
    some_episodes,
    trainer_of,
)

__all__ = ["place", "plain", "trainer_of"]  # fixtures


class Plain(PolicyLoss):
    """The policy gradient of a token, as if the policy itself had sampled it."""

    averaging = "token"

    def per_token(self, logprobs, advantages):
        return -logprobs * advantages


class Ratio(PolicyLoss):
    """With the ratio to the policy before the rollout's first update, nothing clipped."""

    averaging = "token"

    def per_token(self, logprobs, advantages, old_logprobs):
        return -(logprobs - old_logprobs).exp() * advantages


def mean(ratio: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    kept = ratio[mask > 0]
    return {"product": kept.prod(), "geometric": kept.log().mean().exp(), "arithmetic": kept.mean()}[kind]


def within(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ((value >= low) & (value <= high)).double()


CORRECTIONS = {
    "none": (Uncorrected(), lambda r, m: torch.ones_like(r)),
    "truncated": (Truncated(cap=1.5), lambda r, m: r.clamp(max=1.5)),
    "masked": (Masked(low=0.5, high=3.0), lambda r, m: r * within(r, 0.5, 3.0)),
    "geometric": (SequenceMasked(low=0.5, high=1.5), lambda r, m: r * within(mean(r, m, "geometric"), 0.5, 1.5)),
    "arithmetic": (
        SequenceMasked(statistic="arithmetic", low=0.5, high=3.0), lambda r, m: r * within(mean(r, m, "arithmetic"), 0.5, 3.0)
    ),
    "product": (SequenceMasked(statistic="product", low=0.0, high=2.0), lambda r, m: r * within(mean(r, m, "product"), 0.0, 2.0)),
}  # fmt: skip
each_correction = pytest.mark.parametrize(("correction", "weight"), CORRECTIONS.values(), ids=CORRECTIONS)


def weighted(model, episodes, weight, *, of_old: bool):
    """The mean over all tokens, masked ones included, of -weight(r) A ratio. of_old: r is pi_old / pi_sampler, and ratio pi / pi_old."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for e in episodes:
        logprobs, mask = plain_scores(model, e)[0], column(e, "loss_mask")
        frozen = logprobs.detach()
        base = column(e, "old_logprobs") if of_old else frozen
        w = weight((base - column(e, "gen_logprobs")).exp(), mask)
        inner = (logprobs - base).exp() if of_old else logprobs
        total = total - (w * column(e, "advantages") * inner * mask).sum()
        count += float(mask.sum())
    return total / count


@each_correction
@pytest.mark.parametrize("max_tokens", [26, 10_000])
def test_a_loss_without_a_ratio_carries_the_weight_at_every_token(correction, weight, max_tokens, trainer_of, plain):
    episodes = some_episodes(12)
    trainer = trainer_of(Plain(), correction=correction, max_tokens=max_tokens)
    trainer.update(episodes, 0)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, weighted(plain, episodes, weight, of_old=False)))


@each_correction
def test_a_loss_with_a_ratio_to_the_trainers_old_policy_is_corrected_from_there(correction, weight, trainer_of, plain):
    episodes = some_episodes(12)
    trainer = trainer_of(Ratio(), correction=correction)
    trainer.update(episodes, 0)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, weighted(plain, episodes, weight, of_old=True)))


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_where_the_sampler_is_the_old_policy_the_weight_replaces_the_ratio_that_the_loss_has(name, trainer_of, plain):
    correction, weight = CORRECTIONS[name]
    episodes = some_episodes(12)
    for e in episodes:
        e.old_logprobs = e.gen_logprobs
    trainer = trainer_of(Ratio(), correction=correction)
    trainer.update(episodes, 0)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, weighted(plain, episodes, weight, of_old=False)))


def test_without_a_correction_a_loss_keeps_the_ratio_that_it_has(trainer_of, plain):
    episodes = some_episodes(12)
    for e in episodes:
        e.old_logprobs = e.gen_logprobs
    trainer = trainer_of(Ratio(), correction=Uncorrected())
    trainer.update(episodes, 0)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, weighted(plain, episodes, lambda r, m: r, of_old=False)))


@pytest.mark.parametrize("loss", [
    GRPOLoss(beta=0.1), GRPOLoss(kl="k3_ratio", beta=0.1, averaging="token"), DAPOLoss(dual_clip=3.0, averaging="prompt"), CISPOLoss(),
    SAPOLoss(), DrGRPOLoss(max_tokens=15), ReinforceLoss(ratio_max=2.0), RLOOLoss(), DPPOLoss(), ReinforcePlusPlusBaselineLoss(beta=0.1),
], ids=lambda loss: type(loss).__name__)  # fmt: skip
def test_that_a_loss_is_elementwise_changes_no_number_of_a_step(loss, trainer_of):
    """Its chunks of tokens go through the head one by one, and gradients are made in the forward pass."""
    assert loss.elementwise

    loss_of_any_kind = copy.copy(loss)
    loss_of_any_kind.__class__ = type("OfAnyKind", (type(loss),), {"elementwise": False})
    options = {"correction": Masked(low=0.2, high=4.0), "top_entropy": 0.7, "entropy_coef": 0.01, "max_tokens": 60}
    episodes = some_episodes(12)
    fast, slow = trainer_of(loss, **options), trainer_of(loss_of_any_kind, **options)
    assert fast.objective.elementwise and not slow.objective.elementwise
    here, there = fast.update(episodes, 0), slow.update(episodes, 0)
    assert here.keys() == there.keys()
    for name in here:
        assert here[name] == pytest.approx(there[name], rel=1e-5, abs=1e-6), name
    assert_same_gradient(gradient(fast), gradient(slow))


@pytest.mark.parametrize("bad", [
    lambda: Truncated(cap=0.0), lambda: Truncated(cap=math.inf), lambda: Masked(low=1.1), lambda: Masked(high=0.9),
    lambda: Masked(low=-0.1), lambda: SequenceMasked(statistic="median"),  # type: ignore[arg-type]
])  # fmt: skip
def test_a_band_that_leaves_out_1_and_a_cap_of_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="cap=|low=|statistic="):
        bad()


def test_a_masked_token_of_a_sequences_ratio_has_no_gradient_and_the_others_keep_theirs(trainer_of, plain):
    """GSPO's loss has its gradient at every token of a sequence: it is what arrives at a token that is weighed."""
    episodes = some_episodes(12, seed=1)
    for e in episodes:
        e.advantages = np.full_like(e.advantages, e.advantages[0])
    trainer = trainer_of(GSPOLoss(clip_low=0.9, clip_high=50.0), correction=Masked(low=0.5, high=3.0))
    trainer.update(episodes, 0)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for e in episodes:
        logprobs, mask = plain_scores(plain, e)[0], column(e, "loss_mask")
        if not mask.any():
            continue
        count += 1
        w = CORRECTIONS["masked"][1]((column(e, "old_logprobs") - column(e, "gen_logprobs")).exp(), mask)
        seen = logprobs.detach() + w * (logprobs - logprobs.detach())
        s = (((seen - column(e, "old_logprobs")) * mask).sum() / mask.sum()).exp()
        a = column(e, "advantages")[0]
        total = total - torch.minimum(s * a, s.clamp(0.1, 51.0) * a)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, total / count))


def test_a_loss_that_weighs_the_sampler_itself_has_no_correction_to_count(trainer_of):
    stats = trainer_of(ReinforceLoss(ratio_max=2.0), correction=Truncated(cap=2.0)).update(some_episodes(12), 0)
    assert not [name for name in stats if name.startswith("is/") and name != "is/ess_seq"] and stats["mismatch/abs_mean"] > 0


def test_what_is_said_of_the_gap_to_the_sampler_is_what_its_definitions_say(trainer_of, plain):
    episodes = some_episodes(12)
    correction = SequenceMasked(statistic="product", low=0.0, high=2.0)
    stats = trainer_of(Ratio(), correction=correction, max_tokens=40).update(episodes, 0)
    gaps = [(column(e, "old_logprobs") - column(e, "gen_logprobs"))[column(e, "loss_mask") > 0].numpy() for e in episodes]
    gaps = [g for g in gaps if len(g)]
    flat, sums = np.concatenate(gaps), np.array([g.sum() for g in gaps])
    assert stats["mismatch/abs_mean"] == pytest.approx(np.abs(flat).mean(), rel=1e-5)
    assert stats["mismatch/abs_max"] == pytest.approx(np.abs(flat).max(), rel=1e-5)
    assert stats["mismatch/k3"] == pytest.approx((np.exp(flat) - 1 - flat).mean(), rel=1e-5)
    assert stats["mismatch/mult_prob_err"] == pytest.approx(np.exp(np.abs(flat)).mean(), rel=1e-5)
    order = np.sort(sums)
    assert stats["mismatch/seq_product_p1"] == pytest.approx(np.exp(order[0]), rel=1e-4)
    assert stats["mismatch/seq_product_p99"] == pytest.approx(np.exp(order[-1]), rel=1e-4)
    geometric = sorted(g.mean() for g in gaps)
    assert stats["mismatch/seq_geometric_p50"] == pytest.approx(np.exp(geometric[len(gaps) // 2]), rel=1e-4)
    kept = [np.exp(g) if g.sum() <= math.log(2) else np.zeros_like(g) for g in gaps]
    weights = np.concatenate(kept)
    assert stats["is/ess_token"] == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()), rel=1e-4)
    products = np.exp(sums)
    assert stats["is/ess_seq"] == pytest.approx(products.sum() ** 2 / (len(products) * (products**2).sum()), rel=1e-4)
    dropped = np.mean([not k.any() for k in kept])
    assert 0 < dropped < 1 and stats["is/frac_seq_dropped"] == pytest.approx(dropped)
    assert stats["is/frac_masked"] == pytest.approx((weights == 0).mean()) and stats["is/frac_truncated"] == 0.0


def test_a_truncated_token_is_counted_as_such(trainer_of):
    episodes = some_episodes(12)
    stats = trainer_of(Ratio(), correction=Truncated(cap=1.5)).update(episodes, 0)
    flat = torch.cat([(column(e, "old_logprobs") - column(e, "gen_logprobs"))[column(e, "loss_mask") > 0] for e in episodes]).numpy()
    assert stats["is/frac_truncated"] == pytest.approx((np.exp(flat) > 1.5).mean()) and stats["is/frac_masked"] == 0.0


@pytest.mark.parametrize("max_tokens", [26, 10_000])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_only_the_tokens_of_highest_entropy_are_kept_and_the_others_stay_in_the_denominator(share, max_tokens, trainer_of, plain):
    episodes = some_episodes(12)
    trainer = trainer_of(ReinforceLoss(), max_tokens=max_tokens, top_entropy=share)
    trainer.update(episodes, 0)
    scored = [(*plain_scores(plain, e), column(e, "loss_mask")) for e in episodes]
    entropies = torch.cat([h.detach()[m > 0] for _, h, m in scored]).sort(descending=True).values
    threshold = entropies[max(round(share * len(entropies)), 1) - 1]
    total = torch.zeros((), dtype=torch.float64)
    for e, (logprobs, h, mask) in zip(episodes, scored, strict=True):
        ratio = (logprobs.detach() - column(e, "gen_logprobs")).exp()
        total = total - (ratio * column(e, "advantages") * logprobs * mask * (h.detach() >= threshold - 1e-6)).sum()
    assert_same_gradient(gradient(trainer), plain_gradient(plain, total / len(entropies)))


@pytest.mark.parametrize("max_tokens", [26, 10_000])
def test_averaging_over_prompts_gives_every_prompt_the_same_weight_whatever_the_packing(max_tokens, trainer_of, plain):
    episodes = some_episodes(9)
    for i, e in enumerate(episodes):
        e.group = i % 3

    trainer = trainer_of(DAPOLoss(averaging="prompt", clip_low=1.0, clip_high=1e9), max_tokens=max_tokens)
    for e in episodes:
        e.old_logprobs = None  # the ratio is 1
    trainer.update(episodes, 0)
    means = []
    for prompt in range(3):
        mine = [(plain_scores(plain, e)[0], column(e, "advantages"), column(e, "loss_mask")) for e in episodes if e.group == prompt]
        means.append(-sum((logprobs * a * m).sum() for logprobs, a, m in mine) / sum(m.sum() for *_, m in mine))
    assert_same_gradient(gradient(trainer), plain_gradient(plain, sum(means) / 3))


def test_a_step_in_which_nothing_counts_is_zero_with_every_option_on(trainer_of):
    episodes = some_episodes(3)
    for e in episodes:
        e.loss_mask = np.zeros_like(e.loss_mask)
    trainer = trainer_of(GRPOLoss(), correction=SequenceMasked(), top_entropy=0.5, entropy_coef=0.1)
    stats = trainer.update(episodes, 0)
    assert stats["loss/policy"] == 0.0 and stats["grad/norm"] == 0.0
