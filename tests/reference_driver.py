"""Run under torchrun by tests/test_reference.py: a policy and its reference as train_grpo.py builds them, without engines.

    torchrun --nproc-per-node=2 tests/reference_driver.py spec.json report.json

The spec: {"run": the name of one of RUNS, "model": a folder, "dtype": of both, "parallelism": degrees, "services": roles or null,
"own": what is different in the reference's plan}. The report is what the run returned on the first rank.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from batch import Episode, attach
from losses import GRPOLoss
from model import Model, ModelSource
from parallel.exchange import from_each, in_order
from parallel.launch import launch
from parallel.memory import live_bytes
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.weights import stream_weights
from trainer import Trainer, TrainingConfig


def some_episodes(count: int = 9) -> list[Episode]:
    """Of many lengths, for rows of 64 tokens that nothing divides."""
    draw = np.random.RandomState(0)
    episodes = []
    for i in range(count):
        prompt, response = draw.randint(2, 20), draw.randint(1, 24)
        ones, ids = np.ones(response, np.float32), draw.randint(3, 17, prompt + response)
        episodes.append(Episode(ids, prompt, ones, np.full(response, draw.randn(), np.float32), group=i))
    return episodes


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def bits(scored: list[np.ndarray]) -> list[list[float]]:
    return [[float(x) for x in values] for values in scored]


def first_step(place: Placement, spread: Any, dtype: str) -> dict[str, Any]:
    """KL to the reference in the first update, and how far the two models' log-probs are apart."""
    assert place.reference is not None
    policy, reference = spread(place.trainer, trainable=True), spread(place.reference, trainable=False)
    trainer = Trainer(policy, TrainingConfig(dtype=dtype), GRPOLoss(beta=0.1))  # type: ignore[arg-type]
    episodes = some_episodes()
    theirs = in_order(reference.logprobs(episodes), place.reference, place)
    own = in_order(policy.logprobs(episodes), place.trainer, place)
    sharded = all(isinstance(p, DTensor) for model in (policy, reference) for p in model.shards().values())
    attach("ref_logprobs", episodes, theirs)
    stats = trainer.train(episodes, 0)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(theirs, own, strict=True))
    return {"kl": stats.get("kl/ref_k3"), "apart": apart, "sharded": sharded}


@torch.no_grad()
def parked(place: Placement, spread: Any, dtype: str) -> dict[str, Any]:
    """A reference in host memory while idle beside one that stays: scores, bytes, and a move to a policy that has changed."""
    assert place.reference is not None
    policy, stays = spread(place.trainer, trainable=True), spread(place.reference, trainable=False)
    idle = spread(place.reference, trainable=False, parked=True)
    episodes, result = some_episodes(), {"bytes": [idle.local_bytes], "scores": [], "staying_bytes": stays.local_bytes}
    for move in (None, 1.0, 0.3):
        for p in policy.shards().values():
            p.add_(0.01 * torch.sign(p))
        for model in (stays, idle) if move is not None else ():
            model.refresh(stream_weights(policy.shards(), place, model.dtype, to_reference=True), mix=move)
        result["bytes"].append(idle.local_bytes)
        result["scores"].append([bits(in_order(m.logprobs(episodes), place.reference, place)) for m in (stays, idle)])
        result["bytes"].append(idle.local_bytes)
    with idle.resident():
        result["resident_bytes"] = idle.local_bytes
        result["same_weights"] = all(
            torch.equal(a.to_local(), b.to_local()) for a, b in zip(idle.shards().values(), stays.shards().values(), strict=True)
        )
    result["live"] = live_bytes(idle.shards().values(), place.device)
    return result


@torch.no_grad()
def damaged(place: Placement, spread: Any, dtype: str) -> dict[str, Any]:
    """What every rank says of each weight in turn, drawn by chance after loading, or with one bit of it changed."""
    model = spread(place.trainer, trainable=False)
    model.check_weights()
    names = {}
    for name, p in model.shards().items():
        local = p.to_local()
        kept = local.clone()
        local.normal_()
        drawn = error_of(model.check_weights)
        local.copy_(kept)
        if local.numel():
            local.view(-1)[-1:].view(torch.int32 if local.element_size() == 4 else torch.int16).bitwise_xor_(1)
        flipped = error_of(model.check_weights)
        local.copy_(kept)
        names[name] = [not local.numel() or f"1 of {len(model.shards())} " in e and name in e for e in (drawn, flipped)]
    model.check_weights()
    return {"seen": [all(map(all, each.values())) for each in from_each(names, place)], "weights": len(names)}


RUNS = (first_step, parked, damaged)


def main() -> None:
    spec, report = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    roles = {name: ServiceConfig(**role) for name, role in (spec["services"] or {}).items()}
    services = ServicesConfig(**roles) if roles else None
    plan = Plan.make(services, ParallelismConfig(**spec["parallelism"]), colocate=False, wants_reference=True, world_size=None)
    assert plan.reference is not None
    place = Placement.build(replace(plan, reference=replace(plan.reference, **spec["own"])), "cpu")

    def spread(grid: Any, **options: Any) -> Model:
        return Model(ModelSource(spec["model"]), grid, dtype=spec["dtype"], temperature=0.8, max_tokens=64, **options)

    found = {run.__name__: run for run in RUNS}[spec["run"]](place, spread, spec["dtype"])
    if place.is_root:
        report.write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
