"""What an optimizer step is: the laws of trainer.py against plain torch, which knows neither packing nor weights per token."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from batch import Completion, Episode, Group, Prompt, to_episodes
from losses import GRPOLoss, NLLLoss, PolicyLoss, ReinforceLoss, SimpleGRPOLoss
from losses.correction import Truncated
from model import Model, ModelSource
from tests.steps import (
    CustomLoss,
    assert_same_gradient,
    column,
    each_objective,
    gradient,
    place,
    plain,
    plain_gradient,
    plain_grpo,
    plain_scores,
    some_episodes,
    trainer_of,
    weights,
)
from trainer import TrainingConfig, lr_at

__all__ = ["place", "plain", "trainer_of"]  # fixtures


@each_objective
@pytest.mark.parametrize("max_tokens", [26, 60, 10_000])
def test_a_step_is_the_plain_gradient_of_one_episode_at_a_time_however_rows_are_packed(loss, reference, max_tokens, trainer_of, plain):
    episodes = some_episodes()
    trainer = trainer_of(loss(), max_tokens=max_tokens)
    assert (len(trainer.model.rows(episodes)) == 1) == (max_tokens == 10_000)
    stats = trainer.update(episodes, 0)
    want = reference(plain, episodes)
    assert stats["loss/policy"] == pytest.approx(want.item(), rel=1e-5, abs=1e-6)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, want))


@each_objective
def test_an_entropy_bonus_adds_its_own_gradient_with_the_weights_of_the_loss(loss, reference, trainer_of, plain):
    episodes = some_episodes()
    trainer = trainer_of(loss(), max_tokens=60, entropy_coef=0.5)
    trainer.update(episodes, 0)
    parts = [(plain_scores(plain, e)[1], column(e, "loss_mask")) for e in episodes if e.loss_mask.any()]
    tokens = sum(mask.sum() for _, mask in parts)
    bonus = sum((h * mask).sum() for h, mask in parts) / tokens
    if reference is plain_grpo:  # averages over sequences
        bonus = sum((h * mask).sum() / mask.sum() for h, mask in parts) / len(parts)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, reference(plain, episodes) - 0.5 * bonus))


def sampled_weight(model, episodes: list[Episode], cap: float):
    """sum over tokens of -min(pi / pi_sampler, cap) A log pi, the weight not differentiated; and the sequences' own means of it."""
    sums, counts = [], []
    for e in episodes:
        logprobs, mask = plain_scores(model, e)[0], column(e, "loss_mask")
        weight = (logprobs.detach() - column(e, "gen_logprobs")).exp().clamp(max=cap)
        sums.append((-weight * column(e, "advantages") * logprobs * mask).sum())
        counts.append(mask.sum())
    return sums, counts


def test_stale_data_weighs_min_of_ratio_and_cap_in_a_loss_that_has_no_ratio(trainer_of, plain):
    episodes = some_episodes()
    trainer = trainer_of(SimpleGRPOLoss(beta=0.0), correction=Truncated(cap=2.0))
    trainer.update(episodes, 0)
    sums, counts = sampled_weight(plain, episodes, 2.0)
    assert any((plain_scores(plain, e)[0].detach() - column(e, "gen_logprobs")).max() > math.log(2) for e in episodes)
    loss = sum(s / n for s, n in zip(sums, counts, strict=True) if n) / sum(n > 0 for n in counts)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, loss))


class Surrogate(PolicyLoss):
    """The importance-weighted objective, with nothing clipped."""

    averaging = "token"

    def per_token(self, logprobs, advantages, old_logprobs):
        return -(logprobs - old_logprobs).exp() * advantages


def test_stale_data_weighs_min_of_ratio_and_cap_in_a_loss_that_has_the_ratio(trainer_of, plain):
    episodes = some_episodes()
    for e in episodes:
        e.old_logprobs = e.gen_logprobs
    trainer = trainer_of(Surrogate(), correction=Truncated(cap=2.0))
    trainer.update(episodes, 0)
    sums, counts = sampled_weight(plain, episodes, 2.0)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, sum(sums) / sum(counts)))


