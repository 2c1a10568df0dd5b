"""Laws of the objectives: golden values and gradients, what each one's formula promises, and what all of them share."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

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
    advantages,
)
from losses.contract import is_whole_batch, token_weights, whole_batch_loss
from tests.test_losses import GOLDEN, CustomLoss, golden_tensors, gradient

OBJECTIVES = [
    GRPOLoss(),
    GRPOLoss(clip_low=0.1, clip_high=0.1, beta=0.3),
    *(GRPOLoss(beta=0.3, kl=kl, averaging="prompt") for kl in ("k1", "k2", "k3_ratio")),
    SimpleGRPOLoss(beta=0.1),
    SimpleGRPOLoss(beta=0.0),
    DrGRPOLoss(max_tokens=7),
    DAPOLoss(),
    DAPOLoss(dual_clip=1.25, averaging="prompt"),
    CISPOLoss(),
    CISPOLoss(ratio_cap=1.0, averaging="prompt"),
    GSPOLoss(),
    GSPOLoss(clip_low=0.2, clip_high=0.2),
    GSPOTokenLoss(),
    GSPOTokenLoss(clip_low=0.2, clip_high=0.2),
    SAPOLoss(),
    ReinforceLoss(),
    ReinforceLoss(clip_ratio=0.2),
    ReinforceLoss(ratio_min=0.1, ratio_max=10, averaging="sum"),
    RLOOLoss(),
    ReinforcePlusPlusLoss(),
    ReinforcePlusPlusBaselineLoss(beta=0.3),
    DPPOLoss(),
    DPPOLoss(threshold=0.01, penalty=0.0),
    NLLLoss(),
]
GROUPS = [0, 0, 1, 1]
every_objective = pytest.mark.parametrize("loss", OBJECTIVES, ids=lambda loss: type(loss).__name__)


def tensors_with(kind: str) -> dict[str, Tensor]:
    """The golden tensors with advantages of that name; "whitened": centred, then z-scores over all tokens, population std."""
    tensors = golden_tensors()
    if kind == "whitened":
        centred = torch.tensor(GOLDEN["advantages"]["centred"], dtype=torch.float64)[:, None].expand(4, 4)
        tokens = centred[tensors["padding_mask"] == 1]
        tensors["advantages"] = (centred - tokens.mean()) / tokens.std(correction=0)
    else:
        tensors["advantages"] = torch.tensor(GOLDEN["advantages"][kind], dtype=torch.float64)[:, None]
    return tensors


def weights_of(loss: PolicyLoss, tensors: dict[str, Tensor]) -> Tensor:
    """[B, 1], each sequence's share of the step per token."""
    lengths = tensors["padding_mask"].sum(1).int().tolist()
    weights = token_weights(loss.averaging, lengths, groups=GROUPS, max_tokens=loss.max_tokens)
    return torch.tensor(weights, dtype=torch.float64)[:, None]


def assert_golden(value: Tensor, tensors: dict[str, Tensor], key: str) -> None:
    expected = GOLDEN["expected"][key]
    assert value.item() == pytest.approx(expected["value"], abs=1e-8)
    assert_close(gradient(value, tensors), torch.tensor(expected["grad"], dtype=torch.float64), rtol=0, atol=1e-8)


