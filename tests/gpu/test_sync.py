"""Fifty rounds of optimizer step and weight sync, from fp32 masters to a bf16 engine, and what a sync's parts take."""

import pytest

from tests.gpu.conftest import scenario

ROUNDS = 50


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_after_every_sync_the_engine_is_the_policy_bit_for_bit(head, smollm2, shape_of, tmp_path, figures):
    model = smollm2 if head == "tied" else shape_of("llama_untied")
    seen = scenario("sync", tmp_path, model=model, rounds=ROUNDS, learning_rate=1e-5)
    gaps = seen["gaps"]
    figures |= {"rounds": ROUNDS, "tensors": seen["tensors"], "gap_before": gaps[0], "gap_mean": sum(gaps[1:]) / ROUNDS}
    figures |= {"gap_max": max(gaps[1:]), "gap_last": gaps[-1], "norm_min": min(seen["norms"])}
    figures |= {name: seen[name] for name in ("moved", "moved_least")}
    assert len(gaps) == ROUNDS + 1 and min(seen["norms"]) > 0
    assert seen["names"] and seen["unequal"] == []
    assert seen["moved_least"] > 0  # every matrix of the engine changed
    assert max(gaps[1:]) <= 2 * gaps[0]
    assert "differs from the trainer's" in seen["fault"]  # one flipped bit is found


def test_the_host_waits_for_the_gpu_a_few_times_a_sync_and_not_once_a_tensor(shape_of, tmp_path, figures):
    """The seconds of each part are among the figures."""
    seen = scenario("stages", tmp_path, model=shape_of("qwen3_06b"), rounds=7)
    figures |= seen
    assert seen["tensors"] == 310 and 0 < seen["waits"] <= 5
