"""Whole GRPO steps on 1, 2, 4, 8 ranks of a machine: runs of train_grpo.py that take turns: JSON lines on stdout.

    python -m bench.scale [--shape tiny] [--ranks 1 2] [--kinds strong weak split] [--prompts 4] [--samples 4] [--new 32]

    weak    every rank has --prompts of its own: the step should take as long on all
    strong  the prompts of the most ranks, whoever shares them
    split   half of the ranks train and half sample (--trainers), --prompts a rank; the same with rollouts a version old (max_policy_age 1),
            which are sampled while the last ones are trained on: its gain is `overlap`, and `sampled_to_trained_s` says whether the two
            take about the same time

In weak and strong all roles are on all ranks. Random weights, every answer as long as is allowed, one optimizer step a rollout. Figures
are medians over a run's steps without the first, which makes the optimizer's moments, and the last, after which nothing is sampled.

`idle` is the share of the ranks' time in which they wait for each other between phases; what they wait in a phase's collectives is that
phase's. `mfu` counts 6 FLOP a parameter and token computed in training over the whole step of all ranks, where the GPU's peak is known;
`mfu_training` over the training ranks' training. `efficiency` is against the fewest ranks: of weak their seconds over these seconds, of
strong the same of ranks x seconds. Laws: seconds = a x ranks^b, where b should be 0 (weak) and -1 (strong).

Exit code 1, and no figures, where runs of equal prompts trained on other numbers of tokens, or their first steps differ. With --folder a
call that was ended goes on after its last whole run. Without --ranks: 1, 2, 4, 8, as far as there are GPUs; 1 and 2 on a CPU, which says
nothing of a GPU.
"""

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import runs
from bench.measure import dtype_of, exponent, figure, positive, refuse, say, spread, tell, turns, versions
from bench.runs import PHASES, Work
from bench.shapes import SHAPES
from bench.step import TOLERANCE, add_run_arguments, first_step_wrong, materials, once, short, tokens_wrong
from parallel.hardware import device_type, num_ranks

Steps = list[dict[str, float]]


@dataclass(frozen=True)
class Setup:
    """Of a run: who does how much. Equal ones of two kinds are one run."""

    ranks: int
    prompts: int  # of a step, on all ranks
    trainers: int = 0  # ranks that only train, while the others sample; 0: every rank does both
    age: int = 0  # max_policy_age

    @property
    def name(self) -> str:
        who = f"{self.trainers}+{self.ranks - self.trainers}" if self.trainers else f"{self.ranks}"
        return f"{who} ranks, {self.prompts} prompts, age {self.age}"

    def keys(self) -> list[str]:
        split = [f"services.trainer.procs={self.trainers}", f"services.generator.num_replicas={self.ranks - self.trainers}"]
        return [f"grpo.max_policy_age={self.age}", "generator.max_num_seqs=null", *(split if self.trainers else [])]


def setups(kind: str, ranks: list[int], prompts: int, share: float) -> list[Setup]:
    """prompts: of a rank; share: of the ranks that train, in split."""
    if kind == "strong":
        return [Setup(n, prompts * max(ranks)) for n in ranks]
    if kind == "weak":
        return [Setup(n, prompts * n) for n in ranks]
    many = [n for n in ranks if n > 1]
    return [Setup(n, prompts * n, min(max(round(n * share), 1), n - 1), age) for n in many for age in (0, 1)]


def run(setup: Setup, work: Work, here: Path, state: dict[str, Any], told: str) -> Steps:
    """Its steps, whose `tokens` are those of all ranks."""
    steps = once(replace(work, ranks=setup.ranks, prompts=setup.prompts, ours=[*setup.keys(), *work.ours]), "ours", here, state, told)
    trainers = setup.trainers or setup.ranks
    return [step | {"tokens": round(step["perf/tok_s_train"] * step["time/train"] * trainers)} for step in steps]


def wrong(found: dict[Setup, Steps], work: Work, tolerance: dict[str, float]) -> list[str]:
    """Where runs did not do what was asked for, or those of equal prompts not the same."""
    lines = [line for setup, steps in found.items() for line in short(steps, replace(work, prompts=setup.prompts), setup.name)]
    for prompts in dict.fromkeys(setup.prompts for setup in found):
        same = {setup.name: steps for setup, steps in found.items() if setup.prompts == prompts}
        base = next(iter(same))
        lines += tokens_wrong(same, base) + first_step_wrong(same, base, tolerance)
    return lines


def figures(setup: Setup, steps: Steps) -> dict[str, Any]:
    middle = steps[1:-1]

    def median(name: str) -> float:
        return statistics.median(s.get(name, 0.0) for s in middle)

    seconds, trainers = median("time/step"), setup.trainers or setup.ranks
    line = {
        "step_s": seconds, "tokens_per_s_rank": median("tokens") / seconds / setup.ranks,
        "response_tokens_per_s_rank": median("loss/tokens") / seconds / setup.ranks,
        "idle": median("perf/bubble"), "sampled_to_trained_s": median("time/generate") / median("time/train"),
    }  # fmt: skip
    if "perf/mfu" in middle[0]:
        line["mfu_training"] = median("perf/mfu")
        line["mfu"] = line["mfu_training"] * median("time/train") * trainers / (seconds * setup.ranks)
    if "mem/peak_gib" in middle[0]:
        line["peak_gib"] = max(s["mem/peak_gib"] for s in steps)
    return line | {f"{name}_s": median(f"time/{name}") for name in (*PHASES, "wait")}


