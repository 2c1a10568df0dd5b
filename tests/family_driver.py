"""Run by tests/test_families.py under torchrun: log-probs and gradients of small models in several layouts, one after the other.

    torchrun --nproc-per-node=2 tests/family_driver.py spec.json report.pt

The spec: {name: {"model": a folder, "lengths": of the episodes, "export": a folder or null, "shared_prompts": are equal prompts computed
once, "groups": how many prompts the episodes answer (0: each its own), "matched": with training.match_sampler or not,
**fields of RolePlan but its ranks}}.
The report: {name: what `measured` returns}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from batch import IDLE, Batch, Episode
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import Grid, Placement
from parallel.roles import ParallelismConfig, Plan, RolePlan
from parallel.switches import Switches

TEMPERATURE = 0.7
PROMPT = 2
LENGTHS = [23, 3, 40, 7, 40, 12]  # longer than a window, and shorter


def episodes(lengths: list[int], groups: int = 0) -> list[Episode]:
    """groups: of so many prompts of PROMPT tokens, each is answered in turn; 0: each episode has its own."""
    draw = np.random.default_rng(0)
    zeros = np.zeros
    if groups:
        prompts = draw.integers(3, 17, (groups, PROMPT))
        rest = [draw.integers(3, 17, n - PROMPT) for n in lengths]
        ones = [np.ones(len(r), np.float32) for r in rest]
        return [
            Episode(np.append(prompts[i % groups], r), PROMPT, one, 0 * one, group=i)
            for i, (r, one) in enumerate(zip(rest, ones, strict=True))
        ]
    return [
        Episode(draw.integers(3, 17, n), PROMPT, np.ones(n - PROMPT, np.float32), zeros(n - PROMPT, np.float32), group=i)
        for i, n in enumerate(lengths)
    ]


def slopes(lengths: list[int]) -> list[Tensor]:
    """Of the loss in the log-probs of each episode: no two alike."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n - PROMPT, generator=generator) for n in lengths]


def measured(
    model: str, lengths: list[int], export: str | None = None, shared_prompts: bool = False, groups: int = 0, matched: bool = False,
    **role: Any,
) -> dict[str, Any]:  # fmt: skip
    """Log-probs of the episodes, and whole gradients of their sum weighted by `slopes`. The model is written to `export`."""
    grid = Grid(RolePlan(list(range(dist.get_world_size())), **role), "cpu")
    options: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": 64, "shared_prompts": shared_prompts}
    options["switches"] = Switches(matched=matched)
    policy = Model(ModelSource(model), grid, dtype="float32", trainable=True, **options)
    if export is not None:
        policy.export(Path(export))
    all_episodes, weights = episodes(lengths, groups), slopes(lengths)
    own = {i: torch.from_numpy(values) for i, values in policy.logprobs(all_episodes).items()}
    rows = policy.rows(all_episodes)

    def finish(i: int, _batch: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
        of_row = [weights[e.group] for e in rows[i] if e is not IDLE]
        return (outputs[0] * torch.cat(of_row)).sum() * grid.num_shards if of_row else outputs[0].sum() * 0

    policy.passes(rows, finish, train=True)
    for p in policy.tp_partial:
        assert isinstance(p.grad, DTensor)
        dist.all_reduce(p.grad.to_local(), group=grid.group("tp"))
    if (tied := policy.tied_between_stages) is not None:
        assert isinstance(tied.grad, DTensor)
        dist.all_reduce(tied.grad.to_local(), group=grid.tied)
    gradients = {name: p.grad.full_tensor() for name, p in policy.shards().items() if isinstance(p.grad, DTensor)}
    found: list[tuple] = [() for _ in grid.ranks]
    dist.all_gather_object(found, (own, gradients))
    logprobs, gradients = ({key: t for of_rank in found for key, t in of_rank[i].items()} for i in range(2))
    return {"logprobs": [logprobs[i] for i in range(len(lengths))], "gradients": gradients}


def main() -> None:
    spec_path, report_path = map(Path, sys.argv[1:])
    world = int(os.environ["WORLD_SIZE"])
    plan = Plan.make(None, ParallelismConfig(), colocate=True, wants_reference=False, world_size=world)
    place = Placement.build(plan, "cpu")
    report = {name: measured(**case) for name, case in json.loads(spec_path.read_text()).items()}
    if place.is_root:
        torch.save(report, report_path)


if __name__ == "__main__":
    launch(main)
