"""The switches of training on the GPU: what each saves, and that in deterministic mode none changes a bit, but for stated rounding."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.conftest import steps_of
from tests.gpu.test_checkpoint import assert_same_bits, cut, numbers, run, weights
from tests.tiny import write_additions

STEPS = 4
Runs = dict[str, Path]
SFT = {
    "plain": [], "again": [], "selective": ["activation_checkpointing=selective"], "full": ["activation_checkpointing=full"],
    "optimizer": ["cpu_offload=optimizer"], "compiled": ["compile=true"], "compiled again": ["compile=true"],
    "plain fp32": ["dtype=float32"], "parameters fp32": ["dtype=float32", "cpu_offload=parameters"],
    "compiled fp32": ["dtype=float32", "compile=true"],
}  # fmt: skip
GRPO = {
    "plain": [], "optimizer": ["cpu_offload=optimizer"], "selective": ["activation_checkpointing=selective"],
    "parameters": ["cpu_offload=parameters"], "compiled": ["compile=true"],
}  # fmt: skip


def all_of(script: str, asked: dict[str, list[str]], cfg: dict[str, Any], folder: Path) -> Runs:
    """Side by side: memory is counted by process, and no time is a verdict."""
    runs = {name: folder / name.replace(" ", "_") for name in asked}
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda name: run(script, runs[name], cfg, *(f"training.{key}" for key in asked[name])), asked))
    return runs


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(write_additions(tmp_path_factory.mktemp("additions") / "train.jsonl", 9000))


@pytest.fixture(scope="module")
def sft_config(checkpoint_of, data) -> dict[str, Any]:
    """24 million parameters, several rows a step."""
    model = checkpoint_of("qwen3", hidden=512, layers=8, heads=16, dtype=torch.bfloat16)
    training = {"steps": STEPS, "batch_size": 2000, "seq_len": 64, "max_tokens_per_batch": 4096, "learning_rate": 1e-3, "adam_eps": 1e-6}
    checkpoint = {"every": 2, "keep": 0, "export_hf": True}
    return {
        "model": str(model), "dataset": {"path": data}, "training": training, "checkpoint": checkpoint, "metrics": {"tensorboard": False}
    }  # fmt: skip


@pytest.fixture(scope="module")
def sft(sft_config, tmp_path_factory) -> Runs:
    return all_of("train_sft", SFT, sft_config, tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def grpo(checkpoint_of, data, tmp_path_factory) -> Runs:
    """Beside an engine, with two updates a rollout and the policy's own log-probs."""
    cfg = {
        "model": str(checkpoint_of("qwen3", dtype=torch.bfloat16)), "dataset": {"path": data},
        "training": {"steps": STEPS, "batch_size": 4, "seq_len": 64, "learning_rate": 1e-3, "updates_per_rollout": 2},
        "grpo": {"n_samples": 8, "max_new_tokens": 16, "beta": 0.1, "old_logprobs": "trainer"},
        "rewards": {"digits": {"fn": "tests.tiny.share_of_digits"}},
        "generator": {"gpu_memory_utilization": 0.05, "enforce_eager": True, "engine": {"kv_cache_memory_bytes": 2**30}},
        "checkpoint": {"every": 2, "keep": 0}, "metrics": {"tensorboard": False},
    }  # fmt: skip
    return all_of("train_grpo", GRPO, cfg, tmp_path_factory.mktemp("grpo"))


def last(output: Path) -> Path:
    return output / f"checkpoints/step_{STEPS}"


def num_parameters(output: Path) -> int:
    return sum(t.numel() for name, t in weights(last(output)).items() if name.startswith("weight/"))


def measured(runs: Runs, name: str, figures: dict[str, Any]) -> dict[str, float]:
    """GiB live after a step, and at most, and seconds of the last step."""
    step = steps_of(runs[name])[-1]
    found = {"allocated": step["mem/allocated_gib"], "peak": step["mem/peak_gib"], "train_s": step["time/train"]}
    figures |= {f"{name}_{what}": value for what, value in found.items()}
    return found


def assert_same_run(a: Path, b: Path) -> int:
    assert numbers(a, 1) == numbers(b, 1) and len(numbers(a, 1)) == STEPS
    return assert_same_bits(last(a), last(b))


