"""Laws of the head: it equals naive log-softmax, whatever the chunk or the ranks, and never keeps logits."""

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from head import default_chunk_tokens, logprobs_from_hidden, loss_from_hidden
from losses import GRPOLoss
from tests.world import ROOT, run_script

M, H, V = 13, 5, 29
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"bias": True},
    {"softcap": 3.0, "temperature": 1.3},
    {"softcap": 3.0, "temperature": 0.6, "bias": True},
]


def inputs(dtype=torch.float64, rows=M, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(rows, H, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(V, (rows,), generator=generator)


def naive(hidden, weight, targets, *, temperature=1.0, bias=None, softcap=None):
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropy = logprobs_from_hidden(hidden, weight, targets, entropy=True, **options)
    assert entropy is not None
    return logprobs, entropy


def used(options, bias):
    return {**options, "bias": bias} if "bias" in options else options


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, None])
def test_values_and_gradients_are_those_of_naive_log_softmax(options, chunk_tokens):
    hidden, weight, bias, targets = inputs()
    slopes = torch.randn(2, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for function, extra in ((naive, {}), (with_entropy, {"chunk_tokens": chunk_tokens})):
        values = function(hidden, weight, targets, **used(options, bias), **extra)
        loss = sum((slope * value).sum() for slope, value in zip(slopes, values, strict=True))
        leaves = (hidden, weight, bias) if "bias" in options else (hidden, weight)
        results.append((*values, *torch.autograd.grad(loss, leaves)))
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck_holds(options, entropy):
    hidden, weight, bias, targets = inputs(rows=5)

    def outputs(hidden, weight, bias):
        values = logprobs_from_hidden(hidden, weight, targets, entropy=entropy, chunk_tokens=2, **used(options, bias))
        return values if entropy else values[0]

    bias.requires_grad_("bias" in options)
    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("which", [0, 1])
def test_either_output_may_be_the_only_one_with_a_gradient(which):
    hidden, weight, _, targets = inputs()
    expected = torch.autograd.grad(naive(hidden, weight, targets)[which].sum(), (hidden, weight))
    values = with_entropy(hidden, weight, targets)
    got = torch.autograd.grad(values[which].sum(), (hidden, weight))
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunk_changes_neither_values_nor_gradients(dtype):
    hidden, weight, _, targets = inputs(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    whole, chunked = (logprobs_from_hidden(hidden, weight, targets, chunk_tokens=n)[0] for n in (M, 3))
    assert_close(chunked, whole, rtol=1e-6, atol=1e-6)
    assert_close(
        torch.autograd.grad(chunked.sum(), (hidden, weight)),
        torch.autograd.grad(whole.sum(), (hidden, weight)),
        rtol=tolerance,
        atol=tolerance,
    )


def test_bf16_inputs_give_fp32_values_close_to_the_exact_ones():
    hidden, weight, _, targets = inputs(torch.bfloat16)
    logprobs, entropy = with_entropy(hidden, weight, targets, chunk_tokens=4)
    exact = naive(hidden.double(), weight.double(), targets)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_close((logprobs.double(), entropy.double()), exact, rtol=0.01, atol=0.03)
    exact_grads = torch.autograd.grad(exact[0].sum() + exact[1].sum(), (hidden, weight))
    grads = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert all(g.dtype == torch.bfloat16 for g in grads)
    assert_close(grads, exact_grads, rtol=0.03, atol=0.06)


def test_the_weight_gradient_in_bf16_does_not_lose_bits_with_the_number_of_chunks():
    hidden, weight, _, targets = inputs(torch.bfloat16, rows=4096)
    exact = torch.autograd.grad(naive(hidden.double(), weight.double(), targets)[0].sum(), weight)[0].double()
    errors = []
    for chunk_tokens in (4096, 8):
        logprobs, _ = logprobs_from_hidden(hidden, weight, targets, chunk_tokens=chunk_tokens)
        grad = torch.autograd.grad(logprobs.sum(), weight)[0]
        errors.append(((grad.double() - exact).norm() / exact.norm()).item())
    assert errors[1] < 1.5 * errors[0], errors


@pytest.mark.parametrize("scale", [100.0, 10000.0])
def test_extreme_logits_stay_finite(scale):
    hidden, weight, _, targets = inputs(torch.float32, scale=scale)
    logprobs, entropy = with_entropy(hidden, weight, targets)
    grads = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert all(t.isfinite().all() for t in (logprobs, entropy, *grads))


def test_no_tokens_give_no_values_and_zero_gradients():
    hidden, weight, bias, targets = inputs(rows=0)
    logprobs, entropy = with_entropy(hidden, weight, targets, bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight, bias))
    assert_close(grads, (torch.zeros(0, H).double(), torch.zeros(V, H).double(), torch.zeros(V).double()))


def test_without_grad_the_values_are_the_same_and_nothing_is_recorded():
    hidden, weight, _, targets = inputs()
    with torch.no_grad():
        logprobs, entropy = logprobs_from_hidden(hidden, weight, targets)
    assert not logprobs.requires_grad and entropy is None
    assert torch.equal(logprobs, logprobs_from_hidden(hidden, weight, targets)[0])


def test_a_frozen_head_gets_no_gradient_and_passes_one_on():
    hidden, weight, _, targets = inputs()
    weight.requires_grad_(False)
    logprobs_from_hidden(hidden, weight, targets)[0].sum().backward()
    assert weight.grad is None
    assert_close(hidden.grad, torch.autograd.grad(naive(hidden, weight, targets)[0].sum(), hidden)[0])


def test_between_forward_and_backward_nothing_as_wide_as_the_vocabulary_is_kept():
    hidden, weight, _, targets = inputs(torch.bfloat16)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        with_entropy(hidden, weight, targets, softcap=3.0)
    assert saved
    kept = {t.data_ptr() for t in (hidden, weight)}
    assert all(t.numel() <= M for t in saved if t.data_ptr() not in kept), [t.shape for t in saved]


class LogitsAlive(TorchDispatchMode):
    """The most logits (numbers in tensors of V columns) that were alive after any operation, and the shapes of all results."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.ignored, self.most = weight.untyped_storage().data_ptr(), 0
        self.shapes: set[tuple[int, ...]] = set()
        self.seen: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.shapes.add(tuple(out.shape))
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == V:
            self.seen.append(weakref.ref(out))
        alive = [t for ref in self.seen if (t := ref()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in alive}
        storages.pop(self.ignored, None)
        self.most = max(self.most, sum(storages.values()))
        return out

    @property
    def largest(self) -> int:
        return max(map(math.prod, self.shapes))


def in_one_pass(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return loss_from_hidden(hidden, weight, targets, all_added, **options).loss


def in_two_passes(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return all_added(*logprobs_from_hidden(hidden, weight, targets, **options), slice(0, len(hidden)))


def all_added(logprobs: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
    return logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()


@pytest.mark.parametrize("function", [in_one_pass, in_two_passes])
@pytest.mark.parametrize(
    ("options", "strips"),
    [({}, 1), ({"temperature": 0.7}, 1), ({"entropy": True}, 2), ({"softcap": 3.0}, 2), ({"softcap": 3.0, "entropy": True}, 3)],
)
def test_one_chunk_of_logits_and_up_to_three_eighths_are_alive_however_many_tokens_there_are(function, options, strips):
    seen = []
    for rows in (48, 192):
        hidden, weight, _, targets = inputs(torch.float32, rows=rows)
        with LogitsAlive(weight) as logits:
            function(hidden, weight, targets, chunk_tokens=16, **options).backward()
        seen.append(logits.most)
        assert logits.largest <= max(16 * V, rows * H)
    assert seen == [(16 + 2 * strips) * V] * 2, "a strip is an eighth of the 16 rows"
    with LogitsAlive(weight) as logits:
        naive(hidden, weight, targets)
    assert logits.most >= 192 * V and logits.largest >= 192 * V  # the measure sees what it should


@pytest.mark.parametrize(("device", "bytes_each", "limit"), [("cpu", 4, 2**26), ("cuda", 2, 2**29)])
def test_a_default_chunk_keeps_to_its_memory_for_any_usual_vocabulary(device, bytes_each, limit):
    for vocabulary in (32_000, 49_152, 65_536):
        assert default_chunk_tokens(vocabulary, torch.device(device)) * vocabulary * bytes_each <= limit
    assert default_chunk_tokens(10**9, torch.device(device)) >= 256
    assert default_chunk_tokens(0, torch.device(device)) <= 8192


OLD = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) / 4 - 3
ADVANTAGES = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def clipped(logprobs: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
    """PPO's surrogate, with an entropy bonus where there is an entropy."""
    ratio = (logprobs - OLD[rows]).exp()
    loss = -torch.minimum(ratio * ADVANTAGES[rows], ratio.clamp(0.8, 1.2) * ADVANTAGES[rows])
    return loss.sum() if entropy is None else (loss - 0.1 * entropy).sum()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, None])
