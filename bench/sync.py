"""Seconds, bytes and GB/s of giving the engine new weights, against what one would write without parallel/weights.py.

    python -m bench.sync [--shapes small] [--rounds 5] [--threads 1] [--device auto]

Two ways, of which each round runs both; the figures are medians:

    buckets     stream_weights and Generator.load, with every check that a run has
    per_tensor  each tensor cast, gathered, broadcast by the trainer's first rank and given to vLLM's load_weights, unchecked

The engine's memory is overwritten with NaN before each, and every tensor is verified after each, both outside the time. "checks" is the
time of one verification, which is part of buckets. The policy: random numbers in a model of the given shape, fp32, for an engine in bf16.
Each layout is a world of its own; bytes are the policy's, however many engines get them. A JSON line a layout and way; CPU seconds
are those of all ranks together. Exit code 1, and no figures, where a tensor arrives wrong. With several shapes: seconds = a + b bytes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.measure import Seconds, compared, figure, line_through, positive, say, settle, stop, tell, turns, where
from bench.shapes import SHAPES, write_checkpoint
from model import Model, ModelSource
from parallel.exchange import from_each
from parallel.hardware import device_type, num_ranks
from parallel.launch import launch
from parallel.memory import empty_cache
from parallel.placement import Placement, holds
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.weights import Bucket, stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.loading import verify

DTYPE = torch.bfloat16
PASSED_ON = ("rounds", "threads", "device", "bucket_mib")
LAYOUTS = {  # ranks, of the trainer, of an engine, engines; 0 of the trainer: it has all ranks
    "1 -> 1": (2, 1, 1, 1),
    "FSDP 2 -> 1": (3, 2, 1, 1),
    "FSDP 2 -> TP 2": (4, 2, 2, 1),
    "FSDP 2 -> 2 engines": (4, 2, 1, 2),
    "FSDP 4 -> 4 engines": (8, 4, 1, 4),
    "FSDP 4 -> 2 engines of TP 2": (8, 4, 2, 2),
    "1, colocated": (1, 0, 1, 1),
    "FSDP 2 and TP 2, colocated": (2, 0, 2, 1),
}


class World:
    """Policy and engine of one layout."""

    def __init__(self, place: Placement, model: str, bucket_bytes: int | None):
        self.place, self.bucket_bytes, source = place, bucket_bytes, ModelSource(model)
        self.policy = Model(source, place.trainer, dtype="float32", temperature=1.0, max_tokens=64, trainable=True)
        settings = GeneratorConfig(dtype="bfloat16", gpu_memory_utilization=0.3, max_num_seqs=8, enforce_eager=True)
        self.generator = Generator(source, settings, place, "float32", 64, seed=0)
        names = from_each([(name, p.shape) for name, p in self.policy.shards().items()], place)
        self.shapes: list[tuple[str, torch.Size]] = names[place.root]
        self.bytes = sum(shape.numel() for _, shape in self.shapes) * DTYPE.itemsize
        sent = [t for bucket in self.stream() for t in bucket]
        self.expected = {t.name: (t.checksum, t.tensor.numel()) for t in sent}

    def stream(self) -> Iterator[Bucket]:
        return stream_weights(self.policy.shards(), self.place, DTYPE, bucket_bytes=self.bucket_bytes)

    def buckets(self) -> None:
        self.generator.load(self.stream(), version=1)

    @torch.no_grad()
    def per_tensor(self) -> None:
        shards, (route,) = self.policy.shards(), self.place.weights
        receives = holds(self.place.generator) and not shards
        for name, shape in self.shapes:
            tensor = torch.empty(shape, dtype=DTYPE, device=self.place.device) if receives else torch.empty(0)
            if shards:
                cast = shards[name].detach().to(DTYPE)
                tensor = cast.full_tensor() if isinstance(cast, DTensor) else cast
            if route.senders and (receives or self.place.is_root):
                dist.broadcast(tensor.contiguous(), src=self.place.root, group=route.groups[0])
            if holds(self.place.generator):
                with self.generator._inside():
                    self.generator._model().load_weights([(name, tensor)])

    def checks(self) -> None:
        if holds(self.place.generator):
            verify(self.generator._model(), self.expected, self.generator._replica)

    @torch.no_grad()
    def spoil(self) -> None:
        for parameter in self.generator._model().parameters() if holds(self.place.generator) else []:
            parameter.fill_(float("nan"))

    def seconds(self, action: Callable[[], None]) -> Seconds:
        """Until the last rank has done it."""
        dist.barrier(self.place.objects)
        start, used = time.perf_counter(), time.process_time()
        action()
        settle()
        times = from_each((time.perf_counter() - start, time.process_time() - used), self.place)
        return Seconds(max(wall for wall, _ in times), sum(cpu for _, cpu in times))


def measure(world: World, rounds: int) -> dict[str, list[Seconds]]:
    """The times of each way, after a round that is not counted: the engine learns in it which parts it keeps."""
    ways = {"buckets": world.buckets, "per_tensor": world.per_tensor}
    times: dict[str, list[Seconds]] = {"buckets": [], "per_tensor": [], "checks": []}
    for number, order in enumerate(turns(list(ways), rounds + 1)):
        for name in order:
            world.spoil()
            taken = world.seconds(ways[name])
            checked = world.seconds(world.checks)  # RuntimeError where a tensor is not the policy's
            if number:
                times[name].append(taken)
            if number and name == "buckets":
                times["checks"].append(checked)
    return times


def run_layout(options: argparse.Namespace) -> None:
    """On every rank of the layout's world; the first prints what was measured."""
    torch.set_num_threads(options.threads)
    ranks, trainers, tp, engines = LAYOUTS[options.layout]
    services = ServicesConfig(trainer=ServiceConfig(procs=trainers or 1), generator=ServiceConfig(procs=tp, num_replicas=engines))
    plan = Plan.make(services, ParallelismConfig(), colocate=not trainers, wants_reference=False, world_size=ranks)
    place = Placement.build(plan, options.device)
    world = World(place, options.model, int(options.bucket_mib * 2**20) if options.bucket_mib else None)
    found = compared(measure(world, options.rounds), "per_tensor")
    if place.is_root:
        sizes = {"bytes": world.bytes, "tensors": len(world.shapes)}
        print(json.dumps(sizes | {"where": where(place.device, DTYPE), "ways": found}), flush=True)
    world.generator.close()


