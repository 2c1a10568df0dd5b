"""The contract of the losses: averaging, the KL estimators, which tensors a loss gets; the laws of each objective: test_objectives.py."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from batch import LossOutput
from config import Call
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
    SAPOLoss,
    SimpleGRPOLoss,
)
from losses.contract import (
    ARGUMENTS,
    forward_arguments,
    is_whole_batch,
    requires_reference,
    token_weights,
    whole_batch_loss,
)
from losses.kl import estimate, k3

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
NAMES = ("logprobs", "old_logprobs", "gen_logprobs", "ref_logprobs", "padding_mask")


class K3Loss(PolicyLoss):
    averaging = "token"

    def per_token(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return k3(logprobs, ref_logprobs)


# The guide's class, as it stands there.
CustomLoss = Call(f"{Path(__file__).parent}/data/guide/custom_loss.py:CustomLoss").target()


def golden_tensors() -> dict[str, Tensor]:
    tensors = {name: torch.tensor(GOLDEN[name], dtype=torch.float64) for name in NAMES}
    tensors["advantages"] = torch.tensor(GOLDEN["advantages"]["zscore"], dtype=torch.float64)[:, None]
    tensors["logprobs"].requires_grad_()
    return tensors


def gradient(value: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(value, tensors["logprobs"])[0]


def test_a_token_mean_over_two_ranks_is_the_mean_over_all_their_tokens():
    """LN-01: one token of loss 4 on rank 0, three of loss 1 on rank 1."""
    weights = token_weights("token", [1, 3])
    ranks = [torch.tensor([[-4.0]], requires_grad=True), torch.full((1, 3), -1.0, requires_grad=True)]
    total = torch.zeros(())
    for logprobs, weight in zip(ranks, weights, strict=True):
        output = NLLLoss().evaluate(logprobs=logprobs, padding_mask=torch.ones_like(logprobs))
        total = total + weight * output.loss.sum()
    assert total.item() == 1.75
    assert all((grad == -0.25).all() for grad in torch.autograd.grad(total, ranks))


class SequenceNLL(PolicyLoss):
    averaging = "sequence"

    def per_token(self, logprobs: Tensor) -> Tensor:
        return -logprobs


@pytest.mark.parametrize("loss", [NLLLoss(), SequenceNLL()], ids=lambda loss: loss.averaging)
def test_masked_answers_count_in_neither_numerator_nor_denominator(loss):
    """LN-05: two answers of four tokens, each of loss 1; the second cut off, then both."""
    for mask, expected in (([[1.0] * 4, [0.0] * 4], 1.0), ([[0.0] * 4] * 2, 0.0)):
        logprobs = torch.full((2, 4), -1.0, requires_grad=True)
        value = loss(logprobs=logprobs, padding_mask=torch.tensor(mask))
        assert value.item() == expected
        assert torch.equal(torch.autograd.grad(value, logprobs)[0], torch.tensor(mask) * -0.25)


@pytest.mark.parametrize("averaging", ["token", "sequence", "constant", "sum"])
def test_a_sequence_without_loss_tokens_changes_no_other_weight(averaging):
    full, empty = (token_weights(averaging, lengths, max_tokens=8) for lengths in ([1, 4], [1, 0, 4, 0]))
    assert empty == [full[0], 0.0, full[1], 0.0]
    assert token_weights(averaging, [0, 0], max_tokens=8) == [0.0, 0.0]


def test_averaging_by_a_constant_needs_the_constant():
    with pytest.raises(ValueError, match="max_tokens=None must be at least 1"):
        token_weights("constant", [1, 2])
    with pytest.raises(ValueError, match="not one of token, sequence, constant, sum"):
        token_weights("tokens", [1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [GRPOLoss(beta=0.3), NLLLoss(), K3Loss()], ids=lambda loss: type(loss).__name__)
def test_gradcheck_holds_away_from_kinks(loss):
    """Not for losses with a detached factor, which finite differences cannot see: golden gradients cover those."""
    tensors = golden_tensors()
    assert torch.autograd.gradcheck(lambda logprobs: loss(**{**tensors, "logprobs": logprobs}), tensors["logprobs"])


@pytest.mark.parametrize(("policy", "reference", "kl"), [(-1.0, -2.0, 0.36788), (-2.0, -1.0, 0.71828)])
@pytest.mark.parametrize("make", [GRPOLoss, SimpleGRPOLoss])
def test_the_loss_rises_by_beta_times_a_kl_that_is_never_negative(make, policy, reference, kl):
    """KL-01."""
    tensors = {"logprobs": torch.tensor([[policy]]), "ref_logprobs": torch.tensor([[reference]])}
    rest = {"advantages": torch.zeros(1, 1), "padding_mask": torch.ones(1, 1)}
    assert make(beta=0.1)(**tensors, **rest).item() == pytest.approx(0.1 * kl, abs=1e-6)
    assert make(beta=0.0)(**tensors, **rest).item() == 0.0
    assert make(beta=0.0).evaluate(**tensors, **rest).metrics["kl"].item() == pytest.approx(kl, abs=1e-5)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ("k1", (0.0, 0.0, 0.0, 0.0)),
        ("k2", (-0.04234, -0.13992, 0.35185, -0.16960)),  # of KL(pi || ref)
        ("k3", (0.02126, -0.14632, 0.28543, -0.16037)),  # of KL(ref || pi)
        ("k3_ratio", (-0.04234, -0.13992, 0.35185, -0.16960)),
    ],
)
def test_the_expected_gradient_of_a_kl_in_the_loss_is_the_stated_one(kl, expected):
    """By enumeration of a categorical over four tokens; and the exact gradients of both directions."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    reference = torch.tensor([0.1, 0.4, -0.3, 0.6], dtype=torch.float64).log_softmax(0)
    mean = (policy.exp().detach() * estimate(kl, policy, reference, policy.detach())).sum()
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=6e-6)
    directions = {
        "k1": policy.sum() * 0,
        "k3": (reference.exp() * (reference - policy)).sum(),
    }
    exact = directions.get(kl, (policy.exp() * (policy - reference)).sum())
    assert_close(found, torch.autograd.grad(exact, logits)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kl", ["k1", "k3", "k3_ratio"])
def test_the_expected_value_of_a_kl_is_the_kl_of_policy_to_reference(kl):
    policy, reference = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.3, -0.2, 0.9], [0.1, 0.4, -0.3]))
    mean = (policy.exp() * estimate(kl, policy, reference, policy)).sum()
    assert_close(mean, (policy.exp() * (policy - reference)).sum(), rtol=1e-12, atol=1e-12)


