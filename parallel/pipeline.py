"""Pipeline parallelism: the stages of a replica run rows of tokens one after the other through torch.distributed.pipelining."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from parallel.placement import Grid

T = TypeVar("T")
ROWS_AT_ONCE = 8  # rows per stage in one run of the schedule, which keeps a buffer for each: (pp - 1) / (9 pp - 1) of the time is idle


class Passing(nn.Module):
    """In the place of what another stage holds: gives on what it is given."""

    def forward(self, given: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return given


def bounds(layers: int, stages: int) -> list[tuple[int, int]]:
    """[first, last) layer of each stage. At least as many layers as stages.

    >>> bounds(5, 2)
    [(0, 2), (2, 5)]
    """
    assert stages <= layers, f"{stages} stages of {layers} layers"
    return [(layers * s // stages, layers * (s + 1) // stages) for s in range(stages)]


def batches(rows: int, stages: int) -> list[range]:
    """How `rows`, at least `stages` of them, are given to the schedule: runs that differ by one row at most.

    >>> batches(40, 2)
    [range(0, 13), range(13, 26), range(26, 40)]
    """
    runs = -(-rows // (ROWS_AT_ONCE * stages))
    return [range(rows * r // runs, rows * (r + 1) // runs) for r in range(runs)]


def run(module: nn.Module, grid: Grid, tokens: Tensor, hidden: Tensor, *, first_row: int, train: bool) -> None:
    """Send tokens [rows, N] through the stages: `module(tokens or hidden, row)` on each, its number [1] as `row`, counted from first_row.

    A stage returns what the next is given, like `hidden` (an example, which may be on "meta"); the last one returns a loss [1], which
    train propagates backward, or zeros. Gradients add up; FSDP reduces them once. Collective over the replica.
    """
    index, count = grid.index("pp"), grid.pp
    example = hidden.detach().requires_grad_(train)
    loss = torch.empty(1, device=hidden.device).requires_grad_(train)
    stage = PipelineStage(
        module, index, count, tokens.device, group=grid.group("pp"),
        input_args=(tokens[:1] if index == 0 else example,), output_args=(loss if index == count - 1 else example,),
    )
    rows = torch.arange(first_row, first_row + len(tokens))
    given = (tokens,) if index == 0 else ()
    if train:
        schedule = Schedule1F1B(stage, len(tokens), loss_fn=lambda output, _row: output.sum(), scale_grads=False)
        schedule.step(*given, row=rows, target=rows if index == count - 1 else None, return_outputs=False)
    else:
        ScheduleGPipe(stage, len(tokens)).step(*given, row=rows, return_outputs=False)


def from_last_stage(value: T, grid: Grid) -> T:
    """What the last stage of this rank's replica knows, on all of its stages. Plain data."""
    if grid.pp == 1:
        return value
    message = [value]
    dist.broadcast_object_list(message, src=dist.get_global_rank(grid.group("pp"), grid.pp - 1), group=grid.group("pp"))
    return message[0]


def from_all_stages(value: T, grid: Grid) -> list[T]:
    """Every stage's plain data, on all stages."""
    values: list[T] = [value] * grid.pp
    if grid.pp > 1:
        dist.all_gather_object(values, value, group=grid.group("pp"))
    return values


def whole_model(shards: dict[str, Tensor], grid: Grid, convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """All tensors of a model spread over the grid, on the CPU of its first rank, each after `convert`; {} on the others.

    Collective over the grid. A tied head, which the last stage holds too, comes from the first.
    """
    whole: dict[str, Tensor] = {}
    stages = from_all_stages([(name, p.shape, convert(p.new_empty(0)).dtype) for name, p in shards.items()], grid)
    here = grid.index("pp")
    for stage, names in enumerate(stages):
        for name, shape, dtype in names:
            if any(name in (known for known, *_ in earlier) for earlier in stages[:stage]):
                continue
            full = None
            if stage == here:
                tensor = convert(shards[name].detach())
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if stage > 0 and dist.get_rank() in grid.ends(stage):
                source, first = grid.ends(stage)
                if full is None:
                    full = torch.empty(shape, dtype=dtype, device=convert(shards[next(iter(shards))].new_empty(0)).device)
                    dist.recv(full, src=source, group=grid.group("pp"))
                else:
                    dist.send(full.contiguous(), dst=first, group=grid.group("pp"))
            if grid.is_first:
                assert full is not None
                whole[name] = full.cpu().clone()  # a gathered tensor is a view of padded storage, which cannot be saved
    return whole
