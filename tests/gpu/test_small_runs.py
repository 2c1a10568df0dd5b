"""Small models on one GPU: SmolLM2 by GRPO, and the demo's road, SFT and then GRPO. Needs the GPU for itself."""

import json
import statistics

import pytest

from tests.gpu.timed import check_time_and_memory, run, sharing
from tests.tiny import make_checkpoint, write_additions


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


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A tiny model and additions of two-digit numbers; after supervised training it gets some of them right."""
    folder = tmp_path_factory.mktemp("demo")
    model = make_checkpoint(folder / "model", hidden=128, layers=4)
    data = write_additions(folder / "train.jsonl", 4000)
    training = {"steps": 400, "batch_size": 128, "seq_len": 32, "learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 20}
    options = {"checkpoint": {"export_hf": True}, "metrics": {"tensorboard": False}}
    steps, _ = run("train_sft.py", folder / "sft", model=str(model), dataset={"path": str(data)}, training=training, **options)
    return folder, steps


def test_the_demo_learns_by_grpo_after_sft(demo, tmp_path, figures):
    folder, sft = demo
    figures["sft_loss"] = f"{sft[0]['loss/policy']:.2f} to {sft[-1]['loss/policy']:.2f}"
    held_out = write_additions(tmp_path / "test.jsonl", 256, first=5000)
    steps, printed = run(
        "train_grpo.py", tmp_path, model=str(folder / "sft/run/hf"), dataset={"path": str(folder / "train.jsonl")},
        training={"steps": 20, "batch_size": 64, "seq_len": 32, "learning_rate": 1e-4},
        grpo={"n_samples": 8, "beta": 0.01}, rewards={"digits": {"fn": "rollout.rewards.DigitsReward", "partial": 0.2}},
        eval={"dataset": {"path": str(held_out)}}, generator={"gpu_memory_utilization": 0.3},
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    rewards = [s["reward/mean"] for s in steps]
    figures |= {"accuracy": f"{accuracy[0]:.2f} to {accuracy[-1]:.2f}", "engine": sharing(printed)}
    figures |= {"reward": f"{statistics.fmean(rewards[:5]):.2f} to {statistics.fmean(rewards[-5:]):.2f}"}
    assert "mem/used_gib" in steps[0] and all("kl/ref_k3" in s for s in steps)
    check_time_and_memory(steps, figures)
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5])
