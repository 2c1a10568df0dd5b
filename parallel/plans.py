"""How each model family is split: which modules FSDP wraps, and how tensor parallelism cuts their linears."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, parallelize_module

from parallel.experts import DealExperts
from parallel.names import check_names
from parallel.pipeline import Passing, bounds
from parallel.placement import Grid
from parallel.rounding import match_sampler
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

    def styles(self, block: nn.Module) -> dict[str, ParallelStyle]:
        """Of `tp`, what is done in this block: layers with experts have no MLP to cut, and no tokens to gather for it."""
        here = {name for name, _ in block.named_modules()}
        found = {path: style for path, style in self.tp.items() if path in here}
        columns = [path for path, style in found.items() if isinstance(style, ColwiseParallel)]
        gathers = {path for path, style in found.items() if isinstance(style, PrepareModuleInput)}
        idle = {path for path in gathers if not any(column.startswith(f"{path}.") for column in columns)}
        return {path: style for path, style in found.items() if path not in idle}


# Between attention and MLP each tensor rank has a part of the tokens (sequence parallelism, 2205.05198): they are gathered where a module
# that is cut begins, and its results are summed and dealt out where it ends. The tokens are in dimension 1.
TOKENS = Shard(1)
UNIT_PARAMETERS = 2**28  # of FSDP's unit on a rank that has all weights: at the end of its backward pass their gradients are there twice
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

QWEN3_MOE = Plan(tp=LLAMA.tp | {"mlp.experts": DealExperts()})

PLANS = {  # keyed by the Hugging Face `model_type`
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "gemma2": LLAMA,
    "gemma3_text": LLAMA,
}


def plan_of(model: nn.Module) -> Plan:
    """The family's plan; for another family one that shards blocks, if they are where most families have them.

    ValueError for a model that cannot be trained at all.
    """
    config, name = model.config, type(model).__name__
    if config.get_text_config() is not config:
        raise ValueError(
            f"model family {config.model_type!r} ({name}) reads more than text: take a model of its family that does not (the small ones "
            f"of Gemma 3 are of type 'gemma3_text')"
        )
    scales = {key: config.to_dict().get(key) for key in ("logits_scaling", "logit_scale")}
    if any(scale not in (1, None) for scale in scales.values()):
        raise ValueError(f"model family {config.model_type!r} ({name}) scales its logits ({scales}), which the head does not: take another")
    check_names(model)
    plan = PLANS.get(config.model_type, Plan())
    if not isinstance(dict(model.named_modules()).get(plan.blocks), nn.ModuleList):
        raise ValueError(
            f"model family {config.model_type!r} ({name}) has no blocks at {plan.blocks!r}, where FSDP looks for them: add the family to "
            f"PLANS in parallel/plans.py with the path of its `blocks`"
        )
    return plan


def restore_scale(embedding: Any) -> None:
    """Gemma's factor of the embedding, in fp32 again: transformers keeps it in the checkpoint's dtype, whatever is computed in later."""
    if (scale := getattr(embedding, "scalar_embed_scale", None)) is not None:
        embedding.embed_scale = torch.tensor(scale, device=embedding.embed_scale.device)


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

    In place, block by block, so that one full block at a time is on the device. On a rank that shares its weights with no other, FSDP
    only casts weights and adds gradients up, at a cost to the host for each unit and pass: there a unit has more blocks, and stays cast
    until `reshard`, or the last pass that `keep_cast` knows of.
    root: the module whose forward uses `model`; it gathers what is in no block. weights: dtype of the sharded parameters;
    compute: of the forward and backward passes. switches: what a block keeps and where its shards live.
    Returns the parameters whose gradients must be summed over "tp": those that are not cut, since each rank has seen a part of the tokens,
    of the heads (q_norm) or of the vocabulary.
    What `parallel.fit.check_model` refuses must not come here.
    """
    tp = grid.tp
    plan = plan_of(model)
    restore_scale(model.get_input_embeddings())
    if switches.matched:
        match_sampler(model, compute)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    alone = is_alone(grid, switches)
    for unit in _units(_stage(model, plan, grid), UNIT_PARAMETERS if alone else 0):
        for block in unit:
            block.to(device=device, dtype=weights)
            if tp > 1:
                parallelize_module(block, grid.weights["tp"], plan.styles(block), src_data_rank=None)
            switches.prepare(block)
        fully_shard(unit, mesh=grid.fsdp, mp_policy=precision, offload_policy=switches.offload_policy, reshard_after_forward=not alone)
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


def _units(blocks: list[nn.Module], most: int) -> list[list[nn.Module]]:
    """Blocks in a row with `most` parameters together; one that has more is alone.

    >>> [len(unit) for unit in _units([nn.Linear(2, 4, bias=False) for _ in range(5)], most=20)]
    [2, 2, 1]
    """
    units: list[list[nn.Module]] = []
    room = 0
    for block in blocks:
        size = sum(p.numel() for p in block.parameters())
        if size > room:
            units.append([])
            room = most
        units[-1].append(block)
        room -= size
    return units


def is_alone(grid: Grid, switches: Switches) -> bool:
    """Does a rank share its weights with no other, and have them on its device?"""
    return grid.fsdp.size() == 1 and switches.offload != "parameters"


def reshard(root: nn.Module) -> None:
    """Free what a pass without gradients leaves gathered or cast, which would be taken for the shards."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_cast(root: nn.Module, more: bool) -> None:
    """Where `is_alone`: will `more` passes of this update follow the next one? Then weights stay cast, and gradients, added up in fp32,
    become those of the shards with the last one's.
    """
    assert isinstance(root, FSDPModule)
    root.set_reshard_after_backward(not more)
    root.set_requires_gradient_sync(not more)
