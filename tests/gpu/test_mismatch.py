"""Sampler against trainer on the GPU: where they part, by how much, and what training.match_sampler changes (docs/mismatch.md)."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.world import ROOT


def doctor(model: Any, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rollout.doctor", str(model), "--json", "--tokens", "256", "--device", "cuda", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engine_is_followed_layer_by_layer_and_differs_by_rounding(smollm2, figures, dtype):
    report = doctor(smollm2, "--dtype", dtype)
    figures["first"] = report["first_difference"]
    figures |= {pair: numbers["mismatch/abs_mean"] for pair, numbers in report["logprobs"].items()}
    assert report["places"]["embedding"]["gap"]["max"] == 0 and report["suspect"] is None
    assert len(report["places"]) == 3 + 30 * 8
    assert report["logprobs"]["trainer - sampled"]["mismatch/abs_mean"] < (0.1 if dtype == "bfloat16" else 1e-3)


def test_rounding_as_a_compiled_engine_does_makes_the_gap_no_wider(smollm2, figures):
    """In bf16, with graphs and compilation as a run has them."""
    gaps = {}
    for name, more in {"plain": [], "matched": ["--match"]}.items():
        numbers = doctor(smollm2, "--compiled", *more)["logprobs"]["trainer - sampled"]
        gaps[name] = numbers["mismatch/abs_mean"]
        figures |= {f"{name}_mean": gaps[name], f"{name}_max": numbers["mismatch/abs_max"], f"{name}_k3": numbers["mismatch/k3"]}
        figures[f"{name}_ess"] = numbers["is/ess_token"]
    assert gaps["matched"] <= 1.1 * gaps["plain"] < 0.1
