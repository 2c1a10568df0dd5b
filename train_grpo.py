"""GRPO in one torchrun world. Every rank runs all of this file; outside its sub-mesh a handle does nothing (docs/architecture.md).

    torchrun --nproc-per-node=8 train_grpo.py configs/qwen.yaml [key=value ...]      (--help lists the keys, --plan the ranks)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import checkpoint
import config
import startup
from batch import attach, to_episodes
from checkpoint import CheckpointConfig
from data import DatasetConfig, PromptStream
from log import Log
from losses.advantages import credit
from metrics import Clock, MetricsConfig, group_metrics
from model import Model, ModelSource
from parallel.exchange import in_order
from parallel.launch import launch
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, ServicesConfig
from parallel.weights import stream_weights
from rollout.ahead import Rollouts
from rollout.evaluate import EvalConfig, HeldOut
from rollout.generator import Generator, GeneratorConfig
from rollout.rewards import Scorer
from speed import BORDERS, residents, speed
from trainer import Trainer, TrainingConfig


@dataclass(kw_only=True)
class Config:
    model: str  # hub id, hf://org/name[@revision], or a folder
    dataset: DatasetConfig | None = None  # prompts to train on; null: enough for --plan
    training: TrainingConfig = field(default_factory=TrainingConfig)
    grpo: startup.GRPOConfig = field(default_factory=startup.GRPOConfig)
    loss: config.Call | None = None  # a loss class with its options, in place of grpo.clip_low, grpo.clip_high and grpo.beta
    rewards: dict[str, config.Call] = field(default_factory=dict)  # by name: fn, weight (1.0) and the options of fn
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    services: ServicesConfig | None = None  # ranks of each role; null: every role on every rank
    colocate: bool = False  # true: every role on every rank; of services only generator.procs and the reference's other keys count
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    seed: int = 0  # of the data's order and of sampling
    output: Path | None = None  # folder of the run; null: runs/<name of the config file>
    resume: str = "auto"  # auto: from the newest whole checkpoint in output; never; or a checkpoint's folder

    def check(self) -> None:
        startup.check_one_home(self.loss, self.grpo)


def main() -> None:
    cfg = config.load(Config, startup.arguments())
    loss, advantage = startup.resolve_objective(cfg.loss, cfg.grpo)
    plan = startup.plan_grpo(loss, cfg)
    if plan is not None:  # None: --plan has printed it, which needs neither data nor rewards
        dataset, scorer = startup.required_dataset(cfg.dataset), Scorer(cfg.rewards, threads=cfg.grpo.reward_threads)
        place = Placement.build(plan, cfg.device, deterministic=cfg.training.deterministic, stall_timeout_s=cfg.training.stall_timeout_s)
        train(cfg, place, startup.open_run(cfg, place, loss), dataset, loss, advantage, scorer)


def handles(cfg: Config, place: Placement, loss: Any, total: int | None) -> tuple[Model, Model | None, Trainer, Generator]:
    """Policy and reference compute log-probs at the sampling temperature; off-policy data carries truncated importance weights."""
    training, grpo, source = cfg.training, cfg.grpo, ModelSource(*config.model_source(cfg.model))
    rows = partial(Model, source, max_tokens=training.row_tokens, shared_prompts=training.shared_prompts)
    spread = partial(rows, dtype=training.dtype, temperature=grpo.temperature, switches=training.switches)
    policy = spread(place.trainer, trainable=True)
    reference = spread(place.reference, trainable=False, parked=startup.parks_reference(cfg, place)) if place.reference else None
    trainer = Trainer(policy, training, loss, correction=grpo.corrected(training), top_entropy=grpo.top_entropy, total=total)
    limits = (training.dtype, training.seq_len, training.row_tokens, training.switches, (training.prompts_per_rollout, grpo.n_samples))
    return policy, reference, trainer, Generator(source, cfg.generator, place, *limits, seed=cfg.seed, policy_bytes=policy.local_bytes)


def train(cfg: Config, place: Placement, output: Path, dataset: DatasetConfig, loss: Any, advantage: Callable, scorer: Scorer) -> None:
    training, grpo, clock, source = cfg.training, cfg.grpo, Clock(), ModelSource(*config.model_source(cfg.model))
    saved = checkpoint.find(cfg.resume, output, place)
    read = partial(PromptStream, tokenizer=source.tokenizer(), max_prompt_tokens=training.seq_len - 1)  # a response token must fit
    prompts = read(dataset, seed=cfg.seed, epochs=training.passes, position=saved.position)
    total = training.steps if training.steps is not None else prompts.steps_in_all(training.prompts_per_rollout)  # None: a stream
    sampling = grpo.sampling(cfg.seed, place.device)
    held_out = HeldOut(cfg.eval, read, sampling, place, clock)
    policy, reference, trainer, generator = handles(cfg, place, loss, total)
    checkpoint.restore(saved, trainer, place, reference)
    clock.watch(partial(residents, policy, reference, trainer, generator), BORDERS)
    rollouts = Rollouts(prompts, training.prompts_per_rollout, grpo.n_samples, generator, scorer, sampling, place, clock, saved)
    log = Log(cfg.metrics, output, place.is_root, total, clock, resumed_after=saved.step)
    step = published = saved.step  # steps done, and by the policy that the engines hold

    def publish() -> int:  # the engines become policy version `step`
        with clock.phase("sync", after=place.objects):
            generator.load(stream_weights(policy.shards(), place, generator.dtype), version=step)
            if reference and training.moves_reference(step, published):
                reference.refresh(stream_weights(policy.shards(), place, reference.dtype, to_reference=True), mix=training.ref_update_mix)
        return step
    publish()
    log.step(step, held_out.evaluate(generator, scorer) if step == 0 else {})
    clock.reduce(place.objects)  # what came before the first step is no part of it
    while total is None or step < total:
        # 1. Give every rank every group. From here to the update all ranks compute the same thing.
        with clock.phase("data"):
            groups = rollouts.next()
            if not groups:
                break  # the pass over the data has ended
            episodes = to_episodes(groups, mask_truncated=grpo.mask_truncated, old_from_sampler=grpo.off_policy(training))

            # 2. Score: with the reference, with the policy where its own log-probs are the ratio's denominator, and by the rewards.
            if reference:
                with clock.phase("logp_ref"):
                    attach("ref_logprobs", episodes, in_order(reference.logprobs(episodes), reference.grid, place))
            if grpo.rescores(training):
                with clock.phase("logp_old"):
                    attach("old_logprobs", episodes, in_order(policy.logprobs(episodes), policy.grid, place))
            advantages = credit(groups, episodes, advantage, kl_in_reward=grpo.kl_in_reward, weights=scorer.weights)
            numbers = group_metrics(groups, advantages, step) | {"policy_version": published}

        # 3. Sample ahead and update. No rank waits for another in between: on disjoint meshes the two overlap.
        rollouts.sample_until(grpo.max_policy_age if total is None else min(grpo.max_policy_age, total - step - 1))
        publishes = (step + 1) % training.sync_interval == 0
        with clock.phase("sleep"), generator.asleep(until_load=publishes), clock.phase("train"):
            stats = trainer.train(episodes, step)
        step += 1

        # 4. Publish policy version `step`, look at it, and keep what a later run needs to go on from here.
        published = publish() if publishes or step == total else published
        if held_out.is_due(step, training.sync_interval) or step == total:
            numbers |= held_out.evaluate(generator, scorer)
        times = clock.reduce(place.objects)
        log.step(step, numbers | stats | prompts.counts() | times | speed(episodes, times, place, policy, generator, stats), groups)
        if checkpoint.is_due(step, cfg.checkpoint, training.sync_interval) or step == total:
            checkpoint.save(output, step, trainer, place, cfg.checkpoint, clock, reference=reference, **rollouts.state())

    if step > saved.step and step != total:  # the data has ended before its expected end
        publish()
        log.step(step, held_out.evaluate(generator, scorer))
        checkpoint.save(output, step, trainer, place, cfg.checkpoint, clock, reference=reference, **rollouts.state())
    if cfg.checkpoint.export_hf:
        policy.export(output / "hf")
    log.close()
    generator.close()


if __name__ == "__main__":
    launch(main)
