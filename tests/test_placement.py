"""Placement may not change the numbers: the law that the whole architecture hangs on.

Each layout runs four rollouts of train_grpo.py with real collectives and is compared with one rank under the same settings. Where
a layout differs in the trainer alone, the completions that the one rank sampled are replayed; the others start real engines.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from batch import Completion, Group
from tests.observe import Observed, read_observed
from tests.world import run_script

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


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names])


each_layout = each(LAYOUTS)


@dataclass
class Run:
    ranks: list[Observed]
    steps: list[dict[str, float]]  # of metrics.jsonl, without evaluations
    evaluations: list[dict[str, float]]
    weights: dict[str, torch.Tensor]  # exported after the last step
    start: dict[str, torch.Tensor]  # before the first


Compare = Callable[[str], tuple[Run, Run]]


@pytest.fixture(scope="module")
def compare(checkpoint_of, additions, held_out_additions, tmp_path_factory) -> Compare:
    """`compare(layout)`: what happened on one rank, and in that layout. Each is run once."""
    done: dict[Layout | str, Run | str] = {}
    folders: dict[Any, Path] = {}

    def run(key: Any, layout: Layout, recorded: Path | None) -> Run:
        if key not in done:
            folder = folders[key] = tmp_path_factory.mktemp("run")
            config = merged(SETTINGS, RECIPES[layout.recipe], layout.roles)
            config |= {"model": str(checkpoint_of(layout.model[0], tied=layout.model[1])), "dataset": {"path": str(additions)}}
            if recorded is None:
                config["eval"] = {"dataset": {"path": str(held_out_additions)}, "max_prompts": 7}
            (folder / "config.yaml").write_text(yaml.safe_dump(config | {"output": str(folder / "run"), "resume": "never"}))
            env = {"OBSERVE": str(folder)} | ({"REPLAY": str(recorded)} if recorded else {})
            try:
                run_script(layout.nproc, "tests/observe.py", str(folder / "config.yaml"), env=env, timeout_s=600)
                done[key] = read_run(folder, Path(config["model"]), layout.nproc)
            except AssertionError as failed:
                done[key] = str(failed)
        result = done[key]
        if isinstance(result, str):
            pytest.fail(result, pytrace=False)
        return result

    def both(name: str) -> tuple[Run, Run]:
        layout = LAYOUTS[name]
        alone = (layout.recipe, layout.model)
        one = run(alone, Layout(layout.recipe, 1, model=layout.model), None)
        return one, run(name, layout, folders[alone] if layout.replays else None)

    return both


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


def samples(run: Observed) -> Iterator[tuple[str, Group, int, Completion]]:
    for step, groups in enumerate(run.groups, 1):
        for group in groups:
            for sample, completion in enumerate(group.completions):
                yield f"step {step}, {group.prompt.text!r}, sample {sample}", group, sample, completion


def first_difference(where: str, one: Completion, other: Completion) -> str:
    """Which token was the first to differ, and how likely each of the two was: close to each other means a near tie."""
    for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if a != b:
            margin = one.logprobs[at] - other.logprobs[at]
            return (
                f"{where}: token {at} is {a} on one rank (log-prob {one.logprobs[at]:.7f}) and {b} here "
                f"({other.logprobs[at]:.7f}; margin {margin:.2e}); {one.text!r} and {other.text!r}"
            )
    return f"{where}: {len(one.token_ids)} tokens on one rank and {len(other.token_ids)} here: {one.text!r} and {other.text!r}"


@each_layout
def test_every_rank_holds_the_completions_and_rewards_of_one_rank(layout, compare: Compare):
    one, run = compare(layout)
    expected = list(samples(one.ranks[0]))
    reasons = {completion.stop_reason for _, _, _, completion in expected}
    assert len(reasons) == 3 or len(expected) < 60, f"the recipe is to show eos, stop_string and length, not only {reasons}"
    for rank in run.ranks:
        found = list(samples(rank))
        assert [where for where, *_ in found] == [where for where, *_ in expected]
        for (where, group, sample, completion), (_, theirs, _, other) in zip(expected, found, strict=True):
            assert completion.token_ids == other.token_ids, first_difference(where, completion, other)
            assert (completion.stop_reason, completion.text) == (other.stop_reason, other.text), where
            assert completion.policy_version == other.policy_version, where
            assert (group.rewards[sample], group.prompt) == (theirs.rewards[sample], theirs.prompt), where
        assert rank.advantages == one.ranks[0].advantages


@each_layout
def test_log_probs_of_every_token_agree_to_1e_4(layout, compare: Compare):
    one, run = compare(layout)
    largest = 0.0
    for rank in run.ranks:
        for (where, _, _, a), (_, _, _, b) in zip(samples(one.ranks[0]), samples(rank), strict=True):
            assert a.token_ids == b.token_ids, first_difference(where, a, b)
            largest = max([largest, *(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))])
            assert largest <= 1e-4, f"sampler, {where}: {a.logprobs} and {b.logprobs}"
        for step, (theirs, ours) in enumerate(zip(one.ranks[0].attached, rank.attached, strict=True), 1):
            assert theirs.keys() == ours.keys()
            for name in theirs:
                gap = max(float(abs(x - y).max()) for x, y in zip(theirs[name], ours[name], strict=True))
                largest = max(largest, gap)
                assert gap <= 1e-4, f"{name}, step {step}: {gap}"
    print(f"{layout}: log-probs {largest:.1e}")


EXEMPT = ("time/", "perf/", "mem/")
COUNTED = ("reward/", "adv/", "len/", "stop/", "trunc_rate", "staleness/", "policy_version", "loss/tokens", "grad/clipped", "optim/lr")


def tolerance(name: str, value: float) -> float:
    """How far a number of metrics.jsonl may be from that of one rank."""
    if name.startswith(COUNTED) or name == "step":
        return 0.0
    if name.startswith("mismatch/") or name == "ratio/max":
        return 1e-4  # of one token: a gap between log-probs
    if name.startswith("grad/norm"):
        return 1e-5 * abs(value)
    if name == "optim/update_to_weight":
        return 1e-4 * abs(value)  # AdamW makes much of gradients that are almost 0
    return 1e-5 * abs(value) + 1e-6


@each_layout
def test_every_steps_numbers_agree(layout, compare: Compare):
    one, run = compare(layout)
    assert len(one.steps) == len(run.steps) == STEPS
    used: dict[str, float] = {}
    for a, b in zip(one.steps, run.steps, strict=True):
        names, theirs = ({name for name in row if not name.startswith(EXEMPT)} for row in (a, b))
        assert names == theirs
        for name in sorted(names):
            gap, limit = abs(a[name] - b[name]), tolerance(name, a[name])
            assert gap <= limit, f"{name}, step {a['step']}: {a[name]} on one rank, {b[name]} here; allowed {limit:.1e}"
            used[name] = max(used.get(name, 0.0), gap / limit if limit else 0.0)
    worst = sorted(used.items(), key=lambda item: -item[1])[:4]
    print(f"{layout}: share of the tolerance used: " + ", ".join(f"{name} {share:.2f}" for name, share in worst))


@each(name for name in LAYOUTS if LAYOUTS[name].recipe in ON_POLICY)
def test_the_first_on_policy_loss_is_zero(layout, compare: Compare):
    """With ratios of 1, no divergence yet, and advantages that add up to 0 in each group, whatever the split.

    The sum is in float64, but advantages are rounded to float32, each by 2**-25 of its size at most.
    """
    _, run = compare(layout)
    size = statistics.fmean(abs(a) for group in run.ranks[0].advantages[0] for a in group)
    assert abs(run.steps[0]["loss/policy"]) <= 2**-24 * size
    assert run.steps[0]["ratio/max"] == 1.0


@each(name for name in LAYOUTS if LAYOUTS[name].recipe in OFF_POLICY)
def test_the_recipes_with_old_data_have_ratios_other_than_one(layout, compare: Compare):
    _, run = compare(layout)
    assert max(row["ratio/max"] for row in run.steps) > 1.001


@each(name for name in LAYOUTS if not LAYOUTS[name].replays)
def test_evaluations_agree(layout, compare: Compare):
    one, run = compare(layout)
    assert len(run.evaluations) == 2
    assert run.evaluations == one.evaluations


@each_layout
def test_the_first_gradient_agrees_on_every_rank_that_trains(layout, compare: Compare):
    """This sees a factor that AdamW hides."""
    one, run = compare(layout)
    expected = one.ranks[0].gradient
    gradients = [rank.gradient for rank in run.ranks if rank.gradient]
    assert set().union(*gradients) == expected.keys() == one.start.keys()
    stages = LAYOUTS[layout].roles.get("parallelism", {}).get("pipeline_parallel_degree", 1)
    worst = (0.0, "")
    for gradient in gradients:
        assert stages > 1 or gradient.keys() == expected.keys()
        for name, ours in gradient.items():
            g = expected[name]
            assert g.norm() > 0, f"{name} has no gradient: nothing is tested"
            off = float((ours - g).norm() / g.norm())
            worst = max(worst, (off, name))
            sizes = f"||g|| is {float(g.norm()):.3e} on one rank, {float(ours.norm()):.3e} here"
            assert off <= 1e-5, f"{name}: ||dg|| / ||g|| = {off:.1e}; {sizes}"
    print(f"{layout}: gradient of {len(gradients)} ranks, {worst[0]:.1e} ({worst[1]})")


@each_layout
def test_the_weights_after_four_steps_agree(layout, compare: Compare):
    one, run = compare(layout)
    assert run.weights.keys() == one.weights.keys() == one.start.keys()
    updates = STEPS * RECIPES[LAYOUTS[layout].recipe].get("training", {}).get("updates_per_rollout", 1)
    norm, largest = (0.0, ""), (0.0, "")
    for name, w in one.weights.items():
        assert (w - one.start[name]).abs().max() > LEARNING_RATE, f"{name} has hardly moved: nothing is tested"
        moved = run.weights[name] - w
        norm = max(norm, (float(moved.norm() / w.norm()), name))
        largest = max(largest, (float(moved.abs().max()), name))
    print(f"{layout}: weights {norm[0]:.1e} ({norm[1]}), largest {largest[0]:.1e} ({largest[1]})")
    assert norm[0] <= 1e-5, f"{norm[1]}: ||dw|| / ||w|| = {norm[0]:.1e}"
    assert largest[0] <= 0.05 * LEARNING_RATE * updates, f"{largest[1]}: max |dw| = {largest[0]:.1e}"
