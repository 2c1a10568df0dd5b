"""Side by side on one GPU: GRPO with TRL as it comes, with its Liger kernels, and with train_grpo.py, in turn in one run.

    python -m bench.grpo_vs_trl w1 [--data gsm8k/train.jsonl] [--rounds 2] [--steps 4] [--folder runs/side_by_side]
    python -m bench.grpo_vs_trl w2 --row-tokens 16384

    w1      Qwen3-0.6B's shape with random weights, 32 prompts x 8 samples x 512 new tokens
    w2      Qwen3-1.7B's shape, 64 x 8 x 1024

Each run is a process of its own, since each wants the GPU for itself; they alternate, A B C, C B A. Shared are the checkpoint (bf16
files), the prompts and their order, sampling (temperature 1, every answer exactly as long: the tokenizer's end of sequence is no word
of the model's), learning rate, clipping, fp32 weights and AdamW with bf16 computation, and vLLM, colocated with sleep and the same share
of the memory. TRL keeps its defaults otherwise: eager (torch_compile is false), padded micro-batches of --micro-batch sequences, activation
checkpointing, its pass for old log-probs. Ours has training.compile=true, which is not its default; `--ours KEY=VALUE ...` replaces that,
and `--ours` with nothing after it leaves train_grpo.py's defaults.

JSON lines and refusals are those of bench.step; `mfu_of_product` compares 6 FLOP a parameter and computed token with a bf16 product of
8192 x 8192 measured in the same run. TRL needs vLLM 0.22 to 0.31. With --folder a call that was ended goes on after the last whole run,
where versions, commit and device are still the same. For a machine without FlashInfer: VLLM_USE_FLASHINFER_SAMPLER=0.
"""

import argparse

from bench.step import add_arguments, compare

WORK = {
    "w1": {"shape": "0.6b", "prompts": 32, "samples": 8, "new": 512},
    "w2": {"shape": "1.7b", "prompts": 64, "samples": 8, "new": 1024},
    "smoke": {"shape": "tiny", "prompts": 2, "samples": 4, "new": 8},  # to see that it runs
}
WAYS = ["trl", "trl_liger", "ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORK)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    add_arguments(parser)
    parser.set_defaults(steps=4, product=8192, micro_batch=16, ours=["training.compile=true"])
    options = parser.parse_args()
    sizes = WORK[options.work]
    case = f"{options.work}: {sizes['shape']}, {sizes['prompts']} x {sizes['samples']} x {sizes['new']} new tokens"
    compare("grpo_vs_trl", case, sizes, options.ways, options.ways[0], options)


if __name__ == "__main__":
    main()
