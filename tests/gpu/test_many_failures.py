"""A rank that is killed, and one that stops, end a run on all GPUs with the reason in view, and the run goes on from its checkpoint."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.gpu.conftest import REHEARSED, start, steps_of
from tests.gpu.many import DEVICE, RANKS, needs_two
from tests.test_failures import LAST_WORDS, begin, processes_of, until

pytestmark = needs_two
SAID = {
    signal.SIGKILL: rf"(?m){LAST_WORDS}",  # and torchrun names the rank and the signal
    signal.SIGSTOP: r"rank 1 has not been heard of",
}
ENDED_S = 300  # a guard against hanging for ever; how long it took is among the figures


@pytest.fixture
def config(checkpoint_of, additions, tmp_path) -> str:
    """Of a run that takes long and saves each second step."""
    training = {"steps": 100_000, "batch_size": 8, "seq_len": 32} | ({"dtype": "float32"} if REHEARSED else {})
    keys = {
        "model": str(checkpoint_of("qwen3")), "dataset": {"path": str(additions)}, "device": DEVICE, "output": str(tmp_path / "run"),
        "training": training, "grpo": {"n_samples": 4, "max_new_tokens": 8},
        "rewards": {"digits": {"fn": "tests.tiny.share_of_digits"}}, "checkpoint": {"every": 2, "keep": 2},
        "generator": {"gpu_memory_utilization": 0.05, "enforce_eager": True}, "metrics": {"tensorboard": False},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(keys))
    return str(tmp_path / "config.yaml")


def process_of(rank: int, folder: Path) -> int:
    """The process of this rank of the run whose config is in `folder`."""
    mine = [pid for pid in processes_of(folder) if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    return min(mine)


def whole(output: Path) -> list[Path]:
    return list(output.glob("checkpoints/step_*/WHOLE"))


@pytest.mark.parametrize("sent", SAID, ids=lambda s: s.name)
def test_a_lost_rank_ends_the_run_with_the_reason_and_it_goes_on_from_its_checkpoint(sent, config, tmp_path, figures):
    output = tmp_path / "run"
    torchrun = begin(RANKS, tmp_path, "train_grpo.py", config)
    try:
        until(lambda: whole(output), 400, torchrun)
        os.kill(process_of(1, tmp_path), sent)
        lost = time.monotonic()
        status = torchrun.wait(timeout=ENDED_S)
        figures["seconds_to_the_end"] = time.monotonic() - lost
    finally:
        for pid in processes_of(tmp_path):  # its own; a stopped rank would outlive torchrun
            os.kill(pid, signal.SIGKILL)
        torchrun.wait()
    printed = (tmp_path / "console.txt").read_text()
    words = [line for line in printed.splitlines() if re.search(SAID[sent], line)]
    assert status != 0 and len(words) == 1, printed[-6000:]
    figures["said"] = words[0]
    if sent == signal.SIGKILL:
        assert "Signal 9 (SIGKILL)" in printed
    saved = max(int(path.parent.name.removeprefix("step_")) for path in whole(output))
    figures["resumed_after"] = saved
    start("train_grpo.py", config, f"training.steps={saved + 2}", nproc=RANKS, timeout_s=400)
    assert [s["step"] for s in steps_of(output)] == list(range(1, saved + 3))
