"""The crossings between sub-meshes. The rules that keep a world of ranks from waiting for each other for ever:

1. World collectives are unconditional and in the same order on every rank. Every function here is one.
2. A handle (Model, Trainer, Generator) uses only its own mesh's collectives, and every replica makes the same number of forward passes.
3. Work is routed by shares: a rank outside a mesh has an empty share.
4. The loop is a sequence of windows between world collectives; within a window no rank waits for another mesh.
5. Control flow depends on replicated values only, never on a clock, a local tensor or a caught exception.
6. An error ends the job, on every rank, with one traceback that matters (parallel/launch.py).
"""

from typing import Any

import torch.distributed as dist

from parallel.placement import Grid, Placement, speaks_for


def everyone(items: list, source: Grid, place: Placement) -> list:
    """Give every rank the items that `source` produced, in the order in which `share` dealt the work out.

    Plain Python data only: a step's token ids and log-probs are a few MB, and once every rank holds them, filtering, weighting
    and metrics are ordinary local code that cannot disagree between ranks.
    """
    shards: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shards, items if speaks_for(source) else [], group=place.objects)
    shards = [shards[rank] for rank in source.spokesmen]
    total = sum(map(len, shards))
    return [shards[i % len(shards)][i // len(shards)] for i in range(total)]


def in_order(scored: dict[int, Any], source: Grid, place: Placement) -> list:
    """Give every rank what the replicas of `source` made of the items they had, by the items' index: all of it, in that order."""
    shards: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shards, scored if speaks_for(source) else {}, group=place.objects)
    found = {index: value for shard in shards for index, value in shard.items()}
    return [found[index] for index in range(len(found))]


def from_root(value: Any, place: Placement) -> Any:
    """The root rank's `value`, on every rank."""
    message = [value]
    dist.broadcast_object_list(message, src=place.root, group=place.objects)
    return message[0]


def from_each(value: Any, place: Placement) -> list:
    """Every rank's `value`, by rank, on every rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=place.objects)
    return values
