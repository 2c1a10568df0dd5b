"""Run by tests/test_head.py under torchrun: a head whose rows are spread over the ranks, against the same head in one piece.

    torchrun --nproc-per-node=2 tests/head_driver.py spec.json report.json

The spec: `cuts`, lists of the number of rows of each rank. The report: by rank, what `case` returns for each case.
"""

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from head import VocabShard, logprobs_from_hidden, loss_from_hidden
from parallel.launch import launch
from tests.test_head import OPTIONS

M, H = 23, 7
SEQUENCES = [slice(0, 5), slice(5, 6), slice(6, 23)]
CHUNK = 6


@dataclass
class Problem:
    """Whole tensors, the same on every rank."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor

    @classmethod
    def make(cls, vocabulary: int, dtype: torch.dtype) -> "Problem":
        generator = torch.Generator().manual_seed(vocabulary)
        sizes = ((M, H), (vocabulary, H), (vocabulary,), (M,), (M,))
        hidden, weight, bias, old, advantages = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes)
        targets = torch.randint(vocabulary, (M,), generator=generator)
        targets[:2] = torch.tensor([0, vocabulary - 1])
        return cls(hidden, weight, bias, targets, old / 4 - 4, advantages)

    def clipped(self, logprobs: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
        """PPO's surrogate with an entropy bonus: tokens on their own."""
        ratio = (logprobs - self.old[rows]).exp()
        advantages = self.advantages[rows]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) / M
        return loss.sum() if entropy is None else (loss - 0.1 / M * entropy).sum()

    def mixed(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """As in GSPO, a sequence has one ratio: a token's slope depends on its neighbours. With entropy, its square."""
        ratios = torch.stack([(logprobs[s] - self.old[s]).mean().exp() for s in SEQUENCES])
        loss = -(ratios * self.advantages[: len(SEQUENCES)]).sum()
        return loss if entropy is None else loss + entropy.mean().square()


class Collectives(TorchDispatchMode):
    """The names of what the ranks exchanged, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::").strip("_"))
        return func(*args, **(kwargs or {}))


def solve(problem: Problem, path: str, entropy: bool, options: dict[str, Any], rows: slice, shard: VocabShard | None) -> dict[str, Tensor]:
    """Values and gradients with the head's `rows`."""
    hidden = problem.hidden.clone().requires_grad_()
    weight, bias = (t[rows].clone().requires_grad_() for t in (problem.weight, problem.bias))
    arguments = {**options, "bias": bias if "bias" in options else None, "entropy": entropy, "chunk_tokens": CHUNK, "shard": shard}
    loss: Tensor
    if path == "fast":
        result = loss_from_hidden(hidden, weight, problem.targets, problem.clipped, **arguments)
        loss, values = result.loss, (result.logprobs, result.entropy)
    else:
        values = logprobs_from_hidden(hidden, weight, problem.targets, **arguments)
        mixes = path == "mixed"
        loss = problem.mixed(*values) if mixes else problem.clipped(*values, slice(0, M))
    (3 * loss).backward()
    found = {"loss": loss, "logprobs": values[0], "entropy": values[1], "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    return {name: t.detach() for name, t in found.items() if t is not None}


def error(got: Tensor, expected: Tensor, largest: Tensor) -> float:
    return float((got - expected).abs().amax() / largest) if got.numel() else 0.0


def case(cuts: list[int], path: str, entropy: bool, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`errors`: the largest difference to the whole head in a tensor, over its largest element. `agree`: the ranks do, to the last bit."""
    problem = Problem.make(sum(cuts), dtype)
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    start = sum(cuts[:rank])
    rows = slice(start, start + cuts[rank])
    with Collectives() as collectives:
        got = solve(problem, path, entropy, options, rows, VocabShard(group, start, sum(cuts)))
    whole = solve(problem, path, entropy, options, slice(None), None)
    assert got.keys() == whole.keys()
    errors = {}
    for name, expected in whole.items():
        own = expected[rows] if name in ("weight", "bias") else expected
        assert got[name].shape == own.shape, (name, got[name].shape, own.shape)
        errors[name] = error(got[name], own, expected.abs().amax())
    replicated = torch.stack([got[n].sum().double() for n in ("loss", "logprobs", "hidden")])
    everyone = [torch.zeros_like(replicated) for _ in cuts]
    dist.all_gather(everyone, replicated)
    return {"errors": errors, "agree": all(torch.equal(t, replicated) for t in everyone), "exchanged": collectives.names}


def main() -> None:
    spec_path, report_path = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    report: dict[str, Any] = {}
    for cuts in json.loads(spec_path.read_text())["cuts"]:
        for path, entropy, dtype in itertools.product(("any", "mixed", "fast"), (False, True), (torch.float64, torch.float32)):
            for options in OPTIONS:
                report[json.dumps([cuts, path, entropy, options, f"{dtype}"])] = case(cuts, path, entropy, options, dtype)
    every: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, report)
    if dist.get_rank() == 0:
        report_path.write_text(json.dumps(every))


if __name__ == "__main__":
    launch(main)
