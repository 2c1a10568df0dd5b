"""Rewards for tests: one that differs between answers of a model that knows nothing, and one that takes the GPU's memory away."""

import zlib

import torch


def spread(prompt: str, response: str, target: str) -> float:
    """A number in [0, 1) that is a function of the response alone."""
    return zlib.crc32(response.encode()) % 1000 / 1000


class Hog:
    """`spread`, and from its first answer on all but `left_mib` of the GPU's free memory is gone."""

    def __init__(self, *, left_mib: int):
        self.left_mib = left_mib
        self.taken: list[torch.Tensor] = []

    def __call__(self, prompt: str, response: str, target: str) -> float:
        if not self.taken:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0] - self.left_mib * 2**20
            self.taken.append(torch.empty(max(free, 0), dtype=torch.uint8, device="cuda"))
        return spread(prompt, response, target)