def test_a_loss_that_weighs_the_samplers_data_itself_keeps_its_own_weights(trainer_of, plain):
    episodes = some_episodes()
    for clip_ratio, cap in ((None, math.inf), (3.0, 4.0)):  # clamped to [-2, 4]: from above, and above the trainer's cap
        trainer = trainer_of(ReinforceLoss(clip_ratio=clip_ratio), correction=Truncated(cap=2.0))
        trainer.update(episodes, 0)
        sums, counts = sampled_weight(plain, episodes, cap)
        assert_same_gradient(gradient(trainer), plain_gradient(plain, sum(sums) / sum(counts)))


def test_without_a_cap_nothing_is_corrected(trainer_of, plain):
    episodes = some_episodes()
    trainer = trainer_of(ReinforceLoss())
    trainer.update(episodes, 0)
    sums, counts = sampled_weight(plain, episodes, math.inf)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, sum(sums) / sum(counts)))


class One(PolicyLoss):
    """1 at every token, with a gradient."""

    averaging = "token"

    def per_token(self, logprobs):
        return 1 + logprobs - logprobs.detach()


def answers(*stop_reasons: str) -> list[Episode]:
    """One completion of 4 tokens for each stop reason, under mask_truncated."""
    completions = [Completion("", [4, 5, 6, 7], [-1.0] * 4, {}, reason) for reason in stop_reasons]
    group = Group(Prompt(0, [3, 3]), completions)
    episodes = to_episodes([group], mask_truncated=True, old_from_sampler=False)
    for e in episodes:
        e.advantages, e.ref_logprobs = np.ones_like(e.advantages), e.gen_logprobs
    return episodes


def test_an_answer_cut_off_counts_in_neither_numerator_nor_denominator(trainer_of):
    # Field case LN-05: the loss was 0.5, and fell as more answers were cut off.
    both, alone = trainer_of(One()), trainer_of(One())
    assert both.update(answers("eos", "length"), 0)["loss/policy"] == pytest.approx(1.0, abs=1e-6)
    alone.update(answers("eos"), 0)
    assert_same_gradient(gradient(both), gradient(alone))


@pytest.mark.parametrize("loss", [One, lambda: GRPOLoss(beta=0.1), CustomLoss.resolve])
def test_a_step_whose_answers_are_all_cut_off_changes_nothing_and_says_so(loss, trainer_of):
    trainer = trainer_of(loss(), entropy_coef=0.1, learning_rate=1.0)
    before = weights(trainer)
    stats = trainer.update(answers("length", "length"), 0)
    assert (stats["loss/policy"], stats["loss/tokens"], stats["grad/norm"], trainer.updates) == (0.0, 0.0, 0.0, 1)
    assert all(torch.equal(v, before[k]) for k, v in weights(trainer).items())


