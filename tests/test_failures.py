"""What goes wrong ends the whole job at once, with one message that says what to change. Real jobs, under torchrun."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.world import ROOT, run_script

RAISES = """
def grade(prompt, response, target):
    if prompt == "PROMPT":
        raise KeyError("no grade for this one")
    return float(len(response))
"""


def processes_of(folder: Path) -> list[int]:
    """Those that were started with `folder` in their command line."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in command.read_bytes():
                found.append(int(command.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return found


@pytest.fixture
def job(tmp_path, tiny_qwen3, additions):
    """Arguments of a small run in `tmp_path`. Afterwards none of its processes is left."""
    config = tmp_path / "small.yaml"
    lines = {
        "model": str(tiny_qwen3),
        "dataset": {"path": str(additions)},
        "training": {"steps": 2, "batch_size": 4, "seq_len": 32, "dtype": "float32"},
        "grpo": {"n_samples": 2, "max_new_tokens": 8},
        "rewards": {"digits": "rollout.rewards.DigitsReward"},
        "device": "cpu",
        "output": str(tmp_path / "run"),
    }
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items()))
    yield ["train_grpo.py", str(config)]
    assert processes_of(tmp_path) == []


def begin(ranks: int, folder: Path, *arguments: str) -> subprocess.Popen:
    """A job in the background, whose output goes to `folder`/console.txt."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    with (folder / "console.txt").open("wb") as console:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=console, stderr=subprocess.STDOUT)


def failure(ranks: int, *arguments: str) -> str:
    """What a job that fails has printed, without the report of torchrun, which is the same for every failure."""
    done = run_script(ranks, *arguments, check=False, timeout_s=400)
    assert done.returncode not in (0, None), done.stdout
    lines = done.stdout.splitlines(keepends=True)
    report = next((i for i, line in enumerate(lines) if "multiprocessing/api.py" in line and "failed (exitcode: " in line), None)
    assert report is not None, done.stdout
    # Where a rank was killed, torchrun says that it ends the others before one of them says in which phase it was.
    return "".join(line for line in lines[:report] if "multiprocessing/api.py" not in line)


KILLS = """
import os, signal
from losses import PolicyLoss

class Deadly(PolicyLoss):
    averaging = "token"

    def per_token(self, logprobs, advantages):
        if os.environ["RANK"] == "1" and os.path.exists("METRICS"):
            os.kill(os.getpid(), signal.SIGKILL)
        return -logprobs * advantages
