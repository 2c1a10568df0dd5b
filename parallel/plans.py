"""How each model family is split: which modules FSDP wraps, and how tensor parallelism cuts their linears."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, parallelize_module

from parallel.pipeline import Passing, bounds
from parallel.placement import Grid
from parallel.switches import ALL_OFF, Switches


@dataclass(frozen=True)
class Plan:
    blocks: str = "model.layers"  # dotted path of the ModuleList of transformer blocks
    norm: str = "model.norm"  # of the last norm, before the head
    tp: dict[str, ParallelStyle] = field(default_factory=dict)  # path inside a block -> what is done there

    @property
    def cut(self) -> list[str]:
        """Paths inside a block of what tensor parallelism cuts."""
        return [path for path, style in self.tp.items() if not isinstance(style, PrepareModuleInput)]


# Between attention and MLP each tensor rank has a part of the tokens (sequence parallelism, 2205.05198): they are gathered where a module
# that is cut begins, and its results are summed and dealt out where it ends. The tokens are in dimension 1.
TOKENS = Shard(1)
LLAMA = Plan(
    tp={
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": TOKENS}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=TOKENS),
        "mlp": PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=TOKENS),
    },
)

PLANS = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}  # keyed by the Hugging Face `model_type`


def parallelize(
    root: nn.Module,
    model: nn.Module,
    grid: Grid,
    device: torch.device,
    *,
    weights: torch.dtype,
    compute: torch.dtype,
    switches: Switches = ALL_OFF,
) -> list[nn.Parameter]:
    """Leave this rank's stage of `model`, cut it along "tp", then shard it along the other axes.

    In place, block by block, so that one full block at a time is on the device.
    root: the module whose forward uses `model`; it gathers what is in no block. weights: dtype of the sharded parameters;
    compute: of the forward and backward passes. switches: what a block keeps and where its shards live.
    Returns the parameters whose gradients must be summed over "tp": those that are not cut, since each rank has seen a part of the tokens,
    of the heads (q_norm) or of the vocabulary.
    ValueError when the family has no plan for tensor or pipeline parallelism, or when its heads or layers cannot be dealt out.
    """
    tp = grid.tp
    plan = PLANS.get(model.config.model_type, Plan())
    if tp > 1:
        _check_tp(model, plan, tp)
    if grid.cp > 1:
        _check_cp(model, tp, grid.cp)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in _stage(model, plan, grid):
        block.to(device=device, dtype=weights)
        if tp > 1:
            parallelize_module(block, grid.weights["tp"], plan.tp, src_data_rank=None)
        switches.prepare(block)
        fully_shard(block, mesh=grid.fsdp, mp_policy=precision, offload_policy=switches.offload_policy)
    for buffer in root.buffers():
        buffer.data = buffer.data.to(device)
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor):  # a block's shards are where they belong
            parameter.data = parameter.data.to(device, weights)
    fully_shard(root, mesh=grid.fsdp, mp_policy=precision, offload_policy=switches.offload_policy, reshard_after_forward=False)
    return [p for p in root.parameters() if "tp" not in _axes(p)] if tp > 1 else []


def _axes(parameter: nn.Parameter) -> tuple[str, ...]:
    """Of the mesh over which it is spread."""
    assert isinstance(parameter, DTensor), "every parameter is sharded by FSDP, over one rank at least"
    return parameter.device_mesh.mesh_dim_names or ()


def _stage(model: nn.Module, plan: Plan, grid: Grid) -> list[nn.Module]:
    """The blocks of this rank's stage; what other stages hold is taken out of the model, and lets what it is given pass.

    The last stage keeps a tied embedding, for the head's sake.
    """
    blocks = model.get_submodule(plan.blocks)
    if grid.pp == 1:
        return list(blocks)
    if model.config.model_type not in PLANS:
        raise ValueError(_no_plan("pipeline", grid.pp, model.config.model_type))
    stage, is_last = grid.index("pp"), grid.index("pp") == grid.pp - 1
    first, last = bounds(len(blocks), grid.pp)[stage]
    for i in range(len(blocks)):
        if not first <= i < last:
            blocks[i] = Passing()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if not is_last:
        model.set_output_embeddings(Passing())
        model.set_submodule(plan.norm, Passing())
    if stage > 0 and not (is_last and tied):
        model.set_input_embeddings(Passing())
    return list(blocks[first:last])


def _no_plan(kind: str, degree: int, family: str) -> str:
    return (
        f"parallelism.{kind}_parallel_degree={degree}: model family {family!r} has no plan for it; set it to 1, or add the family to PLANS "
        f"in parallel/plans.py (known: {', '.join(PLANS)})"
    )


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
        raise ValueError(_no_plan("tensor", tp, config.model_type))
    for name, count in (("attention", config.num_attention_heads), ("key-value", config.num_key_value_heads)):
        if count % tp:
            raise ValueError(f"parallelism.tensor_parallel_degree={tp} does not divide the model's {count} {name} heads")
