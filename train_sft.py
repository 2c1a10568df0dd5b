"""Supervised fine-tuning in one torchrun world.

    torchrun --nproc-per-node=2 train_sft.py configs/demo_sft.yaml [key=value ...]

The model, packing, trainer, checkpoints and metrics of train_grpo.py; the episodes come from a dataset instead of an engine, and
the loss is the mean negative log-likelihood of the completion's tokens over the whole step.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import checkpoint
import config
from batch import supervised
from checkpoint import CheckpointConfig
from data import DatasetConfig, PromptStream, encode_completion
from log import Log
from losses import NLLLoss
from metrics import Clock, MetricsConfig
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import Placement
from parallel.roles import ParallelismConfig
from speed import speed
from startup import SUPERVISED, arguments, make_plan, open_run, reached
from trainer import Trainer, TrainingConfig


@dataclass(kw_only=True)
class Config:
    model: str  # hub id, hf://org/name[@revision], or a folder
    dataset: DatasetConfig  # its target is the completion, kept whole
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    seed: int = 0  # of the data's order
    output: Path | None = None  # folder of the run; null: runs/<name of the config file>
    stop_at_loss: float | None = None  # end early, once the mean loss of the last 10 steps is at most this; null: never
    resume: str = "auto"  # auto: from the newest whole checkpoint in output; never; or a checkpoint's folder

    def check(self) -> None:
        for key, neutral in (("updates_per_rollout", 1), ("sync_interval", 1), ("ref_update_interval", 0)):
            if (value := vars(self.training)[key]) != neutral:
                raise ValueError(f"training.{key}={value}: supervised fine-tuning has neither rollouts nor a reference; remove the key")


def main() -> None:
    cfg = config.load(Config, arguments())
    options: dict[str, Any] = {"model": cfg.model, "training": cfg.training, "roles": SUPERVISED}
    plan = make_plan(None, cfg.parallelism, colocate=True, wants_reference=False, **options)
    if plan is not None:  # None: --plan has printed it
        place = Placement.build(plan, cfg.device, deterministic=cfg.training.deterministic)
        train(cfg, place, open_run(cfg, place))


def train(cfg: Config, place: Placement, output: Path) -> None:
    training, clock, source = cfg.training, Clock(), ModelSource(*config.model_source(cfg.model))
    tokenizer = source.tokenizer()
    saved = checkpoint.find(cfg.resume, output, place)
    rows = PromptStream(
        cfg.dataset, tokenizer, seed=cfg.seed, max_prompt_tokens=training.seq_len - 1, epochs=training.passes,
        position=saved.position, target=str.strip,
    )
    spread = partial(Model, source, place.trainer, trainable=True, switches=training.switches)
    policy = spread(dtype=training.dtype, temperature=1.0, max_tokens=training.row_tokens)
    trainer = Trainer(policy, training, NLLLoss())
    checkpoint.restore(saved, trainer, place)
    total = training.steps if training.steps is not None else rows.steps_in_all(training.prompts_per_update)
    log = Log(cfg.metrics, output, place.is_root, total, clock, resumed_after=saved.step)
    step = saved.step  # steps done
    recent = deque(saved.recent, maxlen=10)  # losses
    while (total is None or step < total) and not reached(cfg.stop_at_loss, recent):
        with clock.phase("data"):
            taken = rows.take(training.prompts_per_update)
            episodes = [supervised(p.token_ids, encode_completion(tokenizer, p.target), training.seq_len) for p in taken]
        if not episodes:
            break  # the pass over the data has ended
        with clock.phase("train"):
            stats = trainer.train(episodes, step)
        step += 1
        recent.append(stats["loss/policy"])
        times = clock.reduce(place.objects)
        numbers = stats | rows.counts() | {"data/tokens": stats["loss/tokens"]} | times
        log.step(step, numbers | speed(episodes, times, place, policy))
        if checkpoint.is_due(step, cfg.checkpoint, 1):
            checkpoint.save(output, step, trainer, place, cfg.checkpoint, clock, position=rows.position, recent=list(recent))
    if step > saved.step:
        checkpoint.save(output, step, trainer, place, cfg.checkpoint, clock, position=rows.position, recent=list(recent))
    if cfg.checkpoint.export_hf:
        policy.export(output / "hf")
    log.close()


if __name__ == "__main__":
    launch(main)
