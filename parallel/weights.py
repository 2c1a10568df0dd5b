"""Policy weights -> engine, in flat buckets, without leaving the process: cast, gathered from the shards, broadcast where needed.

What keeps ranks from waiting for each other for ever: all buckets have one order, the same on every rank, and every rank begins them
in it. To begin a bucket is to take part in its gather (the ranks of its pipeline stage), then to start its broadcast (its sender and
the receivers). A rank waits for a broadcast after it has begun the next bucket, and for nothing else; so whatever a rank waits for
needs only what all others begin without waiting for anything later.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from parallel.exchange import from_each
from parallel.names import to_checkpoint
from parallel.placement import Placement, holds
from parallel.routes import Route

MOST_BYTES = 64 * 2**20  # of a bucket whose size nobody has chosen
ON_THE_WAY = 2  # buckets at a time: while one is loaded, the next one travels
ADDED_AT_ONCE = 2**22  # elements of a checksum on a GPU, where torch makes an int64 of each before it adds them up


class NamedTensor(NamedTuple):
    name: str  # the checkpoint's own
    tensor: Tensor  # full, in the engine's dtype
    checksum: Tensor  # of the trainer's copy, on the device: reading it there would keep the host from what comes next. int64, []


Bucket = list[NamedTensor]


class Parcel(NamedTuple):
    """What a bucket will hold, as every rank knows it beforehand."""

    route: Route
    number: int  # among its stage's buckets; decides who sends it
    contents: list[tuple[str, torch.Size]]  # by the trainer's names


class Journey(NamedTuple):
    """A bucket on its way to this rank, or past it."""

    named: list[tuple[str, Tensor]]
    checksums: Tensor | None  # int64, one for each; None where nothing is kept
    works: list[dist.Work]


def checksum(tensor: Tensor) -> Tensor:
    """Sum of the tensor's bit patterns as a scalar int64: additive over slices, sensitive to every bit of every value."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(kind)
    if bits.device.type == "cpu":  # numpy adds small integers up ten times as fast as torch
        return torch.tensor(bits.numpy().sum(dtype=np.int64))
    return added_up(bits)


def added_up(bits: Tensor, at_once: int = ADDED_AT_ONCE) -> Tensor:
    """Sum of integers as a scalar int64, of so many at a time."""
    if bits.numel() <= at_once:
        return bits.sum(dtype=torch.int64)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in bits.flatten().split(at_once)]).sum()


PartsOf = Callable[[str, Tensor], list[tuple[str, Tensor]]]  # a parameter's tensors, as views; depends on name and shape alone


