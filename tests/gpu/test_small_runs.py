"""Small models on one GPU: SmolLM2 by GRPO, and the demo. Needs the GPU for itself."""

import json
import os
import subprocess
import sys

from tests.gpu.conftest import steps_of
from tests.gpu.timed import check_time_and_memory, run, sharing
from tests.world import ROOT


def test_smollm2_on_gsm8k_with_an_engine_that_sleeps(smollm2, gsm8k, tmp_path, figures):
    """Rows of 512k tokens are announced and never come: so the engine expects no room and sleeps at level 2."""
    steps, printed = run(
        "train_grpo.py", tmp_path, model=smollm2, dataset={"path": gsm8k},
        training={"steps": 20, "batch_size": 8, "seq_len": 512, "learning_rate": 1e-6, "max_tokens_per_batch": 2**19},
        grpo={"n_samples": 8, "max_new_tokens": 128}, rewards={"math": {"fn": "rollout.rewards.MathReward"}},
        generator={"gpu_memory_utilization": 0.5},
    )  # fmt: skip
    figures["engine"] = sharing(printed)
    assert "the engine sleeps" in figures["engine"]
    check_time_and_memory(steps, figures)


def test_the_demo_learns(tmp_path, figures):
    """As a user runs it, on one GPU: fp32, two updates a rollout, the engine beside the trainer."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    command = [sys.executable, "demo.py", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    figures |= summary["accuracy"] | {f"{name}_seconds": seconds for name, seconds in summary["seconds"].items()}
    figures["engine"] = sharing(done.stdout)
    steps = steps_of(tmp_path / "grpo")
    assert len(steps) == 75 and all(s["grad/norm"] > 0 for s in steps)
    assert summary["accuracy"]["grpo"] > 0.85 > 0.65 > summary["accuracy"]["sft"]
    check_time_and_memory(steps, figures)
