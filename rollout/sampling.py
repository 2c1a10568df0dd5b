"""How a policy is sampled, and with which random numbers: those of a sample depend on its name alone."""

import hashlib
from dataclasses import dataclass

import torch

from parallel.hardware import computes_reproducibly


@dataclass(frozen=True)
class Sampling:
    temperature: float  # 0: greedy
    max_new_tokens: int | None = None  # None: what training.seq_len leaves after the prompt
    stop: tuple[str, ...] = ()
    seed: int | None = None  # of the run: each (prompt, sample) gets its own, so that who samples does not matter; None: the engine's


def sample_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """The random seed of one sample, a function of nothing but its name. (vLLM gives the children of n=G the seeds s, s+1, ...)

    >>> sample_seed(0, 0, 0) == sample_seed(0, 0, 0), sample_seed(0, 0, 1) == sample_seed(0, 1, 0)
    (True, False)
    """
    name = f"{run_seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 2


def sampling_seed(mode: str, run_seed: int, device: torch.device) -> int | None:
    """`run_seed` where each sample gets a seed of its own, else None. mode: grpo.seeded_sampling.

    On CUDA a seed on every request costs 3 to 21 % of a decode step, so `auto` gives them there in torch's deterministic mode only,
    where the rest of the run repeats as well.
    """
    return run_seed if mode == "always" or (mode == "auto" and computes_reproducibly(device)) else None
