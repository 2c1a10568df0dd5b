"""bf16 computation over fp32 master weights: what it keeps, and how far it is from fp32."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gpu.conftest import scenario
from tests.gpu.precision import gradient_error


def test_small_steps_reach_the_weights_only_through_fp32_masters(smollm2, gsm8k, tmp_path, figures):
    """100 AdamW steps of 1e-6. A bf16 weight of 0.02 cannot move by less than 6e-5."""
    seen = scenario("moved", tmp_path, model=smollm2, data=gsm8k, steps=100, learning_rate=1e-6)
    figures |= seen
    assert seen["fp32"] > 0.99
    assert seen["bf16_of_fp32"] > 1.5 * seen["pure_bf16"]
    assert seen["first_loss"] == pytest.approx(seen["pure_first_loss"], rel=0.02)
    assert seen["loss"] < seen["pure_loss"]  # of the same last ten batches


def test_loss_and_gradient_are_the_cpus_in_fp32_within_bf16_noise(smollm2, gsm8k, tmp_path, figures):
    """fp32 on the GPU as well, where only the order of sums differs: the distance of bf16 is noise of bf16, not an error of ours."""

    def step(how: tuple[str, str]) -> dict[str, float]:
        device, dtype = how
        folder = tmp_path / f"{device}_{dtype}"
        folder.mkdir()
        return scenario("first_step", folder, model=smollm2, data=gsm8k, dtype=dtype, device=device, gradient=str(folder / "g.pt"))

    ways = [("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")]
    with ThreadPoolExecutor() as pool:
        cpu, exact, half = pool.map(step, ways)
    reference = tmp_path / "cpu_float32/g.pt"
    for name, seen, folder in (("fp32", exact, "cuda_float32"), ("bf16", half, "cuda_bfloat16")):
        figures[f"{name}_loss"] = abs(seen["loss"] / cpu["loss"] - 1)
        figures[f"{name}_norm"] = abs(seen["norm"] / cpu["norm"] - 1)
        figures[f"{name}_gradient"] = gradient_error(tmp_path / folder / "g.pt", reference)
    assert cpu["tokens"] == exact["tokens"] == half["tokens"] > 1000
    assert figures["fp32_loss"] <= 1e-5 and figures["fp32_norm"] <= 1e-4 and figures["fp32_gradient"] <= 1e-3
    assert figures["bf16_loss"] <= 0.01 and figures["bf16_norm"] <= 0.02 and figures["bf16_gradient"] <= 0.1
