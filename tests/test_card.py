"""The card says what is optimised, with its numbers, and the linter warns of each known foot-gun and of nothing else."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import losses
from losses import (
    CISPOLoss,
    DAPOLoss,
    DPPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    GSPOTokenLoss,
    NLLLoss,
    PolicyLoss,
    ReinforceLoss,
    ReinforcePlusPlusBaselineLoss,
    ReinforcePlusPlusLoss,
    RLOOLoss,
    SAPOLoss,
    SimpleGRPOLoss,
)
from losses.card import Settings, card, lint
from losses.correction import Masked, SequenceMasked, Truncated, Uncorrected
from startup import GRPOConfig, resolve_loss
from trainer import TrainingConfig

GRPO, TRAINING = GRPOConfig(), TrainingConfig()
DEFAULT = Settings(
    home="grpo",
    advantage="losses.advantages.group_zscore",
    correction=GRPO.corrected(TRAINING),
    old_logprobs="own",
    stop=bool(GRPO.stop),
    **{k: vars(GRPO)[k] for k in ("n_samples", "temperature", "kl_in_reward", "top_entropy", "mask_truncated", "max_new_tokens")},
    **{k: vars(TRAINING)[k] for k in ("seq_len", "updates_per_rollout", "sync_interval", "dtype", "learning_rate", "entropy_coef")},
    max_policy_age=GRPO.max_policy_age,
)
LOSS = resolve_loss(None, GRPO)


def settings(**changes) -> Settings:
    """The defaults with these changes. advantage: its short name."""
    if "advantage" in changes:
        changes["advantage"] = f"losses.advantages.{changes['advantage']}"
    return replace(DEFAULT, **changes)


def as_defined(loss: PolicyLoss, **changes) -> Settings:
    return settings(**{"home": "loss", "advantage": loss.advantage} | changes)


def given(loss, changes: dict) -> Settings:
    return as_defined(loss, **changes) if isinstance(loss, PolicyLoss) else settings(**{"home": "loss"} | changes)


class Whole(nn.Module):
    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        return -(logprobs * advantages * padding_mask).sum()


class WholeWithEntropy(nn.Module):
    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor, entropy: Tensor) -> Tensor:
        return -((logprobs * advantages + entropy) * padding_mask).sum()


class Twice(GRPOLoss):
    """Computes something else than its parent, and says nothing about it."""

    def per_token(self, logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor) -> Tensor:  # type: ignore[override]
        return -2 * torch.exp(logprobs - old_logprobs) * advantages


SHIPPED = [  # a loss with numbers that no other has, and what its card must show
    (GRPOLoss(clip_low=0.11, clip_high=0.37, beta=0.013), ["u = -min(r A, clip(r, 0.89, 1.37) A) + 0.013 k3", "of KL(ref || pi)"]),
    (GRPOLoss(beta=0.013, kl="k1"), ["+ 0.013 k1", "expected gradient 0"]),
    (GRPOLoss(beta=0.013, kl="k2", averaging="prompt"), ["+ 0.013 k2", "of KL(pi || ref)", "(1/P) sum_p (1/N_p) sum_it u"]),
    (GRPOLoss(beta=0.013, kl="k3_ratio", averaging="sum"), ["+ 0.013 r k3", "of KL(pi || ref)", "(1/B) sum_i sum_t u"]),
    (SimpleGRPOLoss(beta=0.17), ["u = -exp(logprobs - sg(logprobs)) A + 0.17 k3", "ratio             none"]),
    (DrGRPOLoss(max_tokens=3000, clip_low=0.3), ["clip(r, 0.7, 1.2)", "(1/B) sum_i (1/L) sum_t u, constant L = 3000 (max_tokens)"]),
    (DAPOLoss(dual_clip=3.5), ["clip(r, 0.8, 1.28) A), at most 3.5 |A| where A < 0", "(1/N) sum_it u"]),
    (CISPOLoss(ratio_cap=4.5), ["u = -sg(min(r, 4.5)) A logprobs"]),
    (GSPOLoss(), ["clip(s, 0.9997, 1.0004)", "(1/B) sum_i (1/n_i) sum_t u"]),
    (GSPOTokenLoss(clip_low=1e-3), ["clip(s, 0.999, 1.0004)"]),
    (SAPOLoss(tau_pos=1.5), ["tau = 1.5 where A > 0, else 1.05"]),
    (ReinforceLoss(ratio_min=0.1, ratio_max=10), ["u = -sg(clip(w, 0.1, 10)) A logprobs, w = exp(logprobs - gen_logprobs)"]),
    (ReinforceLoss(ratio_min=0.1), ["clip(w, 0.1, inf)"]),
    (ReinforceLoss(), ["u = -sg(w) A logprobs"]),
    (RLOOLoss(), ["u = -A logprobs", "A = R - mean of the prompt's 7 other samples"]),
    (ReinforcePlusPlusLoss(clip_high=0.33), ["clip(r, 0.8, 1.33)", "A_t = (G_t - mean) / std over all tokens of the rollout"]),
    (ReinforcePlusPlusBaselineLoss(beta=0.0007), ["clip(r, 0.8, 1.2) A) + 0.0007 k2", "0.0007 k2: expected gradient of KL(pi ||"]),
    (DPPOLoss(threshold=0.25, penalty=0.002), ["(p - q) sign(A) > 0.25", "0.002 log(w)^2"]),
    (NLLLoss(), ["u = -logprobs"]),
]


def test_every_shipped_class_is_among_those_tested():
    assert {type(loss).__name__ for loss, _ in SHIPPED} == set(losses.__all__) - {"PolicyLoss"}


@pytest.mark.parametrize(("loss", "shown"), SHIPPED, ids=lambda x: type(x).__name__)
def test_the_card_of_a_shipped_objective_shows_its_numbers_on_few_ascii_lines(loss, shown):
    text = card(loss, as_defined(loss))
    assert all(part in text for part in shown), text
    lines = text.splitlines()
    assert text.isascii() and len(lines) <= 25 and max(map(len, lines)) <= 160
    assert all(one[16:18] == "  " and one[18] != " " for one in lines), "the texts stand in one column"


FORMULAS = [loss for loss, _ in SHIPPED if not isinstance(loss, GSPOLoss | GSPOTokenLoss)]  # theirs is in words


@pytest.mark.parametrize("loss", FORMULAS, ids=lambda loss: type(loss).__name__)
def test_the_formula_on_the_card_evaluates_to_the_loss(loss):
    generator = torch.Generator().manual_seed(0)
    policy, old, gen, ref = (-0.2 - 2 * torch.rand(40, 5, generator=generator, dtype=torch.float64) for _ in range(4))
    advantages = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    tensors = {"logprobs": policy, "old_logprobs": old, "gen_logprobs": gen}
    found = loss.evaluate(**tensors, ref_logprobs=ref, advantages=advantages, padding_mask=torch.ones_like(policy)).loss
    symbols = tensors | {"A": advantages, "p": policy.exp(), "q": gen.exp(), "k1": policy - ref, "k2": (policy - ref).square() / 2}
    symbols |= {"k3": (ref - policy).exp() - (ref - policy) - 1}
    torch.testing.assert_close(evaluated(loss.formula(), symbols), found)


def evaluated(formula: str, symbols: dict[str, Tensor]) -> Tensor:
    """The printed formula as it stands, "u = ..., r = ...": what it uses is explained after it, and symbols side by side multiply."""
    functions = {name: vars(torch)[name] for name in ("exp", "log", "sigmoid", "sign")}
    functions |= {"min": lambda a, b: a.minimum(torch.as_tensor(b, dtype=a.dtype)), "clip": torch.clamp, "sg": torch.detach}
    known = symbols | functions | {"inf": float("inf")}
    formula, _, bound = formula.replace(" |A| where A < 0", "").partition(", at most ") if "at most" in formula else (formula, "", "")
    bound, _, rest = bound.partition(", ")
    for definition in reversed(re.split(r", (?=\w+ = )", f"{formula}, {rest}" if rest else formula)):
        name, *_, text = definition.split(" = ")
        value, _, condition = text.partition(" where ")
        condition, _, other = condition.partition(", else ")
        known[name] = torch.where(*(run(x, known) for x in (condition, value, other))) if condition else run(value, known)
    u, a = known["u"], known["A"]
    return torch.where(a < 0, u.minimum(float(bound) * a.abs()), u) if bound else u


def run(text: str, known: dict) -> Tensor:
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text.replace("^", "**"))
    return eval(product, {}, known)


SAMPLER = {"old_logprobs": "sampler"}
LINES = [  # (loss, settings), a line's name, and what it says
    (GRPOLoss(), {}, "ratio", "the ratio is 1, and no bound on it acts"),
    (GRPOLoss(), {"old_logprobs": "trainer", "updates_per_rollout": 4}, "ratio", "before the rollout's first of 4 updates, by the trainer"),
    (GRPOLoss(), {"old_logprobs": "sampler"}, "ratio", "old_logprobs are the sampler's"),
    (ReinforceLoss(), {}, "ratio", "against gen_logprobs, the sampler's"),
    (RLOOLoss(), {}, "ratio", "none: nothing but the correction"),
    (GRPOLoss(), {}, "correction", "none"),
    (GRPOLoss(), {"correction": Truncated(cap=2.5)}, "correction", "u x w, w = min(rho, 2.5), rho = sg(pi) / pi_sampler"),
    (GRPOLoss(), {"correction": Truncated(), **SAMPLER}, "correction", "u x w / rho (u holds a ratio to the sampler), w = min(rho, 2)"),
    (RLOOLoss(), {"correction": Truncated(), **SAMPLER}, "correction", "u x w, w = min(rho, 2), rho = sg(pi) / pi_sampler"),
    (GRPOLoss(), {"correction": Masked(high=4), "old_logprobs": "trainer"}, "correction", "where rho is in 0.5 .. 4, else 0, rho = pi_o"),
    (GRPOLoss(), {"correction": SequenceMasked()}, "correction", "rho where the geometric mean over its sequence is in 0.999 .. 1.002"),
    (GRPOLoss(), {"correction": SequenceMasked(statistic="product")}, "correction", "rho where the product over its sequence is in"),
    (GRPOLoss(), {"correction": Uncorrected()}, "correction", "none"),
    (GRPOLoss(), {"correction": torch.minimum}, "correction", "w = minimum(rho, mask)"),
    (DPPOLoss(), {"correction": Truncated()}, "correction", "none: the loss weighs the sampler's tokens itself"),
    (GRPOLoss(), {"n_samples": 16}, "advantage", "A = (R - mean) / (std + 1e-06) over a prompt's 16 samples, std unbiased [group_zscore]"),
    (GRPOLoss(beta=0.0), {}, "KL in the loss", "none (weight 0)"),
    (Twice(), {}, "at a token", "u = Twice.per_token(advantages, logprobs, old_logprobs)"),
    (Whole(), {}, "at a token", "its author's own formula: a scalar of advantages, logprobs, padding_mask"),
    (Whole(), {}, "averaging", "evaluated once per step on the whole [B, T], at the cost of one more forward pass"),
    (GRPOLoss(), {"kl_in_reward": 0.01}, "KL in the reward", "R less 0.01 k1 summed over the answer"),
    (ReinforcePlusPlusLoss(), {"kl_in_reward": 0.01}, "KL in the reward", "R less 0.01 k1 at each token"),
    (GRPOLoss(), {"entropy_coef": 0.003}, "entropy", "loss less 0.003 x the exact entropy of each position, averaged as u"),
    (Whole(), {"entropy_coef": 0.003}, "entropy", "averaged over the step's tokens"),
    (GRPOLoss(), {"top_entropy": 0.2}, "kept tokens", "u of the 20% of the step's tokens with the highest entropy"),
    (GRPOLoss(), {}, "who counts", "also where seq_len = 4096 cut it off"),
    (GRPOLoss(), {"mask_truncated": True, "max_new_tokens": 99}, "who counts", "none cut off at max_new_tokens = 99, not in denom"),
    (GRPOLoss(), {"mask_truncated": True, "stop": True}, "who counts", "in denominators either (one ended by a stop string counts)"),
    (GRPOLoss(), {"temperature": 0.7}, "temperature", "softmax(logits / 0.7), as sampled; gradients carry 1/0.7 = 1.43"),
    (GRPOLoss(), {"learning_rate": 3e-6}, "weights", "learning rate 3e-06; computed in bfloat16, stored in float32"),
]


@pytest.mark.parametrize(("loss", "changes", "name", "says"), LINES)
def test_a_line_of_the_card_follows_its_settings(loss, changes, name, says):
    text = card(loss, given(loss, changes))
    (found,) = [one for one in text.splitlines() if one.startswith(f"{name}  ")]
    assert says in found and len(found) <= 160


def test_an_advantage_function_of_ones_own_is_named_with_its_options():
    text = card(GRPOLoss(), replace(DEFAULT, advantage="mine.py:Best", advantage_options={"of": 3}))
    assert "A by a function of its own, 8 samples a prompt [mine.py:Best, of=3]" in text


def test_a_loss_that_computes_something_else_than_its_parent_is_warned_of_nothing_that_is_its_parents():
    assert any("k3" in one for one in lint(GRPOLoss(beta=0.1), DEFAULT)) and lint(Twice(beta=0.1), DEFAULT) == []


# The linter: each rule with settings that trigger it and settings that do not


def test_the_defaults_give_no_warning():
    assert lint(LOSS, DEFAULT) == []


@pytest.mark.parametrize("loss", [loss for loss, _ in SHIPPED if "advantages" in loss.needs()], ids=lambda loss: type(loss).__name__)
def test_a_shipped_objective_as_it_is_defined_gives_notes_at_most_about_what_was_set(loss):
    defaults = type(loss)(max_tokens=1024) if isinstance(loss, DrGRPOLoss) else type(loss)()
    found = lint(defaults, as_defined(defaults))
    assert all("k3" in message and message.startswith("note: ") for message in found), found  # SimpleGRPOLoss has a beta


STALE, SEVERAL = SAMPLER | {"max_policy_age": 1}, SAMPLER | {"updates_per_rollout": 4}
TRIGGERS = [  # what the message must say, then (loss, settings) that trigger it and that do not
    ("loss: NLLLoss does not ask for advantages", (NLLLoss(), {}), (RLOOLoss(), {})),
    (
        "grpo.advantage: leave_one_out has the reward's own scale, and GRPOLoss is defined with group_zscore",
        (GRPOLoss(), {"advantage": "leave_one_out"}),
        (RLOOLoss(), {"advantage": "leave_one_out"}),
    ),
    (
        "grpo.advantage: group_zscore has a scale of 1, and DrGRPOLoss is defined with group_centred",
        (DrGRPOLoss(max_tokens=9), {"advantage": "group_zscore"}),
        (Whole(), {"advantage": "group_zscore"}),
    ),
    (
        "note: grpo.advantage: RLOOLoss is defined with leave_one_out; group_centred is (n - 1) / n times",
        (RLOOLoss(), {"advantage": "group_centred"}),
        (DrGRPOLoss(max_tokens=9), {"advantage": "group_centred"}),
    ),
    (
        "note: grpo.advantage: ReinforcePlusPlusLoss is defined with token_whitened, and the run uses batch_zscore",
        (ReinforcePlusPlusLoss(), {"advantage": "batch_zscore"}),
        (GRPOLoss(), {"advantage": "parts_zscore"}),
    ),
    (
        "note: grpo.advantage: GRPOLoss is defined with group_zscore, and the run uses batch_zscore",
        (GRPOLoss(), {"advantage": "batch_zscore"}),
        (GRPOLoss(), {"advantage": "batch_zscore", "n_samples": 1}),
    ),
    ("grpo.n_samples=1 with group_zscore", (GRPOLoss(), {"n_samples": 1}), (GRPOLoss(), {"n_samples": 1, "advantage": "batch_zscore"})),
    ("grpo.n_samples=2 with group_zscore", (GRPOLoss(), {"n_samples": 2}), (GRPOLoss(), {"n_samples": 3})),
    ("loss.clip_high=0.2 hardly ever acts", (GSPOLoss(clip_high=0.2), {}), (GSPOLoss(clip_high=0.01), {})),
    ("loss.clip_low=0.2 hardly ever acts", (GSPOTokenLoss(clip_low=0.2), {}), (GRPOLoss(clip_low=0.2), {})),
    ("loss.clip_high=1 clips the ratio at 2", (GRPOLoss(clip_high=1.0), {}), (GRPOLoss(), {})),
    ("loss.clip_high=1.28 clips the ratio at 2.28", (DAPOLoss(clip_high=1.28), {}), (DAPOLoss(clip_high=0.9), {})),
    ("loss.dual_clip=1.28 is within the clip, 1 + clip_high = 1.28", (DAPOLoss(dual_clip=1.28), {}), (DAPOLoss(), {})),
    ("loss.dual_clip=1.25 is within the clip, 1 + clip_high = 1.28", (DAPOLoss(dual_clip=1.25), {}), (DAPOLoss(dual_clip=1.3), {})),
    (
        "loss.max_tokens=3000 and grpo.max_new_tokens=1000 differ: gradients are 0.333 times",
        (DrGRPOLoss(max_tokens=3000), {"max_new_tokens": 1000}),
        (DrGRPOLoss(max_tokens=1000), {"max_new_tokens": 1000}),
    ),
    ("loss.max_tokens=500 and", (DrGRPOLoss(max_tokens=500), {"max_new_tokens": 1000}), (GRPOLoss(), {"max_new_tokens": 1000})),
    ("more than training.seq_len=4096", (DrGRPOLoss(max_tokens=5000), {}), (DrGRPOLoss(max_tokens=4096), {})),
    ("loss.kl=k1 with loss.beta=0.1", (GRPOLoss(beta=0.1, kl="k1"), {}), (GRPOLoss(kl="k1"), {})),
    ("note: grpo.beta=0.1 with k3", (GRPOLoss(beta=0.1), {"home": "grpo"}), (GRPOLoss(beta=0.1, kl="k3_ratio"), {"home": "grpo"})),
    ("note: loss.beta=0.1 with k3", (SimpleGRPOLoss(), {}), (SimpleGRPOLoss(beta=0.0), {})),
    (
        "grpo.kl_in_reward=0.01 and loss.beta=0.2: the KL to the reference is penalised twice",
        (ReinforcePlusPlusBaselineLoss(beta=0.2), {"kl_in_reward": 0.01}),
        (ReinforcePlusPlusBaselineLoss(), {"kl_in_reward": 0.01}),
    ),
    (
        "grpo.top_entropy=0.2 with loss.beta=0.1",
        (GRPOLoss(beta=0.1, kl="k2"), {"top_entropy": 0.2}),
        (GRPOLoss(), {"top_entropy": 0.2}),
    ),
    (
        "grpo.kl_in_reward=0.01 with group_zscore: where a prompt's samples earn the same",
        (GRPOLoss(), {"kl_in_reward": 0.01}),
        (RLOOLoss(), {"kl_in_reward": 0.01}),
    ),
    (
        "note: grpo.mask_truncated with grpo.stop",
        (GRPOLoss(), {"mask_truncated": True, "stop": True}),
        (GRPOLoss(), {"mask_truncated": True}),
    ),
    (
        "grpo.correction: training.updates_per_rollout=4, but SimpleGRPOLoss has no ratio",
        (SimpleGRPOLoss(beta=0.0), {"updates_per_rollout": 4}),
        (SimpleGRPOLoss(beta=0.0), {**SEVERAL, "correction": Truncated()}),
    ),
    (
        "data up to 2 versions old (grpo.max_policy_age, training.sync_interval), but RLOOLoss has no ratio",
        (RLOOLoss(), {"max_policy_age": 1, "sync_interval": 2, "correction": Uncorrected()}),
        (RLOOLoss(), {"correction": Uncorrected()}),
    ),
    ("but Whole has no ratio", (Whole(), {"sync_interval": 2}), (Whole(), {})),
    (
        "grpo.correction: data up to 1 versions old (grpo.max_policy_age, training.sync_interval), but the ratio starts at the trainer's",
        (GRPOLoss(), {"max_policy_age": 1, "old_logprobs": "trainer"}),
        (GRPOLoss(), {"updates_per_rollout": 4, "old_logprobs": "trainer"}),
    ),
    (
        "grpo.correction.cap=0.5 is below 1",
        (GRPOLoss(), {"correction": Truncated(cap=0.5)}),
        (GRPOLoss(), {"correction": Truncated(cap=1)}),
    ),
    (
        "grpo.correction.statistic=product with answers of up to 4096 tokens: a gap of 0.02 a token is a factor 3.6",
        (GRPOLoss(), {"correction": SequenceMasked(statistic="product", high=2)}),
        (GRPOLoss(), {"correction": SequenceMasked(statistic="product", high=2), "max_new_tokens": 512}),
    ),
    (
        "answers of up to 600 tokens",
        (GRPOLoss(), {"correction": SequenceMasked(statistic="product"), "max_new_tokens": 600}),
        (GRPOLoss(), {"correction": SequenceMasked(), "max_new_tokens": 600}),
    ),
    (
        "grpo.correction=Masked has no effect",
        (DPPOLoss(), {"correction": Masked()}),
        (DPPOLoss(), {**STALE, "correction": Truncated()}),
    ),
    (
        "grpo.correction=Truncated has no effect",
        (DPPOLoss(), {"correction": Truncated(cap=4)}),
        (GRPOLoss(), {"correction": Truncated(cap=4)}),
    ),
    (
        "grpo.correction.cap=2 truncates before loss.ratio_cap=5 can",
        (CISPOLoss(), {**SEVERAL, "correction": Truncated()}),
        (CISPOLoss(ratio_cap=2), {**SEVERAL, "correction": Truncated()}),
    ),
    (
        "grpo.correction.cap=2 truncates before loss.dual_clip=3 can",
        (DAPOLoss(dual_clip=3), {**STALE, "correction": Truncated()}),
        (DAPOLoss(dual_clip=3), {"correction": Truncated()}),
    ),
    ("loss.ratio_max=null", (ReinforceLoss(), {**STALE, "correction": Truncated()}), (ReinforceLoss(ratio_max=2), STALE)),
    (
        "training.learning_rate=1e-06 with weights stored in bfloat16",
        (GRPOLoss(), {"fp32_masters": False}),
        (GRPOLoss(), {"fp32_masters": False, "dtype": "float32"}),
    ),
    ("note: grpo.temperature=0.7", (GRPOLoss(), {"temperature": 0.7}), (GRPOLoss(), {"temperature": 1.0})),
    ("no gradient passes through it in a whole-batch loss", (WholeWithEntropy(), {}), (Whole(), {})),
]


@pytest.mark.parametrize(("message", "wrong", "right"), TRIGGERS, ids=[m for m, *_ in TRIGGERS])
def test_a_foot_gun_is_named_where_it_is_and_not_where_it_is_not(message, wrong, right):
    found = lint(wrong[0], given(*wrong))
    assert [one for one in found if message in one], found
    assert all(re.match(r"(note: )?(grpo\.|loss[.:]|training\.)", one) and one.isascii() and "\n" not in one for one in found)
    assert not [one for one in lint(right[0], given(*right)) if shared(message) in re.sub(r"[\d.]+", "#", one)]


def shared(message: str) -> str:
    """What a rule says whatever the numbers."""
    return re.sub(r"[\d.]+", "#", message)
