"""From a config to a checked plan: everything that can be known to be wrong before a process group, a model or an engine exists."""

import inspect
import logging
import math
import os
import random
import re
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
import yaml
from transformers import AutoConfig

import checkpoint
import config
from batch import Completion, Group, Prompt, to_episodes
from config import Call
from data import DatasetConfig
from estimate import Estimate, Shape
from lock import lock
from losses import GRPOLoss, PolicyLoss
from losses.advantages import credit
from losses.card import Settings, card, lint
from losses.contract import forward_arguments, requires_reference
from losses.correction import Truncated
from model import ModelSource
from parallel.fit import check_model, check_switches, idle_ranks
from parallel.hardware import is_kept_on_cpu, largest_memory
from parallel.memory import GIB, capacity
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, ServicesConfig
from rollout.sampling import Sampling, sampling_seed
from skipping import check_skips
from trainer import TrainingConfig

DEFAULT_CLIP = {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.0}


@dataclass(kw_only=True)
class GRPOConfig:
    n_samples: int = 8  # completions per prompt, compared with each other
    temperature: float = 1.0  # of sampling; every log-prob is taken at it
    max_new_tokens: int | None = None  # response tokens at most; null: what training.seq_len leaves after the prompt
    top_p: float = 1.0  # 1; the sampler's log-probs over a cut vocabulary are not those that are trained
    top_k: int = 0  # 0, likewise
    min_p: float = 0.0  # 0, likewise
    stop: list[str] = field(default_factory=list)  # strings that end a response, besides the model's end-of-sequence token
    clip_low: float | None = None  # GRPOLoss: the ratio is clipped at 1 - clip_low; null: 0.2
    clip_high: float | None = None  # GRPOLoss: the ratio is clipped at 1 + clip_high; null: 0.28
    beta: float | None = None  # GRPOLoss: weight of KL(policy || reference); null: 0, no reference needed
    advantage: Call | None = None  # rewards -> advantages (losses/advantages.py); null: the one that the loss is defined with
    kl_in_reward: float = 0.0  # weight of k1 to the reference, taken off the reward at each token; above 0 needs a reference
    correction: Call | None = None  # weights of sampled tokens (losses/correction.py); null: Truncated at 2 off policy, else none
    top_entropy: float = 1.0  # share of a step's tokens, those of highest entropy, whose policy loss is kept
    max_policy_age: int = 0  # versions between sampling and training; 1 or more samples ahead, while other ranks train
    old_logprobs: Literal["auto", "trainer", "sampler"] = "auto"  # the ratio's denominator; auto: trainer for fresh data used once
    reward_threads: int = 0  # answers scored at once while others are sampled; 0: one by one after it, in the main thread
    mask_truncated: bool = False  # true: answers cut off by the length limit do not count in the loss
    seeded_sampling: Literal["auto", "always", "never"] = "auto"  # a seed for each sample; auto: on a CPU, and where torch is deterministic

    def check(self) -> None:
        for key, least in (("n_samples", 1), ("max_policy_age", 0), ("reward_threads", 0)):
            if vars(self)[key] < least:
                raise ValueError(f"{key}={vars(self)[key]}: must be at least {least}")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature}: must be above 0; greedy samples are all the same (eval.temperature may be 0)"
            )
        for key, value, neutral in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0), ("min_p", self.min_p, 0.0)):
            if value != neutral:
                raise ValueError(
                    f"{key}={value}: must be {neutral} in training. The sampler renormalises its log-probs over the tokens it keeps and "
                    f"the policy's are over all, so every ratio would be off by the kept mass; sharpen samples with grpo.temperature, at "
                    f"which both are taken"
                )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1, or null")
        if not 0 < self.top_entropy <= 1:
            raise ValueError(f"top_entropy={self.top_entropy}: must be above 0 and at most 1, the share of tokens that is kept")
        if not 0 <= self.kl_in_reward < math.inf:
            raise ValueError(f"kl_in_reward={self.kl_in_reward}: must be 0 (no KL in the reward) or more")

    def rescores(self, training: TrainingConfig) -> bool:
        """Does the policy score a rollout before its first update? With one update its log-probs are those of the update's own pass."""
        return (training.updates_per_rollout > 1 or self.kl_in_reward > 0) and not self.off_policy(training)

    def corrected(self, training: TrainingConfig) -> Any:
        """What sampled tokens are weighted by, or None."""
        if self.correction is not None:
            return self.correction.resolve()
        return Truncated() if self.off_policy(training) else None

    def sampling(self, seed: int, device: torch.device) -> Sampling:
        """How the policy is sampled for training. seed: the run's."""
        return Sampling(self.temperature, self.max_new_tokens, tuple(self.stop), sampling_seed(self.seeded_sampling, seed, device))

    def off_policy(self, training: TrainingConfig) -> bool:
        """Is the sampler's log-prob the ratio's denominator?"""
        if self.old_logprobs != "auto":
            return self.old_logprobs == "sampler"
        return self.max_policy_age > 0 or training.updates_per_rollout > 1 or training.sync_interval > 1


