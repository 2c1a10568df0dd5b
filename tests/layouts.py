"""What the law of placement is tried on: settings, recipes, layouts, and their runs (tests/test_placement.py has the law itself).

On a CPU, a layout that differs in the trainer alone replays the completions that one rank sampled; the others start real engines, whose
tokens are the same. With LAYOUTS_DEVICE=cuda all of it runs on GPUs, over NCCL (tests/gpu/test_many_layouts.py). There two engines need
not sample the same: where two tokens are nearly as good, rounding decides, which depends on the batch. So real engines sample, which is
written down, and training goes on with the one rank's completions. LAYOUTS_DEVICE=follow does that on a CPU.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.observe import Observed, read_observed
from tests.world import ROOT, run_script

ASKED = os.environ.get("LAYOUTS_DEVICE", "cpu")
FOLLOWS = ASKED != "cpu"  # real engines follow one rank's completions
# Products of fp32 on CUDA are added up in another order for every shape: the gradient of a GPU is 2.5e-5 from a CPU's (docs/results.md).
LOOSER = {"cuda": 10.0}.get(ASKED, 1.0)  # than on a CPU, by this factor, are tolerances of sums
ENGINE = {"kv_cache_memory_bytes": 2**30, "disable_custom_all_reduce": True}  # vLLM's own needs memory that an engine that sleeps has not
ON_DEVICE: dict[str, dict[str, Any]] = {
    "cuda": {
        "device": "cuda", "grpo": {"seeded_sampling": "always"},
        "generator": {"gpu_memory_utilization": 0.05, "enforce_eager": True, "engine": ENGINE},
    },
}  # fmt: skip

LEARNING_RATE, STEPS = 1e-4, 4

# Five prompts of three samples are dealt to 1, 2 or 4 ranks, in rows of at most 64 tokens: nothing divides anything.
SETTINGS: dict[str, dict[str, Any]] = {
    "training": {
        "steps": STEPS, "batch_size": 5, "seq_len": 24, "max_tokens_per_batch": 64, "dtype": "float32",
        "learning_rate": LEARNING_RATE, "max_grad_norm": 100.0,
    },
    "grpo": {"n_samples": 3, "max_new_tokens": 8, "beta": 0.1, "temperature": 0.8, "stop": ["-"]},
    "rewards": {"digits": {"fn": "tests.tiny.share_of_digits"}},
    "metrics": {"tensorboard": False},
    "checkpoint": {"export_hf": True},
}

# What is done, whoever does it. Each is run on one rank first.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "fresh": {},
    # Everything that makes a ratio differ from 1, and clipping of the gradient, of which AdamW would make whole steps where it is rounding.
    "stale": {
        "training": {"updates_per_rollout": 2, "sync_interval": 2, "max_grad_norm": 0.1, "entropy_coef": 0.01, "adam_eps": 1e-6},
        "grpo": {"max_policy_age": 1},
    },
    "two_updates": {"training": {"updates_per_rollout": 2}},
    "two_updates_own_old": {"training": {"updates_per_rollout": 2}, "grpo": {"old_logprobs": "trainer"}},
    "a_version_old": {"grpo": {"max_policy_age": 1}},
    "synced_every_other_step": {"training": {"sync_interval": 2}},
    "two_episodes": {"training": {"batch_size": 1}, "grpo": {"n_samples": 2}},
    "by_token": {"loss": {"fn": "losses.ReinforceLoss", "clip_ratio": 0.2}, "grpo": {"beta": None, "max_policy_age": 1}},
    "whole_batch": {"loss": {"fn": "tests/data/guide/custom_loss.py:CustomLoss"}, "grpo": {"beta": None}},
    "by_sequence": {  # a ratio of whole sequences, each token's gradient corrected
        "loss": {"fn": "losses.GSPOLoss", "clip_low": 0.2, "clip_high": 0.2}, "grpo": {"beta": None},
        "training": {"updates_per_rollout": 2},
    },
    "truncated_masked": {"grpo": {"mask_truncated": True}, "training": {"weight_decay": 0.1, "gradient_accumulation_steps": 2}},
}


@dataclass(frozen=True)
class Layout:
    """Who does it: `nproc` ranks, and the keys of the config that place the roles on them."""

    recipe: str
    nproc: int
    roles: dict[str, Any] = field(default_factory=dict)
    replays: bool = False  # the one rank's completions, instead of engines of its own
    model: tuple[str, bool] = ("qwen3", True)  # family, and whether embedding and head are tied
    kv_heads: int = 2


def services(
    trainer: int, generator: int, *, replicas: int = 1, ref_model: int | None = None, own: dict[str, int] | None = None
) -> dict[str, Any]:
    """ref_model None: the reference lives on the trainer's ranks. own: its degrees, by their full names."""
    reference: dict[str, Any] = {"with_gpus": False} if ref_model is None else {"procs": ref_model}
    reference |= {"parallelism": own} if own else {}
    return {"trainer": {"procs": trainer}, "ref_model": reference, "generator": {"procs": generator, "num_replicas": replicas}}


