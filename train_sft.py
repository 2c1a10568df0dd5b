"""Supervised fine-tuning in one torchrun world.

    torchrun --nproc-per-node=2 train_sft.py configs/demo_sft.yaml [key=value ...]      (--help, --plan, --show-batch)

As train_grpo.py, with episodes from a dataset; the loss is the mean negative log-likelihood of the step's trained tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import checkpoint
import config
import finetune
import startup
from checkpoint import CheckpointConfig
from examples import Overlong, SFTDataConfig
from log import Log
from losses import NLLLoss
from metrics import Clock, MetricsConfig
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import Placement
from parallel.roles import ParallelismConfig
from rollout.generator import GeneratorConfig
from speed import speed
from trainer import Trainer, TrainingConfig


@dataclass(kw_only=True)
class Config:
    model: str  # hub id, hf://org/name[@revision], or a folder
    dataset: SFTDataConfig | list[SFTDataConfig]  # rows to train on; a list: of several datasets, by their weights
    overlong: Overlong = "truncate"  # what becomes of a row of more than training.seq_len tokens: its first ones, none, or pieces
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    eval: finetune.SFTEvalConfig = field(default_factory=finetune.SFTEvalConfig)
    rewards: dict[str, config.Call] = field(default_factory=dict)  # by name, of answers to held-out prompts; empty: no engine is started
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)  # of that engine
    early_stop: finetune.EarlyStopConfig | None = None  # end where evaluations get no better; null: never
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    seed: int = 0  # of the data's order, and of sampled answers
    output: Path | None = None  # folder of the run; null: runs/<name of the config file>
    stop_at_loss: float | None = None  # end early, once the mean loss of the last 10 steps is at most this; null: never
    resume: str = "auto"  # auto: from the newest whole checkpoint in output; never; or a checkpoint's folder

    check = finetune.check


def main() -> None:
    cfg = config.load(Config, startup.arguments(startup.SHOW))
    plan = None if finetune.shows_batch(cfg) else startup.plan_sft(cfg)
    if plan is not None:  # None: --show-batch or --plan has printed what it shows
        place = Placement.build(plan, cfg.device, deterministic=cfg.training.deterministic, stall_timeout_s=cfg.training.stall_timeout_s)
        train(cfg, place, startup.open_run(cfg, place))


def train(cfg: Config, place: Placement, output: Path) -> None:
    training, clock, source = cfg.training, Clock(), ModelSource(*config.model_source(cfg.model))
    saved = checkpoint.find(cfg.resume, output, place)
    rows = finetune.read_rows(cfg, source.tokenizer(), saved.position, saved.cut)
    total = training.steps if training.steps is not None else rows.steps_in_all(training.prompts_per_update)  # None: not known
    options: dict[str, Any] = {"dtype": training.dtype, "max_tokens": training.row_tokens, "switches": training.switches}
    policy = Model(source, place.trainer, trainable=True, temperature=1.0, **options)
    trainer = Trainer(policy, training, NLLLoss(), total=total)
    checkpoint.restore(saved, trainer, place)
    evaluation = finetune.Evaluation(cfg, source, policy, place, clock, saved)
    log = Log(cfg.metrics, output, place.is_root, total, clock, resumed_after=saved.step)
    step = kept = saved.step  # steps done, and those of the newest checkpoint
    log.step(step, evaluation.run(step) if step == 0 else {})
    clock.reduce(place.objects)  # what came before the first step is no part of it
    while (total is None or step < total) and not evaluation.ends_run:
        with clock.phase("data"):
            episodes = rows.take(training.prompts_per_update)
        if not episodes:
            break  # the data has ended
        with clock.phase("train"):
            numbers = trainer.train(episodes, step)
        step += 1
        numbers |= rows.counts() | finetune.data_numbers(episodes, policy)
        numbers |= evaluation.after_step(step, numbers["loss/policy"], is_last=step == total)
        log.step(step, numbers | (times := clock.reduce(place.objects)) | speed(episodes, times, place, policy, evaluation.generator))
        if evaluation.is_best(step) or checkpoint.is_due(step, cfg.checkpoint, 1):
            checkpoint.save(output, step, trainer, place, cfg.checkpoint, clock, **rows.state, **evaluation.state())
            kept = step
    log.step(step, last := evaluation.at_the_end(step))
    if step > kept or last:
        checkpoint.save(output, step, trainer, place, cfg.checkpoint, clock, **rows.state, **evaluation.state())
    if cfg.checkpoint.export_hf:
        policy.export(output / "hf")
        checkpoint.export_best(output, evaluation.best, trainer, place)
    log.close()
    evaluation.close()


if __name__ == "__main__":
    launch(main)