def test_two_steps_are_two_steps_of_plain_adamw(trainer_of, tiny_qwen3):
    rate, rollouts = 1e-3, [some_episodes(seed=1), some_episodes(seed=2)]
    # adam_eps above the rounding noise of fp32 gradients: below it a gradient of 1e-9 moves a weight as far as one of 1.
    training = {"learning_rate": rate, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_eps": 1e-5, "max_grad_norm": 0.5}
    trainer = trainer_of(GRPOLoss(beta=0.1), max_tokens=60, **training)

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float64)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-5)
    for step, episodes in enumerate(rollouts):
        trainer.update(episodes, step)
        adamw.zero_grad()
        plain_grpo(model, episodes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()

    got, want = weights(trainer), dict(model.named_parameters())
    for name in want:
        assert_close(got[name].double(), want[name].detach(), rtol=0, atol=0.01 * rate * 2, msg=name)


def test_weight_decay_shrinks_matrices_and_nothing_else(trainer_of):
    trainer = trainer_of(One(), learning_rate=0.01, weight_decay=0.1)
    before = weights(trainer)
    trainer.update(answers("length"), 0)  # no token counts, so decay is all that acts
    for name, weight in weights(trainer).items():
        assert_close(weight, before[name] * (1 - 0.01 * 0.1) if weight.ndim > 1 else before[name])


def test_master_weights_are_fp32_so_that_bf16_training_keeps_steps_of_1e_6(trainer_of):
    # Field case NU-01: in bf16 a weight of 0.02 has neighbours 1.2e-4 away and never moves.
    trainer = trainer_of(NLLLoss(), dtype="bfloat16", learning_rate=1e-6, adam_eps=1e-20)
    before = weights(trainer)
    trainer.update(some_episodes(), 0)
    grad = gradient(trainer)
    for name, weight in weights(trainer).items():
        assert weight.dtype == grad[name].dtype == torch.float32
        moved = (weight.double() - before[name].double())[grad[name].abs() > 1e-9]
        assert len(moved) > 0, name
        assert_close(moved.abs(), torch.full_like(moved, 1e-6), rtol=0, atol=1.3e-7)  # rounding of a weight near 1 to fp32


def test_forty_steps_of_1e_6_add_up_under_bf16(trainer_of):
    trainer = trainer_of(NLLLoss(), dtype="bfloat16", learning_rate=1e-6)
    episodes = some_episodes(2)
    before = weights(trainer)
    for step in range(40):
        trainer.update(episodes, step)
    moved = {name: (weight - before[name]).abs().max() for name, weight in weights(trainer).items()}
    assert min(moved.values()) > 0.5 * 40 * 1e-6


def test_gradients_are_scaled_down_to_max_grad_norm_and_never_up(trainer_of):
    free, tight, loose = (trainer_of(NLLLoss(), max_grad_norm=limit) for limit in (0.0, 0.01, 1e6))
    results = [t.update(some_episodes(), 0) for t in (free, tight, loose)]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient(free).values()))
    assert [r["grad/norm"] for r in results] == pytest.approx([norm] * 3, rel=1e-6)  # as it was, before scaling
    assert [r["grad/clipped"] for r in results] == [0.0, 1.0, 0.0]
    assert_same_gradient(gradient(tight), {k: g * 0.01 / norm for k, g in gradient(free).items()})
    assert_same_gradient(gradient(loose), gradient(free))


def test_a_gradient_that_is_not_finite_ends_the_run_and_names_the_step(trainer_of):
    class Broken(One):
        def per_token(self, logprobs):
            return logprobs * math.nan

    with pytest.raises(RuntimeError, match="gradient's norm is nan at step 3"):
        trainer_of(Broken()).update(some_episodes(), 3)


@pytest.mark.parametrize("updates", [1, 3])
def test_update_to_weight_is_the_measured_move(updates, trainer_of):
    trainer = trainer_of(NLLLoss(), learning_rate=1e-3, adam_beta1=0.9)
    for step in range(updates):
        before = weights(trainer)
        reported = trainer.update(some_episodes(seed=step), step)["optim/update_to_weight"]
    after = weights(trainer)
    moved = math.sqrt(sum(float((after[k] - before[k]).double().square().sum()) for k in after))
    size = math.sqrt(sum(float(w.double().square().sum()) for w in after.values()))
    assert reported == pytest.approx(moved / size, rel=1e-3)


SCHEDULES = {
    "constant": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.25, 0.5, 0.75, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0],
    "cosine": [0.25, 0.5, 0.75, 1, *((1 + math.cos(math.pi * k / 8)) / 2 for k in range(9))],
    "wsd": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_learning_rate_rises_linearly_and_then_follows_its_schedule_to_zero(schedule):
    decay = 4 if schedule == "wsd" else None
    cfg = TrainingConfig(steps=12, warmup_steps=4, learning_rate=1e-3, schedule=schedule, decay_steps=decay)
    want = [1e-3 * share for share in SCHEDULES[schedule]]
    assert [lr_at(step, cfg) for step in range(len(want))] == pytest.approx(want, abs=1e-18)
    above = replace(cfg, min_lr_ratio=0.1)
    floor = [1e-3 * (share if i < 4 or schedule == "constant" else 0.1 + 0.9 * share) for i, share in enumerate(SCHEDULES[schedule])]
    assert [lr_at(step, above) for step in range(len(want))] == pytest.approx(floor, abs=1e-18)


