"""Where a colocated sync's time goes, and how often the host waits in it."""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from model import Model, ModelSource
from parallel.placement import Placement
from parallel.weights import stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.loading import compare


@torch.no_grad()
def stages(place: Placement, *, model: str, rounds: int) -> dict[str, Any]:
    """Median seconds of each part by itself, the GPU's work included; `host`: processor seconds of a whole load, `waits`: its waits for
    the GPU. cast_and_gather has the trainer's checksums in it; wake is that of a KV cache that was dropped, forget that of one that stayed.
    """
    source = ModelSource(model)
    policy = Model(source, place.trainer, dtype="bfloat16", temperature=1.0, max_tokens=16384, trainable=True)
    cfg = GeneratorConfig(gpu_memory_utilization=0.4, enforce_eager=True)
    generator = Generator(source, cfg, place, dtype="bfloat16", seq_len=1024, seed=0, policy_bytes=policy.local_bytes)
    loader, engine = generator._loader, generator._model()

    def stream() -> Any:
        return stream_weights(policy.shards(), place, generator.dtype)

    def load() -> None:
        generator.load(stream(), version=1)

    def wake() -> float:
        generator._residency = "drops its KV cache"
        with generator.asleep(until_load=True):
            pass
        taken = seconds(generator._wake_kv_cache)
        generator._residency = "stays"
        return taken

    generator._residency = "stays"
    load()  # here the engine's own loader has to be asked
    load()
    buckets = list(stream())
    expected = {t.name: (t.checksum, t.tensor.numel()) for bucket in buckets for t in bucket}
    assert loader._places is not None
    places = loader._places
    parts: dict[str, Callable[[], float]] = {
        "whole": lambda: seconds(load),
        "cast_and_gather": lambda: seconds(lambda: [None for _ in stream()]),
        "copy": lambda: seconds(lambda: [loader._take(engine, bucket) for bucket in buckets]),
        "verify": lambda: seconds(lambda: compare(places.slices, expected, generator._replica)),
        "forget": lambda: seconds(generator._wake_kv_cache),
        "wake": wake,
    }
    found: dict[str, Any] = {name: statistics.median([run() for _ in range(rounds)]) for name, run in parts.items()}
    start = time.process_time()
    load()
    found["host"] = time.process_time() - start
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    torch.cuda.set_sync_debug_mode("default")
    found |= {"waits": sum("synchronizing" in str(w.message) for w in caught), "tensors": len(expected), "buckets": len(buckets)}
    generator.close()
    return found


def seconds(action: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start
