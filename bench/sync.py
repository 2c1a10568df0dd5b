"""Seconds, bytes and GB/s of giving the engine new weights, against what one would write without parallel/weights.py: a table on stdout.

    python -m bench.sync [--shape small] [--rounds 5] [--threads 1] [--device auto]

Two ways, of which each round runs both; the figures are medians:

    buckets     stream_weights and Generator.load, with every check that a run has
    per_tensor  each tensor cast, gathered, broadcast by the trainer's first rank and given to vLLM's load_weights, unchecked

The engine's memory is overwritten with NaN before each, and every tensor is verified after each, both outside the time. "checks" is the
time of one verification, which is part of buckets. The policy: random numbers in a Qwen3 of the given shape, fp32, for an engine in bf16.
Each layout is a world of its own; bytes are the policy's, however many engines get them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from model import Model, ModelSource
from parallel.exchange import from_each
from parallel.launch import launch
from parallel.placement import Placement, holds
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.weights import Bucket, stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.loading import verify

DTYPE = torch.bfloat16
SHAPES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
              "intermediate_size": 1536, "vocab_size": 32000},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
             "intermediate_size": 3072, "vocab_size": 151936},
}  # fmt: skip
PASSED_ON = ("rounds", "threads", "device", "bucket_mib")
LAYOUTS = {  # ranks, services, colocate
    "1 -> 1": (2, {"trainer": 1, "generator": 1}, False),
    "FSDP 2 -> 1": (3, {"trainer": 2, "generator": 1}, False),
    "FSDP 2 -> TP 2": (4, {"trainer": 2, "generator": 2}, False),
    "1, colocated": (1, {"generator": 1}, True),
    "FSDP 2 and TP 2, colocated": (2, {"generator": 2}, True),
}


def write_policy(folder: Path, shape: str) -> None:
    """A checkpoint of random numbers; no two parts of a tensor are alike."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=256, pad_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


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

    def seconds(self, action: Callable[[], None]) -> float:
        """Until the last rank has done it."""
        dist.barrier(self.place.objects)
        start = time.perf_counter()
        action()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return max(from_each(time.perf_counter() - start, self.place))


def measure(world: World, rounds: int) -> dict[str, float]:
    """Median seconds of each way, after a round that is not counted: the engine learns in it which parts it keeps."""
    times: dict[str, list[float]] = {"buckets": [], "per_tensor": [], "checks": []}
    for number in range(rounds + 1):
        for name, action in (("buckets", world.buckets), ("per_tensor", world.per_tensor)):
            world.spoil()
            taken = world.seconds(action)
            checked = world.seconds(world.checks)  # RuntimeError where a tensor is not the policy's
            if number:
                times[name].append(taken)
                times["checks"].append(checked)
    return {name: statistics.median(values) for name, values in times.items()}


def run_layout(options: argparse.Namespace) -> None:
    """On every rank of the layout's world; the first prints what was measured."""
    torch.set_num_threads(options.threads)
    ranks, procs, colocate = LAYOUTS[options.layout]
    services = ServicesConfig(**{role: ServiceConfig(procs=count) for role, count in procs.items()})
    plan = Plan.make(services, ParallelismConfig(), colocate=colocate, wants_reference=False, world_size=ranks)
    place = Placement.build(plan, options.device)
    world = World(place, options.model, int(options.bucket_mib * 2**20) if options.bucket_mib else None)
    found = measure(world, options.rounds) | {"bytes": world.bytes}
    if place.is_root:
        print(json.dumps(found), flush=True)
    world.generator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the policy")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each way")
    parser.add_argument("--threads", type=int, default=1, help="of torch, a rank")
    parser.add_argument("--bucket-mib", type=float, help="size of a bucket; default: that of a run")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; layouts that need more GPUs than there are fail")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which to run")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout:
        launch(lambda: run_layout(options))
        return
    print(f"{'layout':<28}{'way':<12}{'seconds':>9}{'MB':>9}{'GB/s':>8}{'speed':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_policy(Path(folder), options.shape)
        for layout in options.layouts:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={LAYOUTS[layout][0]}"]
            given = {name: value for name, value in vars(options).items() if name in PASSED_ON and value is not None}
            passed = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
            command = [*torchrun, "-m", "bench.sync", "--layout", layout, "--model", folder, *passed]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
            for way in ("buckets", "per_tensor", "checks"):
                speed, ratio = found["bytes"] / found[way] / 1e9, found["per_tensor"] / found[way]
                print(f"{layout:<28}{way:<12}{found[way]:>9.3f}{found['bytes'] / 1e6:>9.1f}{speed:>8.2f}{ratio:>7.2f}x", flush=True)


if __name__ == "__main__":
    main()