def check_one_home(loss: Call | None, grpo: GRPOConfig) -> None:
    """Options of the loss have one home: `loss`, or grpo.clip_low, grpo.clip_high and grpo.beta."""
    for key in DEFAULT_CLIP:
        if loss is not None and (value := vars(grpo)[key]) is not None:
            raise ValueError(
                f"grpo.{key}={value} and loss.fn={loss.fn} are both set: remove grpo.{key} and give {loss.fn} its options under loss"
            )


def resolve_objective(loss: Call | None, grpo: GRPOConfig) -> tuple[Any, Any]:
    """The loss and the advantage function that goes with it."""
    built = resolve_loss(loss, grpo)
    return built, resolve_advantage(built, grpo)


def resolve_loss(loss: Call | None, grpo: GRPOConfig) -> Any:
    """The objective, built: `loss`, or GRPOLoss with grpo's options."""
    if loss is None:
        options: dict[str, Any] = {key: default if vars(grpo)[key] is None else vars(grpo)[key] for key, default in DEFAULT_CLIP.items()}
        return GRPOLoss(**options)
    built = loss.resolve()
    forward_arguments(built)
    return built


def advantage_call(loss: Any, grpo: GRPOConfig) -> Call:
    """grpo.advantage, or the function that the loss is defined with."""
    return grpo.advantage or Call(f"losses.advantages.{loss.advantage if isinstance(loss, PolicyLoss) else 'group_zscore'}")


def objective_settings(
    loss: Any, given: Call | None, grpo: GRPOConfig, training: TrainingConfig, rewards: dict[str, Call]
) -> Settings:
    """What the card of the run's objective says besides the loss."""
    advantage = advantage_call(loss, grpo)
    old: Literal["own", "trainer", "sampler"] = "trainer" if grpo.rescores(training) else "own"
    old = "sampler" if grpo.off_policy(training) else old
    of_grpo = ("n_samples", "temperature", "kl_in_reward", "top_entropy", "mask_truncated", "max_new_tokens", "max_policy_age")
    of_training = ("entropy_coef", "seq_len", "updates_per_rollout", "sync_interval", "dtype", "learning_rate")
    read: dict[str, Any] = {key: vars(grpo)[key] for key in of_grpo} | {key: vars(training)[key] for key in of_training}
    return Settings(
        home="grpo" if given is None else "loss", advantage=advantage.fn, advantage_options=advantage.kwargs,
        rewards={name: call.kwargs.get("weight", 1.0) for name, call in rewards.items()},
        correction=grpo.corrected(training), old_logprobs=old, stop=bool(grpo.stop), **read,
    )  # fmt: skip


