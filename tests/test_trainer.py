"""What an optimizer step is: the laws of trainer.py against plain torch, which knows neither packing nor weights per token."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from batch import Completion, Episode, Group, Prompt, pad, to_episodes
from config import Call
from losses import GRPOLoss, NLLLoss, PolicyLoss, ReinforceLoss, SimpleGRPOLoss
from model import Model, ModelSource
from parallel.placement import ParallelismConfig, Placement, Plan
from tests.world import run_script
from trainer import Trainer, TrainingConfig, lr_at

TEMPERATURE = 0.7
CustomLoss = Call("tests/data/guide/custom_loss.py:CustomLoss")


@pytest.fixture(scope="module")
def place():
    """A world of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")  # so that they are as they were, whatever the world sets
            patch.delenv(name)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the tensors are tiny
        plan = Plan.make(None, ParallelismConfig(), colocate=False, wants_reference=False, world_size=1)
        yield Placement.build(plan, "cpu")
        torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)


@pytest.fixture
def trainer_of(place, tiny_qwen3):
    """`trainer_of(loss, max_tokens=..., importance_cap=..., <training keys>)` on the tiny Qwen3."""

    def make(loss, *, max_tokens: int = 10_000, importance_cap: float | None = None, **training) -> Trainer:
        cfg = TrainingConfig(**{"dtype": "float32", "max_grad_norm": 0.0, "adam_beta1": 0.0} | training)
        source = ModelSource(str(tiny_qwen3))
        model = Model(source, place.trainer, dtype=cfg.dtype, temperature=TEMPERATURE, max_tokens=max_tokens, trainable=True)
        return Trainer(model, cfg, loss, importance_cap=importance_cap)

    return make


@pytest.fixture(scope="module")
def plain(tiny_qwen3):
    """The same checkpoint as transformers runs it, in float64."""
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float64, attn_implementation="eager")


def some_episodes(count: int = 7, seed: int = 0) -> list[Episode]:
    """Lengths of every kind, tokens that do not count, one episode of which none does, and ratios on both sides of every clip."""
    draw = np.random.RandomState(seed)
    episodes = []
    for i in range(count):
        prompt, response = draw.randint(1, 12), draw.randint(1, 15)
        mask = (draw.rand(response) < 0.8) & (i != 2)
        guess = draw.uniform(-4.5, -1.0, (3, response)).astype(np.float32)
        episodes.append(
            Episode(
                token_ids=draw.randint(3, 17, prompt + response),
                num_prompt_tokens=prompt,
                loss_mask=mask.astype(np.float32),
                advantages=draw.randn(response).astype(np.float32),
                gen_logprobs=guess[0],
                ref_logprobs=guess[1],
                old_logprobs=guess[2],
                group=i,
            )
        )
    return episodes


