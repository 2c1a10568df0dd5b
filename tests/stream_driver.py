"""Run by tests/test_weight_stream.py under torchrun: what each rank of a world is sent of the policy. No engine.

    torchrun --nproc-per-node=3 tests/stream_driver.py spec.json report.json

The spec: `trainer`, `generator` and `reference` as RolePlan takes them, and `cases`, a list of {name, run, ...}, as in sync_driver.py.
"""

import hashlib
import json
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.launch import launch
from parallel.placement import Grid, Placement
from parallel.roles import Plan, RolePlan
from parallel.routes import make_routes
from parallel.weights import Bucket, checksum, stream_weights
from tests.cases import answer

BUCKET_BYTES = 40_000


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def seen(buckets: list[Bucket]) -> dict[str, Any]:
    sent = [t for bucket in buckets for t in bucket]
    return {
        "digests": {t.name: digest(t.tensor) for t in sent},
        "count": len(sent),
        "buckets": len(buckets),
        "checksums": all(t.checksum == int(checksum(t.tensor)) for t in sent),
    }


def spread(place: Placement, *, model: str, dtype: str, max_senders: int, to_reference: bool = False) -> dict[str, Any]:
    """The real model over the trainer's grid."""
    from model import Model, ModelSource  # of the runs here only this one needs transformers

    reader = place.reference if to_reference else place.generator
    assert reader is not None
    routes = make_routes(place.trainer.stages, reader.ranks, max_senders=max_senders)
    place = replace(place, weights=routes, reference_weights=routes)
    policy = Model(ModelSource(model), place.trainer, dtype="float32", temperature=1.0, max_tokens=64, trainable=True)
    stream = stream_weights(policy.shards(), place, getattr(torch, dtype), to_reference=to_reference, bucket_bytes=BUCKET_BYTES)
    return seen(list(stream)) | {"senders": routes[0].senders}


def numbers(name: str, size: int) -> Tensor:
    """The tensor of this name, the same on every rank."""
    draw = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    return torch.randn(size, generator=draw)


def staged(
    place: Placement, *, stages: list[list[int]], held: list[dict[str, int]], readers: list[int], max_senders: int
) -> dict[str, Any]:
    """Ranks `stages[i]` hold the tensors `held[i]` (name: elements) and no other rank does."""
    routes = make_routes(stages, readers, max_senders=max_senders)
    place = replace(place, generator=Grid(RolePlan(readers), "cpu"), weights=routes)
    mine = [names for ranks, names in zip(stages, held, strict=True) if dist.get_rank() in ranks]
    shards = {name: numbers(name, size) for names in mine for name, size in names.items()}
    result = seen(list(stream_weights(shards, place, torch.bfloat16, bucket_bytes=BUCKET_BYTES)))
    everything = {name: digest(numbers(name, size).bfloat16()) for names in held for name, size in names.items()}
    return result | {"right": result["digests"] == everything}


class LiveBytes(TorchDispatchMode):
    """Of the tensors made inside, `now` and at their `peak`; those of `known` do not count."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self._live = {t.untyped_storage()._cdata: 0 for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._live.pop(key)


def memory(place: Placement, *, sizes: list[int], bucket_bytes: int, keep: int) -> dict[str, int]:
    """Live bytes of a stream whose reader holds `keep` buckets beside the one it has just got."""
    names = {f"{i}": size for i, size in enumerate(sizes)}
    shards = {name: numbers(name, size) for name, size in names.items()} if dist.get_rank() in place.trainer.ranks else {}
    kept: list[Bucket] = []
    with LiveBytes(list(shards.values())) as live:

        def take(bucket: Bucket) -> None:
            kept.append(bucket)
            del kept[:-keep or len(kept)]
            time.sleep(0.02)  # gloo's thread lets go of a tensor a moment after it has said that it arrived

        for _ in map(take, stream_weights(shards, place, torch.bfloat16, bucket_bytes=bucket_bytes)):
            pass
    kept.clear()
    return {"peak": live.peak, "left": live.now}


RUNS = (spread, staged, memory)


def main() -> None:
    spec_path, report_path = map(Path, sys.argv[1:])
    spec = json.loads(spec_path.read_text())
    roles = {name: RolePlan(**spec[name]) if spec.get(name) else None for name in ("trainer", "generator", "reference")}
    trainer, generator = roles["trainer"], roles["generator"]
    assert trainer is not None and generator is not None
    plan = Plan(max(r for role in roles.values() if role for r in role.ranks) + 1, trainer, generator, roles["reference"])
    answer(RUNS, spec["cases"], Placement.build(plan, "cpu"), report_path)


if __name__ == "__main__":
    launch(main)
