"""Laws of advantages: golden values, and no signal where all samples of a group are equal."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from batch import Completion, Episode, Group, Prompt, to_episodes
from losses.advantages import (
    batch_zscore,
    credit,
    group_centred,
    group_centred_token_whitened,
    group_zscore,
    leave_one_out,
    parts_zscore,
    token_whitened,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())


def test_zscore_advantages_are_the_golden_ones():
    assert group_zscore(GOLDEN["rewards"]) == pytest.approx(GOLDEN["advantages"]["zscore"], abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.7] * 8, [1.0] * 4, [0.0] * 2, [0.7] * 12])
def test_equal_rewards_give_exactly_no_advantage(rewards):
    """AD-01."""
    assert group_zscore(rewards) == [0.0] * len(rewards)


def test_rewards_equal_up_to_rounding_give_next_to_no_advantage():
    assert max(map(abs, group_zscore([0.1 + 0.2, 0.3, 0.3, 0.3]))) < 1e-9


@pytest.mark.parametrize("advantage", [group_zscore, group_centred, leave_one_out])
def test_a_lone_sample_has_nothing_to_be_compared_with(advantage):
    assert advantage([1.0]) == [0.0] and advantage([None, 3.0, None]) == [0.0] * 3


@pytest.mark.parametrize(("name", "advantage"), [("centred", group_centred), ("leave_one_out", leave_one_out)])
def test_the_other_baselines_are_the_golden_ones(name, advantage):
    assert advantage(GOLDEN["rewards"]) == pytest.approx(GOLDEN["advantages"][name], abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.3, 0.9, -1.0], [5.0, 5.0, 5.1, 5.0]])
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards):
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    assert leave_one_out(rewards) == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])
    shrunk = [a * (len(rewards) - 1) / len(rewards) for a in leave_one_out(rewards)]
    assert group_centred(rewards) == pytest.approx(shrunk)


@pytest.mark.parametrize("advantage", [group_zscore, group_centred, leave_one_out])
def test_a_missing_reward_changes_no_other_advantage(advantage):
    known = advantage([1.0, 0.0, 0.5])
    assert advantage([1.0, None, 0.0, 0.5, None]) == [known[0], 0.0, known[1], known[2], 0.0]


def test_the_batchs_zscore_is_that_of_all_samples_whatever_the_sizes_of_their_groups():
    groups: list[list[float | None]] = [[1.0, 0.0], [0.5], [2.0, None, 0.0]]
    flat = [r for g in groups for r in g]
    assert [a for g in batch_zscore(groups) for a in g] == group_zscore(flat)
    assert batch_zscore([[0.1], [0.1, None]]) == [[0.0], [0.0, 0.0]]


def sampled(rewards: list[list[float | None]], lengths: list[list[int]]) -> tuple[list[Group], list[Episode]]:
    """Groups with these rewards and completions of these lengths, and their episodes."""
    groups = [
        Group(Prompt(i, [3]), [Completion("", [4] * n, [-1.0] * n) for n in ns], rs, {"a": rs, "b": [r and 2 * r for r in rs]})
        for i, (rs, ns) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return groups, to_episodes(groups, mask_truncated=False, old_from_sampler=True)


def test_whitened_tokens_have_mean_0_and_deviation_1_over_the_step():
    groups, episodes = sampled([[1.0, 0.0], [0.5, None, 2.0]], [[3, 1], [7, 2, 5]])
    for advantage in (token_whitened, group_centred_token_whitened):
        credit(groups, episodes, advantage, kl_in_reward=0.0, weights={})
        tokens = np.concatenate([e.advantages[e.loss_mask > 0] for e in episodes])
        assert len(tokens) == 16 and tokens.mean() == pytest.approx(0, abs=1e-6) and tokens.std() == pytest.approx(1, abs=1e-6)
        missing = next(e for e in episodes if (e.group, e.sample) == (1, 1))
        assert not missing.loss_mask.any() and not missing.advantages.any()


def test_equal_tokens_whiten_to_exactly_0():
    groups, episodes = sampled([[0.7, 0.7], [0.7]], [[3, 1], [2]])
    credit(groups, episodes, token_whitened, kl_in_reward=0.0, weights={})
    assert not any(e.advantages.any() for e in episodes)


def test_a_tokens_return_is_the_reward_less_the_kl_that_is_still_to_come():
    groups, episodes = sampled([[1.0], [0.0]], [[3], [2]])
    for e in episodes:
        e.ref_logprobs = -1 - np.arange(1, len(e.loss_mask) + 1, dtype=np.float32)  # old is -1: k1 is 1, 2, 3
    credit(groups, episodes, token_whitened, kl_in_reward=0.1, weights={})
    returns = np.array([1 - 0.6, 1 - 0.5, 1 - 0.3, -0.3, -0.2])
    want = (returns - returns.mean()) / returns.std()
    assert np.concatenate([e.advantages for e in episodes]) == pytest.approx(want, abs=1e-5)


def test_kl_in_the_reward_is_taken_off_before_the_baseline():
    groups, episodes = sampled([[1.0, 0.0, 0.5]], [[3, 1, 2]])
    for e in episodes:
        e.ref_logprobs = np.full(len(e.loss_mask), -2.0, np.float32)  # old is -1: k1 is 1 at every token
    credit(groups, episodes, leave_one_out, kl_in_reward=0.1, weights={})
    assert [float(e.advantages[0]) for e in episodes] == pytest.approx(leave_one_out([0.7, -0.1, 0.3]), abs=1e-6)


def test_each_reward_normalised_by_itself_weighs_what_its_weight_says_whatever_its_spread():
    groups, episodes = sampled([[1.0, 0.0, 0.5], [0.0, 3.0, 0.0]], [[1, 1, 1]] * 2)
    values = credit(groups, episodes, parts_zscore, kl_in_reward=0.0, weights={"a": 1.0, "b": 0.5})
    assert values == [pytest.approx([1.5 * a for a in group_zscore(g.rewards)], abs=1e-5) for g in groups]


def test_a_sample_without_a_reward_is_in_no_parts_mean():
    known = parts_zscore([[1.0, 0.0]], [{"a": [1.0, 0.0], "b": [0.0, 0.0]}], {"a": 1.0, "b": 1.0})[0]
    parts: list[dict[str, list[float | None]]] = [{"a": [1.0, 0.0, 5.0], "b": [0.0, 0.0, None]}]
    assert parts_zscore([[1.0, 0.0, None]], parts, {"a": 1.0, "b": 1.0}) == [[*known, 0.0]]


def test_a_completion_without_tokens_counts_in_the_baseline_and_has_no_episode():
    groups, episodes = sampled([[1.0, 0.0]], [[0, 2]])
    assert len(episodes) == 1
    assert credit(groups, episodes, group_centred, kl_in_reward=0.0, weights={}) == [[0.5, -0.5]]
    assert episodes[0].advantages.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="must be finite"):
        group_zscore([1.0, reward])