def plain_scores(model, e: Episode):
    """Log-probs and entropy of the response tokens, [R] each, from one sequence alone."""
    logits = model(torch.tensor(e.token_ids)[None]).logits[0, e.num_prompt_tokens - 1 : -1] / TEMPERATURE
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(-1, torch.tensor(e.token_ids[e.num_prompt_tokens :])[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def plain_gradient(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the only update so far, as AdamW got it: without its first decay, the first moment is the gradient."""
    state = trainer.state()
    return {k.removeprefix("exp_avg/"): v.full_tensor().clone() for k, v in state.items() if k.startswith("exp_avg/")}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in trainer.model.shards().items()}


def assert_same_gradient(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        gap, size = (got[name].double() - want[name].double()).norm(), want[name].double().norm()
        assert size > 0, f"{name} has no gradient, so nothing is compared"
        assert gap <= 1e-5 * size, f"{name}: ||dg|| / ||g|| = {gap / size:.1e}"


def column(e: Episode, name: str) -> torch.Tensor:
    return torch.tensor(vars(e)[name], dtype=torch.float64)


def plain_nll(model, episodes):
    total = sum((plain_scores(model, e)[0] * column(e, "loss_mask")).sum() for e in episodes)
    return -total / sum(column(e, "loss_mask").sum() for e in episodes)


def plain_grpo(model, episodes, clip_low=0.2, clip_high=0.28, beta=0.1):
    """Formula by formula, an episode at a time."""
    per_episode = []
    for e in episodes:
        logprobs, mask, a = plain_scores(model, e)[0], column(e, "loss_mask"), column(e, "advantages")
        if not mask.sum():
            continue
        ratio = (logprobs - column(e, "old_logprobs")).exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        gap = column(e, "ref_logprobs") - logprobs
        terms = -torch.minimum(ratio * a, clipped * a) + beta * (gap.exp() - gap - 1)
        per_episode.append((terms * mask).sum() / mask.sum())
    return sum(per_episode) / len(per_episode)


def plain_custom(model, episodes):
    """The guide's class on the padded [B, T] of the step."""
    device = torch.device("cpu")
    rows = torch.nn.utils.rnn.pad_sequence([plain_scores(model, e)[0] for e in episodes], batch_first=True)
    named = {n: pad([vars(e)[n] for e in episodes], device).double() for n in ("ref_logprobs", "advantages", "loss_mask")}
    return CustomLoss.resolve()(rows, named["ref_logprobs"], named["advantages"], named["loss_mask"])


OBJECTIVES = {
    "likelihood": (NLLLoss, plain_nll),
    "GRPO with clips and KL": (lambda: GRPOLoss(clip_low=0.2, clip_high=0.28, beta=0.1), plain_grpo),
    "the guide's CustomLoss": (CustomLoss.resolve, plain_custom),
}
each_objective = pytest.mark.parametrize(("loss", "reference"), OBJECTIVES.values(), ids=OBJECTIVES)


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
    trainer = trainer_of(SimpleGRPOLoss(beta=0.0), importance_cap=2.0)
    trainer.update(episodes, 0)
    sums, counts = sampled_weight(plain, episodes, 2.0)
    assert any((plain_scores(plain, e)[0].detach() - column(e, "gen_logprobs")).max() > math.log(2) for e in episodes)
    loss = sum(s / n for s, n in zip(sums, counts, strict=True) if n) / sum(n > 0 for n in counts)
    assert_same_gradient(gradient(trainer), plain_gradient(plain, loss))


def test_stale_data_weighs_min_of_ratio_and_cap_in_a_loss_that_has_the_ratio(trainer_of, plain):
    episodes = some_episodes()
    trainer = trainer_of(ReinforceLoss(), importance_cap=2.0)
    trainer.update(episodes, 0)
    sums, counts = sampled_weight(plain, episodes, 2.0)
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
    episodes = to_episodes([group], [[1.0] * len(completions)], mask_truncated=True, old_from_sampler=False)
    for e in episodes:
        e.ref_logprobs = e.gen_logprobs
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
        assert_close(got[name].double(), want[name].detach(), rtol=0, atol=0.01 * rate * 2, msg=lambda m, n=name: f"{n}: {m}")


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
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_learning_rate_rises_linearly_and_then_follows_its_schedule_to_zero(schedule):
    cfg = TrainingConfig(steps=12, warmup_steps=4, learning_rate=1e-3, schedule=schedule)
    want = [1e-3 * share for share in SCHEDULES[schedule]]
    assert [lr_at(step, cfg) for step in range(len(want))] == pytest.approx(want, abs=1e-18)


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


# The guide's train_step(inputs, targets) ---------------------------------------------------------------------------


def dictionaries(episodes: list[Episode], rows: int, *, attention_mask: bool = False):
    """The guide's lists: left-padded prompts and right-padded responses, `rows` of them in each entry."""
    inputs, targets = [], []
    for start in range(0, len(episodes), rows):
        part = episodes[start : start + rows]
        left = max(e.num_prompt_tokens for e in part)
        width = max(e.num_response_tokens for e in part)
        tokens, here = torch.zeros(len(part), left + width, dtype=torch.int64), torch.zeros(len(part), left + width)
        for i, e in enumerate(part):
            begin = left - e.num_prompt_tokens
            tokens[i, begin : begin + len(e.token_ids)] = torch.tensor(e.token_ids)
            here[i, begin : begin + len(e.token_ids)] = 1
        cpu = torch.device("cpu")
        grids = {n: pad([vars(e)[n] for e in part], cpu) for n in ("ref_logprobs", "advantages", "loss_mask", "old_logprobs")}
        grids["padding_mask"] = grids.pop("loss_mask")
        inputs.append({"tokens": tokens} | ({"attention_mask": here} if attention_mask else {}))
        targets.append({"response": tokens[:, left:].clone(), **grids})
    return inputs, targets


@each_objective
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_train_step_returns_the_steps_loss_as_a_float_and_is_update_however_its_lists_are_cut(loss, reference, rows, trainer_of):
    episodes = some_episodes()
    by_step, by_update = trainer_of(loss()), trainer_of(loss(), max_tokens=60)
    value = by_step.train_step(*dictionaries(episodes, rows))
    assert isinstance(value, float)
    assert value == pytest.approx(by_update.update(episodes, 0)["loss/policy"], rel=1e-5, abs=1e-6)
    assert_same_gradient(gradient(by_step), gradient(by_update))
    assert by_step.updates == 1


def test_train_step_takes_the_guides_keys_alone_with_one_advantage_a_row(trainer_of):
    inputs, targets = dictionaries(some_episodes(), 7)
    for target in targets:
        del target["old_logprobs"]
        target["advantages"] = target["advantages"][:, :1]
    wide = copy.deepcopy(targets)
    wide[0]["advantages"] = wide[0]["advantages"].expand(-1, wide[0]["response"].shape[1])
    one, all_tokens = trainer_of(SimpleGRPOLoss(beta=0.1)), trainer_of(SimpleGRPOLoss(beta=0.1))
    assert one.train_step(inputs, targets) == all_tokens.train_step(inputs, wide)
    assert_same_gradient(gradient(one), gradient(all_tokens))


def test_a_pad_token_inside_a_prompt_is_kept_and_one_in_front_needs_an_attention_mask(trainer_of):
    episodes = some_episodes(1)
    episodes[0].token_ids = np.array([3, 0, 5, 7, 8, 9])
    episodes[0].num_prompt_tokens = 3
    for name in ("loss_mask", "advantages", "gen_logprobs", "ref_logprobs", "old_logprobs"):
        vars(episodes[0])[name] = np.full(3, -1.0 if "logprobs" in name else 1.0, np.float32)
    inside, want = trainer_of(NLLLoss()), trainer_of(NLLLoss())
    assert inside.train_step(*dictionaries(episodes, 1)) == want.update(episodes, 0)["loss/policy"]
    episodes[0].token_ids = np.array([0, 4, 5, 7, 8, 9])
    masked, want = trainer_of(NLLLoss()), trainer_of(NLLLoss())
    assert masked.train_step(*dictionaries(episodes, 1, attention_mask=True)) == want.update(episodes, 0)["loss/policy"]


def broken(key: str, change):
    def apply(inputs, targets):
        where = inputs if key in inputs[0] else targets
        where[0][key] = change(where[0][key])

    return apply


MISTAKES = {
    "no tokens": (lambda i, t: i[0].pop("tokens"), "inputs lack tokens; their keys: attention_mask, tokens"),
    "no response": (lambda i, t: t[0].pop("response"), "targets lack response"),
    "no mask": (lambda i, t: t[0].pop("padding_mask"), "targets lack padding_mask"),
    "no advantages": (lambda i, t: t[0].pop("advantages"), "targets lack advantages"),
    "no reference": (lambda i, t: t[0].pop("ref_logprobs"), "beta=0.1 needs a reference, and there are no ref_logprobs"),
    "an unknown key": (lambda i, t: t[0].update(refs=1), "targets have an unknown refs; their keys: advantages, gen_logprobs,"),
    "a list too long": (lambda i, t: t.append(t[0]), "as many targets as inputs, at least one; got 1 and 2"),
    "nothing": (lambda i, t: (i.clear(), t.clear()), "as many targets as inputs, at least one; got 0 and 0"),
    "the prompt alone": (broken("tokens", lambda x: x[:, :2]), "tokens [7, 2] must be [B, P + T] with P >= 1, and response [7, 12]"),
    "one row": (broken("response", lambda x: x[0]), "and response [12] [B, T]"),
    "fewer rows": (broken("tokens", lambda x: x[:3]), "tokens [3, 22] must be [B, P + T] with P >= 1, and response [7, 12]"),
    "a mask of another width": (broken("padding_mask", lambda x: x[:, 1:]), "padding_mask [7, 11] must be [7, 12]"),
    "a reference of another width": (broken("ref_logprobs", lambda x: x[:, 1:]), "ref_logprobs [7, 11] must be [7, 12]"),
    "flat advantages": (broken("advantages", lambda x: x[:, 0]), "advantages [7] must be [7, 12] or [7, 1]"),
    "another response": (broken("response", lambda x: x + 1), "the last T columns of tokens must be the response"),
    "no prompt": (broken("tokens", lambda x: torch.cat([0 * x[:, :-12], x[:, -12:]], 1)), "row 0 has no prompt token"),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_train_step_refuses_a_mistake_in_words(mistake, message, trainer_of):
    inputs, targets = dictionaries(some_episodes(), 7)
    mistake(inputs, targets)
    with pytest.raises(ValueError) as error:
        trainer_of(SimpleGRPOLoss()).train_step(inputs, targets)
    assert message in str(error.value)


TWO_RANKS = """
import pickle, sys
from losses import GRPOLoss
from config import Call
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import ParallelismConfig, Placement, Plan
from tests.test_trainer import dictionaries, gradient, some_episodes
from trainer import Trainer, TrainingConfig

def main():
    tp = int(sys.argv[3])
    place = Placement.build(
        Plan.make(None, ParallelismConfig(tensor_parallel_degree=tp), colocate=False, wants_reference=False, world_size=2), "cpu"
    )
    results = {}
    losses = {"grpo": GRPOLoss(beta=0.1), "custom": Call("tests/data/guide/custom_loss.py:CustomLoss").resolve()}
    for name, loss in losses.items():
        model = Model(ModelSource(sys.argv[1]), place.trainer, dtype="float32", temperature=0.7, max_tokens=60, trainable=True)
        trainer = Trainer(model, TrainingConfig(dtype="float32", max_grad_norm=0.0, adam_beta1=0.0), loss)
        value = trainer.train_step(*dictionaries(some_episodes(), 3))
        results[name] = value, gradient(trainer)
    pickle.dump(results, open(f"{sys.argv[2]}/{place.is_root}.pkl", "wb"))

launch(main)
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_train_step_on_two_ranks_is_train_step_on_one(tp, tiny_qwen3, tmp_path, trainer_of):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    run_script(2, script, str(tiny_qwen3), str(tmp_path), str(tp))
    root, other = (pickle.loads((tmp_path / f"{is_root}.pkl").read_bytes()) for is_root in (True, False))
    for name, loss in {"grpo": GRPOLoss(beta=0.1), "custom": CustomLoss.resolve()}.items():
        alone = trainer_of(loss)
        value = alone.train_step(*dictionaries(some_episodes(), 3))
        assert root[name][0] == other[name][0] == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert_same_gradient(root[name][1], gradient(alone))
