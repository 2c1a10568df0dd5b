"""A prompt that several responses share is computed once in a row, and no number is another for it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import attention
from batch import Episode, attach, row_length, to_batch
from losses import GRPOLoss
from model import Model
from packing import KEYS_PER_TOKEN, plan_shared_rows
from parallel.experts import NAME as EXPERTS
from parallel.plans import PLANS
from tests.groups import grouped, some_groups
from tests.steps import TEMPERATURE, assert_same_gradient, gradient, place, trainer_of  # noqa: F401 - two are fixtures
from tests.tiny import FAMILIES, SPECIAL_FAMILIES, WINDOW

CPU = torch.device("cpu")
KNOWN = [family for family in (*FAMILIES, *SPECIAL_FAMILIES) if family in PLANS]
# Prompts and responses longer than the window of 5 and shorter, a group of one, and two groups that may have equal prompts of one token.
GROUPS = [(9, [12, 1, 3, 12, 7]), (1, [8, 2]), (4, [6]), (2, [1, 1, 1]), (1, [5, 2]), (6, [4, 4])]


def logits(model: torch.nn.Module, episodes: list[Episode], *, shared_prompts: bool, length: int | None = None) -> torch.Tensor:
    """[M, V] of all response tokens, in episode order."""
    batch = to_batch(episodes, CPU, length, shared_prompts=shared_prompts)
    segments = attention.Segments(batch.cu_seqlens, batch.max_seqlen, None, batch.keys)
    given = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None], "segments": segments}
    return model(**given, use_cache=False).logits[0, batch.rows]


@pytest.mark.parametrize("at_once", [attention.SCORES_AT_ONCE, 200])
@pytest.mark.parametrize("family", KNOWN)
def test_every_family_has_the_logits_and_gradients_of_prompts_computed_for_each_response(family, at_once, checkpoint_of, monkeypatch):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)  # few: several chunks of queries in each segment
    options = {"attn_implementation": attention.NAME, "experts_implementation": EXPERTS}
    dtype, tolerance = (torch.float32, 1e-5) if "moe" in family else (torch.float64, 1e-12)  # torch's grouped product has no fp64
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=dtype, **options)
    episodes = grouped(GROUPS, shuffled=True)
    found = []
    for shared in (False, True):
        out = logits(model, episodes, shared_prompts=shared)
        spread = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append((out, torch.autograd.grad((out * spread).sum(), list(model.parameters()), allow_unused=True)))
    (want, slopes), (got, ours) = found
    assert_close(got, want, rtol=tolerance, atol=tolerance)
    for (name, _), g, w in zip(model.named_parameters(), ours, slopes, strict=True):
        assert w is not None and g is not None, name
        assert (g - w).norm() <= max(tolerance, 1e-6) * w.norm() and w.norm() > 0, name  # transformers' norms have fp32 in them


@pytest.mark.parametrize("groups", [[(4, [4, 3, 5])], [(WINDOW, [WINDOW, WINDOW])], [(2, [1, 2])]])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_a_window_ends_inside_the_prompt_where_neither_prompt_nor_response_is_longer_than_it(family, groups, checkpoint_of):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=torch.float64, attn_implementation=attention.NAME)
    with torch.no_grad():
        want, got = (logits(model, grouped(groups), shared_prompts=shared) for shared in (False, True))
    assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
def test_random_groups_in_any_order_have_the_logits_of_their_episodes(family, seed, checkpoint_of):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=torch.float64, attn_implementation=attention.NAME)
    episodes = grouped(some_groups(seed, longest=14 if seed < 3 else WINDOW), seed, shuffled=True)
    length = row_length(episodes, shared_prompts=True)
    with torch.no_grad():
        want = logits(model, episodes, shared_prompts=False)
        for more in (0, 1, 100):
            assert_close(logits(model, episodes, shared_prompts=True, length=length + more), want, rtol=1e-12, atol=1e-12)


def test_a_row_has_the_prompt_once_then_the_responses_whose_positions_go_on_after_it():
    a, b = np.array([5, 6, 7]), np.array([8, 9])
    ids = [(a, [10, 11]), (b, [12]), (a, [13]), (a, [14, 15, 16])]
    ones = [np.ones(len(r), np.float32) for _, r in ids]
    episodes = [Episode(np.append(p, r), len(p), one, one) for (p, r), one in zip(ids, ones, strict=True)]
    batch = to_batch(episodes, CPU, 15, shared_prompts=True)
    assert batch.token_ids.tolist() == [5, 6, 7, 10, 11, 13, 14, 15, 16, 8, 9, 12, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 3, 4, 5, 0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 9, 12, 15] and batch.max_seqlen == 3
    assert batch.rows.tolist() == [2, 3, 10, 2, 2, 6, 7] and batch.targets.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert batch.shape == (4, 3) and batch.grid.tolist() == [0, 1, 3, 6, 9, 10, 11]
    keys = batch.keys
    assert keys is not None and keys.cu_seqlens.tolist() == [0, 3, 8, 12, 18, 21, 24] and keys.max_seqlen == 6
    prompt = [0, 1, 2]
    assert keys.places.tolist() == [*prompt, *prompt, 3, 4, *prompt, 5, *prompt, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert keys.places[keys.first].tolist() == list(range(15)) and keys.places[keys.again].tolist() == prompt * 3
    assert keys.shared[keys.of_shared].tolist() == prompt * 3


@pytest.mark.parametrize("seed", range(4))
def test_what_shares_nothing_is_the_row_and_the_plan_that_it_was(seed):
    draw = np.random.RandomState(seed)
    episodes = [e for i in range(9) for e in grouped([(8, [int(draw.randint(1, 30))])], seed=100 * seed + i)]
    plain, shared = (to_batch(episodes, CPU, 400, shared_prompts=on) for on in (False, True))
    assert shared.keys is None and vars(plain).keys() == vars(shared).keys()
    for name, value in vars(plain).items():
        assert torch.equal(value, vars(shared)[name]) if isinstance(value, torch.Tensor) else value == vars(shared)[name], name
    for replicas in (1, 3):
        plans = [plan_shared_rows(episodes, replicas, 60, shared_prompts=on) for on in (False, True)]
        assert plans[0] == plans[1]


def gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: attention.Segments, scores: attention.Scores) -> torch.Tensor:
    """As `flash` does it, with SDPA of each segment in place of the kernel, which needs a GPU."""
    assert segments.keys is not None
    k, v = (attention._Gathered.apply(t, segments.keys) for t in (k, v))
    plain = attention.Segments(segments.keys.cu_seqlens, segments.keys.max_seqlen)
    every = [slice(a, b) for a, b in zip(plain.cu_seqlens, plain.cu_seqlens[1:], strict=False)]
    queries = q.split(segments.cu_seqlens.diff().tolist())
    parts = []
    for one, at in zip(queries, every, strict=True):
        mask = torch.ones(len(one), at.stop - at.start, dtype=torch.bool).tril(at.stop - at.start - len(one))
        ks, vs = (t[at].repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
        parts.append(torch.nn.functional.scaled_dot_product_attention(one.transpose(0, 1), ks, vs, attn_mask=mask).transpose(0, 1))
    return torch.cat(parts)


def test_gathered_keys_have_the_gradients_of_all_that_saw_them():
    batch = to_batch(grouped(GROUPS), CPU, shared_prompts=True)
    segments = attention.Segments(batch.cu_seqlens, batch.max_seqlen, None, batch.keys)
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(len(batch.token_ids), h, 8, dtype=torch.float64, generator=draw, requires_grad=True) for h in (4, 2, 2)]
    upstream = torch.randn(len(batch.token_ids), 4, 8, dtype=torch.float64, generator=draw)
    q, k, v = inputs
    outs = [kernel(q, k, v, segments, attention.Scores()) for kernel in (attention.per_length, gather)]
    assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)
    for want, got in zip(*(torch.autograd.grad(out, inputs, upstream) for out in outs), strict=True):
        assert_close(got, want, rtol=1e-12, atol=1e-12)


def tokens(episodes: list[Episode], row: list[int]) -> int:
    return row_length([episodes[i] for i in row], shared_prompts=True)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(12))
def test_a_plan_holds_every_episode_once_within_its_budgets_and_spreads_the_tokens_evenly(seed, replicas):
    draw = np.random.RandomState(seed)
    episodes = grouped(some_groups(seed, count=int(draw.randint(1, 40)), longest=int(draw.choice([5, 40]))), seed, shuffled=True)
    longest = max(len(e.token_ids) for e in episodes)
    limit = longest + int(draw.randint(0, 100))
    plan = plan_shared_rows(episodes, replicas, limit, shared_prompts=True)
    assert plan == plan_shared_rows(episodes, replicas, limit, shared_prompts=True)
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(len(episodes)))
    assert len(plan) == replicas and len({len(rows) for rows in plan}) == 1
    rows = [row for rows in plan for row in rows if row]
    assert max(tokens(episodes, row) for row in rows) <= limit
    for row in rows:
        batch = to_batch([episodes[i] for i in row], CPU, shared_prompts=True)
        assert batch.keys is None or len(batch.keys.places) <= KEYS_PER_TOKEN * limit
    # Prompts that are in several rows because a group fits none, or its keys do not, come on top; the bound is of what is dealt.
    dealt = plan_shared_rows(episodes, replicas, 10**6, shared_prompts=True)
    load = [sum(tokens(episodes, row) for row in rows if row) for rows in dealt]
    prompt, once = max(e.num_prompt_tokens for e in episodes), row_length(episodes, shared_prompts=True)
    assert max(load) <= once / replicas + prompt + longest
    assert once <= sum(load)
    assert sum(load) <= sum(tokens(episodes, row) for row in rows) <= sum(len(e.token_ids) for e in episodes)


def test_on_a_step_of_usual_size_no_replica_has_2_percent_more_than_the_mean_and_hardly_a_prompt_is_computed_twice():
    draw = np.random.RandomState(0)
    responses = np.minimum(np.exp(draw.normal(5.5, 0.8, (64, 8))).astype(int) + 1, 1024)
    episodes = grouped([(int(draw.randint(50, 300)), of_group.tolist()) for of_group in responses])
    plan = plan_shared_rows(episodes, 8, 16384, shared_prompts=True)
    load = [sum(tokens(episodes, row) for row in rows if row) for rows in plan]
    assert max(load) <= 1.02 * sum(load) / 8
    assert sum(load) <= 1.01 * row_length(episodes, shared_prompts=True) < 0.9 * row_length(episodes)


def test_groups_that_fit_are_not_split_and_a_prompt_is_computed_as_often_as_its_group_is():
    whole = grouped([(100, [20] * 8)] * 6)
    (rows,) = plan_shared_rows(whole, 1, 600, shared_prompts=True)
    assert [tokens(whole, row) for row in rows] == [520, 520, 520]
    assert all({whole[i].group for i in row} == {whole[i].group for i in row} and len(row) % 8 == 0 for row in rows)
    both = plan_shared_rows(whole, 2, 600, shared_prompts=True)
    assert [sum(tokens(whole, row) for row in rows if row) for rows in both] == [780, 780]
    one = grouped([(100, [20] * 8)])
    assert [tokens(one, row) for rows in plan_shared_rows(one, 4, 600, shared_prompts=True) for row in rows] == [140] * 4
    assert [tokens(one, row) for row in plan_shared_rows(one, 1, 140, shared_prompts=True)[0]] == [140] * 4


@pytest.mark.parametrize("max_tokens", [30, 60, 10_000])
def test_a_step_with_shared_prompts_is_the_step_without(max_tokens, trainer_of):  # noqa: F811
    episodes = grouped(GROUPS)
    made = [trainer_of(GRPOLoss(beta=0.1), max_tokens=max_tokens, shared_prompts=on) for on in (False, True)]
    plain, shared = ([to_batch(r, CPU, shared_prompts=t.model.shared_prompts) for r in t.model.rows(episodes)] for t in made)
    assert sum(len(b.token_ids) for b in shared) < sum(len(b.token_ids) for b in plain)
    assert any(b.keys is not None for b in shared)
    scored = [t.model.logprobs(episodes) for t in made]
    for i in range(len(episodes)):
        assert_close(torch.tensor(scored[1][i]), torch.tensor(scored[0][i]), rtol=1e-5, atol=2e-6)
    stats = [t.update(episodes, 0) for t in made]
    assert stats[0].keys() == stats[1].keys()
    for name, value in stats[0].items():
        if not name.startswith("perf/"):
            assert stats[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert_same_gradient(gradient(made[1]), gradient(made[0]))


def test_a_reference_in_the_same_layout_scores_the_same_rows_and_is_no_distance_away(place, trainer_of):  # noqa: F811
    trainer, episodes = trainer_of(GRPOLoss(beta=0.1), max_tokens=60, shared_prompts=True), grouped(GROUPS)
    for e in episodes:
        e.gen_logprobs = None  # made up, which the reference would notice
    options: dict[str, Any] = {"dtype": "float32", "temperature": TEMPERATURE, "max_tokens": 60, "shared_prompts": True}
    reference = Model(trainer.model.source, place.trainer, trainable=False, **options)
    attach("ref_logprobs", episodes, list(reference.logprobs(episodes).values()))
    assert trainer.update(episodes, 0)["kl/ref_k3"] == 0.0


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_changes_no_bit_of_a_shared_row(checkpointing, trainer_of):  # noqa: F811
    made = [trainer_of(GRPOLoss(beta=0.1), shared_prompts=True, activation_checkpointing=kind) for kind in ("none", checkpointing)]
    stats = [t.update(grouped(GROUPS), 0) for t in made]
    assert stats[0] == stats[1]
    for name, tensor in gradient(made[0]).items():
        assert torch.equal(gradient(made[1])[name], tensor), name