def resolve_advantage(loss: Any, grpo: GRPOConfig) -> Any:
    """The advantage function, tried on a step of two groups of the run's size."""
    call = advantage_call(loss, grpo)
    advantage = call.resolve()
    asked = inspect.signature(advantage).parameters
    if grpo.kl_in_reward and "parts" in asked and "token_kl" not in asked:
        raise ValueError(
            f"grpo.kl_in_reward={grpo.kl_in_reward} with grpo.advantage={call.fn}, which reads the rewards' parts, where there is no KL: "
            f"set grpo.kl_in_reward: 0 (and the loss's beta for a KL in the loss), or another advantage"
        )
    answers = [[Completion("", [0], [0.0], {}, "eos")] * grpo.n_samples] * 2
    groups = [Group(Prompt(i, [0]), a, [float(i)] * grpo.n_samples, {"r": [float(i)] * grpo.n_samples}) for i, a in enumerate(answers)]
    episodes = to_episodes(groups, mask_truncated=False, old_from_sampler=False)
    try:
        values = credit(groups, episodes, advantage, kl_in_reward=0, weights={"r": 1.0})
    except (TypeError, ValueError) as error:
        raise ValueError(f"grpo.advantage={call.fn}: {error}") from error
    if not all(math.isfinite(v) for of_group in values for v in of_group):
        raise ValueError(f"grpo.advantage={call.fn}: gave {values} for groups of equal rewards: it must give each sample a finite number")
    if grpo.n_samples == 1 and not any(v for of_group in values for v in of_group):
        raise ValueError(
            f"grpo.n_samples=1 with grpo.advantage={call.fn}: it compares the samples of a prompt with each other and gives a lone one 0; "
            f"set grpo.n_samples to at least 2, or grpo.advantage: losses.advantages.batch_zscore"
        )
    return advantage


def required_dataset(dataset: DatasetConfig | None) -> DatasetConfig:
    if dataset is None:
        raise ValueError("missing: dataset.path, what to train on: a file, a folder of files, or a dataset's name on the Hugging Face Hub")
    return dataset


SHOW = "--show-batch"  # or --show-batch=N, of train_sft.py: print the first (N) rows of the first step as they are trained, and end
PLAN = "--plan"  # or --plan=N: print who does what on N ranks (default: as many as the config needs), and end; =NxG: on GPUs of G GiB


def arguments(*flags: str) -> list[str]:
    """The command line without --plan and other `flags`, for config.load."""
    return [a for a in sys.argv[1:] if a.partition("=")[0] not in (PLAN, *flags)]


def asked_rows() -> int | None:
    """--show-batch[=ROWS]: the number of rows to show; None where it was not asked."""
    asked = next((a.partition("=")[2] for a in sys.argv[1:] if a.partition("=")[0] == SHOW), None)
    if asked is None:
        return None
    if asked and (not asked.isdecimal() or not int(asked)):
        raise ValueError(f"{SHOW}={asked}: must be a number of rows, at least 1")
    return int(asked or 4)


def check_repeatable(grpo: GRPOConfig, training: TrainingConfig) -> None:
    """ValueError where two runs could differ that were asked to be equal."""
    if training.deterministic and grpo.seeded_sampling == "never":
        raise ValueError(
            "grpo.seeded_sampling=never with training.deterministic=true: samples without seeds of their own need not be the same twice; "
            "set grpo.seeded_sampling to auto or always"
        )


def plan_grpo(loss: Any, cfg: Any) -> Plan | None:
    """Who does what; None when --plan asked to print that and no more. ValueError where that, or what is trained, does not fit together."""
    grpo, training, services, colocate = cfg.grpo, cfg.training, cfg.services, cfg.colocate
    if cfg.checkpoint.best is not None:
        raise ValueError(f"checkpoint.best={cfg.checkpoint.best}: train_sft.py alone keeps a best checkpoint; remove the key")
    check_repeatable(grpo, training)
    if training.skip_zero_advantages:
        check_skips(loss, entropy_coef=training.entropy_coef, top_entropy=grpo.top_entropy)
    needs = requires_reference(loss) or grpo.kl_in_reward > 0
    if services is not None and services.ref_model is None and needs and not colocate:
        raise ValueError(
            "the loss needs a reference model (grpo.beta or grpo.kl_in_reward above 0, or a loss that asks for ref_logprobs) and "
            "services.ref_model is absent: add services.ref_model: {procs: 1}, or set grpo.beta: 0 and grpo.kl_in_reward: 0"
        )
    wants = needs or (services is not None and services.ref_model is not None)
    if training.ref_update_interval and not wants:
        raise ValueError(
            f"training.ref_update_interval={training.ref_update_interval}, and there is no reference to move: set it to 0, or give the "
            f"run a reference (grpo.beta or grpo.kl_in_reward above 0, or services.ref_model)"
        )
    options: dict[str, Any] = {"model": cfg.model, "training": training, "colocate": colocate, "wants_reference": wants}
    return make_plan(services, cfg.parallelism, **options, more=partial(plan_notes, cfg))


