"""How far vLLM's log-probs are from the policy's, after each of several random changes of the weights, in fp32 and in bf16.

    PYTHONPATH=. python tests/measure_sync.py MODEL_FOLDER [number of seeds]

After each sync: largest and mean |difference| over the sampled tokens, of the engine against the fp32 policy; and of the policy
itself when it computes in bf16, on the same tokens and without vLLM: what bf16 costs any implementation.
"""

import sys

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from batch import Prompt, to_episodes
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import ParallelismConfig, Placement, Plan
from parallel.weights import stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.sampling import Sampling

QUESTIONS = ("The capital of France is", "Water boils at", "def factorial(n):", "Once upon a time there was a", "12 + 30 =", "1, 2, 3, 4,",
             "To be or not to be,", "The three laws of robotics say")  # fmt: skip
TEMPERATURE, CHANGES, SEQ_LEN = 0.8, 4, 64


def gaps(policy: Model, rounded: Model, generator: Generator, prompts: list[Prompt], sampling: Sampling) -> list[np.ndarray]:
    groups = generator.generate(prompts, 2, sampling)
    episodes = to_episodes(groups, mask_truncated=False, old_from_sampler=False)
    exact, own = (np.concatenate(list(model.logprobs(episodes).values())) for model in (policy, rounded))
    return [np.abs(np.concatenate([e.gen_logprobs for e in episodes]) - exact), np.abs(own - exact)]


@torch.no_grad()
def measure(place: Placement, folder: str, engine_dtype: str, seeds: int, scale: float) -> None:
    source = ModelSource(folder)
    policy, rounded = (
        Model(source, place.trainer, dtype=dtype, temperature=TEMPERATURE, max_tokens=2048, trainable=True)
        for dtype in ("float32", "bfloat16")
    )
    tokenizer = source.tokenizer()
    prompts = [Prompt(i, tokenizer(text).input_ids) for i, text in enumerate(QUESTIONS)]
    generator = Generator(source, GeneratorConfig(dtype=engine_dtype), place, dtype="float32", seq_len=SEQ_LEN, seed=0)
    weights, copies = ([p.to_local() for p in model.shards().values() if isinstance(p, DTensor)] for model in (policy, rounded))
    original = [p.clone() for p in weights]
    for seed in range(seeds):
        noise = torch.Generator().manual_seed(seed)
        for p, at_first in zip(weights, original, strict=True):
            p.copy_(at_first)
        for change in range(CHANGES + 1):
            for p, copy in zip(weights, copies, strict=True):
                if change:
                    p.add_(torch.randn(p.shape, generator=noise), alpha=scale * float(p.square().mean().sqrt()))
                copy.copy_(p)
            generator.load(stream_weights(policy.shards(), place, generator.dtype), version=change)
            engine, bf16 = gaps(policy, rounded, generator, prompts, Sampling(TEMPERATURE, max_new_tokens=24, seed=seed))
            print(
                f"{engine_dtype} engine, scale {scale:g}, seed {seed}, after {change} changes, {len(engine)} tokens: engine - fp32 policy "
                f"max {engine.max():.2g} mean {engine.mean():.2g}   bf16 policy - fp32 policy max {bf16.max():.2g} mean {bf16.mean():.2g}",
                flush=True,
            )
    generator.close()


def main() -> None:
    folder, seeds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    plan = Plan.make(None, ParallelismConfig(), colocate=True, wants_reference=False, world_size=1)
    place = Placement.build(plan, "cpu")
    for scale in (0.02, 0.1):  # of a tensor's own root mean square, a change
        for dtype in ("float32", "bfloat16"):
            measure(place, folder, dtype, seeds, scale)


if __name__ == "__main__":
    launch(main)
