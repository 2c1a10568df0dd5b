"""Who is on the GPU when roles share one: decided from bytes at start, printed, and explained when it was wrong."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

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


class TrainingBytes(NamedTuple):
    """What the trainer will take on one GPU beside its weights."""

    kept: int  # from step to step: AdamW's moments, where they are not on the host
    peak: int  # at most, `kept` included


def training_bytes(
    weights: int, *, hidden: int, intermediate: int, heads: int, layers: int, tokens: int, itemsize: int, switches: Switches = ALL_OFF
) -> TrainingBytes:
    """For `weights` bytes of fp32 shards and rows of `tokens`, before anything was trained. heads: width of q, k and v together;
    itemsize: bytes of a number of the computation's dtype.

    Two moments and gradients are 3 x `weights`, the weights gathered in the computation's dtype at most itemsize / 4 as much again.
    Activations of one row without checkpointing, in vectors a token and layer of transformers' eager blocks: about 10 of the hidden, 4
    of the intermediate and 3 of the heads' width (docs/results.md compares bf16 with what was measured). With `selective`: the input, q, k,
    v, attention and three products of each layer, with `full` its input, and all of one layer. What a compiled block saves is not
    counted. The head's chunks, and with offload to the host the moments of a part of the weights: 2 GiB.
    """
    of_layer = 10 * hidden + 4 * intermediate + 3 * heads
    kept = {"none": of_layer, "selective": 3 * hidden + 2 * intermediate + 2 * heads, "full": hidden}[switches.activations]
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
    choice: Residency = "stays" if free > needed.peak else "drops its KV cache" if free + kv_cache > needed.peak else "sleeps"
    level = " (level 2 when new weights follow, else level 1)" if choice == "sleeps" else ""
    log.info(
        "engine and trainer share a GPU of %.1f GiB: %.1f GiB are free beside the engine, whose KV cache has %.1f GiB; training is "
        "expected to take %.1f GiB more, so the engine %s%s while the policy trains",
        *(total / GIB, free / GIB, kv_cache / GIB, needed.peak / GIB, choice, level),
    )
    return choice


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
