"""One optimizer step: rows of packed episodes -> loss -> gradients -> clip -> AdamW. The same for every loss and for SFT.

The step's loss is a sum over all its tokens, each with a weight computed once from the lengths of all episodes. So no split into
micro-batches, packed rows or ranks can change a gradient: the law that tests/test_placement.py holds.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from batch import IDLE, Batch, Episode, from_dictionaries, row_length
from metrics import TOKEN_MAXIMA, TOKEN_MEANS, TokenStats
from model import Model
from objective import Correction, Objective
from parallel.memory import explained, live_bytes
from parallel.pipeline import from_all_stages, from_last_stage
from parallel.switches import Switches, blank_state, blank_state_on_host, step_by_parts, whole_step
from skipping import check_skips, with_advantage


@dataclass(kw_only=True)
class TrainingConfig:
    steps: int | None = None  # rollouts to train on; null: what `epochs` takes
    epochs: int | None = None  # passes over the data, in place of steps; null: one, where steps is null too
    batch_size: int = 4  # prompts (SFT: rows of the dataset) per optimizer step, times gradient_accumulation_steps
    gradient_accumulation_steps: int = 1  # multiplies batch_size; how a step is cut into passes, max_tokens_per_batch decides
    max_tokens_per_batch: int | None = None  # tokens in one forward pass of one replica; null: 16384, or seq_len if that is more
    seq_len: int = 4096  # tokens of prompt and response together, at most
    shared_prompts: bool = True  # of GRPO: a prompt is computed once for all its responses in a row; false: for each of them
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of computation; the master weights are float32 in either case
    activation_checkpointing: Literal["none", "selective", "full"] = "none"  # keep all; matrix products and attention; a block's input only
    compile: bool = False  # true: torch.compile of each block but its attention, and of the head's softmax; needs a C++ compiler
    cpu_offload: Literal["none", "optimizer", "parameters"] = "none"  # in host memory: AdamW's moments; weights and gradients as well
    match_sampler: bool = False  # true: bfloat16 is rounded where vLLM rounds it, in dense Llama, Mistral and Qwen (docs/mismatch.md)
    fp32_logits: bool = False  # true: logits are not rounded to bfloat16, in the trainer and in the engine (docs/mismatch.md)
    deterministic: bool = False  # true: torch's deterministic mode; two runs are equal bit for bit on a GPU too
    stall_timeout_s: float = 600  # the job ends when no rank has made progress for so long, and says where each is; 0: never
    learning_rate: float = 1e-6  # peak of the schedule
    # after the warm-up; linear and cosine fall from there to the run's end, wsd (warm-up, stable, decay) in its last decay_steps
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = 0  # steps over which the learning rate rises from 0
    decay_steps: int | None = None  # wsd: steps of the linear fall at the end; null: a tenth of the run's
    min_lr_ratio: float = 0.0  # share of learning_rate at which a schedule ends
    weight_decay: float = 0.0  # AdamW's, on matrices only
    adam_beta1: float = 0.9  # AdamW's decay of the first moment
    adam_beta2: float = 0.95  # AdamW's decay of the second moment
    adam_eps: float = 1e-8  # AdamW's stabiliser
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm; 0: never
    updates_per_rollout: int = 1  # a rollout of this many times the prompts is split into that many optimizer steps
    sync_interval: int = 1  # steps between two transfers of the weights to the generator
    entropy_coef: float = 0.0  # weight of an entropy bonus in the loss
    skip_zero_advantages: bool = False  # true: answers whose advantages are all 0 are in no training pass, only in the denominators
    ref_update_interval: int = 0  # steps between moves of the reference to the policy, put off to a step that syncs; 0: never
    ref_update_mix: float = 1.0  # how far it moves: reference <- (1 - mix) reference + mix policy

    def check(self) -> None:
        for key in ("batch_size", "gradient_accumulation_steps", "updates_per_rollout", "sync_interval"):
            if vars(self)[key] < 1:
                raise ValueError(f"{key}={vars(self)[key]}: must be at least 1")
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"steps={self.steps}: must be 0 or more, or null for one pass over the data")
        if self.epochs is not None and (self.epochs < 1 or self.steps is not None):
            raise ValueError(f"epochs={self.epochs} with steps={self.steps}: give one of the two, or neither; epochs are at least 1")
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len}: must be at least 2, a prompt token and a response token")
        if self.max_tokens_per_batch is not None and self.max_tokens_per_batch < self.seq_len:
            raise ValueError(
                f"max_tokens_per_batch={self.max_tokens_per_batch}: must hold a sequence of training.seq_len={self.seq_len} tokens"
            )
        if not 0 < self.ref_update_mix <= 1:
            raise ValueError(f"ref_update_mix={self.ref_update_mix}: must be above 0 and at most 1, which is the policy itself")
        if self.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "activation_checkpointing=selective with compile=true: a compiled block chooses itself what it keeps, much the same; set "
                "activation_checkpointing to none, or to full to keep less"
            )
        for key in "learning_rate warmup_steps ref_update_interval weight_decay max_grad_norm entropy_coef stall_timeout_s".split():
            if vars(self)[key] < 0:
                raise ValueError(f"{key}={vars(self)[key]}: must be 0 or more")
        for key in ("adam_beta1", "adam_beta2"):
            if not 0 <= vars(self)[key] < 1:
                raise ValueError(f"{key}={vars(self)[key]}: must be at least 0 and below 1")
        if self.adam_eps <= 0:
            raise ValueError(f"adam_eps={self.adam_eps}: must be above 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio={self.min_lr_ratio}: must be at least 0 and at most 1, the peak itself")
        if self.min_lr_ratio and self.schedule == "constant":
            raise ValueError(f"min_lr_ratio={self.min_lr_ratio} with schedule=constant, which does not fall: set 0, or another schedule")
        if self.decay_steps is not None and (self.schedule != "wsd" or self.decay_steps < 1):
            raise ValueError(f"decay_steps={self.decay_steps} with schedule={self.schedule}: it is wsd's, and at least 1")
        if self.schedule != "constant" and self.steps is None and self.epochs is None:
            raise ValueError(f"schedule={self.schedule} needs training.steps or training.epochs, at whose end the learning rate has fallen")
        if self.steps is not None:
            self.check_schedule(self.steps)

    def check_schedule(self, total: int | None) -> None:
        """ValueError where the schedule does not fit a run of `total` steps; None: not known."""
        if self.schedule != "constant" and total is None:
            raise ValueError(
                f"schedule={self.schedule} with epochs={self.epochs}: the rows are not counted beforehand (streaming, or overlong: split); "
                f"set training.steps"
            )
        if self.schedule == "wsd" and total and self.warmup_steps + self.decay(total) > total:
            raise ValueError(
                f"decay_steps={self.decay(total)} with warmup_steps={self.warmup_steps}: together more than the run's {total} steps"
            )

    def decay(self, total: int) -> int:
        """Steps over which wsd falls, of a run's `total`."""
        return self.decay_steps if self.decay_steps is not None else max(total // 10, 1)

    def moves_reference(self, step: int, published: int) -> bool:
        """After `step` steps, the last weights having been published after `published`."""
        return (every := self.ref_update_interval) > 0 and step // every > published // every

    @property
    def passes(self) -> int | None:
        """Over the data: `epochs`, or one, where `steps` is null; else None, as many as the steps take."""
        return (self.epochs or 1) if self.steps is None else None

    @property
    def switches(self) -> Switches:
        return Switches(self.activation_checkpointing, self.compile, self.cpu_offload, self.match_sampler, self.fp32_logits)

    @property
    def row_tokens(self) -> int:
        return self.max_tokens_per_batch or max(self.seq_len, 16384)

    @property
    def prompts_per_update(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_rollout(self) -> int:
        return self.prompts_per_update * self.updates_per_rollout


class Trainer:
    """Trains a Model. Outside the model's mesh there is nothing to train, and `update` returns {}."""

    def __init__(
        self, model: Model, cfg: TrainingConfig, loss: Any, *, correction: Correction | None = None, top_entropy: float = 1.0,
        total: int | None = None,
    ):  # fmt: skip
        """loss, correction, top_entropy: as `Objective` takes them. total: the run's steps, for the schedule; None: cfg.steps."""
        self.model, self.cfg = model, cfg
        self._total = cfg.steps if total is None else total
        cfg.check_schedule(self._total)
        self.objective = Objective(loss, correction=correction, entropy_coef=cfg.entropy_coef, top_entropy=top_entropy)
        if cfg.skip_zero_advantages:
            check_skips(loss, entropy_coef=cfg.entropy_coef, top_entropy=top_entropy)
        self.updates = 0  # optimizer steps taken
        if not model.is_local:
            return
        self._parameters = model.shards()
        self._tied = model.tied_between_stages
        self._present = set().union(*from_all_stages(set(map(module_group, self._parameters)), model.grid))
        groups: dict[tuple[int, bool], list[Tensor]] = {}
        for p in self._parameters.values():  # one fused call cannot mix meshes
            groups.setdefault((_sharded(p).device_mesh.ndim, p.ndim > 1), []).append(p)
        self._adamw = torch.optim.AdamW(
            [{"params": ps, "weight_decay": cfg.weight_decay if matrix else 0.0} for (_, matrix), ps in groups.items()],
            lr=cfg.learning_rate, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_eps, fused=True,
        )
        self._adamw.zero_grad()
        self._take_step = whole_step
        if cfg.cpu_offload == "optimizer":
            self._take_step = step_by_parts
            self._adamw.state.update((p, blank_state_on_host(p)) for p in self._parameters.values())

    def train(self, episodes: list[Episode], step: int) -> dict[str, float]:
        """A rollout's optimizer steps: its groups are split, in order, into `updates_per_rollout` parts. Collective over the mesh.

        Returns the means over the updates of their statistics; maxima are maxima, perf/* are sums, and the mismatch to the sampler is the
        first's.
        """
        groups = 1 + max(e.group for e in episodes)
        parts: list[list[Episode]] = [[] for _ in range(self.cfg.updates_per_rollout)]
        for e in episodes:
            parts[e.group * len(parts) // groups].append(e)
        keys = "training.max_tokens_per_batch, training.seq_len or, beside an engine, generator.gpu_memory_utilization"
        with explained("training", keys):
            results = [self.update(part, step) for part in parts if part]
        merged = {}
        for name in dict.fromkeys(name for r in results for name in r):
            values = [r[name] for r in results if name in r]  # an update in which no token counts has no means over tokens
            merge = max if name.endswith("/max") else sum if name.startswith("perf/") else statistics.fmean
            merged[name] = values[0] if name.startswith("mismatch/") else merge(values)
        return merged

    def update(self, episodes: list[Episode], step: int) -> dict[str, float]:
        """One optimizer step on all of `episodes`, of which this rank's replica runs its share. Collective over the model's mesh.

        `step` sets the learning rate. Returns statistics, equal on all ranks of the mesh.
        """
        if not self.model.is_local:
            return {}
        device, grid = self.model.device, self.model.grid
        trained = with_advantage(episodes) if self.cfg.skip_zero_advantages else episodes
        rows = self.model.rows(trained) or [[IDLE]] * grid.pp
        loss = self.objective.of_step(episodes, rows, self.model)
        shares = [loss.by_chunks(row) for row in rows]
        stats: TokenStats | None = None
        shared_prompts = self.model.shared_prompts
        computed = sum(row_length(row, shared_prompts=shared_prompts) for row in rows if row[0] is not IDLE)
        sums = torch.tensor([0.0, computed], dtype=torch.float64, device=device)  # the loss, and tokens

        def finish(i: int, batch: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
            nonlocal stats
            if shares[i] is None:
                share, metrics, mask = loss.row(rows[i], *(_grid(values, batch) for values in outputs))
            else:
                share, *scores = outputs
                with torch.no_grad():
                    _, metrics, mask = loss.row(rows[i], *(_grid(values, batch) for values in scores))
            sums[0].add_(share.detach())
            stats = stats or TokenStats(means=tuple(dict.fromkeys((*TOKEN_MEANS, *metrics))), device=device)
            for name, values in metrics.items():
                stats.add(name, values, mask)
                if (name := name.replace("mean", "max")) in TOKEN_MAXIMA:
                    stats.add(name, values, mask)
            return share * grid.num_shards  # undo FSDP's average: the weights are shares of the whole step

        self.model.passes(rows, finish, shares=shares, train=True)
        result = {}
        if self.model.local.is_last:
            assert stats is not None, "no episodes"
            dist.all_reduce(sums, group=grid.group("dp"))
            total, passed = sums.tolist()
            result = {"loss/policy": total if loss.value is None else loss.value, "perf/tokens_computed": passed}
            result |= stats.reduce(grid.group("dp")) | loss.sequence_metrics(grid.group("dp"))
        counted, kept = (float(sum(int(e.loss_mask.sum()) for e in some)) for some in (episodes, trained))
        tokens = {"loss/tokens": counted} | ({"loss/tokens_skipped": counted - kept} if self.cfg.skip_zero_advantages else {})
        return from_last_stage(result, grid) | tokens | self._step(step)

    @torch.no_grad()
    def _step(self, step: int) -> dict[str, float]:
        for p in self.model.tp_partial:
            if p.grad is not None:
                self._add_up(p.grad, self.model.grid.group("tp"))
        if self._tied is not None:
            assert self._tied.grad is not None, "embedding and head are both in the loss"
            self._add_up(self._tied.grad, self.model.grid.tied)
        norms = self._norms({name: p.grad for name, p in self._parameters.items() if p.grad is not None})
        norm = norms.pop("all")
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient's norm is {norm} at step {step}: lower training.learning_rate, or check the loss and the rewards"
            )
        limit = self.cfg.max_grad_norm
        clipped = bool(limit) and norm > limit
        if clipped:
            torch._foreach_mul_([_local(p.grad) for p in self._parameters.values() if p.grad is not None], limit / norm)
        lr = lr_at(step, self.cfg, self._total)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self.updates += 1
        names = {p: name for name, p in self._parameters.items()}
        moves: dict[str, Tensor] = {}
        for part in self._take_step(self._adamw):
            moves |= {names[p]: self._last_move(p, lr).norm(dtype=torch.float32) for p in part}
        self._adamw.zero_grad()
        moved = self._norms(moves)["all"]
        moved /= self._norms(self._parameters)["all"]
        by_group = {f"grad/norm_{group}": value for group, value in norms.items() if group in self._present}
        return {"grad/norm": norm, "grad/clipped": float(clipped), "optim/lr": lr, "optim/update_to_weight": moved} | by_group

    def _add_up(self, gradient: Tensor, group: dist.ProcessGroup | None) -> None:
        """In place, over the group's ranks; by way of the device, where the group has its links, if it is on the host."""
        local = _local(gradient)
        total = local.to(self.model.device)
        dist.all_reduce(total, group=group)
        local.copy_(total)

    def _last_move(self, p: Tensor, lr: float) -> Tensor:
        """The step AdamW has just taken, from its moments (weight decay left out); this rank's shard."""
        state, cfg = self._adamw.state.get(p), self.cfg
        if not state:
            return torch.zeros_like(_local(p))
        first, second = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        scale = lr / (1 - cfg.adam_beta1**self.updates)
        return first * scale / ((second / (1 - cfg.adam_beta2**self.updates)).sqrt() + cfg.adam_eps)

    def _norms(self, tensors: dict[str, Tensor]) -> dict[str, float]:
        """L2 norms, by module group and of all, of tensors sharded like the parameters of the same names, over all their meshes."""
        grid = self.model.grid
        groups = list(MODULE_GROUPS)
        sums = torch.zeros(2, len(groups), dtype=torch.float64, device=self.model.device)
        for name, tensor in tensors.items():
            if self._parameters[name] is self._tied and not self.model.local.is_first:
                continue  # it is the first stage's
            parameter = _sharded(self._parameters[name])
            copies = math.prod(parameter.device_mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_replicate())
            square = _local(tensor).norm(dtype=torch.float32).double().square() / copies
            cut = "tp" in (parameter.device_mesh.mesh_dim_names or ())
            sums[int(cut), groups.index(module_group(name))] += square
        dist.all_reduce(sums, group=grid.shards)
        if grid.tp > 1:
            dist.all_reduce(both := sums[1].clone(), group=grid.group("tp"))
            sums[1] = both
        if grid.pp > 1:
            dist.all_reduce(sums, group=grid.group("pp"))
        squares = sums.sum(0).tolist()
        return {g: math.sqrt(x) for g, x in zip(groups, squares, strict=True)} | {"all": math.sqrt(sum(squares))}

    def train_step(self, inputs: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> float:
        """One optimizer step on micro-batches as dictionaries; returns the step's global loss. Collective over the model's mesh.

        inputs: `tokens` [B, P + T], left-padded prompt and right-padded response (`attention_mask` of the same shape says where
        tokens are; without it, leading pad tokens are padding). targets: `response` [B, T], `advantages` [B, 1] or [B, T],
        `padding_mask` [B, T], `ref_logprobs` [B, T] where the loss wants one, and `groups` [B], the prompt each row answers, for averaging
        "prompt" (by default its own). All entries are ONE step, and every rank of the trainer passes the same lists.
        """
        if not inputs or len(inputs) != len(targets):
            raise ValueError(f"train_step needs as many targets as inputs, at least one; got {len(inputs)} and {len(targets)}")
        episodes: list[Episode] = []
        for i, t in zip(inputs, targets, strict=True):
            episodes += from_dictionaries(i, t, self.model.source.pad_token_id, len(episodes))
        return self.update(episodes, self.updates).get("loss/policy", 0.0)

    def residents(self) -> dict[str, int]:
        """Bytes of live gradients and moments on this rank's device; {} outside the mesh."""
        if not self.model.is_local:
            return {}
        kept = {
            "gradients": [p.grad for p in self._parameters.values() if p.grad is not None],
            "moments": [t for moments in self._adamw.state.values() for name, t in moments.items() if name != "step"],
        }
        return {name: live_bytes(tensors, self.model.device) for name, tensors in kept.items()}

    def state(self) -> dict[str, Tensor]:
        """Weights and moments by name, as this rank's shards, for saving and for loading in place. {} outside the mesh."""
        if not self.model.is_local:
            return {}
        state: dict[str, Tensor] = {}
        for name, p in self._parameters.items():
            moments = self._adamw.state[p]
            if not moments:
                moments |= blank_state(p)
            state |= {f"weight/{name}": p.detach()} | {f"{kind}/{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
        return state

    def resume_at(self, updates: int) -> None:
        """Go on after `updates` optimizer steps, once `state` has been loaded."""
        self.updates = updates
        if self.model.is_local:
            for moments in self._adamw.state.values():
                moments["step"].fill_(float(updates))


MODULE_GROUPS = ("embed", "attn", "mlp", "norm", "head", "other")


def module_group(name: str) -> str:
    """Which part of the model a parameter belongs to, for the norms in the log. A tied head is the embedding.

    >>> module_group("model.layers.0.self_attn.q_norm.weight"), module_group("model.layers.0.mlp.up_proj.weight")
    ('norm', 'mlp')
    """
    found = (group for group in ("norm", "embed", "head", "attn", "mlp") if group in name)
    return next(found, "other")


def lr_at(step: int, cfg: TrainingConfig, total: int | None = None) -> float:
    """Linear warm-up from 0, then the schedule, which ends after `total` steps (None: cfg.steps). `step` counts from 0.

    WSD (2404.06395) holds the peak until its last steps, so that a run can be made longer from a checkpoint before them.

    >>> [lr_at(step, TrainingConfig(schedule="wsd", warmup_steps=2, decay_steps=4, learning_rate=1.0), total=8) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    total = cfg.steps if total is None else total
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant" or total is None:
        return cfg.learning_rate
    start = total - cfg.decay(total) if cfg.schedule == "wsd" else cfg.warmup_steps
    done = min(max((step - start) / max(total - start, 1), 0.0), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if cfg.schedule == "cosine" else 1 - done
    return cfg.learning_rate * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left)


def _grid(values: Tensor, batch: Batch) -> Tensor:
    """[M] response tokens in episode order -> [B, T], 0 where an episode has ended."""
    return values.new_zeros(batch.shape[0] * batch.shape[1]).index_copy(0, batch.grid, values).view(batch.shape)


def _sharded(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "every trained parameter is sharded by FSDP, over one rank at least"
    return parameter


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
