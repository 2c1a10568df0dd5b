"""train_grpo.py as it stands, with what happened inside written down: for torchrun, in place of train_grpo.py.

    OBSERVE=<folder> [REPLAY=<folder> | FOLLOW=<folder>] torchrun --nproc-per-node=3 tests/observe.py <config> [key=value ...]

Every rank writes <folder>/rank_<r>.pkl, which `read_observed` reads. Nothing is replaced, each observation point calls the code it stands
before, but for one thing: with REPLAY the engines are left out and every generator rank answers its share of the prompts with
the completions that an earlier observation holds. That is for layouts that differ in the trainer only. With FOLLOW the engines are
there and sample, which is written down, and then answer in the same way.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import train_grpo
from batch import Episode, Group, Prompt
from parallel.launch import launch
from parallel.placement import Placement, holds, share
from rollout.generator import Generator
from rollout.sampling import Sampling
from trainer import Trainer

Done = Callable[[Group], None]


@dataclass
class Observed:
    """What one rank saw. A rank that does not train has no gradient; the lists have one entry a rollout."""

    groups: list[list[Group]] = field(default_factory=list)
    advantages: list[list[list[float]]] = field(default_factory=list)
    attached: list[dict[str, list[np.ndarray]]] = field(default_factory=list)  # "ref_logprobs", "old_logprobs": [R] per episode
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first update, as AdamW gets it: whole tensors
    sampled: list[Group] = field(default_factory=list)  # by an engine that follows


def read_observed(path: Path) -> Observed:
    return Observed(**pickle.loads(path.read_bytes()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def observe(seen: Observed) -> None:
    """Put the observation points around train_grpo's and the trainer's own functions."""
    to_episodes, attach, credit, init = train_grpo.to_episodes, train_grpo.attach, train_grpo.credit, Trainer.__init__

    def all_groups(groups: list[Group], **options: Any) -> list[Episode]:
        seen.groups.append(groups)
        seen.attached.append({})
        return to_episodes(groups, **options)

    def advantages(*arguments: Any, **options: Any) -> list[list[float]]:
        seen.advantages.append(credit(*arguments, **options))
        return seen.advantages[-1]

    def logprobs(name: str, episodes: list[Episode], values: list[np.ndarray]) -> None:
        seen.attached[-1][name] = values
        attach(name, episodes, values)

    def first_gradient(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        init(trainer, *arguments, **options)
        if trainer.model.is_local:
            shards = trainer.model.shards()

            def keep(*_: Any) -> None:
                if not seen.gradient:
                    seen.gradient |= {name: whole(p.grad) for name, p in shards.items() if p.grad is not None}

            trainer._adamw.register_step_pre_hook(keep)

    train_grpo.to_episodes, train_grpo.attach, train_grpo.credit = all_groups, logprobs, advantages
    Trainer.__init__ = first_gradient  # type: ignore[method-assign, assignment]


class Replay(Generator):
    """A generator without an engine: a prompt's completions are those recorded, which the same version must have sampled."""

    recorded: dict[int, Group]  # by the prompt's index

    def __init__(self, source: Any, cfg: Any, place: Placement, *limits: Any, **options: Any):
        nowhere = SimpleNamespace(ranks=[])  # no rank is in it: no engine is started
        super().__init__(source, cfg, replace(place, generator=nowhere), *limits, **options)  # type: ignore[arg-type]
        self.grid = place.generator

    def generate(self, prompts: list[Prompt], n_samples: int, sampling: Sampling, done: Done = lambda _group: None) -> list[Group]:
        return from_record(self.recorded, share(prompts, self.grid), n_samples, self.version, done)

    def load(self, buckets: Iterator, version: int) -> None:
        sent = [name for bucket in buckets for name, _, _ in bucket]
        assert sent or not holds(self.grid), "an engine was sent no weights"
        self.version = version


class Follow(Generator):
    """A generator whose engine samples, and that answers with the completions recorded."""

    recorded: dict[int, Group]  # by the prompt's index
    seen: Observed

    def generate(self, prompts: list[Prompt], n_samples: int, sampling: Sampling, done: Done = lambda _group: None) -> list[Group]:
        self.seen.sampled += super().generate(prompts, n_samples, sampling)
        return from_record(self.recorded, share(prompts, self.grid), n_samples, self.version, done)


def from_record(recorded: dict[int, Group], prompts: list[Prompt], n_samples: int, version: int, done: Done) -> list[Group]:
    groups = [replace(recorded[p.index], rewards=[], reward_parts={}) for p in prompts]
    for group, prompt in zip(groups, prompts, strict=True):
        assert group.prompt == prompt and len(group.completions) == n_samples, f"{prompt} was not recorded"
        versions = {c.policy_version for c in group.completions}
        assert versions == {version}, f"prompt {prompt.index}: recorded versions {versions}, now {version}"
        done(group)
    return groups


def recorded_groups(folder: Path) -> dict[int, Group]:
    return {g.prompt.index: g for groups in read_observed(folder / "rank_0.pkl").groups for g in groups}


def observed(main: Callable[[], None], seen: Observed, folder: Path) -> Callable[[], None]:
    def run() -> None:
        main()
        (folder / f"rank_{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(vars(seen)))

    return run


if __name__ == "__main__":
    seen, folder = Observed(), Path(os.environ["OBSERVE"])
    folder.mkdir(parents=True, exist_ok=True)
    observe(seen)
    if "REPLAY" in os.environ:
        Replay.recorded = recorded_groups(Path(os.environ["REPLAY"]))
        train_grpo.Generator = Replay  # type: ignore[misc]
    if "FOLLOW" in os.environ:
        Follow.recorded, Follow.seen = recorded_groups(Path(os.environ["FOLLOW"])), seen
        train_grpo.Generator = Follow  # type: ignore[misc]
    launch(observed(train_grpo.main, seen, folder))
