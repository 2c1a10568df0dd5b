"""Bytes per rank of a plan, from the shape of the model alone: what `--plan` prints besides the ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model import head_width
from parallel.memory import GIB, TrainingBytes, training_bytes
from parallel.placement import Plan, RolePlan
from parallel.plans import PLANS
from parallel.switches import Switches


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

    @classmethod
    def read(cls, name: str, revision: str | None) -> "Shape | None":
        """From a folder, or from what the cache already holds; None where neither has it. Nothing is downloaded, no weight is read."""
        try:
            config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
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
        widths = (shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size, shape.num_attention_heads * head + kv, kv)
        return cls(cut, sum(sizes.values()) - cut, *widths)

    def parameters(self, role: RolePlan) -> int:
        """On one rank of the role, sharded as FSDP does it; the last rank may have a little less."""
        shards = len(role.ranks) // (role.tp * role.replicate)
        return -(-self.cut // (role.tp * shards)) - (-self.whole // shards)


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
        role, s = self.plan.trainer, self.shape
        tokens = -(-self.row_tokens // role.cp)
        widths: dict[str, Any] = {"hidden": s.hidden, "intermediate": s.intermediate // role.tp, "heads": s.heads // role.tp}
        options: dict[str, Any] = {"layers": s.layers, "tokens": tokens, "itemsize": self.dtype.itemsize, "switches": self.switches}
        return training_bytes(self.weights, **widths, **options)

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
        return self.engine_dtype.itemsize * self.shape.layers * -(-self.shape.kv // self.plan.generator.tp)

    def lines(self, seq_len: int) -> list[str]:
        training, sequence = self.training, seq_len * self.kv_per_token
        lines = [
            f"bytes per rank, {(self.shape.cut + self.shape.whole) / 1e9:.2f} billion parameters",
            f"  trainer     weights {_gib(self.weights_on_device)}, moments {_gib(training.kept)}, and at most "
            f"{_gib(training.peak - training.kept)} more in a pass of {self.row_tokens} tokens",
        ]
        if host := {"none": 0, "optimizer": 2, "parameters": 4}[self.switches.offload] * self.weights:
            lines.append(f"  trainer     in host memory {_gib(host)}")
        if (reference := self.plan.reference) is not None:
            lines.append(f"  ref_model   weights {_gib(self.dtype.itemsize * self.shape.parameters(reference))}")
        cache = f"KV cache {self.kv_per_token / 2**10:.1f} KiB a token: {_gib(sequence)} for a sequence of {seq_len}"
        return [*lines, f"  generator   weights {_gib(self.engine_weights)}, {cache}"]

    def warnings(self, total: int, share: float) -> list[str]:
        """What will not fit a GPU of `total` bytes of which the engine takes `share`, where trainer and engine share it."""
        engine, kept = int(total * share), self.weights_on_device + self.training.kept
        found = []
        if set(self.plan.trainer.ranks) & set(self.plan.generator.ranks) and engine + kept > total:
            found.append(
                f"warning: the engine's share of {_gib(engine)} and the policy's weights and moments of {_gib(kept)} exceed the GPU's "
                f"{_gib(total)}: lower generator.gpu_memory_utilization or raise the trainer's ranks"
            )
        if self.weights_on_device + self.training.peak > total:
            found.append(
                f"warning: training takes up to {_gib(self.weights_on_device + self.training.peak)} of the GPU's {_gib(total)}: lower "
                f"training.max_tokens_per_batch, set training.activation_checkpointing: full, or raise the trainer's ranks"
            )
        if self.engine_weights > engine:
            found.append(
                f"warning: the engine's weights of {_gib(self.engine_weights)} exceed its share of {_gib(engine)}: raise "
                f"generator.gpu_memory_utilization or services.generator.procs"
            )
        return found


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"