def test_the_ratio_of_k3_makes_it_right_for_tokens_of_an_older_policy():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    old, reference = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.0, 1.0, 0.5], [0.1, 0.4, -0.3]))
    mean, exact = (old.exp() * estimate("k3_ratio", policy, reference, old)).sum(), (policy.exp() * (policy - reference)).sum()
    assert_close(mean, exact, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (mean, exact)]
    assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "values"),
    [
        (GRPOLoss(beta=0.1, kl="k1"), (1.0, -1.0)),
        (GRPOLoss(beta=0.1, kl="k2"), (0.5, 0.5)),
        (GRPOLoss(beta=0.1, kl="k3"), (0.36788, 0.71828)),
        (GRPOLoss(beta=0.1, kl="k3_ratio"), (0.36788, 0.71828)),
        (ReinforcePlusPlusBaselineLoss(beta=0.1), (0.5, 0.5)),
    ],
)
def test_every_kl_has_its_right_sign_and_the_metric_is_never_negative(loss, values):
    """KL-01: a token of log-prob -1 under the policy and -2 under the reference, then the other way round."""
    for (policy, reference), value in zip([(-1.0, -2.0), (-2.0, -1.0)], values, strict=True):
        tensors = {"logprobs": torch.tensor([[policy]]), "ref_logprobs": torch.tensor([[reference]])}
        output = loss.evaluate(**tensors, advantages=torch.zeros(1, 1), padding_mask=torch.ones(1, 1))
        assert output.loss.item() == pytest.approx(0.1 * value, abs=1e-6)
        assert output.metrics["kl"].item() > 0


def test_k3_is_never_negative_and_exact_near_zero_in_fp32():
    logprobs = torch.linspace(-20, 0, 20001)
    assert (k3(logprobs, logprobs.flip(0)) >= 0).all()
    d = torch.tensor(1e-3)
    assert k3(torch.zeros(()), d).item() == pytest.approx(math.expm1(d.item()) - d.item(), rel=2e-4)


