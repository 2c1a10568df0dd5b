"""The same updates on two ranks under several sets of training's switches: for torchrun.

    torchrun --nproc-per-node=2 tests/switch_driver.py spec.pkl weights.pt

The spec, a pickle: {"model": a folder, "degrees": of parallelism, "switches": a list of TrainingConfig's fields, "rounds": the episodes of
each update, "max_tokens": of a row, "loss": a PolicyLoss}. weights.pt: a list of {name: whole tensor}, one for each set of switches.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from model import Model, ModelSource
from parallel.launch import launch
from parallel.pipeline import whole_model
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan
from tests.world import run_script
from trainer import Trainer, TrainingConfig


def weights_under(folder: Path, **spec: Any) -> list[dict[str, torch.Tensor]]:
    """What the driver finds; files of the exchange go into `folder`."""
    (folder / "spec.pkl").write_bytes(pickle.dumps(spec))
    run_script(2, "tests/switch_driver.py", str(folder / "spec.pkl"), str(folder / "weights.pt"))
    return torch.load(folder / "weights.pt")


def main() -> None:
    spec = pickle.loads(Path(sys.argv[1]).read_bytes())
    plan = Plan.make(None, ParallelismConfig(**spec["degrees"]), colocate=False, wants_reference=False, world_size=2)
    place = Placement.build(plan, "cpu")
    found = []
    for keys in spec["switches"]:
        cfg = TrainingConfig(dtype="float32", learning_rate=1e-3, adam_eps=1e-4, **keys)
        options: dict[str, Any] = {"dtype": "float32", "temperature": 1.0, "max_tokens": spec["max_tokens"], "switches": cfg.switches}
        policy = Model(ModelSource(spec["model"]), place.trainer, trainable=True, shared_prompts=cfg.shared_prompts, **options)
        trainer = Trainer(policy, cfg, spec["loss"])
        for step, episodes in enumerate(spec["rounds"]):
            trainer.update(episodes, step)
        found.append(whole_model(trainer.model.shards(), place.trainer, lambda tensor: tensor))
    if place.is_root:
        torch.save(found, sys.argv[2])


if __name__ == "__main__":
    launch(main)
