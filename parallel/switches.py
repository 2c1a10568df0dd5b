"""What is traded for memory, time or nearness to the sampler: activations, compiled blocks, state on the host, rounding, exact repeats.

Everything here acts on a transformer block before it is sharded, on the optimizer's step, or on the process before CUDA starts.
"""

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# What `selective` keeps: products with weights, and fused attention. No `bmm`: attention that is not fused makes its L x L scores with it.
KEPT = {
    "aten": (
        "mm", "addmm", "linear", "_grouped_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    ),
    "torch_attn": ("_varlen_attn",),
}  # fmt: skip


@dataclass(frozen=True)
class Switches:
    activations: Literal["none", "selective", "full"] = "none"
    compiled: bool = False
    offload: Literal["none", "optimizer", "parameters"] = "none"
    matched: bool = False  # blocks round where vLLM's do (parallel/rounding.py)
    fp32_logits: bool = False  # the head's product is not rounded, here and in the engine

    @property
    def without_training(self) -> "Switches":
        """For a model that is never trained. Compiled like the policy, or the same weights would have other log-probs."""
        return replace(self, activations="none", offload="none")

    @property
    def offload_policy(self) -> OffloadPolicy:
        """As `fully_shard` takes it."""
        return CPUOffloadPolicy() if self.offload == "parameters" else OffloadPolicy()

    def check(self, device: torch.device, tp: int) -> None:
        """ValueError where `device` or `tp` ranks a layer cannot do what is asked for; to be called before weights are read."""
        if self.offload != "none" and device.type == "cpu":
            raise ValueError(
                f"training.cpu_offload={self.offload} on a CPU: everything is in host memory already; set training.cpu_offload: none, or "
                f"device: cuda"
            )
        self.check_cut(tp)
        if self.compiled:
            _check_compiler(device)

    def check_cut(self, tp: int, key: str = "parallelism") -> None:
        """ValueError where blocks that `tp` ranks share, as the section `key` says, cannot be what is asked for."""
        if self.compiled and tp > 1:
            raise ValueError(
                f"training.compile=true with {key}.tensor_parallel_degree={tp}: torch does not compile "
                f"layers cut over ranks for rows of any length; set training.compile: false, or the degree to 1"
            )

    def prepare(self, block: nn.Module) -> None:
        """Wrap the forward of a transformer block, in place, before `fully_shard`, whose hooks then stay outside."""
        forward: Any = block.forward
        if self.compiled:
            # Sizes are symbols, so that rows of any length share graphs. Fused bf16 is rounded where eager bf16 is, and a kernel's shape
            # is not chosen by timing where that would change sums.
            options: dict[str, Any] = {"emulate_precision_casts": True, "deterministic": torch.are_deterministic_algorithms_enabled()}
            forward = torch.compile(forward, dynamic=True, options=options)
        if self.activations != "none":
            keeps: dict[str, Any] = {"context_fn": _selective} if self.activations == "selective" else {}
            forward = functools.partial(checkpoint, forward, use_reentrant=False, **keeps)
        block.forward = forward


ALL_OFF = Switches()


@functools.cache
def _kept() -> frozenset[Any]:
    """The operators of KEPT that this torch has, in all their overloads."""
    packets = [getattr(getattr(torch.ops, space), name, None) for space, names in KEPT.items() for name in names]
    return frozenset(getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads())


def _keep(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keep)


def _check_compiler(device: torch.device) -> None:
    """Compiles one small function: that there is no compiler must not be found out after a model was loaded and data were sampled."""
    remedy = "Install a C++ compiler (g++, or the one that CXX names) and unset TORCH_COMPILE_DISABLE, or set training.compile: false"
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(f"training.compile=true, and there is no C++ compiler {compiler} here. {remedy}")
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise ValueError(f"training.compile=true, and torch.compile is switched off in the environment. {remedy}")
    try:
        torch.compile(torch.sin)(torch.zeros(8, device=device))
    except (TorchDynamoException, InductorError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"training.compile=true, and torch cannot compile here: {said}. {remedy}") from error


def compute_deterministically() -> None:
    """From here on this process computes the same bits each time. To be called before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # A warning, not an error: vLLM sorts with a CUDA kernel that has no other version, and gets the same order each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


# The optimizer ----------------------------------------------------------------------------------------------------------

MOMENTS = ("exp_avg", "exp_avg_sq")
PART_BYTES = 512 * 2**20  # of weights whose moments are on the device at a time


def blank_state(p: Tensor) -> dict[str, Tensor]:
    """AdamW's of a parameter before its first step."""
    return {"step": torch.tensor(0.0, device=p.device)} | {kind: torch.zeros_like(p, requires_grad=False) for kind in MOMENTS}


def blank_state_on_host(p: Tensor) -> dict[str, Tensor]:
    """The same with the moments in host memory, pinned where `p` is on a GPU."""
    pinned = p.device.type != "cpu"
    moments = {kind: torch.zeros_like(p, device="cpu", pin_memory=pinned, requires_grad=False) for kind in MOMENTS}
    return {"step": torch.tensor(0.0, device=p.device)} | moments


def whole_step(adamw: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """One step; yields its parameters, whose moments are where they can be read."""
    adamw.step()
    yield [p for group in adamw.param_groups for p in group["params"]]


def step_by_parts(adamw: torch.optim.Optimizer, part_bytes: int = PART_BYTES) -> Iterator[list[Tensor]]:
    """The same step for moments on the host: part by part they visit the parameters' device. To be exhausted.

    AdamW computes number by number, so the bits are those of `whole_step`. Parameters must have a `blank_state_on_host`.
    """
    parameters = [p for group in adamw.param_groups for p in group["params"]]
    gradients = {p: p.grad for p in parameters}
    for p in parameters:
        p.grad = None  # AdamW leaves it alone
    for part in _parts(parameters, part_bytes):
        on_host = {p: {kind: adamw.state[p][kind] for kind in MOMENTS} for p in part}
        for p in part:
            p.grad = gradients.pop(p)
            adamw.state[p] |= {kind: tensor.to(p.device, non_blocking=True, copy=True) for kind, tensor in on_host[p].items()}
        adamw.step()
        yield part
        for p in part:
            p.grad = None
            for kind, tensor in on_host[p].items():
                _local(tensor).copy_(_local(adamw.state[p][kind]))
            adamw.state[p] |= on_host[p]


def _parts(parameters: list[Tensor], part_bytes: int) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    size = 0
    for p in parameters:
        if part and size + _local(p).nbytes > part_bytes:
            yield part
            part, size = [], 0
        part.append(p)
        size += _local(p).nbytes
    if part:
        yield part


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
