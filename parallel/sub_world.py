"""A smaller world inside the torch world, for libraries that take the default process group for themselves.

vLLM builds its groups from the *default* process group and reads RANK and WORLD_SIZE. Inside `sub_world(replica)` both describe
one engine replica: a world of exactly its tensor-parallel ranks, numbered from 0. Outside, nothing has changed. LOCAL_RANK is
left alone because it selects the GPU.

Private torch API used: `distributed_c10d._world.group_count`, `_update_default_pg` (same in torch 2.11 and 2.13).
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Group names are numbered by a counter that all ranks of a world must agree on. Groups made inside a sub-world take numbers from
# a range of their own, which grows so that a second engine in the same process cannot meet the names of the first.
_next_name = 100_000


@contextmanager
def sub_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Make `group` the default process group of this process for the duration. Every rank of `group` must enter."""
    global _next_name
    world = c10d._world
    saved_group, saved_count = world.default_pg, world.group_count
    saved_env = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE")}
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    try:
        c10d._update_default_pg(group)
        world.group_count = _next_name
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        yield
    finally:
        _next_name = max(_next_name, world.group_count)
        c10d._update_default_pg(saved_group)
        world.group_count = saved_count
        for key, value in saved_env.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


class OwnRandomState:
    """Random number generators of a guest: its draws and seeds neither move ours nor are moved by them.

    vLLM reseeds python, numpy and torch when an engine starts, and draws from the global torch generator even for seeded requests.
    """

    def __init__(self) -> None:
        self.state: tuple | None = None  # the guest's; None until it has run once

    @contextmanager
    def entered(self) -> Iterator[None]:
        ours = random_state()
        if self.state is not None:
            set_random_state(self.state)
        try:
            yield
        finally:
            self.state = random_state()
            set_random_state(ours)


def random_state() -> tuple:
    """State of the python, numpy, torch CPU and (if in use) CUDA generators of this process."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_state(state: tuple) -> None:
    """Inverse of `random_state`."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
