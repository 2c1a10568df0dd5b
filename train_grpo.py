"""GRPO in one torchrun world.

    torchrun --nproc-per-node=8 train_grpo.py configs/qwen.yaml [key=value ...]      (--help lists the keys, --plan the ranks)

Every rank runs this file from top to bottom. The policy, the reference and the engine live on sub-meshes of the world
(parallel/placement.py). Outside its mesh a handle does nothing and its share of any work is [], so the loop has no roles in it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import checkpoint
import config
from batch import Group, attach, to_episodes
from checkpoint import CheckpointConfig
from config import Call
from data import DatasetConfig, PromptStream
from log import Log
from metrics import Clock, MetricsConfig, group_metrics, throughput
from model import Model, ModelSource
from parallel.exchange import everyone
from parallel.launch import launch
from parallel.placement import ParallelismConfig, Placement, ServicesConfig, share
from parallel.weights import stream_weights
from rollout.evaluate import EvalConfig, evaluate, load_prompts, score_share
from rollout.generator import Generator, GeneratorConfig, Sampling
from rollout.rewards import Scorer
from startup import GRPOConfig, arguments, check_one_home, device_type, open_run, plan_grpo, resolve_advantage, resolve_loss
from trainer import Trainer, TrainingConfig


@dataclass(kw_only=True)
class Config:
    model: str  # hub id, hf://org/name[@revision], or a folder
    dataset: DatasetConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    loss: Call | None = None  # a loss class with its options, in place of grpo.clip_low, grpo.clip_high and grpo.beta
    rewards: dict[str, Call] = field(default_factory=dict)  # by name: fn, weight (1.0) and the options of fn
    services: ServicesConfig | None = None  # ranks of each role; null: every role on every rank
    colocate: bool = False  # true: every role on every rank, whatever services says (generator.procs stays the engine's TP degree)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    seed: int = 0  # of the data's order and of sampling
    output: Path | None = None  # folder of the run; null: runs/<name of the config file>
    resume: str = "auto"  # auto: from the newest whole checkpoint in output; never; or a checkpoint's folder

    def check(self) -> None:
        check_one_home(self.loss, self.grpo)


def main() -> None:
    cfg = config.load(Config, arguments())
    loss, advantage, scorer = resolve_loss(cfg.loss, cfg.grpo), resolve_advantage(cfg.grpo), Scorer(cfg.rewards)
    plan = plan_grpo(loss, cfg.services, cfg.parallelism, colocate=cfg.colocate)
    if plan is not None:  # None: --plan has printed it
        place = Placement.build(plan, device_type(cfg.device))
        train(cfg, place, open_run(cfg, place), loss, advantage, scorer)


def train(cfg: Config, place: Placement, output: Path, loss: Any, advantage: Callable, scorer: Scorer) -> None:
    training, grpo, clock = cfg.training, cfg.grpo, Clock()
    source = ModelSource(*config.model_source(cfg.model))
    tokenizer, longest = source.tokenizer(), training.seq_len - 1  # of a prompt: a response token must fit
    saved = checkpoint.find(cfg.resume, output, place)
    passes = 1 if training.steps is None else None
    prompts = PromptStream(cfg.dataset, tokenizer, seed=cfg.seed, max_prompt_tokens=longest, position=saved.position, epochs=passes)
    held_out = load_prompts(cfg.eval, tokenizer, longest)

    # The handles. Policy and reference compute log-probs at the sampling temperature.
    scale = {"dtype": training.dtype, "temperature": grpo.temperature, "max_tokens": training.row_tokens}
    policy = Model(source, place.trainer, trainable=True, **scale)
    reference = Model(source, place.reference, trainable=False, **scale) if place.reference else None
    off_policy = grpo.off_policy(training)
    trainer = Trainer(policy, training, loss, pad_token_id=tokenizer.pad_token_id, importance_cap=2.0 if off_policy else None)
    generator = Generator(source, cfg.generator, place, dtype=training.dtype, seq_len=training.seq_len, seed=cfg.seed)
    sampling = Sampling(grpo.temperature, grpo.max_new_tokens, tuple(grpo.stop), grpo.sampling_seed(cfg.seed, place.device))
    checkpoint.restore(saved, trainer, place)

    wanted = training.prompts_per_update * training.updates_per_rollout
    total = training.steps if training.steps is not None else prompts.steps_in_all(wanted)  # None: a stream, whose end is not known
    log = Log(cfg.metrics, output, place.is_root, total)
    log.resume_at(saved.step + 1 if saved.step else 0)
    ahead: deque[list[Group]] = deque(share(groups, place.generator) for groups in saved.ahead)  # sampled, not yet trained on
    step = published = saved.step  # steps done, and by the policy that the engines hold

    def sample_ahead(count: int) -> None:
        """Sample until `count` rollouts wait. Groups stay where they were made until `everyone`."""
        while len(ahead) < count and (total is None or step + len(ahead) < total):
            with clock.phase("generate"):
                ahead.append(score_share(generator, scorer, prompts.take(wanted), grpo.n_samples, sampling))

    def publish() -> int:
        """The engines become policy version `step`."""
        with clock.phase("sync"):
            generator.load(stream_weights(policy.shards(), place, generator.dtype), version=step)
        return step

    def score_held_out() -> dict[str, float]:
        with clock.phase("eval"):
            return evaluate(cfg.eval, held_out, generator, scorer, place, sampling)

    def save() -> None:
        with clock.phase("ckpt"):
            waiting = [everyone(groups, place.generator, place) for groups in ahead]
            checkpoint.save(output, step, trainer, place, cfg.checkpoint, position=prompts.position, ahead=waiting)

    publish()
    if step == 0:
        log.step(step, score_held_out())
    while total is None or step < total:
        # 1. Give every rank every group. From here to the update all ranks compute the same thing.
        sample_ahead(1)
        with clock.phase("wait"):
            groups = everyone(ahead.popleft(), place.generator, place)
        if not groups:
            break  # the pass over the data has ended
        advantages = [advantage(g.rewards) for g in groups]
        episodes = to_episodes(groups, advantages, mask_truncated=grpo.mask_truncated, old_from_sampler=off_policy)

        # 2. Score them, with the reference and where its own log-probs are the ratio's denominator with the policy.
        with clock.phase("logp_ref"):
            if reference:
                attach("ref_logprobs", episodes, everyone(reference.logprobs(episodes), reference.mesh, place))
            if not off_policy and training.updates_per_rollout > 1:
                attach("old_logprobs", episodes, everyone(policy.logprobs(episodes), policy.mesh, place))

        # 3. Sample ahead and update. No rank waits for another in between: on disjoint meshes the two overlap.
        sample_ahead(grpo.max_policy_age)
        publishes = (step + 1) % training.sync_interval == 0
        with generator.asleep(until_load=publishes), clock.phase("train"):
            stats = trainer.train(episodes, step)
        numbers = group_metrics(groups, advantages, step) | stats | {"policy_version": published}
        step += 1

        # 4. Publish policy version `step`, and keep what a later run needs to go on from here.
        if publishes:
            published = publish()
            if checkpoint.is_due(step, cfg.checkpoint, training.sync_interval) and step != total:
                save()
        if cfg.eval.every and step % cfg.eval.every == 0 and step != total:
            numbers |= score_held_out()
        times = clock.reduce(place.objects)
        log.step(step, numbers | times | throughput(groups, times, len(place.plan.generator.ranks), len(place.plan.trainer.ranks)))
        log.samples(step, groups)

    if published != step:
        publish()
    if step > saved.step:
        log.step(step, score_held_out())
        save()
    if cfg.checkpoint.export_hf:
        policy.export(output / "hf")
    log.close()
    generator.close()


if __name__ == "__main__":
    launch(main)