def plan_sft(cfg: Any) -> Plan | None:
    """The trainer on all ranks, and an engine on each where there are rewards; None when --plan asked to print that and no more."""

    def notes(plan: Plan, gpu: int) -> list[str]:
        return idle(cfg, plan, None) + plan_bytes(cfg, plan, gpu)

    options: dict[str, Any] = {"model": cfg.model, "colocate": True, "wants_reference": False, "samples": bool(cfg.rewards)}
    return make_plan(None, cfg.parallelism, training=cfg.training, **options, more=notes)


def plan_notes(cfg: Any, plan: Plan, gpu: int) -> list[str]:
    """What --plan says of a GRPO run besides its ranks. gpu: its bytes, 0 for this machine's."""
    return idle(cfg, plan, cfg.grpo.n_samples) + plan_bytes(cfg, plan, gpu)


def idle(cfg: Any, plan: Plan, samples: int | None) -> list[str]:
    """Warnings of ranks without work. samples: of a prompt; None where nothing is sampled."""
    training = cfg.training
    if samples is None:
        return idle_ranks(plan, sequences=training.prompts_per_update, prompts=None)
    return idle_ranks(plan, sequences=training.prompts_per_update * samples, prompts=training.prompts_per_rollout)


def estimate_of(cfg: Any, plan: Plan) -> Estimate | None:
    """Bytes of the run's roles; None where the model's shape is not at hand."""
    shape = Shape.read(*config.model_source(cfg.model))
    if shape is None:
        return None
    training, engine = cfg.training, cfg.generator.dtype or cfg.training.dtype
    dtypes = (getattr(torch, training.dtype), getattr(torch, engine))
    return Estimate(shape, plan, *dtypes, training.row_tokens, training.switches)


def parks_reference(cfg: Any, place: Placement) -> bool:
    """Does the reference wait in host memory while it is idle? From the bytes that --plan prints; says so."""
    estimate = estimate_of(cfg, place.plan)
    return estimate is not None and estimate.parks_reference(capacity(place.device), cfg.generator.gpu_memory_utilization)


def plan_bytes(cfg: Any, plan: Plan, asked: int) -> list[str]:
    """What --plan says of memory, where the model's shape is at hand. asked: bytes of a GPU; 0: of this machine's, if the run uses it."""
    if (estimate := estimate_of(cfg, plan)) is None:
        return []
    training, engine, share, cache = cfg.training, cfg.generator, cfg.generator.gpu_memory_utilization, 0
    if (total := asked or largest_memory(cfg.device)) or is_kept_on_cpu(cfg.device):
        rollout = (training.prompts_per_rollout, cfg.grpo.n_samples) if plan.samples else None
        cache = engine.engine.get("kv_cache_memory_bytes") or estimate.kv_cache(engine, total, training.seq_len, rollout) or 0
    return estimate.lines(training.seq_len, total, share, cache) + (estimate.warnings(total, share, cache) if total else [])


def asked_plan() -> tuple[int | None, int] | None:
    """--plan[=RANKS[xGIB]]: the number of ranks, None for as many as the config needs, and the bytes of a GPU, 0 for this machine's."""
    asked = next((a.partition("=")[2] for a in sys.argv[1:] if a.partition("=")[0] == PLAN), None)
    if asked is None:
        return None
    found = re.fullmatch(r"(\d*)(?:x(\d+(?:\.\d+)?)(?:GiB)?)?", asked)
    if not found or (found[1] and not int(found[1])) or (found[2] and not float(found[2])):
        raise ValueError(f"{PLAN}={asked}: must be a number of ranks, at least 1, and may go on with a GPU's GiB, as in {PLAN}=8x80")
    return int(found[1]) if found[1] else None, int(float(found[2] or 0) * GIB)


def config_at_hand(model: str) -> Any | None:
    """The model's, from a folder or from what the cache holds; nothing is downloaded."""
    name, revision = config.model_source(model)
    try:
        return AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None


