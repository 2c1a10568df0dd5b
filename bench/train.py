"""Training steps on given rollouts, against TRL's GRPOTrainer on the same ones: JSON lines on stdout.

    python -m bench.train [--shape small] [--prompts 4] [--samples 4] [--prompt 64] [--longest 128] [--device auto]

Random weights, recorded rollouts of random words with log-normal lengths, the same advantages. Two ways to one optimizer step:

    ours    Trainer.train
    trl     what GRPOTrainer does between two steps of its own loop, given the rollouts by its rollout_func: no generation, and no
            pass for old log-probs, which it makes only with vLLM

One process: ours takes its turns in TRL's callbacks, before and after TRL's own step. fp32 weights on both sides, computation in --dtype. A
line a way: tokens/s, share of the GPU's peak (`mfu`, 6 FLOP a parameter and token that was computed: ours computes a shared prompt once
a row, which tokens/s does not say), MiB of the first step above what was held before.
Exit code 1, and no figures, where the first step's gradient norm, entropy or number of tokens disagree. The last line: tokens/s of ours
over the number of sequences, an exponent that should be 0. Without trl: `--peer none` measures ours alone.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batch import Episode
from bench import trl_peer
from bench.measure import (
    Peak,
    Seconds,
    alone,
    arguments,
    compared,
    differences,
    dtype_of,
    exponent,
    figure,
    now,
    refuse,
    say,
    since,
    timed,
    where,
)
from bench.shapes import SHAPES, lengths_drawn, write_checkpoint
from losses import GRPOLoss
from losses.advantages import group_zscore
from model import Model, ModelSource
from parallel.hardware import peak_flops
from parallel.launch import launch
from parallel.placement import Placement
from trainer import Trainer, TrainingConfig

# Of the first step. bf16: what one batch's rounding was seen to do (docs/results.md), twice.
TOLERANCE = {torch.float32: {"grad/norm": 1e-3, "entropy/mean": 1e-4}, torch.bfloat16: {"grad/norm": 5e-2, "entropy/mean": 5e-3}}

SHOWN = {str(dtype): limits for dtype, limits in TOLERANCE.items()}


def recorded(prompts: int, samples: int, prompt: int, longest: int, vocabulary: int) -> list[Episode]:
    """A rollout's episodes, with advantages of made-up rewards."""
    draw = np.random.default_rng(prompts * samples)
    lengths = lengths_drawn(prompts * samples, longest)
    found = []
    for group in range(prompts):
        question = draw.integers(1, vocabulary, prompt)
        for sample, advantage in enumerate(group_zscore(list(draw.random(samples)))):
            length = lengths[group * samples + sample]
            ids = np.concatenate([question, draw.integers(1, vocabulary, length)])
            values = np.full(length, advantage, np.float32)
            found.append(Episode(ids, prompt, np.ones(length, np.float32), values, group=group, sample=sample))
    return found


def our_trainer(folder: str, place: Placement, dtype: str, row_tokens: int, loss: Any = None, **switches: Any) -> Trainer:
    """loss: None for GRPOLoss as TRL averages it; switches: keys of `training`."""
    cfg = TrainingConfig(steps=10**6, seq_len=min(row_tokens, 8192), max_tokens_per_batch=row_tokens, dtype=dtype, **switches)  # type: ignore[arg-type]
    options: dict[str, Any] = {"dtype": dtype, "temperature": 1.0, "max_tokens": cfg.row_tokens, "trainable": True}
    policy = Model(ModelSource(folder), place.trainer, switches=cfg.switches, shared_prompts=cfg.shared_prompts, **options)
    return Trainer(policy, cfg, loss or GRPOLoss(averaging="token"))


class Ours:
    """Training steps on the same episodes, and what the first of them said."""

    def __init__(self, trainer: Trainer, episodes: list[Episode]):
        self.trainer, self.episodes = trainer, episodes
        self.first: dict[str, float] = {}

    def step(self) -> None:
        found = self.trainer.train(self.episodes, self.trainer.updates)
        self.first = self.first or found


def rollout_of(episodes: list[Episode]) -> dict[str, Any]:
    """As TRL's rollout_func returns it."""
    parts = [(e.token_ids[: e.num_prompt_tokens].tolist(), e.token_ids[e.num_prompt_tokens :].tolist()) for e in episodes]
    return {"prompt_ids": [p for p, _ in parts], "completion_ids": [c for _, c in parts], "logprobs": None}


def taking_turns(ours: Ours, peer: trl_peer.Peer, device: torch.device) -> tuple[dict[str, list[Seconds]], dict, dict]:
    """Seconds of each way, MiB of each one's first step, and what TRL logs of its own."""
    from transformers import TrainerCallback

    times: dict[str, list[Seconds]] = {"ours": [], "trl": []}
    peaks: dict[str, float] = {}

    class Turns(TrainerCallback):
        """TRL's step lies between the two calls; step 0 is not counted."""

        def __init__(self) -> None:
            self.done = 0

        def ours(self) -> None:
            if self.done == 0:
                peak = Peak(device)
                ours.step()
                peaks["ours"] = peak.mib()
            else:
                times["ours"].append(timed(ours.step))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.done % 2 == 0:
                self.ours()
            self.peak = Peak(device)
            self.start = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            taken = since(self.start)
            if self.done == 0:
                peaks["trl"] = self.peak.mib()
            else:
                times["trl"].append(taken)
            if self.done % 2 == 1:
                self.ours()
            self.done += 1

    values = {i: float(e.advantages[0]) for i, e in enumerate(ours.episodes)}

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [values[i] for i in range(len(completions))]  # advantages have mean 0 and deviation 1 already

    rows = [{"prompt": "recorded"} for _ in range(peer.prompts)]
    given = rollout_of(ours.episodes)
    trainer = trl_peer.make(peer, rows, reward, callbacks=[Turns()], rollout=lambda prompts, trainer: given)
    trainer.train()
    logged = trainer.state.log_history[0]
    first = {"grad/norm": logged["grad_norm"], "entropy/mean": logged["entropy"], "tokens": logged["num_tokens"]}
    return times, peaks, {name: float(value) for name, value in first.items()}


