"""The demo: a tiny model learns two-digit addition, by SFT until it gets about half of it right, then by GRPO with real vLLM.

    ./run.sh                     (or: python demo.py [--seed N] [--output runs/demo])

Makes a character-level Qwen3 from a config, training and held-out problems that do not overlap, runs train_sft.py and train_grpo.py as
anyone would, and ends with a table of held-out greedy accuracy. The numbers are in <output>/summary.json.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

HELD_OUT = 500  # of the 10,000 problems
NUM_RANKS = 2  # on a CPU; one per GPU where there are fewer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights, the problems held out and the sampling")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder of the demo, started over each time")
    options = parser.parse_args()
    output, seconds = options.output.resolve(), {}

    def timed(phase: str, script: str, config: str, *overrides: str) -> Path:
        print(f"\n=== {phase}: {script} {config}", flush=True)
        folder, begun = output / phase, time.monotonic()
        run(script, f"configs/{config}", f"output={folder}", f"seed={options.seed}", "resume=never", *overrides)
        seconds[phase] = round(time.monotonic() - begun, 1)
        return folder

    begun = time.monotonic()
    for part in ("model", "base", "sft", "grpo"):  # of an earlier demo; nothing else in the folder is touched
        shutil.rmtree(output / part, ignore_errors=True)
    (output / "summary.json").unlink(missing_ok=True)
    make_problems(output, options.seed)
    make_model(output / "model", options.seed)
    seconds["setup"] = round(time.monotonic() - begun, 1)
    data = [f"dataset.path={output}/train.jsonl", f"eval.dataset.path={output}/held_out.jsonl"]
    untrained = [f"model={output}/model", "training.steps=0", "checkpoint.export_hf=false"]
    base = timed("base", "train_grpo.py", "demo_grpo.yaml", *untrained, *data)
    sft = timed("sft", "train_sft.py", "demo_sft.yaml", f"model={output}/model", data[0])
    grpo = timed("grpo", "train_grpo.py", "demo_grpo.yaml", f"model={sft}/hf", *data)
    seconds["total"] = round(time.monotonic() - begun, 1)

    scores = accuracies(grpo)
    accuracy = {"base": accuracies(base)[0], "sft": scores[0], "grpo": scores[-1]}
    (output / "summary.json").write_text(json.dumps({"accuracy": accuracy, "seconds": seconds}, indent=2) + "\n")
    print(f"\nGreedy accuracy on {HELD_OUT} two-digit sums that were never trained on:\n")
    for name, phase in (("base", "as made"), ("sft", "after SFT"), ("grpo", "after GRPO")):
        print(f"  {phase:<12} {accuracy[name]:6.1%} {seconds[name]:8.1f} s")
    print(f"\n{seconds['total']:.0f} s in all. Numbers: {output}/summary.json, curves: tensorboard --logdir {output}", flush=True)


def run(script: str, *arguments: str) -> None:
    """The script under torchrun, as ./run.sh starts it; ends the demo with its exit code when it fails."""
    from parallel.hardware import num_ranks

    ranks = f"--nproc-per-node={num_ranks(NUM_RANKS)}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, script, *arguments]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    code = subprocess.run(command, env=environment, cwd=Path(__file__).parent).returncode
    if code:
        print(f"demo: {script} ended with exit code {code}", file=sys.stderr, flush=True)
        raise SystemExit(max(code, 1))


def accuracies(folder: Path) -> list[float]:
    """Held-out accuracy of a run, oldest first."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]


def problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers below 100, shuffled: those to train on, and those held out."""
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a in range(100) for b in range(100)]
    random.Random(f"problems {seed}").shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def make_problems(output: Path, seed: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "held_out"), problems(seed), strict=True):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer():
    """One token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(folder: Path, seed: int) -> None:
    """A Qwen3 of 0.4 million random parameters, saved as any checkpoint is."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
