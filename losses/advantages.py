"""From the rewards of one group (all samples of one prompt) to one advantage per sample, in plain floats."""

import math


def group_zscore(rewards: list[float]) -> list[float]:
    """(reward - mean) / (std + 1e-6) within the group, as in GRPO (2402.03300).

    The paper leaves the standard deviation open: this one is unbiased (divides by n - 1). Equal rewards give exactly 0,
    decided by comparing them: a computed std of equal numbers may be rounding noise, which the division would blow up.

    >>> group_zscore([1.0, 0.0, 0.0, 0.5])[3]
    0.26111593848014075
    >>> group_zscore([0.1] * 8) == [0.0] * 8
    True
    """
    if len(rewards) < 2:
        raise ValueError(
            f"group_zscore compares the samples of a prompt with each other, and a group has {len(rewards)}: "
            f"grpo.n_samples must be at least 2"
        )
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {rewards} of a group must be finite")
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) for r in rewards]
