"""Supervised fine-tuning by the law of tests/test_placement.py: how the trainer's ranks share the work may not change the numbers."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.world import run_script

STEPS = 4
DEGREES = {
    "pp": "pipeline_parallel_degree", "replicate": "data_parallel_replicate_degree", "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}  # fmt: skip
LAYOUTS = {  # ranks, and degrees where they are not 1; what is left of the ranks are FSDP shards
    "FSDP 2": (2, {}),
    "PP 2": (2, {"pp": 2}),
    "TP 2": (2, {"tp": 2}),
    "CP 2": (2, {"cp": 2}),
    "HSDP 2 x 2": (4, {"replicate": 2}),
    "PP 2 x TP 2": (4, {"pp": 2, "tp": 2}),
    "PP 2 x FSDP 2": (4, {"pp": 2}),
    "CP 2 x FSDP 2": (4, {"cp": 2}),
    "PP 2 x FSDP 2 x TP 2": (8, {"pp": 2, "tp": 2}),
    "PP 2 x CP 2 x TP 2": (8, {"pp": 2, "cp": 2, "tp": 2}),
}
FAST = ("PP 2 x TP 2",)


class Run:
    def __init__(self, output: Path):
        self.output = output
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        self.steps = [line for line in lines if line["step"] > 0]
        self.weights = load_file(output / "hf/model.safetensors")


@pytest.fixture(scope="module")
def tune(checkpoint_of, additions, held_out_additions, tmp_path_factory):
    """`tune(layout, *overrides)`: the run of a tied Qwen3 in that layout; None: on one rank."""

    def start(layout: str | None, *overrides: str) -> Run:
        nproc, degrees = LAYOUTS[layout] if layout else (1, {})
        folder = tmp_path_factory.mktemp("sft")
        config = {
            "model": str(checkpoint_of("qwen3", tied=True)), "dataset": {"path": str(additions)}, "output": str(folder / "run"),
            "training": {
                "steps": STEPS, "batch_size": 13, "seq_len": 24, "max_tokens_per_batch": 40, "dtype": "float32", "learning_rate": 1e-3,
                "weight_decay": 0.1, "activation_checkpointing": "full" if layout == "PP 2" else "none",
            },
            "parallelism": {DEGREES[key]: degree for key, degree in degrees.items()},
            "eval": {"dataset": {"path": str(held_out_additions)}, "every": 2, "max_rows": 7},
            "metrics": {"tensorboard": False}, "checkpoint": {"export_hf": True, "every": 2, "keep": 0},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        run_script(nproc, "train_sft.py", folder / "config.yaml", *overrides)
        return Run(folder / "run")

    return start


@pytest.fixture(scope="module")
def alone(tune) -> Run:
    return tune(None)


@pytest.fixture(scope="module")
def spread(tune):
    done: dict[str, Run] = {}

    def run(layout: str) -> Run:
        done[layout] = done.get(layout) or tune(layout)
        return done[layout]

    return run


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, w in theirs.items():
        off = float((ours[name] - w).norm() / w.norm())
        assert off <= 1e-5, f"{name}: ||dw|| / ||w|| = {off:.1e}"


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in LAYOUTS])
def test_losses_gradient_norms_and_weights_are_those_of_one_rank(layout, spread, alone):
    run = spread(layout)
    assert len(run.steps) == len(alone.steps) == STEPS
    for ours, theirs in zip(run.steps, alone.steps, strict=True):
        counted, same = ({n for n in line if n.startswith(("loss/", "grad/", "optim/", "data/", "eval/"))} for line in (theirs, ours))
        assert counted == same and ("eval/loss" in counted) is (theirs["step"] % 2 == 0)
        for name in counted - {"data/packing_efficiency"}:  # replicas pack their rows apart
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-8), f"{name}, step {theirs['step']}"
    assert alone.steps[-1]["loss/policy"] < alone.steps[0]["loss/policy"] - 0.1, "nothing was learnt: nothing is tested"
    assert_same_weights(run.weights, alone.weights)


@pytest.mark.parametrize(("saved_by", "resumed_by"), [
    ("PP 2 x TP 2", None),
    pytest.param(None, "PP 2", marks=pytest.mark.slow),
    pytest.param("PP 2", "CP 2 x FSDP 2", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_saved_in_one_layout_goes_on_in_another(saved_by, resumed_by, spread, alone, tune):
    folder = (spread(saved_by) if saved_by else alone).output / "checkpoints/step_2"
    run = tune(resumed_by, f"resume={folder}")
    assert [row["step"] for row in run.steps] == [3, 4]
    assert_same_weights(run.weights, alone.weights)
