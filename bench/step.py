"""Whole GRPO steps: runs of train_grpo.py against runs of TRL's GRPOTrainer on the same work: JSON lines on stdout.

    python -m bench.step [--shape tiny] [--prompts 8] [--samples 4] [--new 32] [--steps 5] [--rounds 2] [--data FILE]

Random weights, the prompts of a JSONL file (without one: made-up problems), every answer as long as is allowed, one optimizer step a
rollout, fp32 weights, the same loss, sampling, batch, learning rate and order of prompts. The ways, each a process of its own because
each wants the device for itself, take turns: ours, trl, trl, ours. Their first step is dropped.

On a CPU TRL samples with transformers' generate: its colocated mode starts vLLM's CPU build but cannot load new weights into it.
A line a way: medians over its steps of the whole step and of each phase (wall time: a CPU must be idle for them to mean anything),
tokens/s, GiB of the training phase. `training_s` is train and logp_old; making a scored batch of what was sampled, fetching rows and
logging are in data and log on both sides. In train: ours has Trainer.train, packing included; TRL, its forward and backward passes, the
optimizer, shuffling and splitting the batch, its callbacks. In sleep: both engines' sleep and waking, but what is woken to be loaded,
which is in TRL's sync, and the KV cache, in ours; TRL's also has reading log-probs out of outputs, which ours has in generate.
`unexplained` is what is in no phase; `computed_share` says how many of the tokens were computed, where prompts are shared, and
`mfu_of_product` counts those. Exit code 1, and no figures, where the ways trained on other numbers of tokens, or their first step's loss,
gradient norm, entropy or log-probs differ.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import runs, trl_peer
from bench.measure import differences, dtype_of, figure, positive, refuse, say, spread, tell, turns, versions
from bench.runs import PHASES, WAYS, Work
from bench.shapes import SHAPES, texts_of, write_checkpoint, write_prompts
from parallel.hardware import device_type

# Of the first step: two samples of many tokens of one model. The loss is a mean of advantages, each of the order of 1, so that it is near
# 0 whatever they are. What shows them is the gradient's norm (relative): in 52 steps of the tiny shape, of 16 and 32 answers, ours was 0.87
# to 1.08 of TRL's, with a deviation of 0.05.
TOLERANCE = {"loss/policy": 0.1, "grad/norm": 0.25, "entropy/mean": 0.02, "entropy/nll": 0.02}


def tokens_wrong(found: dict[str, list[dict[str, float]]], base: str) -> list[str]:
    """Where a way trained on another number of tokens in some step than `base`, or sampled another number."""
    wrong = []
    for way, steps in found.items():
        for name in ("tokens", "loss/tokens"):
            mine, theirs = ([int(s[name]) for s in of] for of in (steps, found[base]))
            if mine != theirs:
                wrong.append(f"{way} has {name} {mine}, and {base} has {theirs}")
    return wrong


def first_step_wrong(found: dict[str, list[dict[str, float]]], base: str, tolerance: dict[str, float]) -> list[str]:
    return [line for way, steps in found.items() if way != base for line in differences(steps[0], found[base][0], tolerance, way)]


def short(found: list[dict[str, float]], work: Work, way: str) -> list[str]:
    """Where answers are not as long as was asked for."""
    expected = work.prompts * work.samples * work.new_tokens
    lengths = [int(s["loss/tokens"]) for s in found]
    return [] if lengths == [expected] * work.steps else [f"{way} sampled {lengths} tokens a step, and {expected} were asked for"]


def figures(steps: list[dict[str, float]], product: float | None) -> dict[str, Any]:
    """Of the steps after the first."""
    later = steps[1:]

    def median(name: str) -> float:
        return statistics.median(s.get(name, 0.0) for s in later)

    phases = {name: figure(median(f"time/{name}")) for name in PHASES}
    training = statistics.median(s.get("time/train", 0.0) + s.get("time/logp_old", 0.0) for s in later)
    named = [sum(s.get(f"time/{name}", 0.0) for name in (*PHASES, "wait", "logp_ref", "eval", "ckpt")) for s in later]
    speed = statistics.median(s["tokens"] for s in later) / training
    line = {
        "step_s": figure(median("time/step")), "phases_s": phases, "training_s": figure(training),
        "unexplained": round(1 - sum(named) / sum(s["time/step"] for s in later), 4),
        "response_tokens_per_s": figure(median("loss/tokens") / median("time/step")), "trained_tokens_per_s": figure(speed),
        "generated_tokens_per_s": figure(median("loss/tokens") / median("time/generate")),
    }  # fmt: skip
    if "mem/peak_gib" in later[0]:
        line["peak_gib"] = figure(max(s["mem/peak_gib"] for s in later))
    computed = [s["perf/tokens_computed"] / s["tokens"] for s in later if "perf/tokens_computed" in s]
    share = statistics.median(computed) if computed else 1.0
    if computed:
        line["computed_share"] = figure(share)
    if product is not None:
        line["mfu_of_product"] = figure(6 * steps[0]["parameters"] * share * speed / product)
    return line


def take_turns(work: Work, ways: list[str], rounds: int, folder: Path) -> list[dict[str, list[dict[str, float]]]]:
    """Each round's steps of each way. A run that `folder` has already, of the same work, versions, commit and device, is not made again."""
    found: list[dict[str, list[dict[str, float]]]] = []
    state = runs.state_of(work.device)
    for number, order in enumerate(turns(ways, rounds)):
        told = f"round {number + 1} of {rounds}: "
        found.append({way: once(work, way, folder / f"{number}-{way}", state, told + way) for way in order})
    return found


