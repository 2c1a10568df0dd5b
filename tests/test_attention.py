"""Packed attention is attention of one sequence at a time, in every model family, forwards and backwards."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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


@pytest.mark.parametrize("at_once", [2**25, 3000, 1])
@pytest.mark.parametrize("scores", [
    attention.Scores(window=5), attention.Scores(window=1), attention.Scores(softcap=2.0, scaling=0.5),
    attention.Scores(softcap=1.0, window=33), attention.Scores(softcap=1.0, window=500),
])  # fmt: skip
def test_windows_and_caps_are_those_of_the_whole_matrix_of_scores_forwards_and_backwards(scores, at_once, monkeypatch):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64, generator=draw, requires_grad=True) for heads in (4, 2, 2))
    got, parts = attention.per_length(q, k, v, segments_of(LENGTHS), scores), []
    for qs, ks, vs in zip(*(t.split(LENGTHS) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))), strict=True):
        s = torch.einsum("ihd,jhd->hij", qs, ks) * (scores.scaling or 8**-0.5)
        s = s if scores.softcap is None else scores.softcap * torch.tanh(s / scores.softcap)
        back = torch.arange(len(qs))[:, None] - torch.arange(len(qs))
        seen = (back >= 0) & (back < (scores.window or len(qs)))
        parts.append(torch.einsum("hij,jhd->ihd", s.masked_fill(~seen, -torch.inf).softmax(-1), vs))
    want = torch.cat(parts)
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    upstream = torch.randn(want.shape, dtype=torch.float64, generator=draw)
    for g, w in zip(*(torch.autograd.grad(out, (q, k, v), upstream) for out in (got, want)), strict=True):
        assert_close(g, w, rtol=1e-10, atol=1e-10)


class LargestTensor(TorchDispatchMode):
    """The most elements that a result of an operation had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


@pytest.mark.parametrize("scores", [attention.Scores(window=9), attention.Scores(softcap=2.0), attention.Scores(softcap=2.0, window=9)])
def test_scores_that_are_written_out_take_no_more_memory_than_they_may(scores, monkeypatch):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 20_000)
    q, k, v = (torch.randn(1000, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    with LargestTensor() as seen:
        attention.per_length(q, k, v, segments_of([1000]), scores).sum().backward()
    assert seen.most <= 20_000, "of 4 million scores"


@pytest.mark.parametrize(("module", "options", "told"), [
    (SimpleNamespace(is_causal=True), {"s_aux": torch.zeros(4)}, "has attention sinks"),
    (SimpleNamespace(is_causal=False), {}, "lets tokens see later ones"),
])  # fmt: skip
def test_attention_that_is_not_done_here_is_refused(module, options, told):
    t = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match=told):
        attention.packed_attention(module, t, t, t, None, segments=segments_of([3]), **options)


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