def as_held(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A parameter under the trainer's own name."""
    return [(name, tensor)]


def stream_weights(
    shards: dict[str, Tensor],
    place: Placement,
    dtype: torch.dtype,
    *,
    to_reference: bool = False,
    bucket_bytes: int | None = None,
) -> Iterator[Bucket]:
    """Yield every weight of the policy, in buckets, on the engine's ranks (to_reference: the reference's); empty ones elsewhere.

    The reference is sent the trainer's parameters, the engine what they are in the checkpoint.

    `shards` are this rank's, of its pipeline stage; {} where nothing is trained. Collective over the world: every rank must exhaust
    the iterator. Shards are cast to `dtype` before the gather. The ranks that hold a stage have its gathered tensors anyway; only
    others are sent them, each bucket by the next of the route's senders. A tensor that two stages hold is the first's. bucket_bytes:
    None for a sixteenth of the weights, so that few of them travel while nothing is loaded, but no more than MOST_BYTES.
    Peak extra memory: two buckets (ON_THE_WAY), and the largest tensor while it is gathered, if the caller keeps no bucket: a loop's
    variable does, `map` does not.
    """
    reader, parts_of = (place.reference, as_held) if to_reference else (place.generator, to_checkpoint)
    reads = reader is not None and holds(reader)
    coming: deque[Journey] = deque()
    for parcel in _parcels(shards, place.reference_weights if to_reference else place.weights, dtype, bucket_bytes, place):
        coming.append(_begin(parcel, shards, place.device, dtype, reads, parts_of))
        if len(coming) == ON_THE_WAY:
            yield _end(coming.popleft(), reads)
    while coming:
        yield _end(coming.popleft(), reads)


def _parcels(
    shards: dict[str, Tensor], routes: list[Route], dtype: torch.dtype, bucket_bytes: int | None, place: Placement
) -> list[Parcel]:
    """All buckets in their order, in which the stages take turns. A tensor larger than a bucket has one of its own."""
    names_it = any(dist.get_rank() == route.ranks[0] for route in routes)
    listed = from_each([(name, shard.shape) for name, shard in shards.items()] if names_it else [], place)
    if bucket_bytes is None:
        everything = sum(shape.numel() for names in listed for _, shape in names) * dtype.itemsize
        bucket_bytes = min(MOST_BYTES, everything // 16)
    known: set[str] = set()
    stages: list[list[Parcel]] = []
    for route in routes:
        parcels: list[Parcel] = []
        size = 0
        for name, shape in listed[route.ranks[0]]:
            if name in known:
                continue
            known.add(name)
            nbytes = shape.numel() * dtype.itemsize
            if not parcels or size + nbytes > bucket_bytes:
                parcels.append(Parcel(route, len(parcels), []))
                size = 0
            parcels[-1].contents.append((name, shape))
            size += nbytes
        stages.append(parcels)
    return [parcel for turn in zip_longest(*stages) for parcel in turn if parcel is not None]


@torch.no_grad()  # not of the iterator: there it would keep each bucket while the next one is made
def _begin(parcel: Parcel, shards: dict[str, Tensor], device: torch.device, dtype: torch.dtype, reads: bool, parts_of: PartsOf) -> Journey:
    """Gather the bucket where its stage is held, and start its broadcast where somebody receives it. Waits for no broadcast."""
    rank, route = dist.get_rank(), parcel.route
    holder, turn = rank in route.ranks, route.turn(parcel.number)
    sends = turn is not None and turn[0] == rank
    travels = turn is not None and (sends or rank in route.receivers)
    if not (travels or reads):
        for name, _ in parcel.contents if holder else []:
            _whole(shards[name], device, dtype)
        return Journey([], None, [])
    flat, parts = torch.empty(0), [torch.empty(0)] * len(parcel.contents)
    if travels:
        sizes = [shape.numel() for _, shape in parcel.contents]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = [part.view(shape) for (_, shape), part in zip(parcel.contents, flat.split(sizes), strict=True)]
    sums: list[Tensor] = []
    for i, (name, _) in enumerate(parcel.contents if holder else []):
        whole = _whole(shards[name], device, dtype)
        sums += [checksum(tensor) for _, tensor in parts_of(name, whole)]
        parts[i] = parts[i].copy_(whole) if sends else whole
        del whole  # before the next one is made
    named = [pair for (name, _), part in zip(parcel.contents, parts, strict=True) for pair in parts_of(name, part)]
    checksums = torch.stack(sums) if holder else torch.empty(len(named), dtype=torch.int64, device=device)
    works = []
    if travels and turn is not None:
        works = [dist.broadcast(tensor, src=turn[0], group=turn[1], async_op=True) for tensor in (flat, checksums)]
    return Journey(named, checksums, works)


def _end(journey: Journey, reads: bool) -> Bucket:
    """Wait for the broadcast; what came, on the ranks that read it."""
    for work in journey.works:
        work.wait()
    if not reads or journey.checksums is None:
        return []
    return [NamedTensor(*pair, total) for pair, total in zip(journey.named, journey.checksums.unbind(), strict=True)]


@torch.no_grad()
def blend(shard: Tensor, whole: Tensor, mix: float) -> None:
    """shard <- (1 - mix) shard + mix whole, in place and in fp32, for this rank's part of the `whole` tensor."""
    local, part = local_part(shard, whole)
    part = part.to(local.device)
    local.copy_(part if mix == 1 else local.float().lerp(part.float(), mix))


def local_part(shard: Tensor, whole: Any) -> tuple[Tensor, Tensor]:
    """This rank's part of a sharded tensor, and the same part of the `whole` one: a tensor, or what is sliced as one is."""
    if not isinstance(shard, DTensor):
        return shard, whole[:]
    sizes, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return shard.to_local(), whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def _whole(shard: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cast, then gathered.

    DTensor's own dispatch costs the host more than most tensors' gather costs the network. So it is asked only where shards are uneven or
    cut in another way than along dim 0 by one axis of the mesh.
    """
    if not isinstance(shard, DTensor):
        return shard.detach().to(dtype).to(device)
    local, sizes = shard.to_local().to(dtype).to(device), shard.device_mesh.shape
    cuts = [axis for axis, placement in enumerate(shard.placements) if sizes[axis] > 1 and not placement.is_replicate()]
    if not cuts:
        return local
    axis = cuts[0]
    along = shard.placements[axis]
    plain = len(cuts) == 1 and type(along) is Shard and along.dim == 0 and shard.shape[0] % sizes[axis] == 0  # a subclass is not
    if not plain:
        options: dict[str, Any] = {"run_check": False, "shape": shard.shape, "stride": shard.stride()}
        return DTensor.from_local(local, shard.device_mesh, shard.placements, **options).full_tensor()
    whole = local.new_empty(shard.shape)
    dist.all_gather_into_tensor(whole, local.contiguous(), group=shard.device_mesh.get_group(axis))
    return whole
