"""From rewards to advantages, in plain floats: every rank holds all rewards, so nothing here communicates.

An advantage function receives what its signature names, by keyword:

- `rewards`, the rewards of one group (all samples of one prompt): it is called once a group and returns one float per sample; or
- `groups`, those of all groups of the step, and returns a list per group. It may also ask for `lengths` (response tokens that count
  in the loss, per group and sample), `parts` (per group, {reward's name: value per sample}, unweighted), `weights` ({reward's name:
  weight}) and `token_kl` (per group and sample, the KL penalty of each response token, [R], already multiplied by
  grpo.kl_in_reward; without this argument its sum over the tokens is part of the rewards). Its advantages may be arrays [R].

A reward of None is missing: the sample is in no mean and no deviation, and its advantage is 0. Equal rewards give exactly 0, decided by
comparing them: a computed deviation of equal numbers may be rounding noise, which a division would blow up.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from batch import Episode, Group

Rewards = list[float | None]
STABILISER = 1e-6  # added to a standard deviation before dividing by it


def group_zscore(rewards: Rewards) -> list[float]:
    """(reward - mean) / (std + 1e-6) within the group, as in GRPO (2402.03300).

    The paper leaves the standard deviation open: this one is unbiased (divides by n - 1). A lone sample gets 0.

    >>> group_zscore([1.0, 0.0, 0.0, 0.5])[3]
    0.26111593848014075
    >>> group_zscore([0.1] * 8) == [0.0] * 8
    True
    """
    return _each(rewards, _zscore)


def group_centred(rewards: Rewards) -> list[float]:
    """reward - mean of the group (Dr.GRPO, 2503.20783): (n - 1) / n times `leave_one_out`.

    >>> group_centred([1.0, 0.0, None, 0.5])
    [0.5, -0.5, 0.0, 0.0]
    """
    return _each(rewards, _centred)


def leave_one_out(rewards: Rewards) -> list[float]:
    """reward - mean of the other samples' rewards (RLOO, 2402.14740). A lone sample gets 0.

    >>> leave_one_out([1.0, 0.0, 0.5])
    [0.75, -0.75, 0.0]
    """
    return _each(rewards, lambda known: [r * len(known) / (len(known) - 1) for r in _centred(known)])


def batch_zscore(groups: list[Rewards]) -> list[list[float]]:
    """(reward - mean) / (std + 1e-6) over all samples of the step, whatever their prompts: a baseline that needs no second sample."""
    return _split(groups, _each([r for g in groups for r in g], _zscore))


def token_whitened(
    groups: list[Rewards], lengths: list[list[int]], token_kl: list[list[np.ndarray]]
) -> list[list[np.ndarray]]:
    """REINFORCE++ (2501.03262): the return of each token, less the mean and over the deviation of all tokens of the step.

    The reward comes with the last token, a KL penalty with each; a token's return is what follows it, itself included (gamma 1).
    Deviation: the population's, as the paper's code. Works with one sample per prompt.
    """
    returns = [
        [np.zeros_like(kl) if r is None else r - np.cumsum(kl[::-1])[::-1] for r, kl in zip(g, kls, strict=True)]
        for g, kls in zip(groups, token_kl, strict=True)
    ]
    return _whiten_tokens(groups, lengths, returns)


def group_centred_token_whitened(groups: list[Rewards], lengths: list[list[int]]) -> list[list[np.ndarray]]:
    """REINFORCE++-baseline (2501.03262): reward - mean of the group, then whitened over all tokens of the step."""
    values = [[np.full(1, a) for a in group_centred(g)] for g in groups]
    return _whiten_tokens(groups, lengths, values)


def parts_zscore(
    groups: list[Rewards], parts: list[dict[str, Rewards]], weights: dict[str, float]
) -> list[list[float]]:
    """Each reward normalised by itself within the group (`group_zscore`), then their weighted sum.

    So a reward with a wide spread cannot drown one with a narrow one, as it does in the z-score of their sum (GDPO, 2601.05242; that
    paper also normalises the result over the batch, which this function does not).

    >>> parts_zscore([[1.0, 10.0]], [{"right": [1.0, 0.0], "length": [0.0, 10.0]}], {"right": 1.0, "length": 1.0})[0][0] < 1e-5
    True
    """
    result = []
    for rewards, named in zip(groups, parts, strict=True):
        known = {name: [None if r is None else v for r, v in zip(rewards, values, strict=True)] for name, values in named.items()}
        columns = [[weights[name] * a for a in group_zscore(values)] for name, values in known.items()]
        result.append([0.0 if r is None else math.fsum(a) for r, *a in zip(rewards, *columns, strict=True)])
    return result


def credit(
    groups: list[Group], episodes: list[Episode], advantage: Callable[..., Any], *, kl_in_reward: float, weights: dict[str, float]
) -> list[list[float]]:
    """Give every response token its advantage. Returns one number per group and sample, the mean over its tokens.

    kl_in_reward: what k1 = log pi_old - log pi_ref at each token is multiplied by before it is taken off the reward; above 0, the
    episodes must carry both log-probs. weights: of the rewards, by name.
    """
    names = inspect.signature(advantage).parameters.keys() & {"groups", "lengths", "parts", "weights", "token_kl"}
    of_sample = {(e.group, e.sample): e for e in episodes}
    token_kl = [[_penalty(of_sample.get((g, i)), kl_in_reward) for i in range(len(x.completions))] for g, x in enumerate(groups)]
    rewards = [list(g.rewards) for g in groups]
    if kl_in_reward and "token_kl" not in names:
        penalised = zip(rewards, token_kl, strict=True)
        rewards = [[r if r is None else r - float(kl.sum()) for r, kl in zip(rs, kls, strict=True)] for rs, kls in penalised]
    if names:
        counts = {key: int(e.loss_mask.sum()) for key, e in of_sample.items()}
        given = {
            "groups": rewards,
            "lengths": [[counts.get((g, i), 0) for i in range(len(x.completions))] for g, x in enumerate(groups)],
            "parts": [g.reward_parts for g in groups],
            "weights": weights,
            "token_kl": token_kl,
        }
        result = advantage(**{name: given[name] for name in names})
    else:
        result = [advantage(rs) for rs in rewards]
    if (got := [len(values) for values in result]) != (want := [len(rs) for rs in rewards]):
        raise ValueError(f"gave {got} advantages to groups of {want} samples: it must give each sample one")
    for (group, sample), e in of_sample.items():
        e.advantages = np.broadcast_to(np.asarray(result[group][sample], np.float32), e.loss_mask.shape).copy()
    return [[float(np.mean(a)) if np.size(a) else 0.0 for a in values] for values in result]


def _penalty(episode: Episode | None, coefficient: float) -> np.ndarray:
    """The KL penalty of each response token, [R]; [0] for a completion without one."""
    if episode is None or not coefficient:
        return np.zeros(0 if episode is None else episode.num_response_tokens)
    assert episode.old_logprobs is not None and episode.ref_logprobs is not None, "KL in the reward needs both log-probs"
    return coefficient * (episode.old_logprobs.astype(np.float64) - episode.ref_logprobs) * episode.loss_mask


def _each(rewards: Rewards, of_known: Callable[[list[float]], list[float]]) -> list[float]:
    """`of_known` on the rewards that there are; 0 for the others, for a lone one, and where all are equal."""
    known = [r for r in rewards if r is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(f"rewards {rewards} must be finite, or None where there is none")
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    values = iter(of_known(known))
    return [0.0 if r is None else next(values) for r in rewards]


def _centred(known: list[float]) -> list[float]:
    mean = math.fsum(known) / len(known)
    return [r - mean for r in known]


def _zscore(known: list[float]) -> list[float]:
    centred = _centred(known)
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(known) - 1))
    return [c / (std + STABILISER) for c in centred]


def _split(groups: list[Rewards], flat: list[float]) -> list[list[float]]:
    values = iter(flat)
    return [[next(values) for _ in g] for g in groups]


def _whiten_tokens(groups: list[Rewards], lengths: list[list[int]], values: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Values ([R] or [1] per sample) less their mean, over their population deviation, both over all tokens that count."""
    counted = [
        np.broadcast_to(v, (n,)).astype(np.float64) if len(v) == 1 else v[:n].astype(np.float64)
        for g, ns, vs in zip(groups, lengths, values, strict=True)
        for r, n, v in zip(g, ns, vs, strict=True)
        if r is not None and n
    ]
    tokens = np.concatenate(counted) if counted else np.zeros(1)
    if tokens.min() == tokens.max():
        return [[np.zeros_like(v) for v in vs] for vs in values]
    mean, std = tokens.mean(), tokens.std()
    return [
        [np.zeros_like(v) if r is None else (v - mean) / (std + 1e-8) for r, v in zip(g, vs, strict=True)]
        for g, vs in zip(groups, values, strict=True)
    ]