"""


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


def test_a_bad_configuration_is_told_once_before_anything_starts(job, tmp_path):
    output = failure(3, *job, "training.learning_rte=1e-6")
    assert len(errors(output)) == 1
    assert errors(output)[0].startswith("error: unknown key training.learning_rte. Did you mean learning_rate? Keys of training: steps,")
    assert "Traceback" not in output and "rank " not in output
    assert not (tmp_path / "run").exists()


def test_a_wrong_number_of_ranks_is_told_once_with_the_rank_table(job, tmp_path):
    output = failure(2, *job, "services={trainer: {procs: 2}, generator: {procs: 1}}")
    assert "error: the services do not fit:\n  trainer    0-1            2 ranks\n  generator  2              1 ranks\n" in output
    assert output.count("the roles need 3 ranks and there are 2; start more (--nproc 3)") == 1
    assert not (tmp_path / "run").exists()


CANNOT_START = {
    "a model that is not there": (["model=/nowhere/m"], "model=/nowhere/m cannot be loaded: there is no such folder. Give a folder"),
    "too many tensor-parallel ranks": (
        ["parallelism.tensor_parallel_degree=3"],
        "parallelism.tensor_parallel_degree=3 does not divide the model's 4 attention heads",
    ),
    "engine ranks that do not divide the heads": (
        ["colocate=true", "services.generator.procs=3"],
        "services.generator.procs=3 does not divide the model's 4 attention heads",
    ),
    "sequences longer than the model's positions": (["training.seq_len=512"], "training.seq_len=512 exceeds the model's 256 positions"),
    "a column that is not there": (["dataset.prompt=question"], "dataset.prompt=question is not a column; there are ['answer', 'prompt']"),
    "prompts that are all too long": (["training.seq_len=4"], "fits: the limit is 3 tokens and the shortest of 200 prompts has 4; raise "),
}
IN_CI = {"a model that is not there", "too many tensor-parallel ranks", "a column that is not there"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [pytest.param(*case, id=name, marks=[] if name in IN_CI else pytest.mark.slow) for name, case in CANNOT_START.items()],
)
def test_what_cannot_start_ends_every_rank_with_one_message(overrides, message, job):
    output = failure(3, *job, *overrides)
    assert len(errors(output)) == 1, output
    assert message in errors(output)[0]
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_checkpoint_without_weights_is_named(job, tmp_path, tiny_qwen3):
    shutil.copytree(tiny_qwen3, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    output = failure(2, *job, f"model={tmp_path / 'bare'}")
    assert len(errors(output)) == 1
    assert f"model={tmp_path / 'bare'} cannot be loaded: " in output and "no file named model.safetensors" in output


def test_a_reward_that_raises_on_one_sample_stops_every_rank_and_names_itself_and_the_sample(job, tmp_path, additions):
    prompt = json.loads(additions.read_text().splitlines()[5])["prompt"]
    (tmp_path / "graders.py").write_text(RAISES.replace("PROMPT", prompt))
    rewards = f"rewards={{odd: '{tmp_path}/graders.py:grade'}}"
    # Streamed rows come in the file's order: the sixth prompt is in the second step, when all has gone well once.
    output = failure(2, *job, rewards, "dataset.streaming=true")
    told = "RewardError: rewards.odd, prompt 5, sample 0 (response "
    assert output.count(told) == 1
    assert "raised KeyError: 'no grade for this one'" in output
    assert 'graders.py", line 4, in grade' in output  # where in the user's own file
    assert len([line for line in output.splitlines() if " failed:" in line]) == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == [1]


# Whether the other rank saw the loss itself or torchrun was faster.
LAST_WORDS = r"^rank \d (?:lost another rank in phase \w+\.|was told to end \(SIGTERM\) in phase \w+:) "


@pytest.mark.parametrize("engine_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_death_of_one_rank_ends_the_job(engine_ranks, job, tmp_path):
    extra = ["training.steps=100000", "colocate=true", f"services.generator.procs={engine_ranks}"]
    torchrun = begin(2, tmp_path, *job, *extra)
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, 400, torchrun)
        victim = max(processes_of(tmp_path))
        shared = {line.split(maxsplit=5)[5] for line in Path(f"/proc/{victim}/maps").read_text().splitlines() if "/dev/shm/" in line}
        os.kill(victim, signal.SIGKILL)
        assert torchrun.wait(timeout=600) != 0  # a guard against hanging for ever, not a bound
    finally:
        torchrun.terminate()
        torchrun.wait()
    left = {name for name in shared if Path(name).exists()}
    for name in left:
        Path(name).unlink()
    assert left == set() or engine_ranks > 1  # a killed engine of several ranks leaves vLLM's segments, 4 MiB a rank
    text = (tmp_path / "console.txt").read_text()
    assert "Signal 9 (SIGKILL)" in text
    assert len(re.findall(LAST_WORDS, text, re.MULTILINE)) == 1


def test_a_rank_killed_while_it_trains_makes_another_name_the_phase(job, tmp_path):
    (tmp_path / "deadly.py").write_text(KILLS.replace("METRICS", str(tmp_path / "run/metrics.jsonl")))
    output = failure(3, *job, f"loss={tmp_path}/deadly.py:Deadly")
    told = [line for line in output.splitlines() if re.match(LAST_WORDS, line)]
    assert len(told) == 1 and " in phase train" in told[0], output


def until(happened, timeout_s: float, process: subprocess.Popen) -> None:
    end = time.monotonic() + timeout_s
    while not happened():
        assert process.poll() is None, f"the job ended by itself with status {process.returncode}"
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.2)


def wait_for_checkpoint(job: list[str], tmp_path: Path, *extra: str) -> subprocess.Popen:
    """A job of two ranks that goes on for ever, once it has a checkpoint."""
    torchrun = begin(2, tmp_path, *job, *extra)
    try:
        until(lambda: any((tmp_path / "run/checkpoints").glob("step_*/WHOLE")), 400, torchrun)
    except AssertionError:
        torchrun.terminate()
        torchrun.wait()
        raise
    return torchrun


def test_a_stopped_rank_ends_the_job_which_goes_on_from_its_checkpoint(job, tmp_path):
    job += ["checkpoint.every=1", "checkpoint.keep=1"]
    torchrun = wait_for_checkpoint(job, tmp_path, "training.steps=100000")
    victim = max(processes_of(tmp_path))
    try:
        os.kill(victim, signal.SIGSTOP)
        assert torchrun.wait(timeout=600) != 0  # a guard against hanging for ever, not a bound
    finally:
        torchrun.terminate()
        torchrun.wait()
    text = (tmp_path / "console.txt").read_text()
    told = re.findall(r"^rank (\d) has not been heard of for \d+ s: its process \((\d+) on \S+\) .* It was in phase (\w+)\.", text, re.M)
    assert len(told) == 1 and told[0][1] == str(victim), text
    done = int(max((tmp_path / "run/checkpoints").glob("step_*"), key=lambda p: int(p.name[5:])).name[5:])
    run_script(2, *job, f"training.steps={done + 1}")
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == list(range(1, done + 2))


SLEEPS = """
import time

def grade(prompt, response, target):
    time.sleep(10_000)
"""


def test_a_job_in_which_nothing_moves_ends_and_says_where_every_rank_is(job, tmp_path):
    (tmp_path / "graders.py").write_text(SLEEPS)
    rewards = f"rewards={{slow: '{tmp_path}/graders.py:grade'}}"
    services = "services={trainer: {procs: 2}, generator: {procs: 1}}"
    output = failure(3, *job, rewards, services, "training.stall_timeout_s=6")
    assert output.count("nothing has moved on any rank for 6 s (training.stall_timeout_s; ") == 1, output
    assert re.search(rf"^  rank 2: in phase reward, {tmp_path}/graders.py:5 in grade: time.sleep\(10_000\)$", output, re.M), output
    assert re.search(r"^  rank 0, 1: in phase wait, parallel/exchange.py:\d+ in \w+: ", output, re.M), output