def test_a_loss_in_one_pass_has_the_values_and_gradients_of_naive_log_softmax(options, entropy, chunk_tokens):
    hidden, weight, bias, targets = inputs()
    leaves = (hidden, weight, bias) if "bias" in options else (hidden, weight)
    logprobs, exact_entropy = naive(hidden, weight, targets, **used(options, bias))
    expected = clipped(logprobs, exact_entropy if entropy else None, slice(0, M))
    got = loss_from_hidden(hidden, weight, targets, clipped, entropy=entropy, chunk_tokens=chunk_tokens, **used(options, bias))
    assert_close((got.loss, got.logprobs), (expected, logprobs.detach()), rtol=1e-10, atol=1e-11)
    assert (got.entropy is not None) == entropy
    if got.entropy is not None:
        assert_close(got.entropy, exact_entropy.detach(), rtol=1e-10, atol=1e-11)
    assert_close(torch.autograd.grad(7 * got.loss, leaves), torch.autograd.grad(7 * expected, leaves), rtol=1e-10, atol=1e-11)


def test_an_entropy_that_is_only_looked_at_changes_no_gradient():
    grads = []
    for entropy in (False, True):
        hidden, weight, _, targets = inputs()
        result = loss_from_hidden(hidden, weight, targets, lambda lp, _, rows: clipped(lp, None, rows), entropy=entropy, chunk_tokens=4)
        grads.append(torch.autograd.grad(result.loss, (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_one_pass_and_two_give_the_same_gradients_in_every_precision(dtype, tolerance):
    hidden, weight, _, targets = inputs(dtype, rows=40)
    one, two = (function(hidden, weight, targets, entropy=True, chunk_tokens=6) for function in (in_one_pass, in_two_passes))
    for a, b in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (one, two)), strict=True):
        assert a.dtype == dtype
        assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_a_head_frozen_or_tied_learns_in_one_pass_what_it_would_learn_naively():
    _, weight, _, targets = inputs()
    ids = torch.arange(M)
    grads = []
    for function in (in_one_pass, lambda *tensors: naive(*tensors)[0].sum()):
        grads.append(torch.autograd.grad(function(weight[ids].tanh(), weight, targets), weight))
    assert_close(*grads)
    hidden, frozen = inputs()[0], weight.detach()
    in_one_pass(hidden, frozen, targets).backward()
    assert frozen.grad is None
    assert_close(hidden.grad, torch.autograd.grad(naive(hidden, frozen, targets)[0].sum(), hidden)[0])


def test_a_frozen_trunk_lets_the_head_learn_alone():
    hidden, weight, _, targets = inputs()
    for function in (in_one_pass, in_two_passes):
        grad = torch.autograd.grad(function(hidden.detach(), weight, targets, chunk_tokens=4), weight)[0]
        assert_close(grad, torch.autograd.grad(naive(hidden, weight, targets)[0].sum(), weight)[0])


def test_a_loss_in_one_pass_of_no_tokens_is_zero_and_so_are_its_gradients():
    hidden, weight, _, targets = inputs(rows=0)
    result = loss_from_hidden(hidden, weight, targets, clipped, entropy=True)
    assert result.loss.item() == 0 and result.logprobs.shape == (0,)
    assert_close(torch.autograd.grad(result.loss, (hidden, weight)), (torch.zeros(0, H).double(), torch.zeros(V, H).double()))


def test_without_grad_a_loss_in_one_pass_has_its_value_and_makes_no_gradient():
    hidden, weight, _, targets = inputs()
    expected = loss_from_hidden(hidden, weight, targets, clipped).loss
    with torch.no_grad(), LogitsAlive(weight) as logits:
        result = loss_from_hidden(hidden, weight, targets, clipped, chunk_tokens=4)
    assert not result.loss.requires_grad and not result.logprobs.requires_grad
    assert_close(result.loss, expected.detach())
    assert (V, H) not in logits.shapes  # a gradient of the weight


def test_the_gradients_of_one_pass_are_handed_out_once():
    hidden, weight, _, targets = inputs()
    loss = in_one_pass(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_a_share_that_is_no_scalar_is_refused():
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match=r"must be a scalar, and has shape \[13\]"):
        loss_from_hidden(hidden, weight, targets, lambda logprobs, entropy, rows: -logprobs)


# A head spread over ranks: tests/head_driver.py

TOLERANCE = {"torch.float64": 1e-10, "torch.float32": 1e-6}


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[[51, 50], [1, 100], [0, 29]], [[34, 34, 33], [40, 61, 0]]], ids=["two", "three"])
def test_a_head_spread_over_ranks_has_the_values_and_gradients_of_the_whole_one(cuts, tmp_path):
    report = spread(cuts, tmp_path)
    assert len(report[0]) == len(cuts) * 3 * 2 * len(OPTIONS) * 2
    for cases in report:
        for name, case in cases.items():
            worst = max(case["errors"].values())
            assert worst <= TOLERANCE[json.loads(name)[-1]], f"{name}: {case['errors']}"
            assert case["agree"], name
            chunks = math.ceil(23 / 6)
            expected = ["allgather_base"] * (chunks if json.loads(name)[1] == "fast" else 1) + ["allreduce"]
            assert case["exchanged"] == expected, name