def once(work: Work, way: str, here: Path, state: dict[str, Any], told: str) -> list[dict[str, float]]:
    """The run's steps, from the folder `here` if it has the same run already."""
    asked, known = {"work": asdict(work), "state": state}, here / "done.json"
    if known.exists() and (kept := json.loads(known.read_text())) == asked | {"steps": kept["steps"]}:
        return kept["steps"]
    here.mkdir(parents=True, exist_ok=True)
    tell(told)
    steps = WAYS[way](work, here)
    known.write_text(json.dumps(asked | {"steps": steps}))
    return steps


def report(bench: str, case: str, work: Work, found: list[dict[str, list[dict[str, float]]]], base: str, options: Any) -> None:
    """A line a way, or none where they disagree."""
    wrong: list[str] = []
    for steps in found:
        wrong += [line for way, of in steps.items() for line in short(of, work, way)]
        wrong += tokens_wrong(steps, base) + first_step_wrong(steps, base, options.tolerance or TOLERANCE)
    refuse(list(dict.fromkeys(wrong)))
    product = runs.measured_product(options.product) if options.product else None
    each = {way: [figures(steps[way], product) for steps in found] for way in found[0]}
    extra = {"product_tflops": figure(product / 1e12)} if product else {}
    shared = {"device": device_type(work.device), "dtype": work.dtype, "weights": "float32", "versions": versions(), **extra}
    shared |= {"threads": runs.threads(work.device).get("OMP_NUM_THREADS", "default")}
    keys = ("prompts", "samples", "new_tokens", "steps", "micro_batch", "row_tokens", "ours")
    for way, lines in each.items():
        middle = {name: statistics.median(line[name] for line in lines) for name, v in lines[0].items() if isinstance(v, float)}
        middle["phases_s"] = {name: statistics.median(line["phases_s"][name] for line in lines) for name in PHASES}
        ratios = {}
        for name in ("step_s", "training_s", "generated_tokens_per_s", *(["peak_gib"] if "peak_gib" in middle else [])):
            ratios[f"{name}_ratio"] = spread([line[name] for line in lines], [line[name] for line in each[base]])
        engine = "vllm" if way == "ours" else work.trl_engine
        asked = {key: vars(work)[key] for key in keys}
        say(bench, case, way=way, generation=engine, rounds=len(found), **middle, **ratios, **asked, **shared)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Of whole runs of train_grpo.py, whatever they are compared with."""
    parser.add_argument("--steps", type=positive, default=5, help="of a run; the first is dropped")
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each")
    parser.add_argument("--data", type=Path, help="JSONL with a column question, such as GSM8K's; default: made-up problems")
    parser.add_argument("--folder", type=Path, help="keeps the runs; one of equal work, versions, commit and device is not made again")
    parser.add_argument("--row-tokens", type=positive, default=16384, help="training.max_tokens_per_batch")
    parser.add_argument("--memory", type=float, default=0.4, help="an engine's share of a GPU's memory")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of train_grpo.py")
    parser.add_argument("--tolerance", type=json.loads, help=f"of the first step, as JSON; default {json.dumps(TOLERANCE)}")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the computation; default: float32 on a CPU, else bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL's sequences in one forward pass")
    parser.add_argument("--product", type=int, default=0, help="size of a bf16 product that the training's speed is compared with")


def materials(folder: Path, given: Path | None, shape: str, dtype: torch.dtype) -> tuple[Path, Path, int]:
    """Model, prompts and the tokens of the longest of these; in `folder`, made where they are not there. given: prompts to take."""
    folder.mkdir(parents=True, exist_ok=True)
    data = given or write_prompts(folder / "prompts.jsonl", 512)
    model = folder / f"model-{shape}"
    if not (model / "tokenizer.json").exists():
        write_checkpoint(model, shape, texts_of(data), dtype=dtype)
    return model, data, max(len(p.token_ids) for p in runs.prompts_of(str(data), str(model), 0, 8192, len(texts_of(data))))


def compare(bench: str, case: str, sizes: dict[str, Any], ways: list[str], base: str, options: argparse.Namespace) -> None:
    """sizes: shape, prompts, samples, new (tokens of an answer)."""
    if any(way.startswith("trl") for way in ways):
        trl_peer.need("trl", "accelerate", *(["liger_kernel"] if "trl_liger" in ways else []))
    device = torch.device(device_type(options.device))
    dtype = dtype_of(options.dtype, device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        model, data, longest = materials(folder, options.data, sizes["shape"], dtype)
        engine = {"cpu": "transformers"}.get(device.type, "vllm")
        work = Work(
            str(model), str(data), sizes["prompts"], sizes["samples"], sizes["new"], options.steps, longest + sizes["new"],
            str(dtype).removeprefix("torch."), options.device, {"fn": "bench.runs.vowels"}, micro_batch=options.micro_batch,
            row_tokens=options.row_tokens, memory=options.memory, ours=options.ours, trl_engine=engine,
        )  # fmt: skip
        report(bench, case, work, take_turns(work, ways, options.rounds, folder), base, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--peer", choices=("trl", "none"), default="trl")
    options = parser.parse_args()
    sizes = {name: vars(options)[name] for name in ("shape", "prompts", "samples", "new")}
    ways = ["ours"] + (["trl"] if options.peer == "trl" else [])
    case = f"{options.shape}, {options.prompts} x {options.samples} x {options.new} new tokens"
    compare("step", case, sizes, ways, ways[-1], options)


if __name__ == "__main__":
    main()
