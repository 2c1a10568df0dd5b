"""Laws of the losses: golden values, no trace of how a step is split, padding that cannot matter, contract checks."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from batch import LossOutput
from config import Call
from losses import GRPOLoss, NLLLoss, PolicyLoss, ReinforceLoss, SimpleGRPOLoss
from losses.contract import (
    ARGUMENTS,
    forward_arguments,
    is_whole_batch,
    requires_reference,
    token_weights,
    whole_batch_loss,
)
from losses.kl import k3

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
NAMES = ("logprobs", "old_logprobs", "gen_logprobs", "ref_logprobs", "padding_mask")
SHIPPED = [
    GRPOLoss(),
    GRPOLoss(clip_low=0.1, clip_high=0.1, beta=0.3),
    SimpleGRPOLoss(beta=0.1),
    SimpleGRPOLoss(beta=0.0),
    ReinforceLoss(),
    ReinforceLoss(clip_ratio=0.2),
    NLLLoss(),
]


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


def assert_golden(value: Tensor, grad: Tensor, key: str) -> None:
    expected = GOLDEN["expected"][key]
    assert value.item() == pytest.approx(expected["value"], abs=1e-8)
    assert_close(grad, torch.tensor(expected["grad"], dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        (SimpleGRPOLoss(beta=0.1), "simple_grpo beta=.1 (ratio 1, k3, sequence mean, zscore)"),
        (GRPOLoss(clip_low=0.2, clip_high=0.2), "grpo clip .2/.2 beta 0 (sequence mean, zscore)"),
        (GRPOLoss(clip_low=0.2, clip_high=0.28, beta=0.04), "grpo clip .2/.28 beta .04 k3 (sequence mean, zscore)"),
        (ReinforceLoss(clip_ratio=1.0), "reinforce IS clip [0, 2] against the sampler (token mean, zscore)"),
        (K3Loss(), "k3 token mean"),
    ],
)
def test_values_and_gradients_are_the_golden_ones(loss, key):
    tensors = golden_tensors()
    value = loss(**tensors)
    assert_golden(value, gradient(value, tensors), key)


def partitions(rows: list[int]):
    """All ways to split the rows into micro-batches."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [rows[0], *rest[i]], *rest[i + 1 :]]


