"""A layer's experts in vLLM: where the checkpoint's matrices are in its parameters, and what keeps them there."""

from typing import Any

from torch import Tensor

# vLLM's parameters, and the matrices of each expert in them, one below the other.
PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
CPU_TILE = 32  # vLLM's CPU kernel pads what it does not divide


def expert_slices(path: str, kind: str, parameter: Tensor) -> dict[str, Tensor]:
    """This rank's part of every expert of the module at `path`, by the checkpoint's names. [E, 2 I, H] (w13) or [E, H, I] (w2)."""
    names, owner = PARTS[kind], path.removesuffix(".routed_experts")
    return {
        f"{owner}.{e}.{name}.weight": part
        for e, expert in enumerate(parameter)
        for name, part in zip(names, expert.chunk(len(names)), strict=True)
    }


def check_engine(options: dict[str, Any]) -> None:
    """ValueError where vLLM's arguments would move experts to where a reload does not put them and a checksum does not see it."""
    if (backend := options.get("moe_backend", "triton")) != "triton":
        raise ValueError(f"engine.moe_backend={backend}: vLLM's other kernels than triton rearrange experts; remove it")
    for key in ("enable_expert_parallel", "enable_eplb"):
        if options.get(key):
            raise ValueError(f"engine.{key}={options[key]}: the engine's ranks must share every expert; remove it")


def check_tile(shape: Any, tp: int) -> None:
    """ValueError where vLLM's CPU build would pad the experts of a model. shape: its text config."""
    width = shape.to_dict().get("moe_intermediate_size")
    if width and width % (CPU_TILE * tp):
        raise ValueError(
            f"services.generator.procs={tp}: on a CPU vLLM needs {CPU_TILE} x {tp} to divide moe_intermediate_size={width} of the model"
        )


def keep_experts(cpu_moe: Any) -> None:
    """Experts stay as they were loaded, in vLLM's module `cpu_moe`. Its kernel takes packed ones only: they are packed at every call."""
    pack, compute = cpu_moe.cpu_prepack_moe_weight, cpu_moe.cpu_fused_moe

    def compute_unpacked(out: Tensor, hidden: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> None:
        isa = rest[5]  # after two biases, weights and numbers of the chosen experts, and the activation
        compute(out, hidden, pack(w13, isa), pack(w2, isa), *rest)

    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight
    cpu_moe.cpu_fused_moe = compute_unpacked