def degrees(**of: int) -> dict[str, Any]:
    """Degrees of parallelism by what they are of: pipeline, replicate, context, tensor."""
    names = {key: f"{key}_parallel_degree" for key in ("pipeline", "context", "tensor")} | {"replicate": "data_parallel_replicate_degree"}
    return {"parallelism": {names[key]: degree for key, degree in of.items()}}


OWN_REFERENCE = {"data_parallel_replicate_degree": 2, "context_parallel_degree": 2}
TP2 = {"parallelism": {"tensor_parallel_degree": 2}}
FAST = {
    "2 colocated": Layout("fresh", 2),
    "trainer 2, ref 1, generator 1": Layout("fresh", 4, {"services": services(2, 1, ref_model=1)}, replays=True),
    "trainer 1, generator 1, stale": Layout("stale", 2, {"services": services(1, 1)}),
    "trainer TP 2 x FSDP 2, stale": Layout("stale", 4, TP2, replays=True),
    "trainer HSDP 2 x 2": Layout("stale", 4, degrees(replicate=2), replays=True),
    "trainer CP 2": Layout("stale", 2, degrees(context=2), replays=True),
    "trainer PP 2": Layout("stale", 2, degrees(pipeline=2), replays=True),
}
SLOW = {
    "trainer 1, generator TP 2": Layout("fresh", 3, {"services": services(1, 2)}),
    "trainer 2, ref 1, generator 1, all real": Layout("fresh", 4, {"services": services(2, 1, ref_model=1)}),
    "trainer 1, generator 1": Layout("fresh", 2, {"services": services(1, 1)}),
    "trainer 1, 2 generators": Layout("fresh", 3, {"services": services(1, 1, replicas=2)}),
    "trainer 1, 2 generators of TP 2, stale": Layout("stale", 5, {"services": services(1, 2, replicas=2)}),
    "2 colocated, generator TP 2": Layout("fresh", 2, {"services": services(1, 2), "colocate": True}),
    "2 colocated, stale": Layout("stale", 2),
    "3 colocated": Layout("fresh", 3),
    "trainer TP 2": Layout("fresh", 2, TP2, replays=True),
    "trainer TP 2 x FSDP 2": Layout("fresh", 4, TP2, replays=True),
    "trainer TP 4": Layout("stale", 4, degrees(tensor=4), replays=True, kv_heads=4),
    "trainer TP 2, ref TP 2, generator 1": Layout("stale", 5, {"services": services(2, 1, ref_model=2)} | TP2, replays=True),
    "2 colocated, two updates": Layout("two_updates", 2, replays=True),
    "trainer TP 2, two updates": Layout("two_updates", 2, TP2, replays=True),
    "2 colocated, two updates, trainer's old log-probs": Layout("two_updates_own_old", 2, replays=True),
    "trainer 1, generator 1, a version old": Layout("a_version_old", 2, {"services": services(1, 1)}),
    "2 colocated, synced every other step": Layout("synced_every_other_step", 2),
    "3 trainers for two episodes": Layout("two_episodes", 3, replays=True),
    "4 ranks for two episodes": Layout("two_episodes", 4, {"services": services(2, 1, replicas=2)}),
    "2 colocated, truncated answers masked": Layout("truncated_masked", 2, replays=True),
    "2 colocated, one scalar for the whole batch": Layout("whole_batch", 2, replays=True),
    "trainer TP 2 x FSDP 2, one scalar for the whole batch": Layout("whole_batch", 4, TP2, replays=True),
    "trainer 3, generator 1, averaged over tokens": Layout("by_token", 4, {"services": {"trainer": {"procs": 3}}}, replays=True),
    "trainer HSDP 2 x 2 x TP 2": Layout("fresh", 8, degrees(replicate=2, tensor=2), replays=True),
    "trainer CP 2 x FSDP 2": Layout("stale", 4, degrees(context=2), replays=True),
    "trainer CP 2 x TP 2": Layout("fresh", 4, degrees(context=2, tensor=2), replays=True),
    "trainer CP 4 for two episodes": Layout("two_episodes", 4, degrees(context=4), replays=True),
    "trainer HSDP 2 x CP 2, ref CP 2, generator 1": Layout(
        "fresh", 7, {"services": services(4, 1, ref_model=2)} | degrees(replicate=2, context=2), replays=True
    ),
    "trainer CP 2, one scalar for the whole batch": Layout("whole_batch", 2, degrees(context=2), replays=True),
    "trainer CP 2 x FSDP 2, a ratio of whole sequences": Layout("by_sequence", 4, degrees(context=2), replays=True),
    "trainer PP 2 x TP 2": Layout("fresh", 4, degrees(pipeline=2, tensor=2), replays=True),
    "trainer PP 2 x FSDP 2": Layout("stale", 4, degrees(pipeline=2), replays=True),
    "trainer PP 2 x HSDP 2 x CP 2": Layout("fresh", 8, degrees(pipeline=2, replicate=2, context=2), replays=True),
    "trainer PP 2 x CP 2 x TP 2": Layout("stale", 8, degrees(pipeline=2, context=2, tensor=2), replays=True),
    "trainer PP 2, ref PP 2, 2 generators": Layout(
        "stale", 6, {"services": services(2, 1, replicas=2, ref_model=2)} | degrees(pipeline=2)
    ),
    "trainer PP 2 for two episodes": Layout("two_episodes", 2, degrees(pipeline=2), replays=True),
    "trainer PP 2, one scalar for the whole batch": Layout("whole_batch", 2, degrees(pipeline=2), replays=True),
    "trainer PP 2 x TP 2, a ratio of whole sequences": Layout("by_sequence", 4, degrees(pipeline=2, tensor=2), replays=True),
    "llama, trainer PP 2 x TP 2": Layout("stale", 4, degrees(pipeline=2, tensor=2), replays=True, model=("llama", False)),
    "llama, trainer CP 2 x TP 2": Layout("stale", 4, degrees(context=2, tensor=2), replays=True, model=("llama", False)),
    "llama, trainer TP 2 x FSDP 2": Layout("stale", 4, TP2, replays=True, model=("llama", False)),
    "qwen2, trainer TP 2 x FSDP 2": Layout("stale", 4, TP2, replays=True, model=("qwen2", True)),
    "trainer TP 2, ref FSDP 2, generator 1": Layout(
        "fresh", 5, {"services": services(2, 1, ref_model=2, own={"data_parallel_shard_degree": 2})} | TP2, replays=True
    ),
    "trainer 1, ref TP 2, generator 1": Layout(
        "fresh", 4, {"services": services(1, 1, ref_model=2, own={"tensor_parallel_degree": 2})}, replays=True
    ),
    "trainer PP 2 x FSDP 2, ref HSDP 2 x CP 2 on the same ranks": Layout(
        "fresh", 4, {"colocate": True, "services": services(1, 1, ref_model=1, own=OWN_REFERENCE)} | degrees(pipeline=2), replays=True
    ),
    "trainer FSDP 2, ref TP 2 on the CPU, generator 1": Layout(
        "fresh", 3, {"services": services(2, 1, own={"tensor_parallel_degree": 2})}, replays=True
    ),
    "qwen3 untied, trainer 1, generator TP 2": Layout("fresh", 3, {"services": services(1, 2)}, model=("qwen3", False)),
    "qwen2 untied, trainer 1, generator TP 2": Layout("fresh", 3, {"services": services(1, 2)}, model=("qwen2", False)),
}


