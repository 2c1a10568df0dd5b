"""Numbers about a step: exact over ranks, the same under every placement, written once.

Three sources meet in one dictionary a step, and `log.Log` writes it: `TokenStats` (per-token values, spread over ranks),
`group_metrics` (plain data that every rank holds) and `Clock` (wall time of every rank). Names are fixed, so that ranks
need not agree on them at run time; a value that does not exist (no reference, no correct answer) is absent.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from batch import Group
from parallel.launch import enter

# Per token, by the trainer: entropy/mean is exact, entropy/nll is -logprobs of the sampled tokens, kl/old is
# old_logprobs - logprobs (k1), clip/high and clip/low are shares of tokens with A > 0 above the range and A < 0 below
# it, ratio is exp(logprobs - old_logprobs), mismatch is |logprobs - gen_logprobs|, of the first update.
TOKEN_MEANS = tuple("entropy/mean entropy/nll kl/ref_k3 kl/old clip/high clip/low ratio/mean mismatch/abs_mean".split())
TOKEN_MAXIMA = ("ratio/max", "mismatch/abs_max")
CPU = torch.device("cpu")
# data: reading, tokenizing, making episodes; sleep: the engine making room for the trainer and coming back; log: writing metrics.
PHASES = ("data", "generate", "reward", "logp_old", "logp_ref", "sleep", "train", "sync", "eval", "log", "ckpt", "wait")
STOP_REASONS = ("eos", "stop_string", "length", "abort")


@dataclass(kw_only=True)
class MetricsConfig:
    tensorboard: bool = True  # write TensorBoard files to <output>/tensorboard
    jsonl: bool = True  # write <output>/metrics.jsonl, one object a step
    samples_every: int = 10  # steps between tables of sample completions, besides the first and the last of `training.steps`; 0: never


class TokenStats:
    """Means and maxima of per-token values over all tokens of one step, whatever the micro-batches and ranks.

    Made anew for each step with the same names, in the same order, on every rank: the reduction sends one vector of all
    names, so a rank that had no tokens, or never called `add`, takes part with zeros. `device`: where `group` reduces.

    >>> stats = TokenStats(means=("kl/old",), maxima=("ratio/max",))
    >>> stats.add("kl/old", torch.tensor([[1.0, 3.0, 9.0]]), mask=torch.tensor([[1, 1, 0]]))
    >>> stats.reduce(None)
    {'kl/old': 2.0}
    """

    def __init__(
        self, means: Sequence[str] = TOKEN_MEANS, maxima: Sequence[str] = TOKEN_MAXIMA, device: torch.device = CPU
    ):
        self.means, self.maxima = tuple(means), tuple(maxima)
        names = self.means + self.maxima
        assert len(set(names)) == len(names), f"a token statistic is named twice in {names}"
        self._sums = torch.zeros(2, len(self.means), dtype=torch.float64, device=device)  # of values; of tokens
        self._largest = torch.full((len(self.maxima),), -math.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """values, mask: [B, T]; a token counts where mask is not 0; what stands elsewhere (inf, NaN) is never read."""
        assert values.shape == mask.shape, f"{name}: values {tuple(values.shape)}, mask {tuple(mask.shape)}"
        counts = mask != 0
        values = values.detach().double()
        if name in self.means:
            i = self.means.index(name)
            self._sums[0, i] += torch.where(counts, values, 0.0).sum()
            self._sums[1, i] += counts.sum()
        elif name in self.maxima:
            i = self.maxima.index(name)
            # A maximum over ranks may lose a NaN; it cannot lose an infinity.
            values = torch.where(values.isnan(), math.inf, values)
            self._largest[i] = torch.cat(
                [self._largest[i : i + 1], torch.where(counts, values, -math.inf).flatten()]
            ).max()
        else:
            raise ValueError(f"{name} is not among this step's token statistics: {', '.join(self.means + self.maxima)}")

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Means and maxima over the tokens of all ranks; a name without a token anywhere is absent.

        Collective over `group`; None: this rank alone. Ranks that hold copies of the same tokens (TP) change nothing if
        every token has equally many copies.
        """
        sums, largest = self._sums.clone(), self._largest.clone()
        if group is not None:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
            if self.maxima:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        totals, counts = sums.tolist()
        result = {name: total / count for name, total, count in zip(self.means, totals, counts, strict=True) if count}
        return result | {n: v for n, v in zip(self.maxima, largest.tolist(), strict=True) if v != -math.inf}


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed (nearest rank): always one of them.

    >>> percentile([40, 10, 20, 30], 50), percentile([40, 10, 20, 30], 95)
    (20, 40)
    """
    return sorted(values)[max(-(-len(values) * percent // 100), 1) - 1]


def _mean_std(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and population std, exactly rounded: the std of equal floats is 0, which sums in floats do not promise."""
    if not values:
        return {}
    if not all(map(math.isfinite, values)):
        return {f"{name}/mean": math.nan, f"{name}/std": math.nan}
    return {f"{name}/mean": float(statistics.mean(values)), f"{name}/std": float(statistics.pstdev(values))}


