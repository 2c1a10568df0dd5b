"""Does it learn, and how fast: reward over steps and seconds, train_grpo.py against TRL from the same model: JSON lines on stdout.

    python -m bench.learn [--steps 60] [--target 0.6] [--seeds 0 1 2]                     the demo's task, on a CPU
    python -m bench.learn --model SmolLM2-135M-Instruct --sums 20 --reward '{"fn": "rollout.rewards.MathReward"}' --new 24 --seq-len 96 ...

Without --model: two-digit sums by the demo's character-level Qwen3, first taught by SFT for --sft steps until it is right now and then. The
data: --sums of two numbers, or a JSONL file as train_grpo.py reads it. Both sides have the same prompts in the same order, batch,
samples, learning rate, clipping, AdamW and seeds; they sample other tokens, since their engines' random numbers differ.

A line a step, way and seed: mean reward of the step's samples, and the seconds of all steps so far, without starting. Then a line a
way: steps and seconds until the mean of the last five steps' rewards reached --target (null: not), and the mean reward of the last
five. Exit code 1, and no figures, where the first step's reward or entropy says that the two do not start from the same policy.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import demo
from bench import trl_peer
from bench.measure import dtype_of, figure, refuse, say, spread, tell, turns, versions
from bench.runs import ROOT, WAYS, Work, threads
from bench.shapes import write_sums
from bench.step import first_step_wrong
from parallel.hardware import device_type

TOLERANCE = {"reward/mean": 0.1, "entropy/mean": 0.1}  # of the first step
RECENT = 5  # steps whose mean reward is compared with the target


def taught(folder: Path, sft_steps: int, device: str) -> tuple[Path, Path]:
    """The demo's model after so many steps of SFT, and its problems."""
    demo.make_problems(folder, 0)
    demo.make_model(folder / "model", 0)
    keys = {
        "model": str(folder / "model"), "dataset.path": str(folder / "train.jsonl"), "training.steps": sft_steps, "stop_at_loss": "null",
        "output": str(folder / "sft"), "resume": "never", "device": device, "metrics.tensorboard": "false",
    }  # fmt: skip
    command = [sys.executable, "train_sft.py", "configs/demo_sft.yaml", *(f"{key}={value}" for key, value in keys.items())]
    tell(f"{sft_steps} steps of SFT")
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return folder / "sft/hf", folder / "train.jsonl"


def curve(steps: list[dict[str, float]]) -> list[tuple[int, float, float]]:
    """Step, seconds so far, reward."""
    seconds = itertools.accumulate(s["time/step"] for s in steps)
    return [(i, t, s["reward/mean"]) for i, (t, s) in enumerate(zip(seconds, steps, strict=True), 1)]


def reached(points: list[tuple[int, float, float]], target: float) -> tuple[int, float] | None:
    """Step and seconds at which the mean of the last rewards first was at least `target`.

    >>> reached([(1, 1.0, 0.0), (2, 2.0, 1.0), (3, 3.0, 1.0), (4, 4.0, 1.0), (5, 5.0, 1.0), (6, 6.0, 1.0)], 0.8)
    (5, 5.0)
    """
    for i in range(RECENT, len(points) + 1):
        if statistics.fmean(reward for _, _, reward in points[i - RECENT : i]) >= target:
            return points[i - 1][:2]
    return None


