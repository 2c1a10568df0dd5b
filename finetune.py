"""What train_sft.py does between its steps: rows are read and shown, the policy is evaluated, the best is remembered, the end is seen."""

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from batch import Episode, packing_efficiency
from best import Mode, of, seen
from checkpoint import Saved
from config import model_source
from conversations import Rendered, coloured
from data import TARGET_COLUMNS, PromptStream, Row, read_messages
from examples import ExampleStream, SFTDataConfig
from metrics import Clock
from model import Model, ModelSource
from parallel.exchange import in_order
from parallel.placement import Placement
from parallel.weights import stream_weights
from rollout.evaluate import EvalConfig, HeldOut
from rollout.generator import Generator
from rollout.rewards import Scorer
from rollout.sampling import Sampling
from startup import asked_rows, reached


@dataclass(kw_only=True)
class SFTEvalConfig:
    dataset: SFTDataConfig | None = None  # held-out rows: their loss, and with `rewards` what is answered to them; null: no evaluation
    every: int = 0  # steps between evaluations, besides before the first and after the last; 0: only those
    max_rows: int | None = None  # so many rows for the loss, the same ones each time; null: all
    max_prompts: int | None = None  # with rewards: so many rows that are answered, the same ones each time; null: all
    max_new_tokens: int | None = None  # of an answer at most; null: what training.seq_len leaves after the prompt
    stop: list[str] = field(default_factory=list)  # strings that end an answer, besides the model's end-of-sequence token
    n_samples: int = 0  # answers that are sampled for each prompt, besides the greedy one; 0: none
    temperature: float = 1.0  # of these

    def check(self) -> None:
        for key in ("every", "n_samples"):
            if vars(self)[key] < 0:
                raise ValueError(f"{key}={vars(self)[key]}: must be 0 or more")
        for key in ("max_rows", "max_prompts", "max_new_tokens"):
            if (value := vars(self)[key]) is not None and value < 1:
                raise ValueError(f"{key}={value}: must be at least 1, or null")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}: must be above 0; the greedy answer is given in any case")
        if self.temperature != 1 and not self.n_samples:
            raise ValueError(f"temperature={self.temperature} with n_samples=0: it is that of sampled answers; set n_samples, or remove it")