def group_metrics(
    groups: list[Group], advantages: Sequence[Sequence[float]] | None, trainer_version: int
) -> dict[str, float]:
    """What a step's scored groups say, before any shaping. `advantages[g][i]` belongs to `groups[g].completions[i]`.

    A pure function of data that every rank holds: no collective. Definitions:
    - The best and the worst reward are the largest and the smallest of this step. Where all its rewards are equal, that
      one is the best if it is above 0, else the worst, and the other does not exist.
    - reward/solve_all, solve_none: share of groups in which every reward is the best, the worst. reward/frac_zero_std:
      share of groups in which all rewards are equal (compared as floats, never through a std).
    - len/mean_correct, mean_wrong: mean response tokens of the samples with the best reward, and of the others.
    - a missing reward is in no mean, and reward/missing is the share of samples with one.
    - every std is the population's; adv/* are over samples; staleness/mean is over tokens, in optimizer steps.
    """
    assert groups, "a step without groups"
    for g in groups:
        assert len(g.rewards) == len(g.completions) > 0, f"{len(g.rewards)} rewards, {len(g.completions)} completions"
    rewards = [r for g in groups for r in g.rewards if r is not None]
    completions = [c for g in groups for c in g.completions]
    worst, best = min(rewards, default=0.0), max(rewards, default=0.0)
    known = [[r for r in g.rewards if r is not None] for g in groups]
    flat = [rs[0] for rs in known if rs and min(rs) == max(rs)]  # one per group without a spread
    has_best, has_worst = best > worst or best > 0, best > worst or best <= 0

    result = _mean_std("reward", rewards)
    for name in groups[0].reward_parts:
        result |= _mean_std(f"reward/{name}", [r for g in groups for r in g.reward_parts[name] if r is not None])
    result["reward/missing"] = 1 - len(rewards) / len(completions)
    result["reward/solve_none"] = sum(r == worst for r in flat) / len(groups) if has_worst else 0.0
    result["reward/solve_all"] = sum(r == best for r in flat) / len(groups) if has_best else 0.0
    result["reward/frac_zero_std"] = len(flat) / len(groups)

    if advantages is not None:
        sizes, given = [len(g.completions) for g in groups], [len(a) for a in advantages]
        assert given == sizes, f"advantages for {given} samples, groups of {sizes}"
        adv = [float(a) for per_sample in advantages for a in per_sample]
        result |= _mean_std("adv", adv)
        tokens = [len(c.token_ids) for c in completions]
        if sum(tokens):
            result["adv/token_mean"] = sum(a * n for a, n in zip(adv, tokens, strict=True)) / sum(tokens)
        result["adv/abs_max"] = max(map(abs, adv))
        result["adv/frac_pos"] = sum(a > 0 for a in adv) / len(adv)

    lengths = [len(c.token_ids) for c in completions]
    result["len/mean"] = statistics.fmean(lengths)
    result |= {f"len/p{p}": float(percentile(lengths, p)) for p in (50, 95)}
    result["len/max"] = float(max(lengths))
    split: dict[str, list[int]] = {"len/mean_correct": [], "len/mean_wrong": []}
    for n, r in zip(lengths, (r for g in groups for r in g.rewards), strict=True):
        if r is None:
            continue
        split["len/mean_correct" if has_best and r == best else "len/mean_wrong"].append(n)
    result |= {name: statistics.fmean(part) for name, part in split.items() if part}

    stops = [c.stop_reason for c in completions]
    for reason in (*STOP_REASONS, *sorted(set(stops) - set(STOP_REASONS))):
        result[f"stop/{reason}"] = stops.count(reason) / len(stops)
    result["trunc_rate"] = result["stop/length"]

    ages = [trainer_version - c.policy_version for c in completions]
    if sum(lengths):
        result["staleness/mean"] = sum(a * n for a, n in zip(ages, lengths, strict=True)) / sum(lengths)
    result["staleness/max"] = float(max(ages))
    return result


