"""Who is on the GPU when roles share one: decided from bytes at start, printed, and explained when it was wrong."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.switches import ALL_OFF, Switches

log = logging.getLogger(__name__)

GIB = 2**30
Residency = Literal["stays", "drops its KV cache", "sleeps"]


def empty_cache() -> None:
    """Give torch's unused blocks back, so that the engine's own allocator can map them. Nothing on a CPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def capacity(device: torch.device) -> int:
    """Bytes of the GPU's memory, in use or not; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


class Parked:
    """Tensors whose home is the host's memory: on their device only inside `resident()` or `changing()`, and no bytes there between.

    Their storages stay the same objects and are emptied and filled again, so whoever holds a tensor or a view of one, as FSDP does, need
    not know. Of a sharded tensor it is this rank's part; nothing is gathered.
    """

    PIECE = 2**26  # bytes of a host buffer: torch rounds each pinned one up to a power of two

    def __init__(self, tensors: Iterable[Tensor]):
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        found = {s.data_ptr(): s for t in local if (s := t.untyped_storage()).nbytes()}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]
        self._pieces: list[tuple[Tensor, torch.UntypedStorage, slice]] = []  # host bytes, and whose they are
        left, room = sum(size for _, size in self._storages), torch.empty(0, dtype=torch.uint8)
        for storage, size in self._storages:
            start = 0
            while start < size:
                if not len(room):
                    room = torch.empty(min(left, self.PIECE), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                here = slice(start, start + min(size - start, len(room)))
                count = here.stop - start
                self._pieces.append((room[:count], storage, here))
                room, start, left = room[count:], here.stop, left - count
        self._store()
        self._free()

    @contextmanager
    def resident(self) -> Iterator[None]:
        """On the device for the duration, to be read."""
        for storage, size in self._storages:
            storage.resize_(size)
        for home, storage, here in self._pieces:
            _bytes(storage)[here].copy_(home, non_blocking=True)
        try:
            yield
        finally:
            self._free()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """On the device for the duration, to be written: what is in the tensors then is theirs."""
        with self.resident():
            yield
            self._store()

    def _store(self) -> None:
        for home, storage, here in self._pieces:
            home.copy_(_bytes(storage)[here])

    def _free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def live_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """On `device`, of the storages of this rank's parts, each counted once; 0 for those that are parked."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    here = [s for t in local if (s := t.untyped_storage()).nbytes() and s.device.type == device.type]
    return sum({s.data_ptr(): s.nbytes() for s in here}.values())


class TrainingBytes(NamedTuple):
    """What the trainer will take on one GPU beside its weights."""

    kept: int  # from step to step: AdamW's moments, where they are not on the host
    peak: int  # at most, `kept` included