PURE_KL = {name: GRPOLoss(beta=1.0, kl=name, averaging="token") for name in ("k1", "k2", "k3")}  # for advantages of 0
DAPO = "dapo clip .2/.28"
GOLDEN_CASES = {
    "simple_grpo beta=.1 (ratio 1, k3, sequence mean, zscore)": (SimpleGRPOLoss(beta=0.1), "zscore"),
    "grpo clip .2/.2 beta 0 (sequence mean, zscore)": (GRPOLoss(clip_high=0.2), "zscore"),
    "grpo clip .2/.28 beta .04 k3 (sequence mean, zscore)": (GRPOLoss(beta=0.04), "zscore"),
    "dr_grpo clip .2/.2 constant=T (centred)": (DrGRPOLoss(max_tokens=4), "centred"),
    f"{DAPO} (token mean, zscore)": (DAPOLoss(), "zscore"),
    f"{DAPO} dual clip 1.25 (token mean, zscore)": (DAPOLoss(dual_clip=1.25), "zscore"),
    "cispo ratio cap 5 (token mean, zscore)": (CISPOLoss(), "zscore"),
    "gspo 3e-4/4e-4 (zscore)": (GSPOLoss(), "zscore"),
    "gspo .2/.2 (zscore)": (GSPOLoss(clip_low=0.2, clip_high=0.2), "zscore"),
    "sapo tau 1.0/1.05 (sequence mean, zscore)": (SAPOLoss(), "zscore"),
    "rloo (leave one out, sum over tokens, mean over sequences, no ratio)": (RLOOLoss(), "leave_one_out"),
    "reinforce IS clip [0, 2] against the sampler (token mean, zscore)": (ReinforceLoss(ratio_max=2.0), "zscore"),
    **{f"{name} token mean": (loss, None) for name, loss in PURE_KL.items()},
}
CORRECTED_CASES = {
    f"{DAPO}, truncated IS C=2 (token mean, zscore)": lambda w: w.clamp(max=2),
    f"{DAPO}, icepop [.5, 5] (token mean, zscore)": lambda w: torch.where((w >= 0.5) & (w <= 5), w, 0),
}


def test_every_golden_entry_is_tested():
    assert GOLDEN_CASES.keys() | CORRECTED_CASES.keys() == GOLDEN["expected"].keys()


@pytest.mark.parametrize("key", GOLDEN_CASES)
def test_values_and_gradients_are_the_golden_ones(key):
    loss, kind = GOLDEN_CASES[key]
    tensors = tensors_with(kind or "zscore")
    if kind is None:
        tensors["advantages"] = torch.zeros(4, 1, dtype=torch.float64)
    assert_golden(loss(**tensors), tensors, key)


@pytest.mark.parametrize("key", CORRECTED_CASES)
def test_weights_for_the_samplers_gap_multiply_the_loss_of_each_token(key):
    tensors, loss = golden_tensors(), DAPOLoss()
    weight = CORRECTED_CASES[key](torch.exp(tensors["old_logprobs"] - tensors["gen_logprobs"]))
    assert_golden((loss.evaluate(**tensors).loss * weight * weights_of(loss, tensors)).sum(), tensors, key)


@pytest.mark.parametrize(
    ("loss", "kind", "value", "norm"),
    [
        (GRPOLoss(clip_high=0.2, beta=0.04), "zscore", 0.05250156, 0.21551466),
        (GSPOTokenLoss(clip_low=0.2, clip_high=0.2), "zscore", 0.03880498, 0.25106797),
        (ReinforcePlusPlusLoss(), "whitened", 0.06074067, 0.24879349),
        (ReinforcePlusPlusBaselineLoss(), "whitened", 0.06074067, 0.24879349),
        (DAPOLoss(dual_clip=3.0), "zscore", 0.10188529, 0.28994247),
        (DPPOLoss(), "zscore", 0.19860809, 0.35614818),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, PolicyLoss) else None,
)
def test_more_values_and_gradient_norms(loss, kind, value, norm):
    tensors = tensors_with(kind)
    result = loss(**tensors)
    assert result.item() == pytest.approx(value, abs=1e-8)
    assert gradient(result, tensors).norm().item() == pytest.approx(norm, abs=1e-8)