class Clock:
    """Wall time of a step by phase: `with clock.phase("train"): ...`, then once a step `clock.reduce(group)`.

    Every moment belongs to one phase: an inner phase interrupts the outer one, and what is in none is "other". So the
    phases of a rank with "other" add up to its step. Time is the host's: a GPU's work counts where it is waited for.
    """

    def __init__(self, phases: Sequence[str] = PHASES):
        assert {"wait"} <= set(phases) and not {"other", "step"} & set(phases), f"phases: {phases}"
        self.seconds = dict.fromkeys((*phases, "other"), 0.0)
        self._current = "other"
        self._since = time.perf_counter()
        self._borders: dict[str, str] = {}  # phase -> what `watch` calls its border
        self._look: Callable[[], dict[str, float]] = dict
        self._seen: dict[str, float] = {}

    def watch(self, look: Callable[[], dict[str, float]], borders: dict[str, str]) -> None:
        """Ask for `look`'s numbers whenever one of the phases `borders` begins; `reduce` adds the last ones as mem/<border>/<name>."""
        self._look, self._borders = look, borders

    def _switch(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[self._current] += now - self._since
        self._current, self._since = phase, now

    @contextmanager
    def phase(self, name: str, *, after: dist.ProcessGroup | None = None) -> Iterator[None]:
        """after: the phase begins when all ranks of that group have come to it; until then it is "wait"."""
        assert name in self.seconds, f"{name} is not one of the phases {', '.join(self.seconds)}"
        if after is not None:
            with self.phase("wait"):
                dist.barrier(after)
        outer = self._current
        self._switch(name)
        enter(name)
        if (border := self._borders.get(name)) is not None:
            self._seen |= {f"mem/{border}/{what}": number for what, number in self._look().items()}
        try:
            yield
        finally:
            self._switch(outer)
        enter(outer)  # not after an error, which ends the program: its last words name the phase

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """time/<phase>, time/other, time/step since the previous reduce: the longest of all ranks; `_mean`: their mean.

        Collective over `group` (the world's, on the CPU), outside all phases; None: this rank alone. The wait for the
        slowest rank in here counts as "wait" of the step that follows. What was watched is this rank's own.
        """
        assert self._current == "other", f"Clock.reduce inside the phase {self._current}"
        self._switch("wait")
        mine = torch.tensor([*self.seconds.values(), sum(self.seconds.values())], dtype=torch.float64)
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        ranks = [mine]
        if group is not None:
            ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(ranks, mine, group=group)
        self._switch("other")
        names, table = (*self.seconds, "step"), torch.stack(ranks)  # [ranks, names]
        result = dict(zip((f"time/{n}" for n in names), table.amax(0).tolist(), strict=True))
        seen, self._seen = self._seen, {}
        return result | dict(zip((f"time/{n}_mean" for n in names), table.mean(0).tolist(), strict=True)) | seen
