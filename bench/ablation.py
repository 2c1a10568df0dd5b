"""What each technique is worth: one switch a row, all in one run: JSON lines on stdout.

    python -m bench.ablation [--shape tiny] [--prompts 4] [--samples 8] [--steps 3] [--rows checkpointing head ...] [--device auto]
    python -m bench.ablation --shape 0.6b --prompts 32 --samples 8 --prompt 128 --longest 512 --row 16384      on one H200

Each row compares `without` and `with` one technique, all others as in `base`. Rows of training run the same recorded rollout in one
process, in turn, A B B A; their loss and gradient norm are compared. Rows of generation need an engine each, and so a process each,
which also take turns; their number of tokens and mean log-prob are compared. Exit code 1, and no figures, where the two disagree.

    checkpointing   training.activation_checkpointing: full, none
    compile         training.compile: false, true
    shared_prompts  training.shared_prompts: false, true
    zero_advantages training.skip_zero_advantages: false, true, where every other group's rewards are all equal
    old_logprobs    a pass for the policy's own log-probs before the update, none
    reference       a pass of a reference (beta 0.01), none (beta 0)
    head            the head's general path, loss_from_hidden
    async           generator.engine.async_scheduling: false, true
    detokenising    in the engine, after it
    graphs          generator.enforce_eager: true, false

`speedup` is seconds without over seconds with, of the same turn. Without --rows: all that the device
knows; one that it does not know is refused.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from batch import Episode, attach
from bench.measure import (
    Peak,
    Seconds,
    alone,
    alternate,
    arguments,
    compared,
    differences,
    dtype_of,
    figure,
    outside,
    refuse,
    say,
    spread,
    stop,
    timed,
    turns,
    where,
)
from bench.rollout import drawn, engine
from bench.shapes import SHAPES, write_checkpoint
from bench.train import TOLERANCE, our_trainer, recorded
from losses import GRPOLoss
from model import Model, ModelSource
from parallel.hardware import device_type
from parallel.launch import launch
from parallel.memory import usage
from parallel.placement import Placement
from rollout.sampling import Sampling
from trainer import Trainer

TRAINING = ("checkpointing", "compile", "shared_prompts", "zero_advantages", "old_logprobs", "reference", "head")
GENERATION = ("async", "detokenising", "graphs")
ROWS = {"cpu": (*TRAINING, "detokenising"), "cuda": (*TRAINING, *GENERATION)}  # a CPU's engine has neither graphs nor the scheduler
ENGINES: dict[str, dict[str, Any]] = {  # what `without` changes
    "async": {"engine": {"async_scheduling": False}},
    "detokenising": {"stop": ("no answer has this text",)},  # so that the engine must look for it
    "graphs": {"eager": True},
}


class GeneralGRPOLoss(GRPOLoss):
    """The same loss, of which the head is not told that tokens are on their own."""

    elementwise: ClassVar[bool] = False


@dataclass
class Step:
    """One optimizer step, with what comes before it."""

    trainer: Trainer
    episodes: list[Episode]
    rescored: Model | None = None  # whose log-probs are the ratio's denominator
    reference: Model | None = None

    def run(self) -> dict[str, float]:
        episodes = [replace(e) for e in self.episodes]
        for name, model in (("old_logprobs", self.rescored), ("ref_logprobs", self.reference)):
            if model is not None:
                found = model.logprobs(episodes)
                attach(name, episodes, [np.asarray(found[i]) for i in range(len(episodes))])
        return self.trainer.train(episodes, self.trainer.updates)


def pair(row: str, base: Step, make: Callable[..., Trainer], frozen: Callable[[], Model]) -> dict[str, Step]:
    """`without` and `with`; base has every technique but compile and the skipping of answers."""
    flat = [replace(e, advantages=e.advantages * (e.group % 2)) for e in base.episodes]
    made: dict[str, Callable[[], dict[str, Step]]] = {
        "checkpointing": lambda: {"without": replace(base, trainer=make(activation_checkpointing="full")), "with": base},
        "compile": lambda: {"without": base, "with": replace(base, trainer=make(compile=True))},
        "shared_prompts": lambda: {"without": replace(base, trainer=make(shared_prompts=False)), "with": base},
        "zero_advantages": lambda: {
            "without": replace(base, episodes=flat), "with": replace(base, trainer=make(skip_zero_advantages=True), episodes=flat),
        },
        "old_logprobs": lambda: {"without": replace(base, rescored=base.trainer.model), "with": base},
        "reference": lambda: {
            "without": replace(base, trainer=make(loss=GRPOLoss(averaging="token", beta=0.01)), reference=frozen()), "with": base,
        },
        "head": lambda: {"without": replace(base, trainer=make(loss=GeneralGRPOLoss(averaging="token"))), "with": base},
    }  # fmt: skip
    return made[row]()


def training_row(row: str, steps: dict[str, Step], options: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    first, peaks = {}, {}
    for name, step in steps.items():
        step.run()  # moments, and what is compiled
        peak = Peak(device)
        first[name] = step.run()
        most = peak.mib()
        if usage(device):  # {} on a CPU, where a process keeps what it has had
            peaks[name] = round(most, 1)
    limit = TOLERANCE[dtype]["grad/norm"]  # not of entropies: answers that are skipped are in no mean
    tolerance = options.tolerance or {"loss/policy": limit, "grad/norm": limit}
    refuse(differences(first["without"], first["with"], tolerance, f"{row}, without"))
    times = alternate({name: step.run for name, step in steps.items()}, options.rounds)
    return line(times) | ({"peak_mib": peaks} if peaks else {})


def line(times: dict[str, list[Seconds]]) -> dict[str, Any]:
    """Seconds of both, and the speedups."""
    found: dict[str, Any] = {name: {k: v for k, v in of.items() if not k.endswith("ratio")} for name, of in compared(times, "with").items()}
    for kind, name in (("wall", "speedup"), ("cpu", "cpu_speedup")):
        without, with_it = ([vars(s)[kind] for s in times[way]] for way in ("without", "with"))
        found[name] = spread(without, with_it)
    return found


def generation_row(row: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """From a process for each turn, each of which has an engine of its own."""
    times: dict[str, list[Seconds]] = {"without": [], "with": []}
    seen: dict[str, dict[str, float]] = {}
    for order in turns(list(times), 1 if options.rounds < 4 else 2):
        for name in order:
            command = [sys.executable, "-m", "bench.ablation", "--model", folder, "--engine", row, name]
            keys = ("shape", "prompts", "samples", "prompt", "longest", "rounds", "threads", "device", "dtype", "memory")
            command += [f"--{key}={vars(options)[key]}" for key in keys if vars(options)[key] is not None]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=outside())
            if done.returncode:
                stop(f"{row}, {name}: ended with exit code {done.returncode}, so there are no figures")
            found = json.loads(done.stdout.splitlines()[-1])
            times[name] += [Seconds(*pair) for pair in found.pop("seconds")]
            seen[name] = found
    refuse(differences(seen["without"], seen["with"], {"tokens": 0.0, "logprob": 0.05}, f"{row}, without"))
    speeds = {f"tokens_per_s_{name}": figure(of["tokens"] / float(np.median([s.wall for s in times[name]]))) for name, of in seen.items()}
    return line(times) | speeds


def one_engine(options: argparse.Namespace) -> None:
    """A turn of a row of generation: prints its seconds, tokens and mean log-prob."""
    row, name = options.engine
    changed = ENGINES[row] if name == "without" else {}
    place = alone(options.device)
    sizes = SHAPES[options.shape][1]
    asked = argparse.Namespace(lengths=[options.prompt], new=options.longest, prompts=[options.prompts], samples=options.samples)
    asked.memory, asked.eager = options.memory, changed.get("eager", False)
    generator = engine(options.model, place, dtype_of(options.dtype, place.device), asked, **changed.get("engine", {}))
    prompts = drawn(options.prompts, options.prompt, sizes["vocab_size"])
    sampling = Sampling(1.0, options.longest, stop=changed.get("stop", ()), seed=None)
    ask = partial(generator.generate, prompts, options.samples, sampling)
    groups = ask()
    times = [timed(ask) for _ in range(options.rounds)]
    logprobs = [value for g in groups for c in g.completions for value in c.logprobs]
    found = {"seconds": [[s.wall, s.cpu] for s in times], "tokens": len(logprobs), "logprob": float(np.mean(logprobs))}
    print(json.dumps(found), flush=True)
    generator.close()


def run(options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    if options.engine:
        one_engine(options)
        return
    place: Placement = alone(options.device)
    device = place.device
    dtype = dtype_of(options.dtype, device)
    named, machine = str(dtype).removeprefix("torch."), where(device, dtype)
    write_checkpoint(Path(folder), options.shape, dtype=dtype)
    rows = sorted(options.rows or ROWS[device.type], key=lambda row: row in TRAINING)  # engines first, while the GPU is empty
    case = f"{options.shape}, {options.prompts} x {options.samples} x ({options.prompt} + {options.longest})"
    sizes = SHAPES[options.shape][1]
    episodes = recorded(options.prompts, options.samples, options.prompt, options.longest, sizes["vocab_size"])
    make = partial(our_trainer, folder, place, named, options.row, learning_rate=0.0)  # every step is the first: all do the same
    limits: dict[str, Any] = {"dtype": named, "temperature": 1.0, "max_tokens": options.row}
    frozen = partial(Model, ModelSource(folder), place.trainer, trainable=False, shared_prompts=True, **limits)
    for row in rows:
        if row in TRAINING:
            steps = pair(row, Step(make(), episodes), make, frozen)
            found = training_row(row, steps, options, dtype, device)
            del steps
            gc.collect()
            found["tokens"] = sum(len(e.token_ids) for e in episodes)
        else:
            found = generation_row(row, options, folder)
        say("ablation", f"{row}: {case}", row=row, **found, **machine)


def main() -> None:
    parser = arguments(__doc__, rounds=4)
    parser.add_argument("--rows", nargs="+", choices=(*TRAINING, *GENERATION))
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model")
    parser.add_argument("--prompts", type=int, default=4, help="of a rollout")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--longest", type=int, default=64, help="tokens of an answer at most; generation makes as many")
    parser.add_argument("--row", type=int, default=16384, help="training.max_tokens_per_batch")
    parser.add_argument("--memory", type=float, default=0.4, help="generator.gpu_memory_utilization")
    parser.add_argument("--tolerance", type=json.loads, help="of the first step, as JSON")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kind = device_type(options.device)
    if unknown := [row for row in options.rows or () if row not in ROWS[kind]]:
        parser.error(f"--rows {' '.join(unknown)}: not on the device {kind}, which has the rows {' '.join(ROWS[kind])}")
    with tempfile.TemporaryDirectory() as folder:
        launch(lambda: run(options, folder))


if __name__ == "__main__":
    main()