def test_a_dual_clip_above_the_upper_clip_is_a_bound_on_the_ratio():
    """INTELLECT-2's form: min(min(r, d) A, clip(r) A). On GRPO's golden numbers, then at random."""
    tensors, loss = golden_tensors(), DAPOLoss(clip_high=0.2, dual_clip=1.25)
    value = (loss.evaluate(**tensors).loss * weights_of(GRPOLoss(), tensors)).sum()
    assert value.item() == pytest.approx(0.04305220, abs=1e-8)
    assert gradient(value, tensors).norm().item() == pytest.approx(0.19531050, abs=1e-8)

    torch.manual_seed(0)
    advantage, ratio = torch.randn(1, 10_000, dtype=torch.float64), torch.randn(1, 10_000, dtype=torch.float64).exp()
    for bound in (1.3, 3.0, 4.0):
        given = {"logprobs": ratio.log(), "old_logprobs": torch.zeros_like(ratio), "padding_mask": torch.ones_like(ratio)}
        output = DAPOLoss(dual_clip=bound).evaluate(**given, advantages=advantage)
        expected = -torch.min(ratio.clamp(max=bound) * advantage, ratio.clamp(0.8, 1.28) * advantage)
        assert_close(output.loss, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(output.metrics["dual_clip"].bool(), (advantage < 0) & (ratio > bound))


def test_dapo_as_printed_weighs_prompts_equally_and_its_code_weighs_tokens_equally():
    tensors = golden_tensors()
    printed = DAPOLoss(averaging="prompt")(**tensors, groups=GROUPS)
    halves = [DAPOLoss()(**{name: tensor[rows] for name, tensor in tensors.items()}) for rows in ([0, 1], [2, 3])]
    assert_close(printed, (halves[0] + halves[1]) / 2)
    equal = {**tensors, "padding_mask": torch.ones(4, 4, dtype=torch.float64)}
    assert_close(DAPOLoss(averaging="prompt")(**equal, groups=GROUPS), DAPOLoss()(**equal))


@pytest.mark.parametrize("clips", [{}, {"clip_low": 0.2, "clip_high": 0.2}])
def test_gspo_and_gspo_token_have_one_value_and_gradient_where_a_sequence_has_one_advantage(clips):
    tensors = golden_tensors()
    whole, token = GSPOLoss(**clips)(**tensors), GSPOTokenLoss(**clips)(**tensors)
    assert_close(whole, token, rtol=1e-12, atol=1e-12)
    assert_close(gradient(whole, tensors), gradient(token, tensors), rtol=1e-12, atol=1e-12)


def test_gspos_value_is_one_clipped_term_per_sequence():
    tensors = golden_tensors()
    terms = []
    for row, n in enumerate(GOLDEN["lengths"]):
        s = torch.exp((tensors["logprobs"] - tensors["old_logprobs"])[row, :n].mean())
        a = tensors["advantages"][row, 0]
        terms.append(-torch.min(s * a, s.clamp(0.8, 1.2) * a))
    assert_close(GSPOLoss(clip_low=0.2, clip_high=0.2)(**tensors), sum(terms) / 4)


def test_sapos_gradient_is_grpos_on_policy_and_fades_where_the_ratio_leaves_one():
    tensors = golden_tensors()
    del tensors["old_logprobs"]
    for loss in (SAPOLoss(), SAPOLoss(tau_pos=3.0, tau_neg=0.2)):
        assert_close(gradient(loss(**tensors), tensors), gradient(GRPOLoss()(**tensors), tensors), rtol=1e-12, atol=1e-12)
    for sign in (1.0, -1.0):
        tensors["advantages"] = torch.full((4, 1), sign, dtype=torch.float64)
        far = {**tensors, "old_logprobs": tensors["logprobs"].detach() - 2.0}
        sizes = [gradient(SAPOLoss()(**given), given).norm() for given in (tensors, far)]
        assert sizes[1] < 0.1 * sizes[0]


def test_cispo_and_reinforce_keep_every_tokens_gradient_where_grpo_drops_some():
    tensors = golden_tensors()
    real = tensors["padding_mask"] == 1
    for loss in (CISPOLoss(ratio_cap=1.2), ReinforceLoss(ratio_max=1.2)):
        assert (gradient(loss(**tensors), tensors)[real] != 0).all()
        assert loss.evaluate(**tensors).metrics["clip_high"].any()
    assert (gradient(GRPOLoss()(**tensors), tensors)[real] == 0).any()


def test_reinforces_bounds_are_those_of_clip_ratio():
    tensors = golden_tensors()
    short, long = ReinforceLoss(clip_ratio=0.25), ReinforceLoss(ratio_min=0.75, ratio_max=1.25)
    assert torch.equal(gradient(short(**tensors), tensors), gradient(long(**tensors), tensors))
    metrics = long.evaluate(**tensors).metrics
    weight = torch.exp(tensors["logprobs"].detach() - tensors["gen_logprobs"])
    real = tensors["padding_mask"] == 1
    assert torch.equal(metrics["clip_low"].bool(), (weight < 0.75) & real) and metrics["clip_low"].any()
    assert torch.equal(metrics["clip_high"].bool(), (weight > 1.25) & real) and metrics["clip_high"].any()
    assert ReinforceLoss().evaluate(**tensors).metrics.keys() == {"ratio"}


def test_dppo_masks_probabilities_that_moved_too_far_with_their_advantage_and_keeps_the_denominator():
    policy, sampler = torch.tensor([[0.75, 0.75, 0.25, 0.25, 0.02]]), torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.001]])
    advantage = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    logprobs = policy.log().requires_grad_()
    loss, given = DPPOLoss(penalty=0.0), {"gen_logprobs": sampler.log(), "advantages": advantage, "padding_mask": torch.ones(1, 5)}
    assert loss.evaluate(logprobs=logprobs, **given).metrics["masked"].tolist() == [[1, 0, 0, 1, 0]]
    grad = torch.autograd.grad(loss(logprobs=logprobs, **given), logprobs)[0]
    assert_close(grad, torch.tensor([[0.0, 1.5, -0.5, 0.0, -20.0]]) / 5)