def test_the_clip_metrics_mark_the_tokens_whose_gradient_the_clip_removed():
    tensors = golden_tensors()
    loss = GRPOLoss(clip_low=0.2, clip_high=0.2)
    metrics = loss.evaluate(**tensors).metrics
    removed = (gradient(loss(**tensors), tensors) == 0) & (tensors["padding_mask"] == 1)
    assert torch.equal((metrics["clip_low"] + metrics["clip_high"]).bool(), removed)
    assert metrics["clip_low"].sum() == 2 and metrics["clip_high"].sum() == 1
    assert not any(values.requires_grad for values in metrics.values())


def test_the_guides_call_returns_a_scalar_for_every_loss():
    tensors = {name: golden_tensors()[name] for name in ("logprobs", "ref_logprobs", "advantages", "padding_mask")}
    for loss in (SimpleGRPOLoss(beta=0.1), ReinforceLoss(clip_ratio=0.2), GRPOLoss(beta=0.1), CustomLoss(0.2, 0.1)):
        assert loss(**tensors).shape == ()


def test_a_reference_that_a_signature_requires_is_asked_for():
    with pytest.raises(ValueError, match="K3Loss needs ref_logprobs"):
        K3Loss()(**{**golden_tensors(), "ref_logprobs": None})


def test_a_missing_tensor_is_named():
    for name in ("logprobs", "advantages", "padding_mask"):
        tensors = golden_tensors()
        del tensors[name]
        with pytest.raises(ValueError, match=f"needs {name}"):
            GRPOLoss()(**tensors)


def test_a_tensor_nobody_knows_is_named():
    with pytest.raises(ValueError, match="was given `logits`"):
        GRPOLoss()(**golden_tensors(), logits=torch.zeros(1))


def test_a_loss_gets_what_it_names_and_nothing_else():
    class Entropy(PolicyLoss):
        averaging = "sum"

        def per_token(self, logprobs: Tensor, *, entropy: Tensor) -> LossOutput:
            return LossOutput(-entropy, {"entropy": entropy})

    loss = Entropy()
    assert loss.needs() == {"logprobs", "entropy"} and not loss.needs_reference
    entropy = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    output = loss.evaluate(**golden_tensors(), entropy=entropy)
    assert not output.metrics["entropy"].requires_grad
    assert torch.equal(output.loss, -golden_tensors()["padding_mask"])
    with pytest.raises(ValueError, match="Entropy needs entropy"):
        loss(**golden_tensors())


def test_an_argument_that_no_trainer_has_is_refused_with_those_it_has():
    class Misspelt(PolicyLoss):
        averaging = "token"

        def per_token(self, logprobs: Tensor, old_logps: Tensor) -> Tensor:
            return logprobs - old_logps

    with pytest.raises(ValueError, match=f"asks for `old_logps`.*{', '.join(ARGUMENTS)}"):
        Misspelt().needs()
    with pytest.raises(ValueError, match="does not ask for `logprobs`"):
        forward_arguments(lambda advantages: advantages.sum())


def test_a_loss_that_does_not_say_who_is_averaged_is_refused_when_it_is_written():
    with pytest.raises(ValueError, match="who is averaged over whom"):

        class Undecided(PolicyLoss):
            def per_token(self, logprobs: Tensor) -> Tensor:
                return -logprobs


def test_a_per_token_loss_that_reduces_is_told_so():
    class Reduced(PolicyLoss):
        averaging = "token"

        def per_token(self, logprobs: Tensor) -> Tensor:
            return -logprobs.mean()

    with pytest.raises(ValueError, match="return one value per token"):
        Reduced()(**golden_tensors())


@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 2)])
def test_advantages_that_would_broadcast_wrongly_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be \[B, 1\] or \[B, T\]"):
        GRPOLoss()(**{**golden_tensors(), "advantages": torch.ones(shape)})