def line_of(way: str, figures: dict[str, Any], tokens: int, computed: int, parameters: int, peak: float | None) -> dict[str, Any]:
    """Tokens/s of wall and CPU time; of the GPU's peak FLOP/s, what the computed tokens needed."""
    line: dict[str, Any] = {"way": way, "tokens": tokens, "tokens_per_s": figure(tokens / figures["seconds"])}
    line["tokens_per_cpu_s"] = figure(tokens / figures["cpu_seconds"])
    if peak is not None:
        line["mfu"] = figure(6 * parameters * computed / figures["seconds"] / peak)
    return line | figures


def run(options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    place = alone(options.device)
    device, sizes = place.device, SHAPES[options.shape][1]
    dtype = dtype_of(options.dtype, device)
    machine = where(device, dtype)
    named = str(dtype).removeprefix("torch.")
    write_checkpoint(Path(folder), options.shape, dtype=torch.float32)
    switches = {"activation_checkpointing": options.checkpointing, "compile": options.compile}
    trainer = our_trainer(folder, place, named, options.row, **switches)
    make = partial(recorded, samples=options.samples, prompt=options.prompt, longest=options.longest, vocabulary=sizes["vocab_size"])
    episodes = make(options.prompts)
    ours, tokens = Ours(trainer, episodes), sum(len(e.token_ids) for e in episodes)
    case = f"{options.shape}, {options.prompts} x {options.samples} x ({options.prompt} + {options.longest})"
    if options.peer == "trl":
        peer = trl_peer.Peer(
            folder, folder + "/trl", options.prompts, options.samples, options.longest, options.rounds + 1, options.micro_batch,
            options.prompt + options.longest, dtype=named, device=options.device,
        )  # fmt: skip
        times, peaks, theirs = taking_turns(ours, peer, device)
        found = ours.first | {"tokens": float(tokens)}
        refuse(differences(theirs, found, options.tolerance or TOLERANCE[dtype] | {"tokens": 0.0}, "trl"))
    else:
        peak = Peak(device)
        ours.step()
        times, peaks = {"ours": [timed(ours.step) for _ in range(options.rounds)]}, {"ours": peak.mib()}
    for way, figures in compared(times, list(times)[-1]).items():
        computed = int(ours.first["perf/tokens_computed"]) if way == "ours" else tokens  # a shared prompt's once
        line = line_of(way, figures, tokens, computed, trainer.model.num_parameters, peak_flops(device))
        line |= {"tokens_computed": computed} if way == "ours" else {}
        say("train", case, **line, peak_mib=round(peaks[way], 1), micro_batch=options.micro_batch, **switches, **machine)
    law(options, trainer, make, machine)


def law(options: argparse.Namespace, trainer: Trainer, make: Callable[[int], list[Episode]], machine: dict[str, Any]) -> None:
    """tokens/s of ours over the number of sequences."""
    sizes, speeds, cpu_speeds = [], [], []
    for prompts in options.growing:
        episodes = make(prompts)
        ours, tokens = Ours(trainer, episodes), sum(len(e.token_ids) for e in episodes)
        ours.step()
        times = [timed(ours.step) for _ in range(options.rounds)]
        sizes.append(len(episodes))
        speeds.append(tokens / statistics.median(s.wall for s in times))
        cpu_speeds.append(tokens / statistics.median(s.cpu for s in times))
    if len(sizes) > 1:
        laws = {"tokens_per_s ~ sequences^": round(exponent(sizes, speeds), 2)}
        laws["tokens_per_cpu_s ~ sequences^"] = round(exponent(sizes, cpu_speeds), 2)
        say("train", "law of ours", way="ours", sequences=sizes, tokens_per_cpu_s=[figure(s) for s in cpu_speeds], **laws, **machine)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the model")
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--longest", type=int, default=128, help="tokens of a response at most")
    parser.add_argument("--row", type=int, default=16384, help="training.max_tokens_per_batch")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="none", help="training.activation_checkpointing")
    parser.add_argument("--compile", action="store_true", help="training.compile")
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL's sequences in one forward pass")
    parser.add_argument("--growing", type=int, nargs="*", default=[2, 4, 8], help="prompts of the cases of the law")
    parser.add_argument("--peer", choices=("trl", "none"), default="trl")
    parser.add_argument("--tolerance", type=json.loads, help=f"of the first step, as JSON; default {json.dumps(SHOWN)}")
    options = parser.parse_args()
    if options.peer == "trl":
        trl_peer.need("trl", "accelerate")
    with tempfile.TemporaryDirectory() as folder:
        launch(lambda: run(options, folder))


if __name__ == "__main__":
    main()
