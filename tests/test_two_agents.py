"""Two torchrun agents, as two nodes have them, are one world: the numbers of one rank, logs of the right rank, failures told once."""

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

from tests.world import ROOT, run_script

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path, tiny_qwen3, additions):
    """`config(name, **keys)`: the file of a small run whose folder is `tmp_path`/name."""

    def write(name: str, **keys: Any) -> Path:
        file = tmp_path / f"{name}.yaml"
        cfg: dict[str, Any] = {
            "model": str(tiny_qwen3), "dataset": {"path": str(additions)}, "rewards": {"digits": {"fn": "tests.tiny.share_of_digits"}},
            "training": {"steps": 3, "batch_size": 4, "seq_len": 24, "dtype": "float32", "learning_rate": 1e-4},
            "grpo": {"n_samples": 3, "max_new_tokens": 8, "beta": 0.1}, "checkpoint": {"every": 2, "export_hf": True},
            "device": "cpu", "output": str(tmp_path / name),
        }  # fmt: skip
        file.write_text(json.dumps(cfg | keys))
        return file

    return write


def two_agents(*arguments: str | Path) -> tuple[list[int], str]:
    """Exit codes of two agents of one rank each that meet at a free port of this machine, and what both printed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranked = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in ranked} | {"OMP_NUM_THREADS": "1"}
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two"]
    command: list[str] = [*agent, f"--rdzv-endpoint=127.0.0.1:{port}", "train_grpo.py", *map(str, arguments)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, cwd=ROOT, env=environment, **options) for _ in range(2)]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in agents]
    finally:
        for process in agents:
            process.terminate()
            process.wait()
    return [process.returncode for process in agents], "\n".join(outputs)


def steps(folder: Path) -> list[dict[str, float]]:
    return [row for line in (folder / "metrics.jsonl").read_text().splitlines() if "grad/norm" in (row := json.loads(line))]


def test_roles_on_two_agents_are_one_run_with_the_numbers_of_one_rank(config, tmp_path):
    run_script(1, "train_grpo.py", str(config("one")))
    roles = {"trainer": {"procs": 1}, "ref_model": {"with_gpus": False}, "generator": {"procs": 1}}
    codes, output = two_agents(config("two", services=roles))
    assert codes == [0, 0], output
    assert output.count("run folder ") == 1
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(one) == len(two) == 3
    for here, there in zip(two, one, strict=True):
        for name in ("reward/mean", "len/mean", "loss/tokens"):
            assert here[name] == there[name]
        for name in ("loss/policy", "kl/ref_k3", "entropy/mean", "grad/norm"):
            assert here[name] == pytest.approx(there[name], rel=1e-5, abs=1e-7)
    weights, expected = (load_file(tmp_path / name / "hf/model.safetensors") for name in ("two", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in (tmp_path / "two/checkpoints").iterdir()) == ["step_2", "step_3"]


def test_what_does_not_fit_is_told_once_for_both_agents(config):
    services = {"trainer": {"procs": 2}, "ref_model": {"with_gpus": False}, "generator": {"procs": 1}}
    codes, output = two_agents(config("three", services=services))
    assert 0 not in codes
    assert output.count("the roles need 3 ranks and there are 2; start more (--nproc 3), lower services.*.procs, or") == 1