def make_plan(
    services: ServicesConfig | None,
    parallelism: ParallelismConfig,
    *,
    model: str,
    training: TrainingConfig,
    colocate: bool,
    wants_reference: bool,
    samples: bool = True,
    more: Callable[[Plan, int], list[str]] = lambda _plan, _gpu: [],
) -> Plan | None:
    """`Plan.make` for the ranks that torchrun started, or for --plan's, which also prints what `more` says of the plan and its GPU.

    samples: whether anything is sampled. ValueError also where the model cannot be spread so, if its config is at hand.
    """
    asked = asked_plan()
    started = int(os.environ.get("WORLD_SIZE", 1))
    size = started if asked is None else asked[0]
    plan = Plan.make(services, parallelism, colocate=colocate, wants_reference=wants_reference, world_size=size)
    plan = replace(plan, samples=samples)
    if (shape := config_at_hand(model)) is not None:  # otherwise `open_run` reads it
        check_model(shape, plan, training.seq_len)
    check_switches(training.switches, plan, shape)
    if asked is None:
        return plan
    print("\n".join([plan.table(), *more(plan, asked[1])]), flush=True)
    return None


# What may differ between a run and its continuation: how far and where it runs, and what it writes.
FREE = set("resume output device services colocate parallelism generator eval checkpoint metrics early_stop grpo.reward_threads".split())
FREE |= {f"training.{k}" for k in "steps epochs max_tokens_per_batch activation_checkpointing compile cpu_offload stall_timeout_s".split()}


def check_same_run(output: Path, before: dict, now: dict) -> None:
    """ValueError when `output` holds checkpoints of a run that was configured otherwise: going on would mix two experiments."""

    def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
        items = ((f"{prefix}{key}", value) for key, value in tree.items() if f"{prefix}{key}" not in FREE)
        return {k: v for key, value in items for k, v in (flat(value, f"{key}.") if isinstance(value, dict) else {key: value}).items()}

    old, new = flat(before), flat(now)
    if changed := sorted(key for key in old | new if old.get(key) != new.get(key)):
        told = ", ".join(f"{key} was {old.get(key)} and is {new.get(key)}" for key in changed[:3])
        raise ValueError(
            f"{output} holds checkpoints of a run with another configuration ({told}): set another output, resume: never to start over, "
            f"the same values to go on, or resume: <a checkpoint's folder> to go on with the new ones"
        )


def reached(goal: float | None, recent: deque[float]) -> bool:
    """Whether the mean of the last losses is at most `goal`; never for null, nor before there are as many as `recent` holds."""
    return goal is not None and len(recent) == recent.maxlen and statistics.fmean(recent) <= goal


def open_run(cfg: Any, place: Placement, loss: Any = None) -> Path:
    """The run's folder, with the resolved configuration in it; prints what runs where. Logs of other ranks are warnings only.

    loss: of a GRPO run, whose objective is printed with its numbers and kept as objective.txt.
    """
    logging.basicConfig(level=logging.INFO if place.is_root else logging.ERROR, format="%(message)s", force=True)
    for noisy in ("httpx", "vllm", "torch", "transformers", "datasets"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    random.seed(cfg.seed)  # of what a user's loss or reward may draw
    np.random.seed(cfg.seed % 2**32)
    torch.manual_seed(cfg.seed)
    check_model(ModelSource(*config.model_source(cfg.model)).read(AutoConfig), place.plan, cfg.training.seq_len)
    output = cfg.output or Path("runs") / config.run_name(arguments())
    if place.is_root:
        output.mkdir(parents=True, exist_ok=True)
        lock(output)
        if cfg.resume == "auto" and checkpoint.whole(output):
            check_same_run(output, yaml.safe_load((output / "config.yaml").read_text()), yaml.safe_load(config.dump(cfg)))
        (output / "config.yaml").write_text(config.dump(cfg))
        warned = idle(cfg, place.plan, cfg.grpo.n_samples if loss is not None else None)
        print("\n".join([place.plan.table(), *warned, f"run folder {output}"]), flush=True)
        if loss is not None:
            settings = objective_settings(loss, cfg.loss, cfg.grpo, cfg.training, cfg.rewards)
            found = (line if line.startswith("note: ") else f"warning: {line}" for line in lint(loss, settings))
            told = "\n".join([card(loss, settings), *found])
            (output / "objective.txt").write_text(told + "\n")
            print(told, flush=True)
    return output