def test_a_decay_without_a_length_is_a_tenth_of_the_run():
    rates = [lr_at(step, TrainingConfig(schedule="wsd", learning_rate=1.0), total=100) for step in (89, 90, 95, 99)]
    assert rates == pytest.approx([1, 1, 0.5, 0.1])


def test_a_step_uses_and_reports_the_rate_of_its_schedule(trainer_of):
    trainer = trainer_of(NLLLoss(), steps=4, schedule="linear", learning_rate=1e-3)
    assert trainer.update(some_episodes(), 3)["optim/lr"] == pytest.approx(0.25e-3)
    plain_step = trainer_of(NLLLoss(), learning_rate=0.25e-3)
    plain_step.update(some_episodes(), 0)
    got, want = weights(trainer), weights(plain_step)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_rollout_is_split_into_its_updates_by_whole_groups_in_order(trainer_of):
    episodes = some_episodes(6)
    at_once = trainer_of(GRPOLoss(), updates_per_rollout=3, learning_rate=1e-3)
    by_hand = trainer_of(GRPOLoss(), learning_rate=1e-3)
    stats = at_once.train(episodes, 0)
    parts = [by_hand.update(episodes[i : i + 2], 0) for i in (0, 2, 4)]
    assert at_once.updates == 3
    got, want = weights(at_once), weights(by_hand)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert stats["loss/policy"] == pytest.approx(sum(p["loss/policy"] for p in parts) / 3)
    assert stats["ratio/max"] == max(p["ratio/max"] for p in parts)
    assert stats["mismatch/abs_mean"] == parts[0]["mismatch/abs_mean"]


def test_a_rollout_may_have_an_update_without_a_token_that_counts(trainer_of):
    cut, whole_answer = answers("length"), answers("eos")
    for order in ([*whole_answer, *cut], [*cut, *whole_answer]):
        for group, e in enumerate(order):
            e.group = group
        trainer = trainer_of(GRPOLoss(beta=0.1), updates_per_rollout=2)
        stats = trainer.train(order, 0)
        assert trainer.updates == 2
        assert stats["loss/tokens"] == 2.0  # the mean of 4 and 0
        assert stats["entropy/mean"] > 0 and stats["grad/norm_attn"] > 0


@pytest.mark.parametrize(("every", "published", "moves"), [
    (2, [2, 4, 5], [2, 4]), (4, [4, 5], [4]), (3, [2, 4, 6, 8], [4, 6]), (1, [2, 4], [2, 4]), (0, [1, 2], []),
    (10, [9, 12, 15, 21], [12, 21]),
])  # fmt: skip
def test_the_reference_moves_at_the_first_sync_at_or_after_its_due_steps(every, published, moves):
    cfg, before, moved = TrainingConfig(ref_update_interval=every), 0, []
    for step in published:
        if cfg.moves_reference(step, before):
            moved.append(step)
        before = step
    assert moved == moves and not cfg.moves_reference(before, before)


@pytest.mark.parametrize("lacking", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_checkpoint_that_lacks_a_weight_is_refused_and_not_filled_with_random_numbers(lacking, place, tiny_qwen3, tmp_path):
    shutil.copytree(tiny_qwen3, tmp_path / "part")
    weights = load_file(tiny_qwen3 / "model.safetensors")
    save_file({n: t for n, t in weights.items() if n != lacking}, tmp_path / "part/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"part lacks \d+ weights of a Qwen3ForCausalLM \(.*{lacking.rpartition('.')[0]}.*random"):
        source = ModelSource(str(tmp_path / "part"))
        Model(source, place.trainer, dtype="float32", temperature=1.0, max_tokens=64, trainable=False)