def documented() -> dict[str, Layout]:
    """The matrix of docs/parallelism.md, by the lines that a reader is told to copy."""
    text = (Path(__file__).parent.parent / "docs/parallelism.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| `([^`]+)` \|$", text, re.MULTILINE)
    layouts = {}
    for name, ranks, line in rows:
        roles: dict[str, Any] = {}
        for override in line.split():
            *path, last = override.partition("=")[0].split(".")
            section = roles
            for key in path:
                section = section.setdefault(key, {})
            section[last] = yaml.safe_load(override.partition("=")[2])
        layouts[f"documented: {name}"] = Layout("fresh", int(ranks), roles)
    return layouts


SLOW |= documented()
LAYOUTS = FAST | SLOW
ON_POLICY = {"fresh", "two_episodes"}  # and advantages that add up to 0 in each group, all of whose tokens count
OFF_POLICY = {"stale", "two_updates", "two_updates_own_old", "a_version_old", "synced_every_other_step", "by_token", "by_sequence"}


@dataclass
class Run:
    ranks: list[Observed]
    steps: list[dict[str, float]]  # of metrics.jsonl, without evaluations
    evaluations: list[dict[str, float]]
    weights: dict[str, torch.Tensor]  # exported after the last step
    start: dict[str, torch.Tensor]  # before the first