def apart(a: Path, b: Path) -> float:
    """The largest distance of a weight's two versions, as a share of its norm."""
    here, there = weights(last(a)), weights(last(b))
    return max(float((here[n] - t).norm() / t.norm()) for n, t in there.items() if n.startswith("weight/"))


def test_two_deterministic_runs_are_equal_bit_for_bit(sft, figures):
    figures["tensors_equal"] = assert_same_run(sft["again"], sft["plain"])


def test_checkpointing_saves_memory_in_its_order_and_changes_no_bit(sft, figures):
    peaks = [measured(sft, kind, figures)["peak"] for kind in ("plain", "selective", "full")]
    assert peaks[0] > peaks[1] > peaks[2]
    for kind in ("selective", "full"):
        assert_same_run(sft[kind], sft["plain"])


def test_moments_on_the_host_leave_the_gpu_and_change_no_bit(sft, figures):
    plain, hosted = (measured(sft, name, figures) for name in ("plain", "optimizer"))
    assert plain["allocated"] - hosted["allocated"] == pytest.approx(8 * num_parameters(sft["plain"]) / 2**30, rel=0.05)
    assert plain["peak"] > hosted["peak"]
    assert_same_run(sft["optimizer"], sft["plain"])


def test_a_run_that_goes_on_with_its_moments_on_the_host_is_the_uninterrupted_one_bit_for_bit(sft, sft_config, tmp_path):
    cut(sft["plain"], tmp_path / "resumed", 2)
    run("train_sft", tmp_path / "resumed", sft_config, "training.cpu_offload=optimizer")
    assert_same_run(tmp_path / "resumed", sft["plain"])


def test_weights_on_the_host_leave_the_gpu_and_agree_within_rounding(sft, figures):
    """AdamW and the gradient's norm are the CPU's."""
    plain, hosted = (measured(sft, name, figures) for name in ("plain fp32", "parameters fp32"))
    assert plain["allocated"] - hosted["allocated"] == pytest.approx(12 * num_parameters(sft["plain"]) / 2**30, rel=0.05)
    figures["weights"] = apart(sft["parameters fp32"], sft["plain fp32"])
    assert 0 < figures["weights"] <= 1e-4
    exported, held = load_file(sft["parameters fp32"] / "hf/model.safetensors"), weights(last(sft["parameters fp32"]))
    assert len(exported) > 50
    assert [name for name, tensor in exported.items() if not torch.equal(tensor, held[f"weight/{name}"])] == []


def test_compiled_blocks_agree_with_eager_ones_and_with_themselves_bit_for_bit(sft, figures):
    measured(sft, "plain", figures)
    measured(sft, "compiled", figures)
    assert_same_run(sft["compiled again"], sft["compiled"])
    assert numbers(sft["compiled fp32"], 1) != numbers(sft["plain fp32"], 1)  # else nothing was compiled
    figures["weights"] = apart(sft["compiled fp32"], sft["plain fp32"])
    assert figures["weights"] <= 1e-3
    for dtype, tolerance in (("", 1e-2), (" fp32", 1e-4)):
        got, want = (steps_of(sft[f"{name}{dtype}"])[0] for name in ("compiled", "plain"))
        for key in ("loss/policy", "grad/norm"):
            figures[f"{key}{dtype}"] = abs(got[key] / want[key] - 1)
            assert figures[f"{key}{dtype}"] <= tolerance


@pytest.mark.parametrize("name", ["optimizer", "selective"])
def test_grpo_beside_an_engine_is_the_same_run_bit_for_bit(name, grpo, figures):
    figures["tensors_equal"] = assert_same_run(grpo[name], grpo["plain"])


@pytest.mark.parametrize("name", ["parameters", "compiled"])
def test_grpo_beside_an_engine_agrees_within_rounding(name, grpo, figures):
    """Every sync is verified tensor by tensor: weights on the host reach the engine whole. Later rollouts may part at a rounding."""
    steps, plain = numbers(grpo[name], 1), numbers(grpo["plain"], 1)
    assert len(steps) == STEPS
    assert all(steps[0][key] == plain[0][key] for key in ("reward/mean", "len/mean"))
    figures["grad/norm"] = abs(steps[0]["grad/norm"] / plain[0]["grad/norm"] - 1)
    assert figures["grad/norm"] <= 5e-2
    figures["mismatch"] = max(s["mismatch/abs_mean"] for s in steps)
    assert figures["mismatch"] <= 2 * max(s["mismatch/abs_mean"] for s in plain) + 1e-3
