"""Laws of advantages: golden values, and no signal where all samples of a group are equal."""

import json
import math
from pathlib import Path

import pytest

from losses.advantages import group_zscore

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())


def test_zscore_advantages_are_the_golden_ones():
    assert group_zscore(GOLDEN["rewards"]) == pytest.approx(GOLDEN["advantages"]["zscore"], abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.7] * 8, [1.0] * 4, [0.0] * 2, [0.7] * 12])
def test_equal_rewards_give_exactly_no_advantage(rewards):
    """AD-01."""
    assert group_zscore(rewards) == [0.0] * len(rewards)


def test_rewards_equal_up_to_rounding_give_next_to_no_advantage():
    assert max(map(abs, group_zscore([0.1 + 0.2, 0.3, 0.3, 0.3]))) < 1e-9


def test_a_group_of_one_is_refused_with_the_key_to_change():
    with pytest.raises(ValueError, match="grpo.n_samples must be at least 2"):
        group_zscore([1.0])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="must be finite"):
        group_zscore([1.0, reward])
