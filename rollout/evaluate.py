"""Held-out prompts through the engine: what the policy answers when it is not being trained."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from batch import Group, Prompt
from data import DatasetConfig, PromptStream
from metrics import Clock
from parallel.exchange import everyone
from parallel.placement import Placement, speaks_for
from rollout.generator import Generator
from rollout.rewards import Scorer
from rollout.sampling import Sampling

EVAL_SEED = 1_000_003  # added to the run's seed, so that no prompt is evaluated with the numbers it is trained with


@dataclass(kw_only=True)
class EvalConfig:
    dataset: DatasetConfig | None = None  # held-out prompts, in the form of `dataset`; null: no evaluation
    every: int = 0  # steps between evaluations, put off to a step that syncs the weights, besides the first and last; 0: only those
    n_samples: int = 1  # completions per prompt
    temperature: float = 0.0  # 0: greedy
    max_prompts: int | None = None  # so many prompts, the same ones each time; null: all

    def check(self) -> None:
        if self.every < 0:
            raise ValueError(f"every={self.every}: must be 0 or more")
        if self.n_samples < 1:
            raise ValueError(f"n_samples={self.n_samples}: must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if self.temperature == 0 and self.n_samples > 1:
            raise ValueError(f"n_samples={self.n_samples} with temperature=0: greedy answers are all the same; set n_samples: 1")
        if self.max_prompts is not None and self.max_prompts < 1:
            raise ValueError(f"max_prompts={self.max_prompts}: must be at least 1, or null for all")


def score_share(
    generator: Generator, scorer: Scorer, prompts: list[Prompt], n_samples: int, sampling: Sampling, clock: Clock
) -> list[Group]:
    """Sample and score this rank's share. Of a replica's ranks one scores, since all hold the same completions."""
    if not speaks_for(generator.grid):
        return generator.generate(prompts, n_samples, sampling)
    groups = generator.generate(prompts, n_samples, sampling, done=scorer.begin)
    with clock.phase("reward"):
        return [scorer.score(g) for g in groups]


class HeldOut:
    """The evaluation's prompts, and how they are asked."""

    def __init__(self, cfg: EvalConfig, read: Callable[..., PromptStream], training: Sampling, place: Placement, clock: Clock):
        """read: how the run reads a dataset. training: how the policy is sampled for training; evaluation keeps its limits, with a
        temperature and seeds of its own.
        """
        self._cfg, self._place, self._clock = cfg, place, clock
        seed = None if training.seed is None else training.seed + EVAL_SEED
        self._sampling = replace(training, temperature=cfg.temperature, seed=seed)
        self._prompts: list[Prompt] = []
        if cfg.dataset is not None:
            self._prompts = read(cfg.dataset, seed=0, epochs=1).take(cfg.max_prompts or sys.maxsize)

    def is_due(self, step: int, sync_interval: int) -> bool:
        """Whether an evaluation falls after `step` steps: every `every`, put off to the next step that publishes the policy."""
        every = self._cfg.every
        return every > 0 and step % sync_interval == 0 and step // every > (step - sync_interval) // every

    def evaluate(self, generator: Generator, scorer: Scorer) -> dict[str, float]:
        """Mean reward, and accuracy: the share of answers to which the first reward gave 1 or more; {} without prompts.

        Of several samples also pass: the share of prompts of which one answer at least got that. Answers whose reward is missing are in
        no mean.

        Every prompt counts once, whatever the number of replicas. Collective over the world.
        """
        if not self._prompts:
            return {}
        with self._clock.phase("eval"):
            share = score_share(generator, scorer, self._prompts, self._cfg.n_samples, self._sampling, self._clock)
            groups = everyone(share, self._place.generator, self._place)
        rewards = [r for g in groups for r in g.rewards if r is not None]
        of_prompt = [[r for r in next(iter(g.reward_parts.values())) if r is not None] for g in groups]
        first = [r for parts in of_prompt for r in parts]
        lengths = [len(c.token_ids) for g in groups for c in g.completions]
        means = {"eval/reward": rewards, "eval/accuracy": [r >= 1 for r in first]}
        if self._cfg.n_samples > 1:
            means["eval/pass"] = [max(parts) >= 1 for parts in of_prompt if parts]
        known = {name: statistics.fmean(values) for name, values in means.items() if values}
        return known | {"eval/len": statistics.fmean(lengths), "eval/prompts": len(groups)}
