"""Out of GPU memory: one message that says what to change, a failing exit code, a free GPU. Needs the GPU for itself."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import scenario, start
from tests.tiny import write_additions

GIB = 2**30


def free() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def cfg(checkpoint_of, tmp_path):
    """GRPO on a tiny model."""
    return {
        "model": str(checkpoint_of("qwen3", dtype=torch.bfloat16)),
        "dataset": {"path": str(write_additions(tmp_path / "additions.jsonl", 64))},
        "training": {"steps": 2, "batch_size": 8, "seq_len": 64},
        "grpo": {"n_samples": 8, "max_new_tokens": 16},
        "rewards": {"spread": {"fn": "tests.gpu.spread.spread"}},
        "generator": {"gpu_memory_utilization": 0.3, "enforce_eager": True},
        "metrics": {"tensorboard": False}, "output": str(tmp_path / "run"),
    }  # fmt: skip


def failure(figures: dict, before: int, script: str, *args: str) -> str:
    """The one line that the failing script ends with; afterwards the GPU is as free as `before`."""
    done: subprocess.CompletedProcess[str] = start(script, *args, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(lines) == 1, done.stdout[-6000:]
    assert done.stdout.count("Traceback") == 1, done.stdout[-6000:]  # torchrun's own, after ours has ended
    figures["message"] = lines[0]
    for _ in range(20):
        if before - free() < 64 * 2**20:
            break
        time.sleep(0.25)  # the driver takes a moment after a process has gone
    figures["not_released_mib"] = max(0, before - free()) // 2**20
    assert figures["not_released_mib"] < 64
    return lines[0]


def written(tmp_path: Path, cfg: dict) -> str:
    (tmp_path / "config.yaml").write_text(json.dumps(cfg))
    return str(tmp_path / "config.yaml")


def test_an_engine_that_finds_the_gpu_taken_says_so_at_start(cfg, tmp_path, figures):
    taken = torch.empty(free() - 20 * GIB, dtype=torch.uint8, device="cuda")
    message = failure(figures, free(), "train_grpo.py", written(tmp_path, cfg))
    del taken
    assert "out of GPU memory while starting the engine" in message and "Lower generator.gpu_memory_utilization" in message
    assert "GiB needed" in message and "GiB free" in message


def test_an_engine_whose_share_is_too_small_says_so_at_start(cfg, shape_of, tmp_path, figures):
    cfg["model"] = shape_of("qwen3_06b")
    cfg["generator"]["gpu_memory_utilization"] = 0.005  # 0.7 GiB, for weights of 1.1
    message = failure(figures, free(), "train_grpo.py", written(tmp_path, cfg))
    assert "out of GPU memory while starting the engine" in message and "Raise generator.gpu_memory_utilization" in message
    assert re.search(r"more than its share of [\d.]+ GiB needed", message) and "GiB free" in message


def test_sampling_without_memory_names_the_keys(cfg, shape_of, tmp_path, figures):
    """The first evaluation's reward takes the memory that the first step's sampling would need."""
    cfg["model"] = shape_of("qwen3_06b")
    cfg["eval"] = {"dataset": cfg["dataset"], "max_prompts": 1}
    cfg["training"] |= {"batch_size": 32}
    cfg["rewards"] = {"hog": {"fn": "tests.gpu.spread.Hog", "left_mib": 16}}
    message = failure(figures, free(), "train_grpo.py", written(tmp_path, cfg))
    assert "out of GPU memory while sampling" in message and "generator.max_num_seqs" in message
    assert "iB needed" in message and "GiB free" in message


def test_training_beside_the_engine_without_memory_names_the_keys(cfg, shape_of, tmp_path, figures):
    cfg["model"] = shape_of("qwen3_06b")
    cfg["rewards"] = {"hog": {"fn": "tests.gpu.spread.Hog", "left_mib": 1024}}
    message = failure(figures, free(), "train_grpo.py", written(tmp_path, cfg))
    assert "out of GPU memory while training" in message and "training.max_tokens_per_batch" in message
    assert "iB needed" in message and "GiB free" in message


def test_rows_that_are_too_long_to_train_on_name_the_keys(shape_of, tmp_path, figures):
    """Supervised: one row of 64 x 4,096 tokens of the 0.6B shape wants more than any GPU has."""
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}", "answer": " word" * 8000}) + "\n" for i in range(64)))
    training = {"steps": 1, "batch_size": 64, "seq_len": 4096, "max_tokens_per_batch": 64 * 4096}
    cfg = {"model": shape_of("qwen3_06b"), "dataset": {"path": str(data)}, "training": training, "output": str(tmp_path / "run")}
    message = failure(figures, free(), "train_sft.py", written(tmp_path, cfg))
    assert "out of GPU memory while training" in message and "training.max_tokens_per_batch" in message
    assert "iB needed" in message and "GiB free" in message


def test_an_engine_that_cannot_wake_up_says_so(checkpoint_of, tmp_path, figures):
    spec = {"run": "waking", "nproc": 1, "arguments": {"model": str(checkpoint_of("qwen3", dtype=torch.bfloat16))}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    message = failure(figures, free(), "tests/gpu/driver.py", str(tmp_path / "spec.json"), str(tmp_path / "report.json"))
    assert "out of GPU memory while waking the engine" in message and "generator.gpu_memory_utilization" in message
    assert "iB needed" in message and "GiB free" in message


def test_the_bytes_that_a_plan_tells_are_those_of_live_tensors(shape_of, tmp_path, figures):
    """Of the 0.6B shape, with two rows of 16,384 tokens and as many keys as packing allows; the engine's cache is what vLLM's own buffers
    leave of its share.
    """
    seen = scenario("budget", tmp_path, model=shape_of("qwen3_06b"))
    live, told = seen["live"], seen["told"]
    assert live.keys() == told.keys()
    for name in told:
        figures[f"{name}_gib"], figures[f"{name}_told_gib"] = round(live[name] / GIB, 3), round(told[name] / GIB, 3)
    print(figures)
    for name in ("weights", "reference", "gradients", "moments", "engine_weights", "peak"):
        assert told[name] == pytest.approx(live[name], rel=0.1), name
    assert live["scoring"] <= told["scoring"] and 0.8 * told["engine_kv_cache"] <= live["engine_kv_cache"] <= told["engine_kv_cache"]
    assert seen["parked"] < 2**20 and seen["equal"]
    kept = {"stays": 2, "drops its KV cache": 1, "sleeps": 0}[seen["choice"]]
    assert sum(count > 0 for count in seen["asleep"].values()) == kept