def test_the_guides_module_is_a_whole_batch_loss_that_requires_a_reference():
    loss = CustomLoss()
    assert is_whole_batch(loss) and not is_whole_batch(GRPOLoss())
    assert forward_arguments(loss) == {"logprobs", "ref_logprobs", "advantages", "padding_mask"}
    assert requires_reference(loss)
    tensors = golden_tensors()
    four = {name: tensors[name] for name in forward_arguments(loss)}
    assert torch.equal(whole_batch_loss(loss, **tensors), loss(**four))
    with pytest.raises(ValueError, match="CustomLoss needs ref_logprobs"):
        whole_batch_loss(loss, **{**tensors, "ref_logprobs": None})
    with pytest.raises(ValueError, match="is a class"):
        is_whole_batch(CustomLoss)


def test_a_signature_says_whether_a_reference_is_required():
    def unannotated(logprobs, ref_logprobs): ...
    def as_text(logprobs: "Tensor", ref_logprobs: "Tensor | None"): ...
    def defaulted(logprobs: Tensor, ref_logprobs=None): ...
    def without(logprobs: Tensor): ...

    assert [requires_reference(f) for f in (unannotated, as_text, defaulted, without)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (GRPOLoss, {"clip_low": 0.0}, "clip_low=0.0 must be above 0 and at most 1"),
        (GRPOLoss, {"clip_low": 1.2}, "clip_low=1.2"),
        (GRPOLoss, {"clip_high": -0.1}, "clip_high=-0.1 must be above 0"),
        (GRPOLoss, {"clip_high": math.nan}, "clip_high=nan"),
        (GRPOLoss, {"beta": -1.0}, "beta=-1.0 must be 0"),
        (GRPOLoss, {"kl": "k4"}, 'kl="k4" is not one of k1, k2, k3, k3_ratio'),
        (GRPOLoss, {"averaging": "constant"}, 'averaging="constant" is not one of .* a constant divisor is DrGRPOLoss'),
        (SimpleGRPOLoss, {"beta": math.inf}, "beta=inf"),
        (DrGRPOLoss, {"max_tokens": 0}, "max_tokens=0 must be at least 1.* generation budget"),
        (DAPOLoss, {"dual_clip": 1.0}, "dual_clip=1.0 must be above 1, or null"),
        (DAPOLoss, {"averaging": "sequence"}, 'averaging="sequence" is not one of token, prompt'),
        (DAPOLoss, {"clip_high": 0.0}, "clip_high=0.0 must be above 0"),
        (CISPOLoss, {"ratio_cap": 0.2}, r"ratio_cap=0.2 must be at least 1.* every token's weight the cap.* give 1 \+ epsilon"),
        (CISPOLoss, {"averaging": "mean"}, 'averaging="mean" is not one of sequence, token, prompt, sum'),
        (GSPOLoss, {"clip_low": -3e-4}, "clip_low=-0.0003 must be above 0"),
        (GSPOTokenLoss, {"clip_high": 0.0}, "clip_high=0.0 must be above 0"),
        (SAPOLoss, {"tau_pos": 0.0}, "tau_pos=0.0 must be above 0"),
        (SAPOLoss, {"tau_neg": math.nan}, "tau_neg=nan must be above 0"),
        (ReinforceLoss, {"clip_ratio": 0.0}, "clip_ratio=0.0 must be above 0"),
        (ReinforceLoss, {"clip_ratio": 0.2, "ratio_max": 2.0}, "clip_ratio=0.2 and ratio_min=0.0, ratio_max=2.0 both bound w"),
        (ReinforceLoss, {"clip_ratio": 0.2, "ratio_min": 0.1}, "clip_ratio=0.2 and ratio_min=0.1, ratio_max=None both bound w"),
        (ReinforceLoss, {"ratio_min": 1.5}, "ratio_min=1.5 must be 0 .* to 1"),
        (ReinforceLoss, {"ratio_max": 0.2}, "ratio_max=0.2 must be at least 1, or null"),
        (ReinforcePlusPlusLoss, {"clip_low": 2.0}, "clip_low=2.0 must be above 0"),
        (ReinforcePlusPlusBaselineLoss, {"beta": -0.1}, "beta=-0.1 must be 0"),
        (DPPOLoss, {"threshold": 0.0}, "threshold=0.0 must be above 0 and at most 1"),
        (DPPOLoss, {"penalty": -1e-3}, "penalty=-0.001 must be 0"),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_name_value_and_range(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
