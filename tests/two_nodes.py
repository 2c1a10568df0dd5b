"""Runs of two nodes: a small configuration, two torchrun agents that stand for nodes, and what must be as on one rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.world import ROOT

EXACT = ("reward/mean", "len/mean", "loss/tokens")
CLOSE = ("loss/policy", "kl/ref_k3", "entropy/mean", "grad/norm")


def write_config(folder: Path, name: str, model: Path | str, data: Path | str, **keys: Any) -> Path:
    """The file of a GRPO run of three steps whose folder is `folder`/name. keys: in place of its own."""
    file = folder / f"{name}.yaml"
    cfg: dict[str, Any] = {
        "model": str(model), "dataset": {"path": str(data)}, "rewards": {"digits": {"fn": "tests.tiny.share_of_digits"}},
        "training": {"steps": 3, "batch_size": 4, "seq_len": 24, "dtype": "float32", "learning_rate": 1e-4},
        "grpo": {"n_samples": 3, "max_new_tokens": 8, "beta": 0.1}, "checkpoint": {"every": 2, "export_hf": True},
        "device": "cpu", "output": str(folder / name),
    }  # fmt: skip
    file.write_text(json.dumps(cfg | keys))
    return file


def two_agents(
    script: str, *arguments: str | Path, nproc: int = 1, env: tuple[dict[str, str], dict[str, str]] = ({}, {})
) -> tuple[list[int], str]:
    """Exit codes of two agents of `nproc` ranks each that meet at a free port of this machine, and what both printed.

    env: variables of each agent's own.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranked = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in ranked} | {"OMP_NUM_THREADS": "1"}
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={nproc}"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-id=two", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command: list[str] = [*agent, *meeting, script, *map(str, arguments)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, cwd=ROOT, env=environment | own, **options) for own in env]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in agents]
    finally:
        for process in agents:
            process.terminate()
            process.wait()
    return [process.returncode for process in agents], "\n".join(outputs)


def steps(folder: Path) -> list[dict[str, float]]:
    """A run's lines of metrics.jsonl that are of training."""
    return [row for line in (folder / "metrics.jsonl").read_text().splitlines() if "grad/norm" in (row := json.loads(line))]


def assert_same_run(folder: Path, expected: Path) -> None:
    """The numbers of every step, the exported weights, the checkpoints and the files beside them are those of `expected`."""
    here, there = steps(folder), steps(expected)
    written, wanted = ([row["step"] for row in rows] for rows in (here, there))
    assert written == wanted != [], f"{written} and {wanted}"
    for mine, other in zip(here, there, strict=True):
        for name in EXACT:
            assert mine[name] == other[name], f"{name}: {mine[name]} and {other[name]}"
        for name in CLOSE:
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), f"{name}: {mine[name]} and {other[name]}"
    weights, others = (load_file(run / "hf/model.safetensors") for run in (folder, expected))
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    for inside in ("", "checkpoints"):
        listed, named = (sorted(p.name for p in (run / inside).iterdir()) for run in (folder, expected))
        assert listed == named, f"{listed} and {named}"
