"""run.sh under a real SLURM with two nodes: one world, one exit code, and a run with the numbers of one rank."""

import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.two_nodes import assert_same_run, write_config
from tests.world import ROOT, run_script

pytestmark = pytest.mark.slow

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
line = f"RANK {dist.get_rank()} NODE {os.environ['SLURM_NODEID']} SUM {int(total)}\\n"
os.write(1, line.encode())  # whole, whoever else prints
if dist.get_rank() == 3 and "LAST_RANK_EXITS" in os.environ:
    os._exit(int(os.environ["LAST_RANK_EXITS"]))
dist.barrier()
dist.destroy_process_group()
"""


def idle_nodes() -> int:
    done = subprocess.run(["timeout", "10", "sinfo", "-h", "-N", "-o", "%T"], text=True, capture_output=True)
    return done.stdout.split().count("idle")


@pytest.fixture(scope="module", autouse=True)
def two_idle_nodes():
    if not shutil.which("sbatch") or idle_nodes() < 2:
        pytest.skip("no SLURM with two idle nodes; tests/slurm/start_two_nodes.sh starts one")


def submit(*arguments: str, output: Path, **env: str) -> tuple[str, str]:
    """Runs a job of two nodes to its end: its state, and what it printed."""
    command = ["sbatch", "--parsable", "--nodes=2", f"--output={output}", "run.sh", *arguments]
    environment = os.environ | {"PYTHON": sys.executable} | env
    job = subprocess.check_output(command, cwd=ROOT, env=environment, text=True).strip()
    shown = ""
    for _ in range(1200):
        shown = subprocess.check_output(["scontrol", "show", "job", job], text=True)
        state = next(word.split("=")[1] for word in shown.split() if word.startswith("JobState="))
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return state, output.read_text()
        time.sleep(0.5)
    subprocess.run(["scancel", job], check=True)
    raise AssertionError(f"the job did not end in 600 s:\n{shown}\n{output.read_text() if output.exists() else ''}")


def test_a_slurm_job_of_two_nodes_is_one_world_and_its_exit_code_is_the_runs(tmp_path):
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    state, printed = submit(str(script), "--nproc", "2", output=tmp_path / "good.log")
    ranks = sorted(line for line in printed.splitlines() if line.startswith("RANK"))
    assert ranks == [f"RANK {rank} NODE {rank // 2} SUM 6" for rank in range(4)], printed
    assert state == "COMPLETED", printed
    state, printed = submit(str(script), "--nproc", "2", output=tmp_path / "bad.log", LAST_RANK_EXITS="7")
    assert state == "FAILED" and "all_reduce.py FAILED" in printed, printed


def test_a_slurm_job_that_trains_on_two_nodes_is_one_run_with_the_numbers_of_one_rank(tmp_path, tiny_qwen3, additions):
    """The trainer's three ranks are on both nodes, the reference's with them; the engine is on the second."""
    config = partial(write_config, tmp_path, model=tiny_qwen3, data=additions)
    training = {"steps": 2, "batch_size": 4, "seq_len": 24, "dtype": "float32", "learning_rate": 1e-4}
    run_script(1, "train_grpo.py", str(config("one", training=training)))
    roles = {"trainer": {"procs": 3}, "ref_model": {"with_gpus": False}, "generator": {"procs": 1}}
    spread = config("two", training=training, services=roles)
    state, printed = submit("--nproc=2", "train_grpo.py", str(spread), output=tmp_path / "job.log", TOKENIZERS_PARALLELISM="false")
    assert state == "COMPLETED", printed
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert printed.count("run folder ") == printed.count("  trainer     0-2 ") == printed.count("  generator   3 ") == 1, printed
    assert len(re.findall(r"^ *2/2 ", printed, re.MULTILINE)) == 1, printed
    assert len(list((tmp_path / "two").rglob("events.out.*"))) == 1
    shards = sorted(p.name for p in (tmp_path / "two/checkpoints/step_2").glob("*.distcp"))
    assert shards == [f"__{rank}_0.distcp" for rank in range(3)]
