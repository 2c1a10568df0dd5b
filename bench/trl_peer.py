"""TRL's GRPOTrainer as the peer of whole steps and of training steps. The only file that imports trl, and only inside functions.

It is no part of the project's requirements. Install it beside them, without its dependencies, which are there already:

    pip install --no-deps trl==1.16.0 accelerate==1.15.0        (and liger-kernel==0.8.5 for the way "liger")

Options are TRL's own defaults but for what both sides must share, which `Peer` names. Its loss is then the project's GRPOLoss with
averaging "token": dapo's normaliser, no KL. What stays TRL's: padded batches of `micro_batch` sequences, activation checkpointing, a
pass for old log-probs with vLLM, the correction that goes with it, detokenising in the engine. In 1.16.0 the head's log-probs are always
made by chunks (torch or Triton); use_liger_kernel changes the layers' kernels only.
"""

import importlib.util
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from bench.measure import settle, stop
from parallel.hardware import device_type
from parallel.memory import allocated, usage

INSTALL = {
    "trl": "trl==1.16.0 with accelerate==1.15.0 (pip install --no-deps trl==1.16.0 accelerate==1.15.0)",
    "accelerate": "accelerate==1.15.0 (pip install --no-deps accelerate==1.15.0)",
    "liger_kernel": "liger-kernel==0.8.5 (pip install --no-deps liger-kernel==0.8.5)",
}


@dataclass(frozen=True)
class Peer:
    """What a run of TRL is given."""

    model: str  # a checkpoint's folder
    output: str
    prompts: int  # of an optimizer step
    samples: int  # of a prompt
    new_tokens: int  # of a sample at most
    steps: int
    micro_batch: int  # sequences of one forward pass
    seq_len: int  # of prompt and sample together
    learning_rate: float = 1e-6
    dtype: str = "float32"  # of the computation, by autocast
    weights: str = "float32"  # of the parameters
    device: str = "auto"
    liger: bool = False
    vllm: bool = False  # else transformers' own generate
    share: float = 0.4  # of a GPU's memory for vLLM
    seed: int = 0
    temperature: float = 1.0
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0


