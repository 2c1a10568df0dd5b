"""Who is on the GPU when roles share one."""

import logging

import torch

log = logging.getLogger(__name__)

GIB = 2**30


def empty_cache() -> None:
    """Give torch's unused blocks back, so that the engine's own allocator can map them. Nothing on a CPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def fits_beside(device: torch.device, shared: bool) -> bool:
    """May a started engine stay in memory while the trainer on the same GPU works?

    It may where what is free with the engine and the policy's weights in place still holds the trainer's state and activations:
    gradients and two moments (3 x the fp32 weights) and as much again. Otherwise the engine sleeps while the trainer works.
    """
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)  # the engine's pool is outside torch's caching allocator when it can sleep
    stays = not shared or free > 6 * weights + total // 4
    if shared:
        log.info(
            "engine and trainer share a GPU of %.1f GiB, %.1f GiB free beside the engine: it %s while the policy trains",
            total / GIB, free / GIB, "stays" if stays else "sleeps",
        )
    return stays
