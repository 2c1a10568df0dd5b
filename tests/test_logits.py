"""Rows of logits under torch.compile: the numbers of the head's own steps, and one graph for chunks of any length."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import head
from head import logprobs_from_hidden, loss_from_hidden
from logits import product_in_fp32

WORDS = 101


def problem(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(dtype).requires_grad_() for n in (tokens, WORDS))
    return hidden, weight, torch.randint(WORDS, (tokens,), generator=generator)


def solved(tokens: int, dtype: torch.dtype, entropy_counts: bool, **options: Any) -> list[Tensor]:
    """Log-probs, entropies, loss and the gradients of both ways to them."""
    hidden, weight, targets = problem(tokens, dtype)
    slopes = torch.linspace(-1, 1, tokens)

    def share(logprobs: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
        assert entropy is not None
        return (slopes[rows] * logprobs).sum() + (entropy.square().sum() if entropy_counts else 0)

    common = {"temperature": 0.7, "entropy": True, "chunk_tokens": 16} | options
    logprobs, entropy = logprobs_from_hidden(hidden, weight, targets, **common)
    later = torch.autograd.grad(share(logprobs, entropy, slice(None)), (hidden, weight))
    found = loss_from_hidden(hidden, weight, targets, share, **common)
    at_once = torch.autograd.grad(found.loss, (hidden, weight))
    assert entropy is not None and found.entropy is not None
    return [logprobs.detach(), entropy.detach(), *later, found.loss.detach(), found.logprobs, found.entropy, *at_once]


def check(tokens: int, dtype: torch.dtype, entropy_counts: bool, **options: Any) -> None:
    wants = solved(tokens, dtype, entropy_counts, **options)
    for got, want in zip(solved(tokens, dtype, entropy_counts, compiled_rows=True, **options), wants, strict=True):
        limit = 2e-6 if want.dtype != torch.bfloat16 else 8e-3  # sums in another order; one bf16 may be rounded to its neighbour
        assert (got - want).abs().max() <= limit * want.abs().max()


def test_compiled_rows_have_the_numbers_of_separate_steps_and_one_graph_serves_chunks_of_any_length():
    torch._dynamo.reset()
    check(37, torch.bfloat16, entropy_counts=True)
    before = counters["stats"]["unique_graphs"]
    for tokens in (16, 29, 50, 7):
        check(tokens, torch.bfloat16, entropy_counts=True)
    assert counters["stats"]["unique_graphs"] == before


def test_no_two_blocks_of_fp32_logits_are_alive_at_once(monkeypatch):
    made: list[weakref.ref[Tensor]] = []

    def product(hidden: Tensor, weight: Tensor) -> Tensor:
        assert not made or made[-1]() is None, "the block before is still there"
        block = product_in_fp32(hidden, weight)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(head, "product_in_fp32", product)
    solved(37, torch.bfloat16, True, fp32_logits=True)
    assert len(made) == 9  # three chunks; the general way computes them again


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy_counts", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_compiled_rows_in_every_type_with_a_cap_and_a_bonus(dtype, entropy_counts, softcap):
    torch._dynamo.reset()
    check(37, dtype, entropy_counts, softcap=softcap)


@pytest.mark.slow
def test_a_bias_and_logits_in_fp32():
    torch._dynamo.reset()
    bias = torch.linspace(-1, 1, WORDS).to(torch.bfloat16)
    check(37, torch.bfloat16, True, bias=bias)
    check(37, torch.bfloat16, True, bias=bias.requires_grad_())
    check(37, torch.bfloat16, True, fp32_logits=True)