def need(*modules: str) -> None:
    """End with one message where a peer is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            stop(f"this bench compares with {INSTALL[module]}, which is not installed here")


def make(
    peer: Peer,
    rows: list[dict[str, Any]],
    reward: Callable[..., list[float]],
    *,
    callbacks: list[Any] | None = None,
    rollout: Callable[..., dict[str, Any]] | None = None,
) -> Any:
    """A GRPOTrainer that takes `rows` in their order. rollout: what TRL calls in place of an engine."""
    need("trl", "accelerate", *(["liger_kernel"] if peer.liger else []))
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    on_cpu = {"cpu": True}.get(device_type(peer.device), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions of vLLM, and of what 2.0 will remove
        from datasets import Dataset
        from transformers import PrinterCallback
        from trl import GRPOConfig, GRPOTrainer

        sequences, threads = peer.prompts * peer.samples, torch.get_num_threads()
        if sequences % peer.micro_batch:
            stop(f"--micro-batch {peer.micro_batch} does not divide the {sequences} sequences of a step")
        passes = sequences // peer.micro_batch
        config = GRPOConfig(
            peer.output, use_cpu=on_cpu, seed=peer.seed, bf16=peer.dtype == "bfloat16", model_init_kwargs={"dtype": peer.weights},
            per_device_train_batch_size=peer.micro_batch, gradient_accumulation_steps=passes, num_generations=peer.samples,
            max_completion_length=peer.new_tokens, max_steps=peer.steps, temperature=peer.temperature,
            learning_rate=peer.learning_rate, lr_scheduler_type=peer.schedule, warmup_steps=peer.warmup_steps,
            adam_beta2=peer.adam_beta2, max_grad_norm=peer.max_grad_norm, epsilon=0.2, epsilon_high=0.28,
            shuffle_dataset=False, use_liger_kernel=peer.liger, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
            use_vllm=peer.vllm, vllm_mode="colocate", vllm_enable_sleep_mode=peer.vllm, vllm_gpu_memory_utilization=peer.share,
            vllm_max_model_length=peer.seq_len,
        )  # fmt: skip
        extra = {"rollout_func": rollout} if rollout else {}
        data = Dataset.from_list(rows)
        trainer = GRPOTrainer(peer.model, reward_funcs=reward, args=config, train_dataset=data, callbacks=callbacks, **extra)
        trainer.remove_callback(PrinterCallback)  # stdout has JSON lines only
        torch.set_num_threads(threads)  # accelerate takes all that there are
        return trainer


class Phases:
    """Seconds of a step by phase, and its mean log-prob: the trainer's methods are wrapped where a phase is a method.

    generate: vLLM's `LLM.generate`, or the turn of transformers' own; sleep: what else TRL does around vLLM's, which is the cache's waking,
    the engine's sleep and reading log-probs out of its outputs; sync: weights to the engine, these woken before; reward; data: fetching
    rows, and what is left of TRL's making a scored batch of them: templates, decoding, padding, advantages; logp_old: passes without a
    gradient; log; train: what is left of the step. An inner phase interrupts the outer one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = time.perf_counter()
        self._logprobs: list[tuple[torch.Tensor, torch.Tensor]] = []  # sum and number of response tokens, read when the step has ended
        self._entropy: list[float] = []
        self.engine_bytes = 0
        self._fresh = True

    def watch(self, trainer: Any) -> None:
        generation = vars(trainer).get("vllm_generation")
        if generation is not None:
            generation.sync_weights = self._timed("sync", generation.sync_weights)
            generation.llm.generate = self._timed("generate", generation.llm.generate)
            generation.generate = self._timed("sleep", generation.generate, then=self._forget_peak)
        else:
            single = trainer._generate_single_turn
            trainer._generate_single_turn = self._timed("generate", single, then=self._forget_peak)
        trainer._calculate_rewards = self._timed("reward", trainer._calculate_rewards)
        trainer.get_batch_samples = self._timed("data", trainer.get_batch_samples)
        trainer._generate_and_score_completions = self._timed("data", trainer._generate_and_score_completions)
        trainer.log = self._timed("log", trainer.log)
        trainer._get_per_token_logps_and_entropies = self._scored(trainer._get_per_token_logps_and_entropies)

    def begin(self) -> None:
        settle()
        self.seconds, self._logprobs, self._since, self._fresh = {}, [], time.perf_counter(), True

    def end(self) -> dict[str, float]:
        """Of the step, in the names that the project's own runs use."""
        self._count("train")
        result = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        result["time/step"] = sum(self.seconds.values())
        total, count = (float(sum(column)) for column in zip(*self._logprobs, strict=True))
        return result | {"entropy/nll": -total / count, "tokens": count} | usage(self.device, self.engine_bytes)

    device = torch.device("cpu")

    def _forget_peak(self) -> None:
        """What follows the generation is training."""
        usage(self.device)

    def _count(self, phase: str) -> None:
        settle()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def _timed(self, phase: str, method: Callable[..., Any], then: Callable[[], None] = lambda: None) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._count(self._stack[-1] if self._stack else "train")
            self._stack.append(phase)
            result = method(*args, **kwargs)
            self._count(self._stack.pop())
            then()
            return result

        return call

    def _scored(self, method: Callable[..., Any]) -> Callable[..., Any]:
        old = self._timed("logp_old", method)

        @wraps(method)
        def call(model: Any, ids: Any, attention_mask: torch.Tensor, logits_to_keep: int, *args: Any, **kwargs: Any) -> Any:
            with_gradient = torch.is_grad_enabled()
            found = (method if with_gradient else old)(model, ids, attention_mask, logits_to_keep, *args, **kwargs)
            if with_gradient:
                mask = attention_mask[:, -logits_to_keep:]
                self._logprobs.append(((found[0].detach() * mask).sum(), mask.sum()))  # a float would wait for the GPU
            return found

        return call


def run(peer: Peer, rows: list[dict[str, Any]], reward: Callable[..., list[float]]) -> list[dict[str, float]]:
    """A whole run: each step's phases and numbers, the run's parameters, and what TRL logs of loss, entropy, reward and tokens."""
    need("trl", "accelerate")
    from transformers import TrainerCallback

    phases = Phases()
    steps: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not steps:
                phases.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(phases.end())
            phases.begin()

    phases.device = torch.device(device_type(peer.device))
    before = allocated(phases.device)
    trainer = make(peer, rows, reward, callbacks=[Watch()])
    if peer.vllm:
        weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        phases.engine_bytes = max(allocated(phases.device) - before - weights, 0)
    phases.watch(trainer)
    trainer.train()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    names = {"loss": "loss/policy", "entropy": "entropy/mean", "reward": "reward/mean", "grad_norm": "grad/norm"}
    for step, log in zip(steps, trainer.state.log_history, strict=False):
        step |= {ours: float(log[theirs]) for theirs, ours in names.items() if theirs in log}
        step |= {"seen": float(log["num_tokens"]), "len/mean": float(log["completions/mean_length"]), "parameters": float(parameters)}
    return steps


def texts_only(reward: Callable[[str, str, str], float]) -> Callable[..., list[float]]:
    """A reward of the project's as TRL calls rewards: on the whole batch, columns by name."""

    def of_batch(prompts: list[Any], completions: list[Any], target: list[str], **_: Any) -> list[float]:
        asked = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
        said = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [reward(*row) for row in zip(asked, said, target, strict=True)]

    return of_batch
