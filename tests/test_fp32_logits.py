"""training.fp32_logits: the head's product is not rounded, and its gradients stay what they were."""

import json
from typing import Any

import pytest
import torch

from head import logprobs_from_hidden, loss_from_hidden
from losses import GRPOLoss
from rollout.loading import widen_head
from tests.steps import gradient, place, some_episodes, trainer_of  # noqa: F401 - two are fixtures
from tests.world import run_script


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of some ten, as a trained model has them, where bf16 rounds by a hundredth or more."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=draw) for n in (37, 101))
    bias, targets = torch.randn(101, generator=draw), torch.randint(101, (37,), generator=draw)
    return hidden.to(dtype), (1.5 * weight).to(dtype), bias.to(dtype), targets


@pytest.mark.parametrize("chunk", [8, 64])
def test_log_probs_are_those_of_the_same_numbers_in_fp32(chunk):
    hidden, weight, bias, targets = problem(torch.bfloat16)
    options: dict[str, Any] = {"temperature": 0.7, "entropy": True, "chunk_tokens": chunk}
    want = logprobs_from_hidden(hidden.float(), weight.float(), targets, bias=bias.float(), **options)
    for got, exact in zip(logprobs_from_hidden(hidden, weight, targets, bias=bias, fp32_logits=True, **options), want, strict=True):
        assert got is not None and exact is not None
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
    rounded = logprobs_from_hidden(hidden, weight, targets, bias=bias, **options)[0]
    assert (rounded - want[0]).abs().mean() > 1e-3


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_gradients_come_in_the_inputs_dtype_and_as_near_to_those_in_fp32(in_one_pass):
    def gradients(dtype: torch.dtype, fp32_logits: bool) -> list[torch.Tensor]:
        hidden, weight, bias, targets = (t.to(dtype) if t.is_floating_point() else t for t in problem(torch.bfloat16))
        inputs = [t.requires_grad_() for t in (hidden, weight, bias)]
        options: dict[str, Any] = {"bias": bias, "chunk_tokens": 8, "fp32_logits": fp32_logits, "entropy": True}
        if in_one_pass:
            loss = loss_from_hidden(hidden, weight, targets, lambda logprobs, _, rows: logprobs.exp().sum(), **options).loss
        else:
            loss = logprobs_from_hidden(hidden, weight, targets, **options)[0].exp().sum()
        return list(torch.autograd.grad(loss, inputs))

    exact, rounded, wide = gradients(torch.float32, False), gradients(torch.bfloat16, False), gradients(torch.bfloat16, True)
    assert [g.dtype for g in wide] == [torch.bfloat16] * 3
    for want, old, new in zip(exact, rounded, wide, strict=True):
        assert (new.float() - want).norm() <= max((old.float() - want).norm(), 5e-3 * want.norm())
    for a, b in zip(exact, gradients(torch.float32, True), strict=True):
        assert torch.equal(a, b)


def test_in_bf16_the_policys_log_probs_change(trainer_of):  # noqa: F811
    plain, wide = (trainer_of(GRPOLoss(beta=0.1), dtype="bfloat16", fp32_logits=on) for on in (False, True))
    assert plain.update(some_episodes(), 0)["entropy/nll"] != wide.update(some_episodes(), 0)["entropy/nll"]


def test_a_model_without_a_head_that_we_know_is_refused_by_its_name():
    with pytest.raises(ValueError, match="training.fp32_logits=true: vLLM's Identity has neither lm_head nor model.embed_tokens"):
        widen_head(torch.nn.Identity())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("gemma2", True), ("llama", False), ("qwen3", True)])
def test_an_engine_does_not_round_its_logits_before_and_after_new_weights(checkpoint_of, tmp_path, family, tied):
    report = tmp_path / "report.json"
    run_script(1, "tests/fp32_engine_driver.py", checkpoint_of(family, tied=tied), report)
    found = json.loads(report.read_text())
    assert found["tokens"] > 0
    for when in ("first", "loaded again"):
        assert found[when]["engine"] < 1e-5 < 1e-3 < found[when]["rounded"]
