"""Run by test_many_gpus.py under torchrun: engines of two ranks, each a world of its own inside the trainers' world.

    torchrun --nproc-per-node=8 tests/gpu/replicas.py spec.json report.json

The spec: {"model": folder, "trainers": ranks that only train or 0 where all roles share ranks, "engines", "ranks", "device"}. The report:
what each rank saw.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from batch import Group, Prompt
from parallel.exchange import everyone, from_each
from parallel.launch import launch
from parallel.placement import Placement, holds
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.sub_world import sub_world
from rollout.generator import GeneratorConfig
from rollout.sampling import Sampling
from tests.gpu.driver import Job
from tests.sync_driver import ids

GREEDY = Sampling(0.0, 16)


def default_world(place: Placement, rank: int) -> dict[str, Any]:
    """The default group as it is now, and the sum over it of the ranks' numbers in the whole world."""
    number = torch.tensor(float(rank), device=place.device)
    dist.all_reduce(number)
    env = [os.environ["RANK"], os.environ["WORLD_SIZE"]]
    return {"rank": dist.get_rank(), "size": dist.get_world_size(), "sum": float(number), "env": env}


def sampled(job: Job, prompts: list[Prompt], sampling: Sampling) -> tuple[list[Group], bool]:
    """Everyone's groups, and whether the ranks of each engine sampled the same."""
    mine = job.generator.generate(prompts, 2 if sampling.temperature else 1, sampling)
    each = from_each(ids(mine), job.place)
    engines = [each[i : i + 2] for i in range(job.place.plan.generator.ranks[0], len(each), 2)]
    return everyone(mine, job.place.generator, job.place), all(a == b for a, b in engines)


def watched(place: Placement, model: str) -> dict[str, Any]:
    rank, inside = dist.get_rank(), None
    if holds(place.generator):
        assert place.replica is not None
        with sub_world(place.replica):
            inside = default_world(place, rank)
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    seen: dict[str, Any] = {"inside": inside, "bound": bound and str(bound), "multicast": os.environ.get("NCCL_NVLS_ENABLE")}
    seen |= default_world(place, rank) | {"backend": dist.get_backend()}

    cfg = GeneratorConfig(gpu_memory_utilization=0.3, enforce_eager=True, engine={"disable_custom_all_reduce": True})
    job = Job.start(place, model, cfg=cfg, seq_len=256, sampled=24)
    job.publish()
    draw = np.random.default_rng(0)
    prompts = [Prompt(i, draw.integers(1, 500, 20).tolist()) for i in range(9)]
    agree, gaps = [], []
    for _ in range(3):
        groups, same = sampled(job, prompts, job.sampling)
        agree.append(same)
        gaps.append(job.gap(groups))
        with job.generator.asleep(until_load=True):
            job.train(groups)
        job.publish()
    # Every engine is given the same prompts: as many copies in a row as there are engines.
    engines = place.generator.num_replicas
    copies = [Prompt(i * engines + copy, p.token_ids) for i, p in enumerate(prompts) for copy in range(engines)]
    answers = [g.completions[0].token_ids for g in sampled(job, copies, GREEDY)[0]]
    pairs = [(answers[i], answers[i + 1]) for i in range(0, len(answers), engines) if engines > 1]
    job.generator.close()
    seen |= {"gaps": gaps, "peers_agree": all(agree), "prompts": len(prompts), "answered": len(groups)}
    return seen | {"same_greedy": f"{sum(a == b for a, b in pairs)} of {len(pairs)}"} | default_world(place, rank)


def main() -> None:
    spec, report = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    trainers, engine = spec["trainers"], ServiceConfig(procs=2, num_replicas=spec["engines"])
    services = ServicesConfig(trainer=ServiceConfig(procs=trainers or 1), generator=engine)
    plan = Plan.make(services, ParallelismConfig(), colocate=not trainers, wants_reference=False, world_size=spec["ranks"])
    place = Placement.build(plan, spec["device"])
    found = from_each(watched(place, spec["model"]), place)
    if place.is_root:
        report.write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