WITH_ADVANTAGES = [loss for loss in OBJECTIVES if not isinstance(loss, NLLLoss)]


@pytest.mark.parametrize(
    ("loss", "per_token_advantages"),
    [(loss, each) for loss in WITH_ADVANTAGES for each in (False, True) if not (each and isinstance(loss, GSPOLoss))],
    ids=lambda case: type(case).__name__ if isinstance(case, PolicyLoss) else None,
)
def test_on_policy_the_gradient_is_minus_the_weighted_advantage(loss, per_token_advantages):
    tensors = golden_tensors()
    if per_token_advantages:
        tensors["advantages"] = tensors["advantages"] + torch.linspace(-1, 1, 4)
    del tensors["old_logprobs"], tensors["gen_logprobs"]  # the policy's own
    tensors["ref_logprobs"] = tensors["logprobs"].detach()
    expected = -tensors["advantages"] * weights_of(loss, tensors) * tensors["padding_mask"]
    found = gradient(loss(**tensors, groups=GROUPS), tensors)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12) == loss.centred


@every_objective
def test_a_loss_looks_at_other_tokens_exactly_if_it_is_not_declared_elementwise(loss):
    """By values, for a detached factor shows in no Jacobian."""
    tensors = golden_tensors()
    before = loss.evaluate(**tensors).loss
    moved = torch.zeros(4, 4, dtype=torch.bool)
    for row, t in product(range(4), range(4)):
        logprobs = tensors["logprobs"].detach().clone()
        logprobs[row, t] -= 0.05
        changed = loss.evaluate(**{**tensors, "logprobs": logprobs}).loss != before
        changed[row, t] = False
        moved |= changed
    assert moved.any() != loss.elementwise


