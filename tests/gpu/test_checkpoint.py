"""A run on the GPU that stopped goes on: on the GPU bit for bit, on a CPU within fp32's rounding; its export is a checkpoint for vLLM."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.gpu.conftest import scenario, start, steps_of
from tests.tiny import write_additions

TIMES = ("time/", "perf/", "mem/")


def config(folder: Path, **keys: object) -> str:
    path = folder / "asked.yaml"  # the run writes its own config.yaml
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(keys))  # JSON is YAML
    return str(path)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint, checkpoint.parent / "whole.pt")
    return torch.load(checkpoint.parent / "whole.pt")


def numbers(output: Path, first: int) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith(TIMES)} for step in steps_of(output) if step["step"] >= first]


def run(script: str, output: Path, cfg: dict, *overrides: str) -> None:
    """In deterministic mode."""
    start(f"{script}.py", config(output, **cfg, output=str(output)), "training.deterministic=true", *overrides)


def cut(whole: Path, resumed: Path, step: int) -> None:
    """The run folder as it was when `whole` had done `step` steps."""
    shutil.copytree(whole / f"checkpoints/step_{step}", resumed / f"checkpoints/step_{step}")
    shutil.copy(whole / "config.yaml", resumed)
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def assert_same_bits(a: Path, b: Path) -> int:
    got, want = weights(a), weights(b)
    assert got.keys() == want.keys()
    different = [n for n in want if not torch.equal(got[n], want[n])]
    assert different == [], f"{len(different)} of {len(want)} tensors"
    return len(want)


@pytest.fixture(scope="module")
def sft(smollm2, gsm8k):
    training = {"steps": 6, "batch_size": 4, "seq_len": 256, "learning_rate": 1e-5, "schedule": "linear", "warmup_steps": 2}
    checkpoint = {"every": 3, "keep": 0}
    return {"model": smollm2, "dataset": {"path": gsm8k}, "training": training, "checkpoint": checkpoint, "metrics": {"tensorboard": False}}


@pytest.fixture(scope="module")
def uninterrupted(sft, tmp_path_factory):
    """Six steps in bf16 and in fp32."""
    folders = {dtype: tmp_path_factory.mktemp(dtype) for dtype in ("bfloat16", "float32")}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda d: run("train_sft", folders[d], sft, f"training.dtype={d}", "checkpoint.export_hf=true"), folders))
    return folders


def test_sft_resumed_on_the_gpu_is_the_uninterrupted_run_bit_for_bit(sft, uninterrupted, tmp_path, figures):
    cut(uninterrupted["bfloat16"], tmp_path / "b", 3)
    run("train_sft", tmp_path / "b", sft)
    assert numbers(tmp_path / "b", 1) == numbers(uninterrupted["bfloat16"], 1)
    last = "checkpoints/step_6"
    figures["tensors_equal"] = assert_same_bits(tmp_path / "b" / last, uninterrupted["bfloat16"] / last)


def test_sft_resumed_on_the_cpu_is_the_run_within_fp32_rounding(sft, uninterrupted, tmp_path, figures):
    cut(uninterrupted["float32"], tmp_path / "c", 3)
    run("train_sft", tmp_path / "c", sft, "training.dtype=float32", "device=cpu")
    got, want = numbers(tmp_path / "c", 4), numbers(uninterrupted["float32"], 4)
    assert len(got) == len(want) == 3
    for name in ("loss/policy", "grad/norm"):
        figures[name] = max(abs(g[name] / w[name] - 1) for g, w in zip(got, want, strict=True))
        assert figures[name] <= 1e-4
    last = "checkpoints/step_6"
    here, there = weights(tmp_path / "c" / last), weights(uninterrupted["float32"] / last)
    gaps = [float((here[n] - t).norm() / t.norm()) for n, t in there.items() if n.startswith("weight/")]
    figures["weights"] = max(gaps)
    assert max(gaps) <= 1e-5


def test_grpo_resumed_on_the_gpu_is_the_uninterrupted_run_bit_for_bit(checkpoint_of, tmp_path, figures):
    cfg = {
        "model": str(checkpoint_of("qwen3", dtype=torch.bfloat16)),
        "dataset": {"path": str(write_additions(tmp_path / "additions.jsonl", 200))},
        "training": {"steps": 4, "batch_size": 8, "seq_len": 64, "learning_rate": 1e-3},
        "grpo": {"n_samples": 8, "max_new_tokens": 16},
        "rewards": {"digits": {"fn": "tests.tiny.share_of_digits"}},
        "generator": {"gpu_memory_utilization": 0.05, "enforce_eager": True, "engine": {"kv_cache_memory_bytes": 2**30}},
        "checkpoint": {"every": 2, "keep": 0}, "metrics": {"tensorboard": False},
    }  # fmt: skip
    run("train_grpo", tmp_path / "a", cfg)
    cut(tmp_path / "a", tmp_path / "b", 2)
    run("train_grpo", tmp_path / "b", cfg)
    assert numbers(tmp_path / "b", 1) == numbers(tmp_path / "a", 1)
    assert len(numbers(tmp_path / "a", 1)) == 4
    figures["tensors_equal"] = assert_same_bits(tmp_path / "b/checkpoints/step_4", tmp_path / "a/checkpoints/step_4")


def test_the_export_is_loaded_by_vllm_bit_for_bit(uninterrupted, tmp_path, figures):
    seen = scenario("exported", tmp_path, model=str(uninterrupted["bfloat16"] / "hf"))
    figures |= {name: seen[name] for name in ("tensors", "gap", "bf16_gap")}
    assert seen["tensors"] > 200 and seen["unequal"] == []
    assert seen["gap"] <= 1.5 * seen["bf16_gap"]  # as far from transformers' fp32 as transformers' own bf16
