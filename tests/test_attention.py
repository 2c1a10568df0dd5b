"""Packed attention is attention of one sequence at a time, in every model family, forwards and backwards."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import attention
from tests.tiny import FAMILIES


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    yield
    torch.set_num_threads(threads)


LENGTHS = [1, 64, 3, 200, 1, 17, 2, 64]  # several of a length, alone and in every order


def sequences(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    draw = np.random.RandomState(seed)
    return [torch.tensor(draw.randint(3, 17, n)) for n in lengths]


def segments_of(lengths: list[int]) -> attention.Segments:
    return attention.Segments(torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32), max(lengths))


def packed(model, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Logits [N, V] of all sequences in one row."""
    positions = torch.cat([torch.arange(len(t)) for t in tokens])
    segments = segments_of([len(t) for t in tokens])
    return model(input_ids=torch.cat(tokens)[None], position_ids=positions[None], use_cache=False, segments=segments).logits[0]


def gradients(model, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum of the logits in which each has a weight of its own."""
    spread = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad((outputs * spread).sum(), parameters), strict=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_has_the_outputs_and_gradients_of_its_sequences_alone(family, kv_heads, checkpoint_of):
    folder = checkpoint_of(family, kv_heads=kv_heads, tied=False)
    row = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=attention.NAME)
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    tokens = sequences(LENGTHS)
    got, want = packed(row, tokens), torch.cat([alone(t[None]).logits[0] for t in tokens])
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    for (name, g), w in zip(gradients(row, got).items(), gradients(alone, want).values(), strict=True):
        assert w.norm() > 0, name
        assert (g - w).norm() <= 1e-9 * w.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_another_episode_or_the_future(family, checkpoint_of):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(family), attn_implementation=attention.NAME)
    lengths = [5, 9, 1, 7]
    tokens = sequences(lengths)
    starts = np.cumsum([0, *lengths])
    with torch.no_grad():
        before = packed(model, tokens)
        for episode, length in enumerate(lengths):
            changed = [t.clone() for t in tokens]
            changed[episode][length // 2] = 3 + (changed[episode][length // 2] - 2) % 14  # another token in its middle
            after = packed(model, changed)
            here = range(starts[episode] + length // 2, starts[episode + 1])
            moved = (after != before).any(1).nonzero()[:, 0].tolist()
            assert moved == list(here), f"a token of episode {episode} moved the outputs at {moved}"


def test_a_row_may_hold_one_sequence_or_nothing_but_single_tokens(checkpoint_of):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(), dtype=torch.float64, attn_implementation=attention.NAME)
    with torch.no_grad():
        for lengths in ([200], [1] * 80):
            tokens = sequences(lengths)
            want = torch.cat([packed(model, [t]) for t in tokens])
            assert_close(packed(model, tokens), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", [None, 0.05])
def test_every_length_from_1_to_200_is_causal_attention_of_its_own_segment(scaling):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randperm(200, generator=draw).add(1).tolist()
    shapes = ((1, 4, sum(lengths), 8), (1, 2, sum(lengths), 8), (1, 2, sum(lengths), 8))
    query, key, value = (torch.randn(s, dtype=torch.float64, generator=draw) for s in shapes)
    out, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, segments=segments_of(lengths), scaling=scaling)
    start = 0
    for n in lengths:
        q, k, v = (t[:, :, start : start + n] for t in (query, key, value))
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        want = scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask, scale=scaling)
        assert_close(out[:, start : start + n], want.transpose(1, 2), rtol=1e-10, atol=1e-10)
        start += n