def merged(*configs: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for config in configs:
        for key, value in config.items():
            result[key] = {**result.get(key, {}), **value} if isinstance(value, dict) else value
    return result


def read_run(folder: Path, model: Path, nproc: int) -> Run:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    ranks = [read_observed(folder / f"rank_{r}.pkl") for r in range(nproc)]
    weights = load_file(folder / "run/hf/model.safetensors")
    evaluations = [{k: v for k, v in row.items() if k == "step" or k.startswith("eval/")} for row in rows if "eval/reward" in row]
    steps = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows if "loss/policy" in row]
    return Run(ranks, steps, evaluations, weights, load_file(model / "model.safetensors"))


class Runs:
    """Runs of layouts, each made once: when it is asked for, or several at a time, each on devices of its own."""

    def __init__(self, model_of: Callable[..., Path], data: Path, held_out: Path, new_folder: Callable[[], Path], devices: list[str]):
        """devices: by the names that CUDA_VISIBLE_DEVICES takes; [] where there are none to deal out: one run at a time."""
        self._model_of, self._data, self._held_out, self._new_folder = model_of, data, held_out, new_folder
        self._free, self._changed = list(devices), threading.Condition()
        self._pool = ThreadPoolExecutor(max(len(devices), 1))
        self._runs: dict[Any, tuple[Future, Path]] = {}

    def pair(self, name: str) -> tuple[Run | str, ...]:
        """What happened on one rank, and in the layout; of a run that failed, why."""
        return tuple(self._started(key, *how)[0].result() for key, how in self._both(name))

    def start(self, names: list[str]) -> None:
        """All of them, those on one rank first: a layout's run waits for its one."""
        pairs = [self._both(name) for name in sorted(names, key=lambda n: -LAYOUTS[n].nproc)]
        for key, how in [one for one, _ in pairs] + [run for _, run in pairs]:
            self._started(key, *how)

    def _both(self, name: str) -> list[tuple[Any, tuple[Layout, Any]]]:
        layout = LAYOUTS[name]
        alone = (layout.recipe, layout.model, layout.kv_heads)
        one = Layout(layout.recipe, 1, model=layout.model, kv_heads=layout.kv_heads)
        return [(alone, (one, None)), (name, (layout, alone if layout.replays or FOLLOWS else None))]

    def _started(self, key: Any, layout: Layout, recorded: Any) -> tuple[Future, Path]:
        if key not in self._runs:
            folder, model = self._new_folder(), self._model_of(layout.model[0], tied=layout.model[1], kv_heads=layout.kv_heads)
            self._runs[key] = self._pool.submit(self._run, layout, model, folder, self._runs.get(recorded)), folder
        return self._runs[key]

    def _run(self, layout: Layout, model: Path, folder: Path, recorded: tuple[Future, Path] | None) -> Run | str:
        config = merged(SETTINGS, RECIPES[layout.recipe], layout.roles, ON_DEVICE.get(ASKED, {}))
        config |= {"model": str(model), "dataset": {"path": str(self._data)}}
        if recorded is None:
            config["eval"] = {"dataset": {"path": str(self._held_out)}, "max_prompts": 7}
        elif isinstance(recorded[0].result(), str):
            return recorded[0].result()
        (folder / "config.yaml").write_text(yaml.safe_dump(config | {"output": str(folder / "run"), "resume": "never"}))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {"OBSERVE": str(folder), "PYTHONPATH": path}
        if recorded is not None:
            env |= {"REPLAY" if layout.replays else "FOLLOW": str(recorded[1])}
        try:
            with self._devices(layout.nproc) as where:
                run_script(layout.nproc, "tests/observe.py", str(folder / "config.yaml"), env=env | where, timeout_s=600)
            return read_run(folder, model, layout.nproc)
        except AssertionError as failed:
            return str(failed)

    @contextmanager
    def _devices(self, count: int) -> Iterator[dict[str, str]]:
        if ASKED != "cuda":
            yield {}
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            mine, self._free = self._free[:count], self._free[count:]
        try:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        finally:
            with self._changed:
                self._free += mine
                self._changed.notify_all()
