"""Policy weights -> engine, in flat buckets, without leaving the process: cast, gathered from the shards, broadcast where needed."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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
    shards: dict[str, Tensor], place: Placement, dtype: torch.dtype, *, bucket_bytes: int = 256 * 2**20
) -> Iterator[Bucket]:
    """Yield every weight of the policy, in buckets, on the ranks that train or generate; `shards` is {} where nothing is trained.

    Collective over the world: every rank must exhaust the iterator. Shards are cast to `dtype` before the gather. Ranks that
    train hold the gathered tensors anyway; only generator ranks that do not train are sent them, one broadcast a bucket.
    Peak extra memory: one bucket, and the largest tensor.
    """
    shapes = from_root([(name, tuple(shard.shape)) for name, shard in shards.items()], place)
    bucket: list[tuple[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in shapes:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if bucket and size + nbytes > bucket_bytes:
            yield _send(bucket, shards, place, dtype)
            bucket, size = [], 0
        bucket.append((name, shape))
        size += nbytes
    if bucket:
        yield _send(bucket, shards, place, dtype)


def _send(names: list[tuple[str, tuple[int, ...]]], shards: dict[str, Tensor], place: Placement, dtype: torch.dtype) -> Bucket:
    sizes = [torch.Size(shape).numel() for _, shape in names]
    trains = holds(place.trainer)
    flat, sums = torch.empty(0), torch.empty(0)
    if trains:
        full = [_full(shards[name].detach().to(dtype)) for name, _ in names]
        flat = torch.cat([t.reshape(-1) for t in full])
        sums = torch.stack([checksum(t) for t in full])
    if place.weights is not None and dist.get_rank(place.weights) >= 0:
        if not trains:
            flat = torch.empty(sum(sizes), dtype=dtype, device=place.device)
            sums = torch.empty(len(names), dtype=torch.int64, device=place.device)
        dist.broadcast(flat, src=place.root, group=place.weights)
        dist.broadcast(sums, src=place.root, group=place.weights)
    elif not trains:
        return []
    parts = zip(names, flat.split(sizes), sums.tolist(), strict=True)
    return [NamedTensor(name, part.view(shape), total) for (name, shape), part, total in parts]


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