def world_of(layout: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a layout's world says. Exit code 1 where it fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={LAYOUTS[layout][0]}"]
    given = {name: value for name, value in vars(options).items() if name in PASSED_ON and value is not None}
    passed = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [*torchrun, "-m", "bench.sync", "--layout", layout, "--model", folder, *passed]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        stop(f"{layout}: ended with {done.returncode}, so there are no figures")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small"], help="of the policy")
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each way")
    parser.add_argument("--threads", type=int, default=1, help="of torch, a rank")
    parser.add_argument("--bucket-mib", type=float, help="size of a bucket; default: that of a run")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; layouts that need more GPUs than there are fail")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="which to run; default: those that have GPUs, of 4 ranks on a CPU")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout:
        launch(lambda: run_layout(options))
        return
    device = device_type(options.device)
    most = num_ranks({"cuda": 8}.get(device, 4))
    layouts = options.layouts or [name for name, (ranks, *_) in LAYOUTS.items() if ranks <= most]
    sizes: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), shape, device=device)
            empty_cache()  # the GPU's memory is for the layouts' own processes
            for layout in layouts:
                found = world_of(layout, folder, options)
                for way, figures in found["ways"].items():
                    speed = figure(found["bytes"] / figures["seconds"] / 1e9)
                    named = {"layout": layout, "shape": shape, "way": way, "bytes": found["bytes"], "tensors": found["tensors"]}
                    say("sync", f"{layout}, {shape}", **named, **figures, gb_per_s=speed, **found["where"])
                    tell(f"{layout:<28}{shape:<8}{way:<12}{figures['seconds']:>9.3f} s{speed:>8.2f} GB/s")
                    sizes.setdefault((layout, way), []).append((found["bytes"], figures["seconds"]))
    for (layout, way), points in sizes.items():
        if len(points) > 1:
            start, slope = line_through(*zip(*points, strict=True))
            law = {"seconds_a": figure(start), "seconds_per_gb": figure(slope * 1e9)}
            say("sync", f"law of {way}, {layout}", layout=layout, way=way, **law, **found["where"])


if __name__ == "__main__":
    main()
