"""How each model family is split: which modules FSDP wraps, and how tensor parallelism cuts their linears."""

import functools
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from parallel.placement import Grid


@dataclass(frozen=True)
class Plan:
    blocks: str = "model.layers"  # dotted path of the ModuleList of transformer blocks
    tp: dict[str, ParallelStyle] = field(default_factory=dict)  # path inside a block -> cut
    partial: tuple[str, ...] = ()  # paths inside a block whose whole weights see only this rank's heads: gradients add up over TP


LLAMA = Plan(
    tp={
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    },
)
QWEN3 = Plan(tp=LLAMA.tp, partial=("self_attn.q_norm", "self_attn.k_norm"))

PLANS = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": QWEN3}  # keyed by the Hugging Face `model_type`


def parallelize(
    root: nn.Module,
    model: nn.Module,
    grid: Grid,
    device: torch.device,
    *,
    weights: torch.dtype,
    compute: torch.dtype,
    recompute: bool = False,
) -> list[nn.Parameter]:
    """Cut `model` along "tp", then shard along the other axes; in place, block by block, so that one full block at a time is on the device.

    root: the module whose forward uses `model`; it gathers what is in no block. weights: dtype of the sharded parameters;
    compute: of the forward and backward passes. recompute: a block keeps its inputs only, and is computed again in the backward pass.
    Returns the parameters whose gradients must be summed over "tp".
    ValueError when the family has no plan for tensor parallelism or its heads cannot be dealt out.
    """
    tp = grid.tp
    plan = PLANS.get(model.config.model_type, Plan())
    if tp > 1:
        _check_tp(model, plan, tp)
    if grid.cp > 1:
        _check_cp(model, tp, grid.cp)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    partial: list[nn.Parameter] = []
    for block in model.get_submodule(plan.blocks):
        block.to(device=device, dtype=weights)
        if tp > 1:
            parallelize_module(block, grid.weights["tp"], plan.tp, src_data_rank=None)
        if recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=grid.fsdp, mp_policy=precision)
        if tp > 1:
            partial += [p for path in plan.partial for p in block.get_submodule(path).parameters()]
    root.to(device=device)
    for parameter in root.parameters():
        parameter.data = parameter.data.to(weights)
    fully_shard(root, mesh=grid.fsdp, mp_policy=precision, reshard_after_forward=False)
    if tp > 1:
        # Each rank's head computes its part of the vocabulary, so the gradient of the whole weight adds up over "tp". A tied weight is
        # also the embedding's, whose gradient every rank has whole: each gives its part of that too.
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        partial += head.parameters()
        if head.weight is embedding.weight:
            embedding.register_forward_hook(lambda _module, _inputs, output: _divide_gradient(output, tp))
    return partial


def _divide_gradient(output: torch.Tensor, count: int) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / count)


def _check_cp(model: nn.Module, tp: int, cp: int) -> None:
    """Ranks exchange tokens for heads: each gets its part of the query heads, and of the key-value heads or a copy of one."""
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads // tp, config.num_key_value_heads // tp
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        beside = f" (of tensor_parallel_degree={tp})" if tp > 1 else ""
        raise ValueError(
            f"parallelism.context_parallel_degree={cp} must divide a rank's {heads} attention heads, and divide or be a multiple of its "
            f"{kv_heads} key-value heads{beside}"
        )


def _check_tp(model: nn.Module, plan: Plan, tp: int) -> None:
    config = model.config
    if not plan.tp:
        raise ValueError(
            f"parallelism.tensor_parallel_degree={tp}: model family {config.model_type!r} has no tensor-parallel plan; set it to 1, "
            f"or add the family to PLANS in parallel/plans.py (known: {', '.join(PLANS)})"
        )
    for name, count in (("attention", config.num_attention_heads), ("key-value", config.num_key_value_heads)):
        if count % tp:
            raise ValueError(f"parallelism.tensor_parallel_degree={tp} does not divide the model's {count} {name} heads")
