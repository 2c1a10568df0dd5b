"""A run as a user starts it, and what its metrics must say whatever it trains."""

import json
import statistics
from pathlib import Path
from typing import Any

from tests.gpu.conftest import start, steps_of


def run(script: str, folder: Path, **keys: Any) -> tuple[list[dict[str, Any]], str]:
    """Its steps and what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(keys | {"output": str(folder / "run")}))
    done = start(script, str(folder / "config.yaml"), timeout_s=450)
    steps = steps_of(folder / "run")
    assert [s["step"] for s in steps] == list(range(1, keys["training"]["steps"] + 1))
    return steps, done.stdout


def check_time_and_memory(steps: list[dict[str, Any]], figures: dict[str, Any], *, engine: bool = True) -> None:
    """The first step also makes the optimizer's moments; from the second on all are alike.

    The phases that must take time are looked at one by one, and what no phase explains may be 3 % in the mean over the steps.

    Without an engine nobody asks torch to give unused blocks back, and only live tensors must come back to the same figure.
    """
    later = steps[1:]
    busy = ("data", "generate", "train", "sync") if engine else ("data", "train")
    for step in steps:
        reference = ("logp_ref",) if "kl/ref_k3" in step else ()
        assert min(step[f"time/{name}"] for name in busy + reference) > 0, step
    other = sum(s["time/other"] for s in later) / sum(s["time/step"] for s in later)
    figures["unexplained"] = other
    figures["unexplained_worst"] = max(s["time/other"] / s["time/step"] for s in later)
    figures["step_s"] = statistics.median(s["time/step"] for s in later)
    for name in ("generate", "train", "sync", "reward", "logp_ref", "data", "sleep", "log", "wait"):
        figures[f"{name}_s"] = statistics.median(s[f"time/{name}"] for s in later)
    for name in ("generate", "train"):
        rates = [s[f"perf/tok_s_{name}"] for s in later if f"perf/tok_s_{name}" in s]
        if rates:
            figures[f"{name}_tok_s"] = statistics.median(rates)
    for name in ("used", "allocated"):
        values = [s[f"mem/{name}_gib"] for s in later]
        figures[f"{name}_gib"] = f"{min(values):.2f}-{max(values):.2f}"
    figures["peak_gib"] = max(s["mem/peak_gib"] for s in later)
    for name in ("used", "allocated") if engine else ("allocated",):
        values = [s[f"mem/{name}_gib"] for s in later]
        assert max(values) - min(values) <= 0.05, f"mem/{name}_gib: {values}"
    assert other <= 0.03, f"unexplained time: {[round(s['time/other'], 3) for s in later]}"


def sharing(printed: str) -> str:
    line = next(line for line in printed.splitlines() if line.startswith("engine and trainer share a GPU"))
    return line.partition(": ")[2]
