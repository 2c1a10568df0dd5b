"""Bytes per rank of a plan, from the shape of the model alone: what `--plan` prints besides the ranks."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model import head_width
from packing import KEYS_PER_TOKEN
from parallel.memory import CPU_SEQS, GIB, Residency, TrainingBytes, choose, cpu_kv_cache, gpu_kv_cache, gpu_seqs, parks, training_bytes
from parallel.pipeline import bounds
from parallel.plans import PLANS
from parallel.roles import Plan, RolePlan, span
from parallel.switches import Switches
from parallel.weights import MOST_BYTES, ON_THE_WAY


@dataclass(frozen=True)
class Shape:
    """Of a checkpoint. Sizes are of the whole model, a tied head counted once."""

    cut: int  # parameters that tensor parallelism cuts
    whole: int  # the others
    layers: int
    hidden: int
    intermediate: int
    heads: int  # width of q, k and v together
    kv: int  # width of k and v together
    kv_heads: int  # of which an engine's rank has one at least
    first: int = 0  # of `whole`, those of the embedding, which a first stage of several has
    last: int = 0  # those of the head, which a last one has; a tied one has the embedding too
    is_tied: bool = True
    largest: int = 0  # parameters of the largest tensor

    @classmethod
    def read(cls, name: str, revision: str | None, *, download: bool = False) -> "Shape | None":
        """From a folder, or from what the cache already holds; None where neither has it. No weight is read, and without `download`
        nothing is fetched.
        """
        try:
            config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=not download)
        except (OSError, ValueError):
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        cut_paths = tuple(f".{path}." for path in PLANS[config.model_type].cut) if config.model_type in PLANS else ()
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        cut = sum(size for name, size in sizes.items() if any(path in name for path in cut_paths))
        shape = config.get_text_config()
        head = head_width(shape)
        kv = 2 * shape.num_key_value_heads * head
        kv_heads, queries = shape.num_key_value_heads, shape.num_attention_heads * head
        widths = (shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size, queries + kv, kv, kv_heads)
        first, last = (sum(p.numel() for p in end.parameters()) for end in (model.get_input_embeddings(), model.get_output_embeddings()))
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        return cls(cut, sum(sizes.values()) - cut, *widths, first=first, last=last, is_tied=tied, largest=max(sizes.values()))

    def parameters(self, role: RolePlan) -> int:
        """On one rank of the role's largest stage, sharded as FSDP does it; the last rank may have a little less."""
        shards = len(role.ranks) // (role.tp * role.replicate * role.pp)
        ends = (self.first, self.last) if role.pp > 1 else (0, 0)
        inside = self.whole - (0 if role.pp == 1 else self.first + (0 if self.is_tied else self.last))
        sizes = []
        for stage, (start, stop) in enumerate(bounds(self.layers, role.pp)):
            part = (stop - start) / self.layers
            whole = math.ceil(inside * part) + ends[0] * (stage == 0) + ends[1] * (stage == role.pp - 1)
            sizes.append(math.ceil(self.cut * part / (role.tp * shards)) + math.ceil(whole / shards))
        return max(sizes)


