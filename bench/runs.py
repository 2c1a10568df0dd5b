"""Whole runs of train_grpo.py and of TRL's GRPOTrainer on the same work, each a process of its own, and what they say of each step."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import trl_peer
from bench.measure import now, since, stop, tell, versions
from config import Call
from data import DatasetConfig, PromptStream
from model import ModelSource
from parallel.hardware import device_type

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("generate", "reward", "data", "logp_old", "train", "sleep", "sync", "log")
LONGEST_RUN_S = 3600


@dataclass(frozen=True)
class Work:
    """What both sides do: one rollout and one optimizer step, over and over."""

    model: str  # a checkpoint's folder
    data: str  # a JSONL file that `data.PromptStream` reads
    prompts: int  # of a step
    samples: int  # of a prompt
    new_tokens: int  # of a sample at most
    steps: int
    seq_len: int
    dtype: str  # of the computation; weights and AdamW are float32
    device: str
    reward: dict[str, Any]  # as in the project's `rewards`: fn and its options
    learning_rate: float = 1e-6
    seed: int = 0
    adam_beta2: float = 0.95
    memory: float = 0.4  # share of a GPU's memory for the engine
    micro_batch: int = 8  # TRL's sequences in one forward pass
    row_tokens: int = 16384  # the project's tokens in one forward pass
    trl_engine: str = "vllm"  # or transformers: what samples for TRL
    ours: list[str] = field(default_factory=list)  # further key=value of train_grpo.py
    ranks: int = 1  # of train_grpo.py, on this machine


def vowels(prompt: str, response: str, target: str) -> float:
    """A reward that random answers earn in many different amounts: the share of their characters that are vowels."""
    return sum(c in "aeiou" for c in response.lower()) / max(len(response), 1)


def ours(work: Work, folder: Path) -> list[dict[str, float]]:
    """Each step's metrics of a run of train_grpo.py."""
    on_gpu = {"generator": {"max_num_seqs": work.prompts * work.samples, "gpu_memory_utilization": work.memory}}
    keys = {
        "model": work.model, "dataset": {"path": work.data}, "device": work.device, "seed": work.seed, "output": str(folder / "run"),
        "training": {
            "steps": work.steps, "batch_size": work.prompts, "seq_len": work.seq_len, "dtype": work.dtype,
            "learning_rate": work.learning_rate, "adam_beta2": work.adam_beta2,
            "max_tokens_per_batch": max(work.row_tokens, work.seq_len),
        },
        "grpo": {"n_samples": work.samples, "max_new_tokens": work.new_tokens},
        "loss": {"fn": "losses.grpo.GRPOLoss", "averaging": "token", "clip_low": 0.2, "clip_high": 0.28},
        "rewards": {"given": work.reward}, "metrics": {"tensorboard": False, "samples_every": 0}, "resume": "never",
    } | on_gpu  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(keys))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work.ranks}"] if work.ranks > 1 else []
    start([sys.executable, *torchrun, "train_grpo.py", str(folder / "config.yaml"), *work.ours], folder / "log.txt", work.device)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    for step in steps:
        step["tokens"] = round(step["perf/tok_s_train"] * step["time/train"])  # of a rank that trains
        step["parameters"] = 1e9 * step["perf/sync_gb"] / getattr(torch, work.dtype).itemsize
    shutil.rmtree(folder / "run/checkpoints")  # a run keeps its last state, 12 bytes a parameter
    return steps


def trl(work: Work, folder: Path, liger: bool = False) -> list[dict[str, float]]:
    """The same of a run of TRL, under the same names."""
    peer = trl_peer.Peer(
        work.model, str(folder / "run"), work.prompts, work.samples, work.new_tokens, work.steps, work.micro_batch, work.seq_len,
        learning_rate=work.learning_rate, dtype=work.dtype, device=work.device, liger=liger, vllm=work.trl_engine == "vllm",
        share=work.memory, seed=work.seed, adam_beta2=work.adam_beta2,
    )  # fmt: skip
    spec, report = folder / "spec.json", folder / "steps.json"
    spec.write_text(json.dumps({"peer": asdict(peer), "data": work.data, "reward": work.reward}))
    start([sys.executable, "-m", "bench.runs", "--trl", str(spec), str(report)], folder / "log.txt", work.device)
    steps = json.loads(report.read_text())
    seen = 0.0
    for step in steps:
        step["loss/tokens"], step["tokens"], seen = step["tokens"], step["seen"] - seen, step["seen"]
    return steps