@pytest.mark.parametrize("loss", SHIPPED, ids=lambda loss: type(loss).__name__)
def test_no_split_into_micro_batches_changes_the_gradient(loss):
    tensors = golden_tensors()
    tensors["padding_mask"][2, 1] = 0  # a hole, as a tool's answer would leave
    expected = loss(**tensors)
    lengths = tensors["padding_mask"].sum(1).int().tolist()
    weights = token_weights(loss.averaging, lengths)
    for split in partitions([0, 1, 2, 3]):
        total = tensors["logprobs"].new_zeros(())
        for rows in split:
            output = loss.evaluate(**{name: tensor[rows] for name, tensor in tensors.items()})
            total = total + (output.loss * output.loss.new_tensor([weights[i] for i in rows])[:, None]).sum()
        assert_close(total, expected, rtol=1e-12, atol=1e-12)
        assert_close(gradient(total, tensors), gradient(loss(**tensors), tensors), rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("loss", [GRPOLoss(), SimpleGRPOLoss(beta=0.0), ReinforceLoss(), ReinforceLoss(clip_ratio=0.2)])
@pytest.mark.parametrize("per_token_advantages", [False, True])
def test_on_policy_the_gradient_is_minus_the_weighted_advantage(loss, per_token_advantages):
    tensors = golden_tensors()
    mask = tensors["padding_mask"]
    if per_token_advantages:
        tensors["advantages"] = tensors["advantages"] + torch.linspace(-1, 1, 4)
    del tensors["old_logprobs"], tensors["gen_logprobs"]  # the policy's own
    weights = torch.tensor(token_weights(loss.averaging, GOLDEN["lengths"]), dtype=torch.float64)[:, None]
    assert_close(gradient(loss(**tensors), tensors), -tensors["advantages"] * weights * mask, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [GRPOLoss(beta=0.3), NLLLoss(), K3Loss()], ids=lambda loss: type(loss).__name__)
def test_gradcheck_holds_away_from_kinks(loss):
    """Not for losses with a detached factor, which finite differences cannot see: golden gradients cover those."""
    tensors = golden_tensors()
    assert torch.autograd.gradcheck(lambda logprobs: loss(**{**tensors, "logprobs": logprobs}), tensors["logprobs"])


@pytest.mark.parametrize("loss", SHIPPED, ids=lambda loss: type(loss).__name__)
def test_a_loss_declared_elementwise_looks_at_no_other_token(loss):
    tensors = golden_tensors()
    jacobian = torch.autograd.functional.jacobian(
        lambda logprobs: loss.evaluate(**{**tensors, "logprobs": logprobs}).loss.flatten(), tensors["logprobs"]
    ).reshape(16, 16)
    assert loss.elementwise
    assert torch.equal(jacobian, torch.diag(jacobian.diag()))
    assert jacobian.diag().any()


@pytest.mark.parametrize("loss", [*SHIPPED, CustomLoss()], ids=lambda loss: type(loss).__name__)
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


@pytest.mark.parametrize("loss", SHIPPED, ids=lambda loss: type(loss).__name__)
def test_losses_stay_finite_at_log_ratios_of_thirty_in_fp32(loss):
    for theta, other in product((-31.0, -1.0), (-31.0, -1.0)):
        logprobs = torch.full((1, 2), theta, requires_grad=True)
        others = dict.fromkeys(("old_logprobs", "gen_logprobs", "ref_logprobs"), torch.full((1, 2), other))
        value = loss(logprobs=logprobs, **others, advantages=torch.tensor([[1.0, -1.0]]), padding_mask=torch.ones(1, 2))
        assert value.isfinite() and torch.autograd.grad(value, logprobs)[0].isfinite().all()


@pytest.mark.parametrize(("policy", "reference", "kl"), [(-1.0, -2.0, 0.36788), (-2.0, -1.0, 0.71828)])
@pytest.mark.parametrize("make", [GRPOLoss, SimpleGRPOLoss])
def test_the_loss_rises_by_beta_times_a_kl_that_is_never_negative(make, policy, reference, kl):
    """KL-01."""
    tensors = {"logprobs": torch.tensor([[policy]]), "ref_logprobs": torch.tensor([[reference]])}
    rest = {"advantages": torch.zeros(1, 1), "padding_mask": torch.ones(1, 1)}
    assert make(beta=0.1)(**tensors, **rest).item() == pytest.approx(0.1 * kl, abs=1e-6)
    assert make(beta=0.0)(**tensors, **rest).item() == 0.0
    assert make(beta=0.0).evaluate(**tensors, **rest).metrics["kl"].item() == pytest.approx(kl, abs=1e-5)


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


def test_absent_old_and_sampler_logprobs_are_the_policys_own():
    tensors = golden_tensors()
    own = tensors["logprobs"].detach()
    bare = {name: tensors[name] for name in ("logprobs", "ref_logprobs", "advantages", "padding_mask")}
    for loss in SHIPPED:
        expected = loss(**bare, old_logprobs=own, gen_logprobs=own)
        assert torch.equal(loss(**bare), expected)
        assert torch.equal(gradient(loss(**bare), tensors), gradient(expected, tensors))


def test_inputs_are_never_edited():
    for loss in SHIPPED:
        tensors = golden_tensors()
        loss(**tensors).backward()
        for name, tensor in golden_tensors().items():
            assert torch.equal(tensors[name], tensor)


def test_a_reference_is_needed_exactly_when_the_kl_has_a_weight():
    assert [loss.needs_reference for loss in SHIPPED] == [False, True, True, False, False, False, False]
    tensors = golden_tensors()
    del tensors["ref_logprobs"]
    for loss in SHIPPED:
        if loss.needs_reference:
            with pytest.raises(ValueError, match="set beta to 0"):
                loss(**tensors)
        else:
            assert "kl" not in loss.evaluate(**tensors).metrics
    with pytest.raises(ValueError, match="K3Loss needs ref_logprobs"):
        K3Loss()(**tensors)


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
        (SimpleGRPOLoss, {"beta": math.inf}, "beta=inf"),
        (ReinforceLoss, {"clip_ratio": 0.0}, "clip_ratio=0.0 must be above 0"),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_name_value_and_range(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
