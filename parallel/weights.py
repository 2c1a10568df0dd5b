"""Policy weights -> engine, in flat buckets, without leaving the process: cast, gathered from the shards, broadcast where needed."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from parallel.exchange import from_root
from parallel.placement import Placement, holds


class NamedTensor(NamedTuple):
    name: str  # the checkpoint's own
    tensor: Tensor  # full, in the engine's dtype
    checksum: int  # of the trainer's copy


Bucket = list[NamedTensor]


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Sum of the tensor's bit patterns as a scalar int64: additive over slices, sensitive to every bit of every value."""
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().contiguous().view(bits).sum(dtype=torch.int64)


@torch.no_grad()
def stream_weights(
    shards: dict[str, Tensor],
    place: Placement,
    dtype: torch.dtype,
    *,
    to_reference: bool = False,
    bucket_bytes: int = 256 * 2**20,
) -> Iterator[Bucket]:
    """Yield every weight of the policy, in buckets, on the ranks that train or generate; `shards` is {} where nothing is trained.

    Collective over the world: every rank must exhaust the iterator. Shards are cast to `dtype` before the gather. Ranks that
    train hold the gathered tensors anyway; only generator ranks (to_reference: those of the reference) that do not train are sent
    them, one broadcast a bucket.
    Peak extra memory: one bucket, and the largest tensor.
    """
    shapes = from_root([(name, tuple(shard.shape)) for name, shard in shards.items()], place)
    group = place.reference_weights if to_reference else place.weights
    bucket: list[tuple[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in shapes:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if bucket and size + nbytes > bucket_bytes:
            yield _send(bucket, shards, place, dtype, group)
            bucket, size = [], 0
        bucket.append((name, shape))
        size += nbytes
    if bucket:
        yield _send(bucket, shards, place, dtype, group)


def _send(
    names: list[tuple[str, tuple[int, ...]]],
    shards: dict[str, Tensor],
    place: Placement,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> Bucket:
    sizes = [torch.Size(shape).numel() for _, shape in names]
    trains = holds(place.trainer)
    flat, sums = torch.empty(0), torch.empty(0)
    if trains:
        full = [_full(shards[name].detach().to(place.device, dtype)) for name, _ in names]
        flat = torch.cat([t.reshape(-1) for t in full])
        sums = torch.stack([checksum(t) for t in full])
    if group is not None and dist.get_rank(group) >= 0:
        if not trains:
            flat = torch.empty(sum(sizes), dtype=dtype, device=place.device)
            sums = torch.empty(len(names), dtype=torch.int64, device=place.device)
        dist.broadcast(flat, src=place.root, group=group)
        dist.broadcast(sums, src=place.root, group=group)
    elif not trains:
        return []
    parts = zip(names, flat.split(sizes), sums.tolist(), strict=True)
    return [NamedTensor(name, part.view(shape), total) for (name, shape), part, total in parts]


@torch.no_grad()
def blend(shard: Tensor, whole: Tensor, mix: float) -> None:
    """shard <- (1 - mix) shard + mix whole, in place and in fp32, for this rank's part of the `whole` tensor."""
    local, part = shard, whole
    if isinstance(shard, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
        local, part = shard.to_local(), whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    part = part.to(local.device)
    local.copy_(part if mix == 1 else local.float().lerp(part.float(), mix))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