def report(found: dict[int, dict[str, list[dict[str, float]]]], options: Any, asked: dict[str, Any]) -> None:
    """found: by seed and way."""
    refuse([f"seed {seed}, {line}" for seed, of in found.items() for line in first_step_wrong(of, options.ways[-1], options.tolerance)])
    curves = {(way, seed): curve(steps) for seed, of in found.items() for way, steps in of.items()}
    for (way, seed), points in curves.items():
        for step, seconds, reward in points:
            say("learn", f"{way}, seed {seed}", way=way, seed=seed, step=step, seconds=figure(seconds), reward=figure(reward))
    ends: dict[str, list[float]] = {}
    for way in options.ways:
        mine = [curves[way, seed] for seed in found]
        times = [reached(points, options.target) for points in mine]
        ends[way] = [statistics.fmean(r for _, _, r in points[-RECENT:]) for points in mine]
        error = statistics.stdev(ends[way]) / len(mine) ** 0.5 if len(mine) > 1 else None
        line = {"way": way, "target": options.target, "steps_to_target": [t and t[0] for t in times]}
        line |= {"seconds_to_target": [t and figure(t[1]) for t in times], "reward_at_end": figure(statistics.fmean(ends[way]))}
        line |= {"standard_error": error if error is None else figure(error), "seeds": list(found)}
        other = [reached(curves[options.ways[-1], seed], options.target) for seed in found]
        both = [(a[1], b[1]) for a, b in zip(times, other, strict=True) if a and b]
        say("learn", f"law of {way}", **line, seconds_ratio=spread([a for a, _ in both], [b for _, b in both]) if both else None, **asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder; default: the demo's, after SFT")
    parser.add_argument("--data", help="with --model: a JSONL file")
    parser.add_argument("--sums", type=int, help="with --model: sums of two numbers up to this one, in place of --data")
    parser.add_argument("--reward", type=json.loads, default={"fn": "rollout.rewards.DigitsReward", "partial": 0.2})
    parser.add_argument("--sft", type=int, default=200, help="steps of SFT before, without --model")
    parser.add_argument("--prompts", type=int, default=256, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--new", type=int, default=4, help="tokens of an answer at most")
    parser.add_argument("--seq-len", type=int, default=16, help="tokens of prompt and answer at most")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--target", type=float, default=0.6, help="reward whose time is reported")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["ours", "trl"], help="the last one is the base of ratios")
    parser.add_argument("--micro-batch", type=int, default=2048, help="TRL's sequences in one forward pass")
    parser.add_argument("--tolerance", type=json.loads, default=TOLERANCE, help="of the first step, as JSON")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the computation; default: float32 on a CPU, else bfloat16")
    parser.add_argument("--folder", type=Path, help="keeps the runs' files")
    options = parser.parse_args()
    if options.model and not (options.data or options.sums):
        parser.error("--model needs --data or --sums")
    if any(way.startswith("trl") for way in options.ways):
        trl_peer.need("trl", "accelerate", *(["liger_kernel"] if "trl_liger" in options.ways else []))
    device = torch.device(device_type(options.device))
    dtype = str(dtype_of(options.dtype, device)).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model, data = (options.model, options.data) if options.model else taught(folder, options.sft, options.device)
        if options.sums:
            data = write_sums(folder / "sums.jsonl", options.prompts * options.steps, options.sums)
        engine = {"cpu": "transformers"}.get(device.type, "vllm")
        found: dict[int, dict[str, list[dict[str, float]]]] = {seed: {} for seed in options.seeds}
        for seed, order in zip(options.seeds, turns(options.ways, len(options.seeds)), strict=True):
            work = Work(
                str(Path(model).resolve()), str(data), options.prompts, options.samples, options.new, options.steps, options.seq_len, dtype,
                options.device, options.reward, learning_rate=options.learning_rate, seed=seed, micro_batch=options.micro_batch,
                trl_engine=engine, adam_beta2=0.99,
            )  # fmt: skip
            for way in order:
                here = folder / f"{seed}-{way}"
                here.mkdir(exist_ok=True)
                tell(f"seed {seed}: {way}")
                found[seed][way] = WAYS[way](work, here)
        asked = {"device": device.type, "dtype": dtype, "versions": versions(), "prompts": options.prompts, "samples": options.samples}
        asked |= {"learning_rate": options.learning_rate, "trl_samples_with": engine, "threads": threads(options.device)}
        report(found, options, asked)


if __name__ == "__main__":
    main()
