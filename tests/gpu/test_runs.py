"""The scripts on one GPU: no error, every phase timed, memory the same after every step. Needs the GPU for itself."""

import statistics

from tests.gpu.timed import check_time_and_memory, run, sharing


def test_the_shape_of_qwen3_06b_with_an_engine_that_stays(shape_of, gsm8k, tmp_path, figures):
    """32 prompts x 8 answers x 512 tokens a step, for which the engine takes no more of its share than they need."""
    steps, printed = run(
        "train_grpo.py", tmp_path, model=shape_of("qwen3_06b"), dataset={"path": gsm8k},
        training={"steps": 20, "batch_size": 32, "seq_len": 1024, "learning_rate": 1e-6},
        grpo={"n_samples": 8, "max_new_tokens": 512}, rewards={"spread": {"fn": "tests.gpu.spread.spread"}},
        generator={"gpu_memory_utilization": 0.85},
    )  # fmt: skip
    figures["engine"] = sharing(printed)
    assert "so the engine stays" in figures["engine"]
    assert all(s["grad/norm"] > 0 and s["len/mean"] > 400 for s in steps)
    check_time_and_memory(steps, figures)
    figures["gap"] = statistics.fmean(s["mismatch/abs_mean"] for s in steps)


def test_smollm2_by_sft(smollm2, gsm8k, tmp_path, figures):
    steps, _ = run(
        "train_sft.py", tmp_path, model=smollm2, dataset={"path": gsm8k},
        training={"steps": 50, "batch_size": 32, "seq_len": 512, "learning_rate": 2e-5, "warmup_steps": 5},
    )  # fmt: skip
    losses = [s["loss/policy"] for s in steps]
    figures["loss"] = f"{losses[0]:.3f} to {statistics.fmean(losses[-5:]):.3f}"
    assert statistics.fmean(losses[-5:]) < losses[0]
    check_time_and_memory(steps, figures, engine=False)