@dataclass(frozen=True)
class Estimate:
    shape: Shape
    plan: Plan
    dtype: torch.dtype  # of the trainer's computation and of the reference
    engine_dtype: torch.dtype
    row_tokens: int
    switches: Switches

    @property
    def training(self) -> TrainingBytes:
        """Beside the policy's weights."""
        return self.training_of(self.weights)

    def training_of(self, weights: int) -> TrainingBytes:
        """Beside so many bytes of them."""
        role, s = self.plan.trainer, self.shape
        tokens = -(-self.row_tokens // role.cp)
        options: dict[str, Any] = {"layers": s.layers, "tokens": tokens, "itemsize": self.dtype.itemsize, "switches": self.switches}
        return training_bytes(weights, **self._widths(role), **options)

    def _widths(self, role: RolePlan) -> dict[str, Any]:
        s = self.shape
        again = (KEYS_PER_TOKEN - 1) * s.kv // role.tp if self.plan.samples else 0  # responses have prompts in common
        return {"hidden": s.hidden, "intermediate": s.intermediate // role.tp, "heads": s.heads // role.tp, "again": again}

    @property
    def weights(self) -> int:
        """Of the policy, in float32."""
        return 4 * self.shape.parameters(self.plan.trainer)

    @property
    def weights_on_device(self) -> int:
        return 0 if self.switches.offload == "parameters" else self.weights

    @property
    def engine_weights(self) -> int:
        return self.engine_dtype.itemsize * -(-(self.shape.cut + self.shape.whole) // self.plan.generator.tp)

    @property
    def kv_per_token(self) -> int:
        s = self.shape
        heads = -(-s.kv_heads // self.plan.generator.tp)  # more ranks than heads repeat them
        return self.engine_dtype.itemsize * s.layers * heads * s.kv // s.kv_heads

    def kv_cache(self, engine: Any, total: int, seq_len: int, rollout: tuple[int, int] | None) -> int | None:
        """Bytes of KV cache that a rank of an engine is given; None: what is left of its share of a GPU, as vLLM finds it.

        engine: its GeneratorConfig; total: bytes of its GPU, 0 on a CPU; rollout: prompts of one and samples of each, None where that is
        not known.
        """
        if not total:
            return cpu_kv_cache(seq_len, self.kv_per_token, engine.max_num_seqs or CPU_SEQS)
        seqs = engine.max_num_seqs or gpu_seqs(rollout, self.plan.generator.num_replicas)
        return gpu_kv_cache(seq_len, self.kv_per_token, seqs, int(total * engine.gpu_memory_utilization) - self.engine_weights)

    @property
    def gradients(self) -> int:
        """On the device, from a step's first backward pass to its end; freed with it."""
        return self.weights_on_device

    @property
    def reference(self) -> int:
        """Weights on one of the reference's ranks; 0 where there is none."""
        return 0 if self.plan.reference is None else self.dtype.itemsize * self.shape.parameters(self.plan.reference)

    @property
    def scoring(self) -> int:
        """What the reference's forward pass takes beside its weights: one layer's activations, and the head's chunks."""
        if (role := self.plan.reference) is None:
            return 0
        tokens = -(-self.row_tokens // role.cp)
        return training_bytes(0, layers=1, tokens=tokens, itemsize=self.dtype.itemsize, **self._widths(role)).peak

    @property
    def syncing(self) -> int:
        """Buckets of weights on their way to the engine, one of them the largest tensor, which is there twice while it is gathered."""
        buckets = min(ON_THE_WAY * MOST_BYTES, self.engine_dtype.itemsize * (self.shape.cut + self.shape.whole))
        return buckets + 2 * self.engine_dtype.itemsize * self.shape.largest

    def on_one_gpu(self, *names: str) -> bool:
        """Do these roles share ranks, and are all of them on the run's device?"""
        roles = {"trainer": self.plan.trainer, "ref_model": self.plan.reference}
        roles["generator"] = self.plan.generator if self.plan.samples else None
        found = [roles[name] for name in names]
        return bool(set.intersection(*(set() if r is None or r.on_cpu else set(r.ranks) for r in found)))

    def parks_reference(self, total: int, share: float) -> bool:
        """Does a reference on the trainer's GPUs of `total` bytes wait in host memory, where an engine on them takes `share`?"""
        if not self.on_one_gpu("trainer", "ref_model"):
            return False
        engine, weights = (int(total * share), self.engine_weights) if self.on_one_gpu("trainer", "generator") else (0, 0)
        others: dict[str, int] = {"policy": self.weights_on_device, "engine": engine, "engine_weights": weights}
        return parks(total, needed=self.training, reference=self.reference, **others)

    def phases(self, total: int, share: float, kv_cache: int) -> dict[tuple[int, ...], dict[str, int]]:
        """Bytes in use in each phase on the ranks that hold the same roles, at most; kv_cache: of an engine's rank, 0 where not known.

        total: of a GPU, 0 where not known, which leaves everything where it is.
        """
        idle = 0 if self.parks_reference(total, share) else self.reference
        alike: dict[tuple[bool, bool, bool], list[int]] = {}
        roles = (self.plan.trainer, self.plan.reference, self.plan.generator if self.plan.samples else None)
        for rank in range(self.plan.world_size):
            held = [role is not None and rank in role.ranks for role in roles]
            alike.setdefault((held[0], held[1] and not (self.plan.reference and self.plan.reference.on_cpu), held[2]), []).append(rank)
        table = {}
        for (trains, refers, samples), ranks in alike.items():
            kept = trains * (self.weights_on_device + self.training.kept) + refers * idle
            engine = samples * (self.engine_weights + kv_cache)
            choice: Residency = "stays"
            if trains and samples and total:
                choice = choose(total - engine - self.weights_on_device - refers * idle, self.training.peak, kv_cache)
            asleep = {"stays": engine, "drops its KV cache": samples * self.engine_weights, "sleeps": 0}[choice]
            table[tuple(ranks)] = {
                "generate": kept + engine,
                "score": kept + engine + refers * (self.reference - idle + self.scoring),
                "train": kept + asleep + trains * (self.training.peak - self.training.kept),
                "sync": kept + max(asleep, samples * self.engine_weights) + (trains or samples) * self.syncing,
            }
            if not self.plan.samples:
                table[tuple(ranks)] = {"train": table[tuple(ranks)]["train"]}
        return table

    def lines(self, seq_len: int, total: int = 0, share: float = 0.5, kv_cache: int = 0) -> list[str]:
        """total: bytes of a GPU, 0 where not known; share: an engine's of it; kv_cache: of an engine's rank, 0: all of its share."""
        training, sequence = self.training, seq_len * self.kv_per_token
        lines = [
            f"bytes per rank, {(self.shape.cut + self.shape.whole) / 1e9:.2f} billion parameters",
            f"  trainer     weights {_gib(self.weights_on_device)}, moments {_gib(training.kept)}, and at most "
            f"{_gib(training.peak - training.kept)} more in a pass of {self.row_tokens} tokens, {_gib(self.gradients)} of it gradients",
            f"  a pass      {self.row_tokens} tokens, {max(self.row_tokens // seq_len, 1)} sequences of {seq_len}, on each of "
            f"{self.plan.trainer.num_replicas} replicas",
        ]
        if host := {"none": 0, "optimizer": 2, "parameters": 4}[self.switches.offload] * self.weights:
            lines.append(f"  trainer     in host memory {_gib(host)}")
        if self.plan.reference is not None:
            where = ", in host memory while idle" if self.parks_reference(total, share) else ""
            where = " on the CPU" if self.plan.reference.on_cpu else where
            lines.append(f"  ref_model   weights {_gib(self.reference)}{where}")
        if not self.plan.samples:
            return [*lines, *self._in_use(total, share, 0)]
        cache = f"KV cache {self.kv_per_token / 2**10:.1f} KiB a token: {_gib(sequence)} for a sequence of {seq_len}"
        lines.append(f"  generator   weights {_gib(self.engine_weights)}, {cache}")
        if kv_cache := kv_cache or max(int(total * share) - self.engine_weights, 0):
            tokens = kv_cache // self.kv_per_token
            held = f"{tokens} tokens or {tokens // seq_len} sequences of {seq_len}"
            lines.append(f"  KV cache    at most {_gib(kv_cache)}, {held} in each engine")
        return [*lines, *self._in_use(total, share, kv_cache)]

    def _in_use(self, total: int, share: float, kv_cache: int) -> list[str]:
        known = kv_cache or not self.plan.samples
        told = f"GPUs of {_gib(total)}" if total else "" if known else "without the KV cache; --plan=RANKSxGIB counts it"
        lines = ["in use by phase, at most" + (f" ({told})" if told else "")]
        for ranks, phases in self.phases(total, share, kv_cache).items():
            numbers = ", ".join(f"{phase} {_gib(count)}" for phase, count in phases.items())
            lines.append(f"  {span(list(ranks)):<11} {numbers}")
        return lines

    def warnings(self, total: int, share: float, kv_cache: int = 0) -> list[str]:
        """What will not fit a GPU of `total` bytes of which the engine may take `share`, where trainer and engine share it."""
        engine, kept = int(total * share), self.weights_on_device + self.training.kept
        found = []
        if self.on_one_gpu("trainer", "generator") and engine + kept > total:
            found.append(
                f"warning: the engine's share of {_gib(engine)} and the policy's weights and moments of {_gib(kept)} exceed the GPU's "
                f"{_gib(total)}: lower generator.gpu_memory_utilization or raise the trainer's ranks"
            )
        if self.weights_on_device + self.training.peak > total:
            found.append(
                f"warning: training takes up to {_gib(self.weights_on_device + self.training.peak)} of the GPU's {_gib(total)}: lower "
                f"training.max_tokens_per_batch, set training.activation_checkpointing: full, or raise the trainer's ranks"
            )
        awake = self.on_one_gpu("trainer", "generator") * (self.engine_weights + kv_cache if kv_cache else engine)
        if self.on_one_gpu("trainer", "ref_model") and (needed := kept + self.reference + self.scoring + awake) > total:
            found.append(
                f"warning: scoring with the reference takes up to {_gib(needed)} of the GPU's {_gib(total)}, with the policy's weights and "
                f"moments and an awake engine: give ref_model ranks of its own (services.ref_model.procs) or the CPU "
                f"(services.ref_model.with_gpus: false), or lower generator.gpu_memory_utilization or training.max_tokens_per_batch"
            )
        if self.plan.reference and not self.on_one_gpu("trainer", "ref_model") and not self.plan.reference.on_cpu:
            if (needed := self.reference + self.scoring) > total:
                found.append(
                    f"warning: scoring takes up to {_gib(needed)} of the GPU's {_gib(total)} on the reference's ranks: raise "
                    f"services.ref_model.procs or lower training.max_tokens_per_batch"
                )
        if self.plan.samples and self.engine_weights > engine:
            found.append(
                f"warning: the engine's weights of {_gib(self.engine_weights)} exceed its share of {_gib(engine)}: raise "
                f"generator.gpu_memory_utilization or services.generator.procs"
            )
        return found


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"