def partitions(rows: list[int]):
    """All ways to split the rows into micro-batches."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [rows[0], *rest[i]], *rest[i + 1 :]]


@every_objective
def test_no_split_into_micro_batches_changes_the_gradient(loss):
    tensors = golden_tensors()
    tensors["padding_mask"][2, 1] = 0  # a hole, as a tool's answer would leave
    expected = loss(**tensors, groups=GROUPS)
    weights = weights_of(loss, tensors)
    for split in partitions([0, 1, 2, 3]):
        total = tensors["logprobs"].new_zeros(())
        for rows in split:
            output = loss.evaluate(**{name: tensor[rows] for name, tensor in tensors.items()})
            total = total + (output.loss * weights[rows]).sum()
        assert_close(total, expected, rtol=1e-12, atol=1e-12)
        assert_close(gradient(total, tensors), gradient(loss(**tensors, groups=GROUPS), tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [*OBJECTIVES, CustomLoss()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("garbage", [1e4, -1e4, math.inf, math.nan])
def test_whatever_lies_in_the_padding_changes_nothing(loss, garbage):
    tensors = golden_tensors()
    tensors["advantages"] = tensors["advantages"].expand(4, 4)
    padding = tensors["padding_mask"] == 0
    run = whole_batch_loss if is_whole_batch(loss) else lambda loss, **given: loss(**given)
    expected = run(loss, **tensors)
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "gen_logprobs", "advantages"):
        dirty = {**tensors, name: tensors[name].detach().masked_fill(padding, garbage)}
        dirty["logprobs"] = dirty["logprobs"].detach().requires_grad_()
        value = run(loss, **dirty)
        grad = gradient(value, dirty)
        assert torch.equal(value, expected)
        assert torch.equal(grad, gradient(run(loss, **tensors), tensors))
        assert (grad[padding] == 0).all()


@every_objective
def test_wider_rows_change_nothing(loss):
    tensors = golden_tensors()
    wide = {name: tensor.detach() for name, tensor in tensors.items()}
    wide = {name: t if t.shape[1] == 1 else torch.cat([t, torch.zeros_like(t)], 1) for name, t in wide.items()}
    wide["logprobs"].requires_grad_()
    expected, value = loss(**tensors, groups=GROUPS), loss(**wide, groups=GROUPS)
    assert_close(value, expected, rtol=1e-12, atol=1e-12)
    grad = gradient(value, wide)
    assert_close(grad[:, :4], gradient(expected, tensors), rtol=1e-12, atol=1e-12)
    assert not grad[:, 4:].any()


@every_objective
def test_losses_stay_finite_at_log_ratios_of_thirty_in_fp32(loss):
    for gaps in product((-30.0, 0.0, 30.0), repeat=3):
        logprobs = torch.full((1, 2), -31.0, requires_grad=True)
        others = {f"{name}_logprobs": logprobs.detach() + gap for name, gap in zip(("old", "gen", "ref"), gaps, strict=True)}
        value = loss(logprobs=logprobs, **others, advantages=torch.tensor([[1.0, -1.0]]), padding_mask=torch.ones(1, 2))
        assert value.isfinite() and torch.autograd.grad(value, logprobs)[0].isfinite().all()


def test_absent_old_and_sampler_logprobs_are_the_policys_own():
    tensors = golden_tensors()
    own = tensors["logprobs"].detach()
    bare = {name: tensors[name] for name in ("logprobs", "ref_logprobs", "advantages", "padding_mask")}
    for loss in OBJECTIVES:
        expected = loss(**bare, old_logprobs=own, gen_logprobs=own)
        assert torch.equal(loss(**bare), expected)
        assert torch.equal(gradient(loss(**bare), tensors), gradient(expected, tensors))


@every_objective
def test_inputs_are_never_edited_and_metrics_carry_no_gradient(loss):
    tensors = golden_tensors()
    loss(**tensors).backward()
    for name, tensor in golden_tensors().items():
        assert torch.equal(tensors[name], tensor)
    metrics = loss.per_token(**{name: tensors[name] for name in loss.needs()})
    assert isinstance(metrics, Tensor) or not any(values.requires_grad for values in metrics.metrics.values())


@every_objective
def test_a_reference_is_needed_exactly_when_the_kl_has_a_weight(loss):
    tensors = golden_tensors()
    del tensors["ref_logprobs"]
    assert loss.needs_reference == (vars(loss).get("beta", 0) > 0)
    if loss.needs_reference:
        with pytest.raises(ValueError, match="set beta to 0"):
            loss(**tensors)
    else:
        assert "kl" not in loss.evaluate(**tensors).metrics


def test_every_exported_objective_is_under_these_laws_and_names_an_advantage_that_exists():
    assert {type(loss).__name__ for loss in OBJECTIVES} == set(losses.__all__) - {"PolicyLoss"}
    assert {loss.advantage for loss in OBJECTIVES} <= vars(advantages).keys()