def training_bytes(
    weights: int, *, hidden: int, intermediate: int, heads: int, layers: int, tokens: int, itemsize: int, again: int = 0,
    switches: Switches = ALL_OFF,
) -> TrainingBytes:  # fmt: skip
    """For `weights` bytes of fp32 shards and rows of `tokens`, before anything was trained. heads: width of q, k and v together;
    again: numbers a token of the keys and values that are there another time, for responses with a prompt in common; itemsize: bytes of a
    number of the computation's dtype.

    Two moments and gradients are 3 x `weights`, the weights gathered in the computation's dtype at most itemsize / 4 as much again.
    Activations of one row without checkpointing, in vectors a token and layer of transformers' eager blocks: about 10 of the hidden, 4
    of the intermediate and 3 of the heads' width (docs/results.md compares bf16 with what was measured). With `selective`: the input, q, k,
    v, attention and three products of each layer, with `full` its input, and all of one layer. What a compiled block saves is not
    counted. The head's chunks, the gradients of a unit of FSDP's on their way, and with offload to the host the moments of a part of the
    weights: 2 GiB.
    """
    of_layer = 10 * hidden + 4 * intermediate + 3 * heads + again
    kept = {"none": of_layer, "selective": 3 * hidden + 2 * intermediate + 2 * heads, "full": hidden}[switches.activations]
    if switches.matched and switches.activations != "none":
        kept += hidden * 4 // itemsize - hidden  # a block's input is in fp32
    activations = itemsize * tokens * (layers * kept + (of_layer if switches.activations != "none" else 0))
    moments = 2 * weights if switches.offload == "none" else 0
    gradients = weights if switches.offload != "parameters" else 0
    return TrainingBytes(moments, moments + gradients + weights * itemsize // 4 + activations + 2 * GIB)


def residency(device: torch.device, needed: TrainingBytes, kv_cache: int) -> Residency:
    """What a started engine does while the trainer on the same GPU works, given the bytes that the trainer will need.

    It stays where those are free beside it; it drops its KV cache (`kv_cache` bytes) where that is enough; otherwise it sleeps.
    ValueError when the two do not fit even between the trainer's steps.
    """
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < needed.kept:
        raise ValueError(
            f"out of GPU memory while starting: {needed.kept / GIB:.2f} GiB needed for the optimizer's moments, {free / GIB:.2f} GiB of "
            f"{total / GIB:.2f} GiB free beside the engine. Lower generator.gpu_memory_utilization"
        )
    choice = choose(free, needed.peak, kv_cache)
    level = " (level 2 when new weights follow, else level 1)" if choice == "sleeps" else ""
    log.info(
        "engine and trainer share a GPU of %.1f GiB: %.1f GiB are free beside the engine, whose KV cache has %.1f GiB; training is "
        "expected to take %.1f GiB more, so the engine %s%s while the policy trains",
        *(total / GIB, free / GIB, kv_cache / GIB, needed.peak / GIB, choice, level),
    )
    return choice


def choose(free: int, peak: int, kv_cache: int) -> Residency:
    """Of an engine beside which `free` bytes are left, where training takes `peak`."""
    return "stays" if free > peak else "drops its KV cache" if free + kv_cache > peak else "sleeps"


def agreed(choice: Residency, replica: dist.ProcessGroup) -> Residency:
    """Of its ranks' choices, the one that makes most room, for all of them.

    Ranks that did otherwise would part: one that drops its KV cache forgets the prompts it knows, and would ask the others for a
    forward pass of other tokens than theirs. Collective over `replica`.
    """
    choices: list[Residency] = [choice] * dist.get_world_size(replica)
    dist.all_gather_object(choices, choice, group=replica)
    return max(choices, key=get_args(Residency).index)


def parks(total: int, *, policy: int, needed: TrainingBytes, reference: int, engine: int, engine_weights: int) -> bool:
    """Does a reference leave a GPU of `total` bytes while it is idle? Only where it would not fit beside what else is there.

    That is the policy's weights, with either all that training takes beside the engine's weights, or what the trainer keeps beside the
    whole engine; engine: 0 where there is none. A cache that is dropped costs nothing and comes first, a reference that moves costs its
    bytes twice over the bus. Always False on a CPU, of which the total is 0.
    """
    others = policy + max(needed.peak + engine_weights, needed.kept + engine) if engine else policy + needed.peak
    parked = 0 < total < others + reference
    if total:
        log.info(
            "reference and trainer share a GPU of %.1f GiB: the reference has %.1f GiB and the others are expected to need up to %.1f GiB, "
            "so it %s", total / GIB, reference / GIB, others / GIB, "waits in host memory while it is idle" if parked else "stays",
        )  # fmt: skip
    return parked


CPU_SEQS = 64  # that an engine on a CPU decodes at once, by default
GRAPH_SEQS = 512  # up to which vLLM captures CUDA graphs by itself


def gpu_seqs(rollout: tuple[int, int] | None, replicas: int) -> int:
    """That an engine on a GPU decodes at once, by default: what a rollout (prompts, samples of each) gives one of so many replicas.

    >>> gpu_seqs((64, 8), 1), gpu_seqs((30, 8), 4), gpu_seqs((4, 4), 1), gpu_seqs((512, 8), 1), gpu_seqs(None, 1)
    (512, 64, 64, 1024, 256)
    """
    if rollout is None:
        return 256
    prompts, samples = rollout
    return min(max(-(-prompts // replicas) * samples, 64), 1024)


def cpu_kv_cache(seq_len: int, bytes_per_token: int, max_num_seqs: int) -> int:
    """Bytes of an engine's KV cache on a CPU: all sequences and one more, at most 1 GiB, but two sequences at least."""
    return max(_sequences(2, seq_len, bytes_per_token), min(_sequences(max_num_seqs + 1, seq_len, bytes_per_token), GIB))


def gpu_kv_cache(seq_len: int, bytes_per_token: int, max_num_seqs: int, left: int) -> int | None:
    """Bytes of an engine's KV cache on a GPU: all sequences and one more, where `left`, what the engine's share of the GPU has beside its
    weights, is clearly more than that (by a quarter of it or 8 GiB); else None, and vLLM finds out how much of it is free.

    With so much no sequence waits for another's memory, and more could only keep prefixes, which new weights make worthless. What a
    forward pass and CUDA graphs take is in the difference.
    """
    enough = _sequences(max_num_seqs + 1, seq_len, bytes_per_token)
    return enough if enough <= left - min(left // 4, 8 * GIB) else None


def _sequences(count: int, seq_len: int, bytes_per_token: int) -> int:
    return count * -(-seq_len // 128) * 128 * bytes_per_token  # 128: tokens of the CPU cache's block; a GPU's is smaller


def usage(device: torch.device, engine: int = 0) -> dict[str, float]:
    """GiB of this rank's GPU: live tensors, their peak since the last call, and all that is in use on the device. {} on a CPU.

    engine: bytes of the engine's live tensors, which the first two leave out: torch counts them also while the engine sleeps and
    their memory is the trainer's.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device) - engine
    torch.cuda.reset_peak_memory_stats(device)
    numbers = {"allocated": torch.cuda.memory_allocated(device) - engine, "peak": peak, "used": total - free}
    return {f"mem/{name}_gib": count / GIB for name, count in numbers.items()}


class Remedy(NamedTuple):
    """What to do about a library's own error that says its memory does not suffice."""

    advice: str
    share_too_small: bool = False  # the bytes known to `explained` are a share that did not suffice, not what was needed


# What CUDA's libraries say besides torch.OutOfMemoryError.
SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def explained(phase: str, keys: str | Remedy, *, needed: int = 0, others: Mapping[str, Remedy] = MappingProxyType({})) -> Iterator[None]:
    """Turn running out of GPU memory inside into one message: the phase, the bytes needed and free, and the `keys` to lower (or advice).

    needed: bytes, where the error will not say. others: errors of a library that mean the same, by their first words.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        said = str(error)
        remedy = next((remedy for words, remedy in others.items() if words in said), None)
        if remedy is not None:
            detail = f" ({said.partition('. ')[0]})"
        elif any(sign in said for sign in SIGNS):
            remedy, detail = keys if isinstance(keys, Remedy) else Remedy(f"Lower {keys}"), ""
        else:
            raise
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
        size = asked[1] if asked else f"{needed / GIB:.2f} GiB" if needed else "more than there is"
        if remedy.share_too_small:
            size = f"more than its share of {needed / GIB:.2f} GiB" if needed else "more than its share"
        kind, state = _state()
        raise ValueError(f"out of {kind} memory while {phase}: {size} needed{detail}{state}. {remedy.advice}") from error


def _state() -> tuple[str, str]:
    """Whose memory it is, and how much of it is free."""
    if not torch.cuda.is_initialized():
        return "the engine's", ""
    free, total = torch.cuda.mem_get_info()
    live = torch.cuda.memory_allocated()
    return "GPU", f", {free / GIB:.2f} GiB of {total / GIB:.2f} GiB free, {live / GIB:.2f} GiB in live tensors of this process"