WAYS: dict[str, Callable[[Work, Path], list[dict[str, float]]]] = {
    "ours": ours,
    "trl": trl,
    "trl_liger": lambda work, folder: trl(work, folder, liger=True),
}


def threads(device: str) -> dict[str, str]:
    """What a run's environment says of them: on a CPU one, unless OMP_NUM_THREADS says otherwise; beside a GPU the libraries' own."""
    return {"cpu": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}}.get(device_type(device), {})


def start(command: list[str], log: Path, device: str) -> None:
    """To its end; the bench ends where it fails."""
    variables = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRL_EXPERIMENTAL_SILENCE": "1"} | threads(device)
    with log.open("w") as out:
        code = subprocess.run(command, cwd=ROOT, env=variables, stdout=out, stderr=subprocess.STDOUT, timeout=LONGEST_RUN_S).returncode
    if code:
        tell(log.read_text()[-6000:])
        stop(f"{' '.join(command)} ended with exit code {code}, so there are no figures")


def prompts_of(work_data: str, model: str, seed: int, seq_len: int, count: int) -> list[Any]:
    """In the order in which a run with this seed takes them."""
    tokenizer = ModelSource(model).tokenizer()
    return PromptStream(DatasetConfig(path=work_data), tokenizer=tokenizer, seed=seed, max_prompt_tokens=seq_len - 1).take(count)


def run_trl(spec: dict[str, Any]) -> list[dict[str, float]]:
    """In this process, which then has the GPU for itself."""
    peer = trl_peer.Peer(**spec["peer"])
    tokenizer = ModelSource(peer.model).tokenizer()
    prompts = prompts_of(spec["data"], peer.model, peer.seed, peer.seq_len, peer.prompts * peer.steps)
    rows: list[dict[str, Any]] = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.text}]
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(prompt.text)["input_ids"]
        if list(ids) != prompt.token_ids:
            stop("TRL would give the model other tokens than the project does for the same prompt: the work is not the same")
        rows.append({"prompt": chat if tokenizer.chat_template else prompt.text, "target": prompt.target})
    options = dict(spec["reward"])
    reward = Call(options.pop("fn"), options).resolve()
    return trl_peer.run(peer, rows, trl_peer.texts_only(reward))


def state_of(device: str) -> dict[str, Any]:
    """What, beside the work, a run's figures are of: versions, commit, device's name. The name of a GPU is asked by a process that ends."""
    shown = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    commit = shown.stdout.strip() if shown and shown.returncode == 0 else "no git"
    asks = f"import torch; from bench.measure import name_of; print(name_of(torch.device({device_type(device)!r})))"
    name = subprocess.run([sys.executable, "-c", asks], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
    return {"versions": versions(), "commit": commit, "device": name}


def product_flops(size: int, rounds: int = 5) -> float:
    """FLOP/s of a large bf16 product on this machine's device, the best of some."""
    from bench.measure import alone

    device = alone("auto").device
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(rounds + 1):
        begun = now()
        a @ b
        times.append(since(begun).wall)
    return 2 * size**3 / min(times[1:])


def measured_product(size: int) -> float:
    """The same from a process of its own."""
    command = [sys.executable, "-m", "bench.runs", "--product", str(size)]
    return float(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", nargs=2, type=Path, metavar=("SPEC", "REPORT"), help="run TRL in this process")
    parser.add_argument("--product", type=int, metavar="SIZE", help="print FLOP/s of a bf16 product of so many rows and columns")
    options = parser.parse_args()
    if options.product:
        print(product_flops(options.product))
    else:
        spec, report = options.trl
        report.write_text(json.dumps(run_trl(json.loads(spec.read_text()))))


if __name__ == "__main__":
    main()