@dataclass(kw_only=True)
class EarlyStopConfig:
    metric: str = "eval/loss"  # of the evaluations
    patience: int = 3  # the run ends at the evaluation that is the so many-th in a row without a better value
    min_delta: float = 0.0  # better by more than this
    mode: Mode = "auto"  # is less or more of it better? auto: less of a loss or a perplexity, more of anything else

    def check(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience={self.patience}: must be at least 1")
        if self.min_delta < 0:
            raise ValueError(f"min_delta={self.min_delta}: must be 0 or more")


def check(cfg: Any) -> None:
    """ValueError where a run's sections do not go together."""
    neutral: dict[str, Any] = {"updates_per_rollout": 1, "sync_interval": 1, "ref_update_interval": 0, "skip_zero_advantages": False}
    for key, unset in (neutral | {"shared_prompts": True}).items():
        if (value := vars(cfg.training)[key]) != unset:
            raise ValueError(f"training.{key}={value}: supervised fine-tuning has neither rollouts nor a reference; remove the key")
    if cfg.rewards and cfg.eval.dataset is None:
        raise ValueError("rewards without eval.dataset: they score what is answered to held-out prompts; add it, or remove rewards")
    if cfg.eval.n_samples and not cfg.rewards:
        raise ValueError(f"eval.n_samples={cfg.eval.n_samples} without rewards, which score the samples: add some, or set it to 0")
    if cfg.eval.every and cfg.eval.dataset is None:
        raise ValueError(f"eval.every={cfg.eval.every} without eval.dataset, the rows to evaluate on: add it, or set eval.every to 0")
    for key in ("max_prompts", "max_new_tokens", "stop"):
        if vars(cfg.eval)[key] and not cfg.rewards:
            raise ValueError(f"eval.{key}={vars(cfg.eval)[key]} without rewards: nothing is answered; add some, or remove the key")
    datasets = cfg.dataset if isinstance(cfg.dataset, list) else [cfg.dataset]
    if cfg.training.steps is None and (cfg.overlong == "split" or any(dataset.streaming for dataset in datasets)):
        cfg.training.check_schedule(None)
    stop = cfg.early_stop
    for key, metric in (("checkpoint.best", cfg.checkpoint.best), ("early_stop.metric", stop.metric if stop else None)):
        if metric is None:
            continue
        if metric not in (known := metric_names(cfg)):
            told = f"the run's evaluations have {', '.join(known)}" if known else "the run has no evaluations: set eval.dataset"
            raise ValueError(f"{key}={metric}: {told} (with rewards also eval/accuracy and eval/reward)")
        if not cfg.eval.every:
            raise ValueError(f"{key}={metric} needs evaluations to choose from: set eval.every to the steps between them")


def metric_names(cfg: Any) -> list[str]:
    """What the run's evaluations report that can be better or worse."""
    scores = ["eval/accuracy", "eval/reward"] if cfg.rewards else []
    names = ("accuracy", "reward", *(["pass"] if cfg.eval.n_samples > 1 else []))
    sampled = [f"eval/sampled_{name}" for name in names] if cfg.eval.n_samples else []
    return ["eval/loss", "eval/perplexity", *scores, *sampled] if cfg.eval.dataset is not None else []


def check_questions(cfg: SFTDataConfig, form: str, row: Row) -> None:
    """ValueError where rows of this format cannot be asked as they are trained: prompts are read by the keys that GRPO has."""
    how = "set eval.dataset.prompt and eval.dataset.target, as in prompt: '{instruction} {input}' and target: output"
    if form not in ("messages", "prompt_completion") or cfg.columns:
        given = f"columns={cfg.columns}" if cfg.columns else f"format={form}"
        raise ValueError(f"rewards with eval.dataset.{given}: held-out prompts are not read by it; {how}, in its place")
    if cfg.target is None and row.keys().isdisjoint(TARGET_COLUMNS) and not read_messages(cfg, row)[1]:
        raise ValueError(f"rewards would see no target: eval.dataset.path={cfg.path} has the columns {sorted(row)}; {how}")


def read_rows(cfg: Any, tokenizer: Any, position: int = 0, cut: Iterable[tuple[str, int]] = ()) -> ExampleStream:
    """The run's training rows from `position` on, behind which so many were cut."""
    training = cfg.training
    options = {"seq_len": training.seq_len, "overlong": cfg.overlong, "epochs": training.passes, "cut": cut}
    return ExampleStream(cfg.dataset, tokenizer, seed=cfg.seed, position=position, **options)


def shows_batch(cfg: Any) -> bool:
    """Was --show-batch asked for? Then print the first rows of the first step, with what is trained marked.

    Needs the tokenizer and the data only.
    """
    if (count := asked_rows()) is None:
        return False
    tokenizer = ModelSource(*model_source(cfg.model)).tokenizer()
    rows = read_rows(cfg, tokenizer)
    for number in range(1, min(count, cfg.training.prompts_per_update) + 1):
        for e in rows.take(1):  # one, or what the chat template makes of the row
            trained = np.concatenate([np.zeros(e.num_prompt_tokens, bool), e.loss_mask > 0])
            print(f"--- row {number}: {len(trained)} tokens, {trained.sum()} trained")
            print(coloured(tokenizer, Rendered(e.token_ids, trained)))
    return True


def data_numbers(episodes: list[Episode], policy: Model) -> dict[str, float]:
    """Of a step: trained tokens, and the share of its rows of training.max_tokens_per_batch tokens that is filled."""
    filled = packing_efficiency([len(e.token_ids) for e in episodes], policy.grid.num_replicas, policy.max_tokens)
    return {"data/tokens": float(sum(int(e.loss_mask.sum()) for e in episodes)), "data/packing_efficiency": filled}


def held_out_loss(policy: Model, episodes: list[Episode], place: Placement) -> dict[str, float]:
    """Of all trained tokens of the episodes: mean negative log-likelihood and its exponential.

    Each episode counts once, whatever the ranks, and the sum is exact, so that its order does not matter. Collective over the world.
    """
    logprobs = in_order(policy.logprobs(episodes), policy.grid, place)
    counted = np.concatenate([values[e.loss_mask > 0] for values, e in zip(logprobs, episodes, strict=True)])
    loss = -math.fsum(counted.tolist()) / len(counted)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/tokens": len(counted), "eval/rows": len(episodes)}


class Evaluation:
    """Held-out rows: their loss, and with rewards what the engine answers to their prompts. The engine sleeps in between.

    Remembers what decides about the checkpoint to keep and about the run's end; all of that is in `state`, and in a checkpoint.
    """

    def __init__(self, cfg: Any, source: ModelSource, policy: Model, place: Placement, clock: Clock, saved: Saved):
        """cfg: the run's. saved: where it goes on."""
        self._cfg, self._policy, self._place, self._clock = cfg, policy, place, clock
        stop = cfg.early_stop
        self.best, self._stopping = of(cfg.checkpoint.best, saved.best), of(stop.metric if stop else None, saved.stopping)
        self._recent = deque(saved.recent, maxlen=10)  # losses
        self._evaluated = saved.step  # steps before the last evaluation
        self.generator: Generator | None = None
        self._asleep = ExitStack()
        self._episodes: list[Episode] = []
        if cfg.eval.dataset is None:
            return
        training, tokenizer = cfg.training, source.tokenizer()
        rows = ExampleStream(cfg.eval.dataset, tokenizer, seed=0, seq_len=training.seq_len, overlong=cfg.overlong, epochs=1)
        self._episodes = rows.take(cfg.eval.max_rows or sys.maxsize)
        if cfg.rewards:
            check_questions(cfg.eval.dataset, *rows.first_rows[0])
            self._scorer = Scorer(cfg.rewards)
            self._questions = dict(self._read_questions(tokenizer))
            limits = (training.dtype, training.seq_len, training.row_tokens, training.switches)
            self.generator = Generator(source, cfg.generator, place, *limits, seed=cfg.seed, policy_bytes=policy.local_bytes)
            if saved.step:  # no evaluation comes before the first step
                self._asleep.enter_context(self.generator.asleep(until_load=True))

    def _read_questions(self, tokenizer: Any) -> Iterator[tuple[str, HeldOut]]:
        """By the prefix of their numbers: answered greedily, and sampled, each sample with a seed of its own so that any run draws it."""
        cfg, held_out = self._cfg, self._cfg.eval
        sampling = Sampling(1.0, held_out.max_new_tokens, tuple(held_out.stop), seed=cfg.seed)
        read = partial(PromptStream, tokenizer=tokenizer, max_prompt_tokens=cfg.training.seq_len - 1)  # a token of the answer must fit
        for prefix, count, temperature in (("eval/", 1, 0.0), ("eval/sampled_", held_out.n_samples, held_out.temperature)):
            if count:
                asked = EvalConfig(dataset=held_out.dataset, n_samples=count, temperature=temperature, max_prompts=held_out.max_prompts)
                yield prefix, HeldOut(asked, read, sampling, self._place, self._clock)

    def run(self, step: int) -> dict[str, float]:
        """The numbers of the policy after `step` steps; {} without held-out rows. Collective over the world."""
        self._evaluated = step
        if not self._episodes:
            return {}
        with self._clock.phase("eval"):
            numbers = held_out_loss(self._policy, self._episodes, self._place)
        if self.generator is not None:
            with self._clock.phase("sleep"):
                self._asleep.close()  # it wakes
            with self._clock.phase("sync"):
                self.generator.load(stream_weights(self._policy.shards(), self._place, self.generator.dtype), version=step)
            for prefix, questions in self._questions.items():
                scores = questions.evaluate(self.generator, self._scorer)
                numbers |= {name.replace("eval/", prefix): value for name, value in scores.items()}
            with self._clock.phase("sleep"):
                self._asleep.enter_context(self.generator.asleep(until_load=True))
        return numbers

    def after_step(self, step: int, loss: float, *, is_last: bool) -> dict[str, float]:
        """The numbers of an evaluation, where one is due or the run is known to end here. loss: of the step. Collective over the world."""
        self._recent.append(loss)
        every = self._cfg.eval.every
        return self._seen(step) if is_last or self.ends_run or (every and step % every == 0) else {}

    def at_the_end(self, step: int) -> dict[str, float]:
        """The numbers after the last step, where the data has ended unforeseen and they are not known. Collective over the world."""
        return self._seen(step) if self._evaluated < step else {}

    def _seen(self, step: int) -> dict[str, float]:
        numbers, wanted, stop = self.run(step), self._cfg.checkpoint, self._cfg.early_stop
        if wanted.best is not None:
            self.best = seen(self.best, wanted.best, wanted.best_mode, step, numbers)
        if stop is not None:
            self._stopping = seen(self._stopping, stop.metric, stop.mode, step, numbers, stop.min_delta)
        return numbers

    def is_best(self, step: int) -> bool:
        """Was the evaluation after `step` steps better than all before?"""
        return self.best is not None and self.best.step == step

    @property
    def ends_run(self) -> bool:
        """By early_stop or stop_at_loss."""
        stop = self._cfg.early_stop
        is_late = stop is not None and self._stopping is not None and self._stopping.since >= stop.patience
        return is_late or reached(self._cfg.stop_at_loss, self._recent)

    def state(self) -> dict[str, Any]:
        """As checkpoint.save takes it."""
        return {"best": self.best, "stopping": self._stopping, "recent": list(self._recent)}

    def close(self) -> None:
        self._asleep.close()
        if self.generator is not None:
            self.generator.close()