def spread(cuts: list[list[int]], folder: Path) -> list[dict[str, dict]]:
    """By rank, every case of heads cut in these ways."""
    spec, report = folder / "spec.json", folder / "report.json"
    spec.write_text(json.dumps({"cuts": cuts}))
    run_script(len(cuts[0]), ROOT / "tests/head_driver.py", str(spec), str(report))
    return json.loads(report.read_text())


def test_a_temperature_scales_the_logits_before_the_softmax():
    """VL-03: logits [2, 0], token 0, temperature 0.5."""
    hidden, weight, target = torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0])
    logprobs, _ = logprobs_from_hidden(hidden, weight, target, temperature=0.5)
    assert logprobs.item() == pytest.approx(-0.018150, abs=1e-6)
    assert logprobs_from_hidden(hidden, weight, target)[0].item() == pytest.approx(-0.126928, abs=1e-6)
    grid = logprobs[None]
    output = GRPOLoss().evaluate(
        logprobs=grid,
        old_logprobs=grid.detach(),
        ref_logprobs=grid,
        advantages=torch.ones(1, 1),
        padding_mask=torch.ones(1, 1),
    )
    assert output.metrics["ratio"].item() == 1.0 and output.metrics["kl"].item() == 0.0


@pytest.mark.parametrize(
    ("option", "message"), [({"temperature": 0.0}, "temperature=0.0"), ({"softcap": 0.0}, "softcap=0.0")]
)
def test_impossible_options_are_refused_by_name(option, message):
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match=message):
        logprobs_from_hidden(hidden, weight, targets, **option)


def test_a_uniform_distribution_has_the_entropy_of_its_size():
    targets = torch.zeros(3, dtype=torch.int64)
    _, entropy = logprobs_from_hidden(torch.zeros(3, H), torch.randn(V, H), targets, entropy=True)
    assert_close(entropy, torch.full((3,), math.log(V)))