def law(ranks: list[int], seconds: list[float]) -> tuple[float, float]:
    """a and b of seconds = a x ranks^b, by least squares of the logarithms.

    >>> law([1, 2, 4], [8.0, 4.0, 2.0])
    (8.0, -1.0)
    """
    b = exponent(ranks, seconds)
    middle = statistics.fmean(map(math.log2, seconds)) - b * statistics.fmean(map(math.log2, ranks))
    return 2**middle, b


def compared(kind: str, each: list[Setup], seconds: dict[Setup, list[float]]) -> dict[Setup, dict[str, Any]]:
    """efficiency or overlap, round by round; seconds: of each round."""
    if kind == "split":
        return {s: {"overlap": spread(seconds[replace(s, age=0)], seconds[s])} for s in each if s.age}
    least = min(each, key=lambda s: s.ranks)
    factor = {"weak": lambda s: 1.0, "strong": lambda s: float(s.ranks)}[kind]
    cost = {s: [factor(s) * value for value in seconds[s]] for s in each}
    return {s: {"efficiency": spread(cost[least], cost[s])} for s in each}


def report(kinds: dict[str, list[Setup]], found: list[dict[Setup, Steps]], work: Work, tolerance: dict[str, float]) -> None:
    """A line a kind and setup and a law a kind, or none where runs disagree. found: by round."""
    refuse(list(dict.fromkeys(line for steps in found for line in wrong(steps, work, tolerance))))
    lines = {setup: [figures(setup, steps[setup]) for steps in found] for setup in found[0]}
    seconds = {setup: [line["step_s"] for line in of] for setup, of in lines.items()}
    shared = {"device": device_type(work.device), "dtype": work.dtype, "versions": versions(), "rounds": len(found)}
    shared |= {name: vars(work)[name] for name in ("samples", "new_tokens", "steps", "row_tokens", "ours")}
    for kind, each in kinds.items():
        ratios = compared(kind, each, seconds)
        for setup in each:
            middle = {name: figure(statistics.median(line[name] for line in lines[setup])) for name in lines[setup][0]}
            say("scale", f"{kind}, {setup.name}", kind=kind, **vars(setup), **middle, **ratios.get(setup, {}), **shared)
        for age in dict.fromkeys(s.age for s in each):
            of_age = [s for s in each if s.age == age]
            if len(of_age) > 1:
                a, b = law([s.ranks for s in of_age], [statistics.median(seconds[s]) for s in of_age])
                say("scale", f"law of {kind}, age {age}", kind=kind, age=age, seconds_a=figure(a), ranks_exponent=round(b, 4), **shared)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model")
    parser.add_argument("--kinds", nargs="+", choices=("strong", "weak", "split"), default=["strong", "weak", "split"])
    parser.add_argument("--ranks", nargs="+", type=positive, help="numbers of ranks")
    parser.add_argument("--prompts", type=positive, default=4, help="of a step and rank")
    parser.add_argument("--samples", type=positive, default=4, help="of a prompt")
    parser.add_argument("--new", type=positive, default=32, help="tokens of an answer")
    parser.add_argument("--trainers", type=float, default=0.5, help="share of the ranks that train, in split")
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(f"--steps {options.steps}: the first and the last step are dropped, so 3 are needed")
    most = num_ranks({"cuda": 8}.get(device_type(options.device), 2))
    options.ranks = sorted(set(options.ranks or [n for n in (1, 2, 4, 8) if n <= most]))
    if options.kinds == ["split"] and max(options.ranks) < 2:
        parser.error(f"--kinds split: needs 2 ranks at least, and --ranks has {options.ranks}")
    return options


def main() -> None:
    options = parsed()
    dtype = dtype_of(options.dtype, torch.device(device_type(options.device)))
    kinds = {kind: setups(kind, options.ranks, options.prompts, options.trainers) for kind in options.kinds}
    kinds = {kind: each for kind, each in kinds.items() if each}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        model, data, longest = materials(folder, options.data, options.shape, dtype)
        work = Work(
            str(model), str(data), options.prompts, options.samples, options.new, options.steps, longest + options.new,
            str(dtype).removeprefix("torch."), options.device, {"fn": "bench.runs.vowels"}, row_tokens=options.row_tokens,
            memory=options.memory, ours=options.ours,
        )  # fmt: skip
        state = runs.state_of(work.device)
        each = {setup.name: setup for of in kinds.values() for setup in of}
        found: list[dict[Setup, Steps]] = []
        for number, order in enumerate(turns(list(each), options.rounds)):
            told = f"round {number + 1} of {options.rounds}: "
            done = {each[name]: run(each[name], work, folder / f"{number}-{name}", state, told + name) for name in order}
            found.append({setup: done[setup] for setup in each.values()})
            for setup, steps in found[-1].items():
                tell(f"{setup.name:<36}{figures(setup, steps)['step_s']:>9.3f} s")
        report(kinds, found, work, options.tolerance or TOLERANCE)


if __name__ == "__main__":
    main()
